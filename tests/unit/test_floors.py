"""Packages stand on floors, and imports go down only; `import torchlake` stays cheap."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchlake

SOURCE = Path(torchlake.__file__).parent
FLOORS = {
    5: "__init__ __main__ cli serving",
    4: "evaluation exporting jobs launching optimization planning preparation reporting scoring training tuning",
    3: "engines runtimes strategies tasks",
    2: "checkpoints data labels metrics models runs serving.batching",
    1: "config distributed loss optim outputs processes storage "
    "tables tables.formats tables.selection tables.sources tables.verification",
    0: "amounts atomic_io display errors failpoints logs plugins progress redaction",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
# Which rooms may import a neighbor on their own floor. Plug-ins have none: they meet on floor 4 as arguments.
NEIGHBORS = {
    "__main__": {"cli"},
    "cli": {"__init__", "serving"},
    "evaluation": {"preparation", "reporting", "scoring"},
    "exporting": {"scoring"},
    "optimization": {"scoring"},
    "planning": {"preparation", "scoring"},
    "preparation": {"jobs", "scoring"},
    "reporting": {"preparation"},
    "scoring": {"jobs"},
    "training": {"evaluation", "preparation", "reporting"},
    "tuning": {"preparation", "training"},
    "metrics": {"labels"},
    "models": {"checkpoints", "data"},
    "runs": {"checkpoints"},
    "config": {"tables.selection"},
    "loss": {"config"},
    "optim": {"config", "processes"},
    "outputs": {"storage", "tables", "tables.formats", "tables.sources"},
    "tables": {"storage", "tables.formats", "tables.selection", "tables.sources"},
    "tables.formats": {"storage", "tables.selection"},
    "tables.sources": {"storage", "tables.formats", "tables.selection"},
    "tables.verification": {"outputs", "storage", "tables", "tables.formats"},
    "amounts": {"errors"},
    "logs": {"redaction"},
    "atomic_io": {"errors", "failpoints"},
    "plugins": {"errors"},
}
# Packages that must work without torch, beside floor 0.
GROUND = {
    "config",
    "engines",
    "labels",
    "outputs",
    "processes",
    "storage",
    "tables",
    "tables.formats",
    "tables.selection",
    "tables.sources",
    "tables.verification",
}
HEAVY = {"torch", "transformers", "pyspark", "ray", "sklearn", "pandas", "polars", "scipy"}
HEAVY |= {"deepspeed", "onnx", "onnxruntime", "openvino", "optuna", "mlflow", "tensorboard", "zentorch"}
# What few jobs need.
UNUSUAL = {"torchlake.scoring.endpoint.job", "torchlake.serving", "torchlake.evaluation", "asyncio"}
# What an engine is made of.
LIBRARIES = {"spark": "pyspark", "ray": "ray"}
# tables/ gives people their own kind of frame back.
FRAMES = {"pandas", "polars"}

MODULES = sorted(SOURCE.rglob("*.py"))


def room_of(dotted: str) -> str:
    """The package or top-level module of a dotted name below torchlake; a public name belongs to `__init__`."""
    parts = dotted.split(".")
    two = ".".join(parts[:2])
    return two if two in FLOOR_OF else parts[0] if parts[0] in FLOOR_OF else "__init__"


def room(path: Path) -> str:
    """The package or top-level module that a file belongs to."""
    return room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))


@cache
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


def rooms(names: set[str]) -> set[str]:
    """The rooms of torchlake among dotted names."""
    return {room_of(name.partition(".")[2]) for name in names if name.split(".")[0] == "torchlake"}


def test_every_module_has_a_floor() -> None:
    top_level = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert top_level <= set(FLOOR_OF)


def climbs(path: Path) -> list[str]:
    """Return a line for each import of a file that goes up, or to a neighbor that is not listed."""
    here = room(path)
    if here == "__init__":
        return []
    return [
        f"{path} (floor {FLOOR_OF[here]}) imports {there} (floor {FLOOR_OF[there]})"
        for there in sorted(rooms(imported(path)) - {here})
        if FLOOR_OF[there] >= FLOOR_OF[here] and there not in NEIGHBORS.get(here, ())
    ]


def test_imports_go_down() -> None:
    assert [line for path in MODULES for line in climbs(path)] == []


def test_the_packages_form_no_cycle_and_every_exception_is_used() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        graph.setdefault(room(path), set()).update(rooms(imported(path)) - {room(path)})
    assert set(TopologicalSorter(graph).static_order()) >= set(FLOOR_OF)
    unused = {(here, there) for here, others in NEIGHBORS.items() for there in others if there not in graph[here]}
    assert unused == set()


def heavy_imports(path: Path) -> set[str]:
    """Return the heavy libraries that a file imports and that its package may not import."""
    allowed = FRAMES if room(path).partition(".")[0] in ("tables", "engines") else set()
    if room(path) == "engines":
        allowed = allowed | {library for engine, library in LIBRARIES.items() if engine in path.stem.split("_")}
    return {name.split(".")[0] for name in imported(path)} & (HEAVY - allowed)


def test_the_ground_floor_and_the_engines_know_no_model() -> None:
    ground = [path for path in MODULES if FLOOR_OF[room(path)] == 0 or room(path) in GROUND]
    assert [(str(path), heavy_imports(path)) for path in ground if heavy_imports(path)] == []


def test_importing_loads_nothing_slow() -> None:
    """One process: each statement adds to what the ones before it loaded."""
    code = (
        "import sys\n"
        "for statement in ('import torchlake', 'import torchlake.cli', 'torchlake.Job, torchlake.TorchlakeError',"
        " 'torchlake.errors', 'torchlake.predict'):\n"
        "    exec(statement)\n"
        f"    loaded = sorted({HEAVY | UNUSUAL!r} & set(sys.modules))\n"
        "    print(*(f'{statement} loads {name}' for name in loaded), sep='\\n', end='')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_the_rules_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "atomic_io.py"
    path.write_text(
        "def f():\n    from torchlake.training.train import train\n    from torchlake import predict, errors\n"
        "    from torchlake.outputs import begin\n    from torchlake.tables import keys\n    import torch\n"
    )
    assert rooms(imported(path)) == {"training", "__init__", "errors", "outputs", "tables"}
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert len(climbs(path)) == 4
    assert heavy_imports(path) == {"torch"}
