"""Tests of everything that runs on a GPU. Where there is none they run on the CPU, except those that need CUDA itself.

`make gpu` runs them on a machine that has never seen the project: no fixture here needs a network or another file than
those of the repository.
"""

import sys

import pytest
import torch


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told at once: a lent machine may be gone before the summary."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", file=sys.__stdout__, flush=True)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def cuda() -> None:
    """Skip where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
