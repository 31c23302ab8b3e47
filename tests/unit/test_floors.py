"""The house has floors, and imports go down only; `import torchlake` stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchlake

SOURCE = Path(torchlake.__file__).parent
FLOORS = {
    4: "__init__ __main__ cli cli_app cli_help cli_options commands console",
    3: "preparing training training_spec attempts predicting scoring scoring_workers launching evaluating verifying "
    "reporting report_page diagnosing loop learner training_rows run_folder optimizing candidates trials "
    "sampling agreement tuning tracking planning plan_tables surveying capacity saving mapping perplexity asking "
    "training_bar data_summary",
    2: "engines strategies tasks runtimes",
    1: "costs workload data models model_config model_tokenizer model_folders model_writing probes "
    "checkpoint distributed metrics recipe safety exports failures generation runtime_choice study "
    "sharding checkpoint_writer lora objective",
    0: "processes tables config complaints yaml_tree record plugins errors failpoints durable progress demo_data "
    "strikes following search_space config_types strategy_options engine_options redaction checkpoint_folder "
    "checkpoint_url checkpoint_places system_errors memory in_flight interrupts logs task_spec",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
# Who may call whom among the verbs. Everyone else there is a stranger.
CALLS = {
    "candidates": {"agreement", "sampling", "scoring", "trials"},
    "evaluating": {"perplexity", "predicting", "scoring"},
    "optimizing": {"candidates", "sampling", "scoring", "trials"},
    "plan_tables": {"capacity", "planning"},
    "planning": {"capacity", "run_folder", "surveying"},
    "asking": {"scoring", "scoring_workers"},
    "mapping": {"asking", "scoring", "scoring_workers"},
    "perplexity": {"preparing", "scoring"},
    "predicting": {"asking", "scoring", "scoring_workers"},
    "preparing": {"data_summary", "scoring"},
    "loop": {"learner", "saving", "training_rows", "training_bar"},
    "training_bar": {"learner", "saving"},
    "learner": {"training_rows"},
    "saving": {"learner", "training_rows"},
    "reporting": {"data_summary", "diagnosing", "report_page"},
    "sampling": {"scoring"},
    "scoring_workers": {"scoring"},
    "surveying": {"scoring"},
    "trials": {"scoring"},
    "attempts": {"loop", "run_folder", "training_rows"},
    "training": {"attempts", "data_summary", "preparing", "reporting", "run_folder", "tracking", "training_spec"},
    "tuning": {"training", "training_spec", "run_folder"},
}
HEAVY = {"torch", "transformers", "pyspark", "ray", "sklearn", "pandas", "polars", "scipy"}
HEAVY |= {"deepspeed", "onnx", "onnxruntime", "openvino", "optuna", "mlflow", "tensorboard"}
# What an engine is made of.
LIBRARIES = {"spark": "pyspark", "ray": "ray"}
# tables/ gives people their own kind of frame back.
FRAMES = {"pandas", "polars"}

MODULES = sorted(SOURCE.rglob("*.py"))


def house_name(path: Path) -> str:
    """The part of the house that a file belongs to: a top-level module or folder."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, lazily or not, and for type checking."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports here are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    """The parts of the house among dotted names; a public name of the package itself is `__init__`."""
    parts = [name.split(".") for name in names if name.split(".")[0] == "torchlake"]
    return {part[1] if len(part) > 1 and part[1] in FLOOR_OF else "__init__" for part in parts}


def test_every_module_has_a_floor_and_every_floor_its_modules() -> None:
    assert {house_name(path) for path in MODULES} <= set(FLOOR_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    here = house_name(path)
    if here == "__init__":
        return
    for there in ours(imported(path)) - {here}:
        below = FLOOR_OF[there] < FLOOR_OF[here]
        neighbours = FLOOR_OF[there] == FLOOR_OF[here] and FLOOR_OF[here] in (0, 1, 4)
        assert below or neighbours or there in CALLS.get(here, ()), (
            f"{path.name} (floor {FLOOR_OF[here]}) imports {there} (floor {FLOOR_OF[there]})"
        )


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if FLOOR_OF.get(house_name(path)) == 0 or house_name(path) == "engines"],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_ground_floor_and_the_engines_know_no_model(path: Path) -> None:
    allowed = FRAMES if house_name(path) in ("tables", "engines") else set()
    if house_name(path) == "engines":
        allowed = allowed | {library for engine, library in LIBRARIES.items() if engine in path.stem.split("_")}
    assert not {name.split(".")[0] for name in imported(path)} & (HEAVY - allowed)


@pytest.mark.parametrize(
    "statement",
    [
        "import torchlake",
        "import torchlake.cli",
        "import torchlake; torchlake.Job, torchlake.TorchlakeError, torchlake.errors",
    ],
)
def test_importing_loads_nothing_slow(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_rules_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "durable.py"
    path.write_text("def f():\n    from torchlake.training import train\n    from torchlake import predict, errors\n")
    assert ours(imported(path)) == {"training", "__init__", "errors"}
