"""A training to break and the same one undisturbed, and the table of times to recovery at the end of these tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import training_runs as runs
from recovery_times import Recovery, Watch, measuring, table

RECOVERIES = pytest.StashKey[list[Recovery]]()


@pytest.fixture
def recovery(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """`recovery(run, case)` measures how long the run that a failpoint of this test breaks takes to go on."""
    with measuring(request.node.name, request.config.stash.setdefault(RECOVERIES, [])) as watch:
        yield watch


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, tiny_bert_dropout: Path) -> dict[str, Any]:
    """A job with dropout: 18 steps, a validation after 9 and 18, a checkpoint every 3."""
    return runs.job(tmp_path_factory.mktemp("job"), tiny_bert_dropout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, sections: dict[str, Any]) -> Path:
    """That job, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert runs.succeed(run, sections).steps == 18
    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if measured := config.stash.get(RECOVERIES, []):
        terminalreporter.section("time to recovery")
        for line in table(measured):
            terminalreporter.line(line)
