# Needs python3.11 or newer, and nothing else: the first target that runs makes .venv and installs into it, with uv if it is
# on the PATH. The demo installs its own few packages; the other targets, everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
COMPILED := $(VENV)/compiled
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/installed-demo)
DEMO := demo
CPU_TESTS := tests/unit/runtimes tests/unit/optimization tests/unit/scoring/test_runtime_choice.py \
	tests/conformance/test_runtimes.py tests/conformance/test_encoders.py tests/conformance/test_text_pairs.py \
	tests/unit/tasks/test_feature_extraction.py tests/unit/training/test_kernels.py tests/golden \
	tests/unit/training/test_labels.py::test_every_runtime_predicts_in_the_units_of_the_labels
# They are about the text of the sources.
STYLE_TESTS := $(addprefix tests/unit/test_,words.py quoted_messages.py private_names.py layout.py class_names.py floors.py)
# One more process than cores: tests often wait for processes and servers, and each process collects all of them first.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
BENCHES := $(sort $(filter-out bench/_%,$(wildcard bench/*.py)))

# Nothing below asks a network for a model: the demo's comes from a package, the tests' are built from a seed.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-avx2 compiled check style types docs docs-serve reference notebook orchestrators engines gpu faults \
	migration mutants bench bench-scoring bench-training bench-spark bench-ray format clean

# Runs once; FORCE=1 removes its folder and runs it again.
demo: $(DEMO_STAMP)
	@$(if $(FORCE),rm -rf $(DEMO),if test -e $(DEMO)/run/report.html; then \
	  echo "The demo is complete, and its report is $(DEMO)/run/report.html. To run it again: make demo FORCE=1"; \
	  exit; fi); \
	$(BIN)/torchlake demo --folder $(DEMO)

test: $(COMPILED)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	  $(addprefix --ignore=,$(STYLE_TESTS))
	@test -n "$$(git status --porcelain 2>&1)" || git rev-parse HEAD > $(VENV)/tested

# The tests that depend on the CPU, limited to AVX2 on any machine. tests/conftest.py limits torch, MKL, oneDNN and
# OpenVINO, too; ONNX Runtime has no such limit.
test-avx2: $(COMPILED)
	TORCHLAKE_TEST_CPU=avx2 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(CPU_TESTS)

check: style types

style: $(STAMP)
	$(BIN)/ruff format --check src tests tools bench examples notebooks
	$(BIN)/ruff check src tests tools bench examples notebooks
	$(BIN)/python -m pytest $(STYLE_TESTS)

types: $(STAMP)
	$(BIN)/mypy --strict src

# The site, in site/. A link to a page or a heading that does not exist is an error.
docs: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt zensical
	$(BIN)/zensical build --clean --strict

docs-serve: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt zensical
	$(BIN)/zensical serve

# The pages of docs/reference and the types of Python arguments that are written from the code.
reference: $(STAMP)
	$(BIN)/python tools/arguments.py
	$(BIN)/python tools/reference.py

# The outputs that are stored in notebooks/laptop.ipynb.
notebook: $(STAMP)
	$(BIN)/python tools/laptop_notebook.py

# The examples of docs/how-to/orchestrators.md, with Airflow and Dagster in environments of their own.
orchestrators: $(STAMP)
	for name in airflow dagster; do \
	  test -x .bench/$$name/bin/$$name || { $(PYTHON) -m venv .bench/$$name && .bench/$$name/bin/pip install --quiet \
	  $$(grep -o "^$$name==.*\|^apache-$$name==.*" constraints.txt) || exit 1; }; done
	$(BIN)/python -m pytest tests/documents/test_orchestrators.py

# The tests of Spark DataFrames with other versions of pyspark, in environments of their own.
PYSPARK_VERSIONS ?= 3.5 4.0
engines: $(STAMP)
	$(BIN)/python tools/engines.py $(PYSPARK_VERSIONS)

# On a machine with a GPU: its tests, rates and comparisons, in bench/results/gpu.json. Installs nothing: it uses the
# Python given, which has torch for that card, and names what is missing there.
GPU_PYTHON ?= $(PYTHON)
gpu:
	$(GPU_PYTHON) tools/gpu.py

faults: export TORCHLAKE_RANDOM_EXAMPLES = 1
faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults tests/conformance tests/golden
	$(BIN)/python -m pytest -m "slow or hypothesis" tests/unit tests/documents tests/examples tests/notebooks tests/gpu

# The scripts of examples/migration before and after. Petastorm needs older libraries, so it has its own environment.
migration: $(STAMP)
	test -x .bench/envs/petastorm/bin/python || $(PYTHON) -m venv .bench/envs/petastorm
	.bench/envs/petastorm/bin/pip install --quiet -r examples/migration/petastorm/requirements.txt
	PETASTORM_PYTHON=$(CURDIR)/.bench/envs/petastorm/bin/python $(BIN)/python -m pytest tests/examples/test_migration.py

# Changes one thing after another in the code where a mistake loses rows, and lists the changes that no test noticed.
mutants: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt mutmut
	$(BIN)/mutmut run
	$(BIN)/mutmut results

bench: $(STAMP)
	for file in $(BENCHES); do $(BIN)/python $$file || exit 1; done

# The peers' libraries, and the plot's. Peers that cannot be beside torchlake get environments of their own in .bench.
bench-scoring: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt matplotlib nncf onnxscript
	$(BIN)/python bench/scoring.py
	$(BIN)/python bench/_plot.py

bench-training: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt lightning
	$(BIN)/python bench/training.py

bench-spark: $(STAMP)
	$(BIN)/python bench/on_spark.py

bench-ray: $(STAMP)
	$(BIN)/python bench/on_ray.py
	$(BIN)/python bench/ray_generation.py

format: $(STAMP)
	$(BIN)/ruff format src tests tools bench examples notebooks
	$(BIN)/ruff check --fix src tests tools bench examples notebooks

clean:
	rm -rf $(VENV) .bench site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache demo runs

compiled: $(COMPILED)

# Some packages hold templates that are not Python: they fail here, and nothing imports them.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py test
	@touch $@

$(VENV)/installed-demo: pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py demo
	@touch $@
