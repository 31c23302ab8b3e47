"""Parameters and examples of tests with more cases than `make test` has time for."""

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

RANDOM = bool(os.environ.get("TORCHLAKE_RANDOM_EXAMPLES"))
"Of `make faults`, which draws other examples each time, and more of them."


def sweep(cases: Iterable[Any], *, quick: Container[Any]) -> list[Any]:
    """Every case; those outside `quick` are slow tests, which `make faults` runs. A tuple is several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]


def examples(number: int, *, quick: int) -> int:
    """How many examples Hypothesis draws: `quick` in `make test`, `number` in `make faults`."""
    return number if RANDOM else quick
