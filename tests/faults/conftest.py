"""The table of times to recovery, at the end of a run of these tests."""

from collections.abc import Iterator

import pytest

from recovery_times import Recovery, Watch, measuring, table

RECOVERIES = pytest.StashKey[list[Recovery]]()


@pytest.fixture
def recovery(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """`recovery(run, case)` measures how long the run that a failpoint of this test breaks takes to go on."""
    with measuring(request.node.name, request.config.stash.setdefault(RECOVERIES, [])) as watch:
        yield watch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if measured := config.stash.get(RECOVERIES, []):
        terminalreporter.section("time to recovery")
        for line in table(measured):
            terminalreporter.line(line)
