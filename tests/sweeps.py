"""Parameters and examples of tests with more cases than `make test` has time for."""

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

RANDOM = bool(os.environ.get("TORCHLAKE_RANDOM_EXAMPLES"))
"Of `make faults`, which draws other examples each time, and more of them."
leaves_out = False
"Whether slow cases are not even collected: in `make test`, where they would be two of five."


def sweep(cases: Iterable[Any], *, quick: Container[Any]) -> list[Any]:
    """Every case; those outside `quick` are slow tests, which `make faults` runs. A tuple is several parameters."""
    cases = list(cases)
    if leaves_out:  # pytest reports a test without any case as skipped
        cases = [case for case in cases if case in quick] or cases[:1]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]


def examples(number: int, *, quick: int) -> int:
    """How many examples Hypothesis draws: `quick` in `make test`, `number` in `make faults`."""
    return number if RANDOM else quick
