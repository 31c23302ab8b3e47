"""Parameters of tests with more cases than `make test` has time for."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], *, quick: Container[Any]) -> list[Any]:
    """Every case; those outside `quick` are slow tests, which `make faults` runs. A tuple is several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]
