"""Golden losses: those of the first steps of a job at full precision, in a file beside the tests.

On the machine and the torch that wrote a file the losses must be equal; other processors sum in another order, and
there they may differ by `TOLERANCE`. After a change that is meant to change them: UPDATE_GOLDEN=1 pytest tests/golden
tests/conformance
"""

import os
from pathlib import Path

import pytest
import torch

from torchlake.processes.hardware import cpu_facts

TOLERANCE = 2e-5
"On another machine or torch."
BETWEEN_STRATEGIES = 1e-5
"A sum over two ranks rounds differently from a sum over one."
FOLDER = Path(__file__).parent / "golden"


def machine() -> str:
    facts = cpu_facts()
    processor = " ".join(facts.get(name, "?") for name in ("model name", "cpu family", "model", "stepping"))
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def check(name: str, found: list[float]) -> None:
    """Hold the losses against the file's, or write them to it."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        lines = [f"# {machine()}", *(f"{step} {loss!r}" for step, loss in enumerate(found, start=1))]
        path.write_text("\n".join(lines) + "\n")
    header, *rows = path.read_text().splitlines()
    golden = [float(row.split()[1]) for row in rows]
    assert len(golden) == len(found)
    assert found == (golden if header == f"# {machine()}" else pytest.approx(golden, abs=TOLERANCE, rel=TOLERANCE))
