"""Fixtures shared by all tests: tiny models, built once per session and never written to."""

import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHLAKE_PROGRESS", "0")
# More processes than cores compute at the same time: threads that spin while they wait would take a fifth of all time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Sessions live for seconds: on a small machine the JVM's optimizing compiler costs more than it gives back.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
# torch, MKL and oneDNN, also OpenVINO's, are limited to the same class of CPUs; they read this when they load.
if cpu_class := os.environ.get("TORCHLAKE_TEST_CPU"):
    os.environ["ONEDNN_MAX_CPU_ISA"] = cpu_class.upper()
    # torch.compile's cache does not know for which width of vectors its code was generated: a program that was made for
    # AVX2 and is compiled for AVX-512 writes beyond its arrays.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{cpu_class}"
    if cpu_class.startswith("avx2"):
        os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis
import pytest

import forked
import sweeps
from torchlake import plugins
from torchlake.processes.hardware import CPU_FEATURES, cpu_features

# A shell without job control starts what runs in its background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The default, 200 ms an example, fails on a machine that does other work too.
# `make test` draws the same examples in every run, `make faults` others each time.
hypothesis.settings.register_profile(
    "torchlake", deadline=None, derandomize=not sweeps.RANDOM, max_examples=sweeps.examples(100, quick=20)
)
hypothesis.settings.load_profile("torchlake")
CLUSTERS = {"spark": "spark", "torch_distributor": "spark", "ray": "ray", "torch_trainer": "ray"}

# Fixtures import what takes seconds: the first process of xdist, which runs no test, would start the others later.
ROOT = Path(__file__).parent
LONGEST = (
    "conformance/test_sinks.py",
    "faults",
    "conformance",
    "unit/training",
    "unit/tasks",
    "unit/scoring",
    "golden",
    "unit/tables",
    "unit/tuning",
)
"Modules and folders in the order in which they begin; the others follow."
SLOW_S = 3600
REAL_STARTS = (
    "unit/engines",
    "conformance/test_engines.py",
    "faults/test_launch_faults.py",
    "faults/test_sockets.py",
    "golden/test_three_engines.py",
    "gpu",
    "unit/training/test_launch.py",
)
"Where the start of a process is the subject: everywhere else the local engine forks its workers and ranks."

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share one server of forks, and the rewriting of assertions after a change.

    Each begins to read the test files at another one, and finds what the others have compiled.
    """
    sweeps.leaves_out = config.option.markexpr == "not slow"
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.add_cleanup(forked.open_session().cleanup)
        if config.getoption("numprocesses", None):  # these would wait for it one after another
            threading.Thread(target=forked.start_server, daemon=True).start()
    elif config.args == config.getini("testpaths"):
        ignored = {os.path.abspath(path) for path in config.option.ignore or ()}
        files = sorted({*map(str, ROOT.rglob("test_*.py"))} - ignored)
        first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = files[first:] + files[:first]


@pytest.fixture(autouse=True, scope="session")
def fast_pages() -> Iterator[None]:
    """Every training writes pages: see `forked.for_speed`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in forked.for_speed():
            patch.setattr(module, name, value)
        yield


@pytest.fixture
def hint_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of label hints is there."""
    from torchlake.evaluation.sections import label_hints

    monkeypatch.setattr(label_hints, "find_spec", find_spec)


@pytest.fixture
def page_libraries(hint_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of pictures and label hints are there."""
    from torchlake.reporting import figures

    monkeypatch.setattr(figures, "find_spec", find_spec)


def pytest_report_header() -> str:
    features = ", ".join(name for flag, name in CPU_FEATURES.items() if flag in cpu_features())
    return f"CPU: {features or 'without instructions that tests depend on'}"


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each module is one process's, with its fixtures; so are all tests of Spark, and all of Ray.

    These two come first, and modules of many seconds before the others, so that no process is alone in the end. The
    order is that of names, in whichever one a process has read the modules. Slow tests have an hour.
    """
    places: dict[pytest.Item, tuple[int, str]] = {}
    for item in items:
        params = getattr(item, "callspec", None)
        words = [*getattr(item, "fixturenames", ()), *(params.params.values() if params else ())]
        clusters = {CLUSTERS[word] for word in words if isinstance(word, str) and word in CLUSTERS}
        module = item.nodeid.partition("::")[0].partition("/")[2]
        group = min(clusters, default=module)
        item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
        longest = next((place for place, name in enumerate(LONGEST) if module.startswith(name)), len(LONGEST))
        places[item] = -1 if clusters else longest, module
    items.sort(key=places.__getitem__)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop with a version of xdist that does not see the groups of tests, which would cost minutes without a word."""
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("xdist does not see the groups of tests: install the versions of constraints.txt")
    gc.collect()
    gc.freeze()  # libraries and tests live as long as the process: each collection would look at all of them
    gc.set_threshold(5_000, 20, 20)  # by default full collections, which find little, take 3 % of the time


@pytest.fixture(scope="module", autouse=True)
def tasks_given_here() -> Iterator[None]:
    """A task that a test gives in Python is known in its module alone."""
    before = dict(plugins._given)
    yield
    plugins._given.clear()
    plugins._given.update(before)


@pytest.fixture(autouse=True)
def forked_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """The local engine's processes start in milliseconds where their start is not the subject."""
    named = str(request.path.relative_to(ROOT)).startswith(REAL_STARTS)
    if named or request.node.get_closest_marker("real_starts"):
        yield
        return
    with forked.children_are_forked():
        yield


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a head and without dropout."""
    import tiny

    return tiny.build_encoder(tmp_path_factory.mktemp("encoders") / "tiny_bert")


@pytest.fixture(scope="session")
def tiny_bert_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoder with dropout 0.1."""
    import tiny

    return tiny.build_encoder(tmp_path_factory.mktemp("encoders") / "tiny_bert_dropout", dropout=0.1)


@pytest.fixture(scope="session")
def tiny_roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of RoBERTa's kind, whose positions begin after the padding id."""
    import tiny

    return tiny.build_encoder(tmp_path_factory.mktemp("encoders") / "tiny_roberta", kind="roberta")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model with random weights, a tokenizer without a padding token, and a chat template."""
    import tiny

    return tiny.build_language_model(tmp_path_factory.mktemp("models") / "tiny_gpt2")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another with rotary positions, and fewer keys and values than queries."""
    import tiny

    return tiny.build_language_model(tmp_path_factory.mktemp("models") / "tiny_llama", kind="llama")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Iterator[Path]:
    """A model folder (task.json, manifest) for the classes "bad" and "good"; its head was never trained."""
    import tiny

    folder = tiny.build_model(tmp_path_factory.mktemp("models") / "tiny_model", encoder=tiny_bert)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield folder
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert after == before, "a test changed the model that all tests share: optimize a copy"


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """A Spark session on this machine: two task slots, and a task may be lost three times."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    from torchlake.engines.spark import Spark

    session = Spark(master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"}).session.get()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    """Ray on this machine, two CPUs, reached from here alone."""
    import ray

    from torchlake.engines.ray import Ray

    Ray(processes=2).join()
    yield
    ray.shutdown()
