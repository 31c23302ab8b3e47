"""Writers of one output in any interleaving, killed, paused, with lost answers: tests/transactions.py says what holds.

A short run here; `make faults` runs more than 10,000 interleavings, and every pair of places where two writers stop.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import torchlake
from interleaving import Writer
from sweeps import sweep
from transactions import MODES, SOURCES, Job, Model, Planned, make_sources

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
WRITERS = 3
"At most, that have not ended."
JOBS = {
    kind: st.builds(
        Job,
        source=st.sampled_from(SOURCES),
        version=st.sampled_from([1, 1, 2]),
        mode=st.sampled_from(modes),
        new_input=st.booleans(),
        discard=st.booleans(),
        grouped=st.booleans(),
    )
    for kind, modes in MODES.items()
}
SOME_QUICK = sweep(MODES, quick={"folder", "table in a store"})
MACHINE = st.sampled_from(["one", "one", "two"])
SOURCE = Path(torchlake.__file__).parent
OTHERS = ("iceberg", "hub")
"Sinks with steps of their own."
SITE = re.compile(r'failpoint\("([\w.]+)"\)|site="([\w.]+)"')


class Writers(RuleBasedStateMachine):
    """Hypothesis chooses who goes on, and what goes wrong; its attributes are set by the test."""

    kind: str
    sources: dict[str, Planned]
    seen: set[int]
    "The interleavings."

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.kind, self.sources)
        self.dead = False

    @initialize(data=st.data(), dead=st.booleans())
    def begin(self, data: st.DataObject, dead: bool) -> None:
        """Two writers, of the same job as often as not."""
        self.dead = dead
        first = data.draw(JOBS[self.kind])
        second = first if data.draw(st.booleans()) else data.draw(JOBS[self.kind])
        for job in (first, second):
            self.model.start(job, machine=data.draw(MACHINE))

    @property
    def active(self) -> list[Writer]:
        return [one for one in self.model.running if one.active]

    @precondition(lambda self: len(self.active) < WRITERS)
    @rule(data=st.data(), machine=MACHINE)
    def start(self, data: st.DataObject, machine: str) -> None:
        """A writer of a new job, or of one that was run before."""
        known = [one.job for one in self.model.running.values()]
        job = data.draw(st.one_of(st.sampled_from(known), JOBS[self.kind]))
        self.model.start(job, machine=machine)

    @precondition(lambda self: self.active)
    @rule(which=st.integers(0, WRITERS), stops=st.integers(1, 24))
    def advance(self, which: int, stops: int) -> None:
        self.model.advance(self.active[which % len(self.active)], stops)

    @precondition(lambda self: self.active)
    @rule(which=st.integers(0, WRITERS))
    def finish(self, which: int) -> None:
        self.model.finish(self.active[which % len(self.active)])

    @precondition(lambda self: any(one.next.offers for one in self.active))
    @rule(which=st.integers(0, WRITERS), fault=st.integers(0, 4))
    def fail(self, which: int, fault: int) -> None:
        """What goes wrong where a writer stands: an answer is lost, a request fails, a disk is full."""
        able = [one for one in self.active if one.next.offers]
        fiber = able[which % len(able)].next
        self.model.step(fiber, fiber.offers[fault % len(fiber.offers)])

    @precondition(lambda self: any(one.renewer for one in self.active))
    @rule(which=st.integers(0, WRITERS), stops=st.integers(1, 6))
    def renew(self, which: int, stops: int) -> None:
        """The other thread of a writer goes on: its time has passed."""
        able = [one for one in self.active if one.renewer]
        fiber = able[which % len(able)].renewer
        for _ in range(stops):
            if fiber is not None and not fiber.ended:
                self.model.step(fiber)

    @precondition(lambda self: any(one.main.thread for one in self.active))
    @rule(which=st.integers(0, WRITERS))
    def kill(self, which: int) -> None:
        able = [one for one in self.active if one.main.thread]
        self.model.world.kill(able[which % len(able)])

    @precondition(lambda self: any(one.lease for one in self.active))
    @rule()
    def expire(self) -> None:
        self.model.expire()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and self.model.running:
                self.model.settle(next(reversed(self.model.running.values())).job, dead=self.dead)
        finally:
            self.model.close()
        trace = self.model.world.trace
        self.seen.add(hash(tuple(trace)))
        for fault in {fault for _, _, fault in trace} - {""}:
            event(fault)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Planned]:
    return make_sources(tmp_path_factory.mktemp("sources"))


@contextmanager
def output(kind: str, sources: dict[str, Planned]) -> Iterator[Model]:
    model = Model(kind, sources)
    try:
        yield model
    finally:
        model.close()


def stops(kind: str, sources: dict[str, Planned], job: Job) -> list[tuple[str, ...]]:
    """What can happen at each stop of a job that nothing disturbs: it is killed, or something fails."""
    with output(kind, sources) as model:
        writer, found = model.start(job).writer, []
        while not writer.ended:
            found.append(("killed", *writer.main.offers))
            model.step(writer.main)
    return found


@pytest.mark.parametrize("kind", SOME_QUICK)
@pytest.mark.parametrize("examples", [12, pytest.param(3000, marks=pytest.mark.slow)])
def test_whatever_happens_each_row_is_there_once(kind: str, examples: int, sources: dict[str, Planned]) -> None:
    seen: set[int] = set()
    machine = type("Machine", (Writers,), {"kind": kind, "sources": sources, "seen": seen})
    options = settings(
        max_examples=examples,
        stateful_step_count=20,
        derandomize=examples < 100,
        deadline=None,
        suppress_health_check=CHECKS,
    )
    run_state_machine_as_test(machine, settings=options)
    assert len(seen) >= 0.7 * examples, "different interleavings: more than 10,000 of all kinds of outputs"


@pytest.mark.parametrize("source", sweep(["a", "ab"], quick={"a"}))
@pytest.mark.parametrize("kind", SOME_QUICK)
def test_a_job_that_ends_anywhere_goes_on(kind: str, source: str, sources: dict[str, Planned]) -> None:
    """It is killed at each stop, or fails there; then it completes, and computes no finished chunk again."""
    job = Job(
        source, mode="append" if "table" in kind else "create", grouped=True
    )  # appended twice, rows would be doubled
    for number, happens in enumerate(stops(kind, sources, job)):
        for what in happens:
            with output(kind, sources) as model:
                writer = model.start(job).writer
                model.advance(writer, number)
                if what == "killed":
                    model.world.kill(writer)
                else:
                    model.step(writer.main, what)
                    model.finish(writer)
                model.settle(job, dead=True)


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["same job", "another job"])
@pytest.mark.parametrize("kind", MODES)
def test_a_writer_that_wakes_anywhere_after_its_lease(kind: str, other: bool, sources: dict[str, Planned]) -> None:
    """Two writers stop anywhere: the first until its lease has expired, the second while the first continues."""
    job = Job("a", mode=MODES[kind][0], grouped=True)
    second = Job("c", mode="overwrite", discard=True) if other else job
    for one in range(len(stops(kind, sources, job))):
        for two in range(len(stops(kind, sources, second))):
            with output(kind, sources) as model:
                writers = [model.start(each).writer for each in (job, second)]
                model.advance(writers[0], one)
                model.expire()
                model.advance(writers[1], two)
                for writer in (*writers, *writers):
                    model.finish(writer)
                model.settle(second, dead=False)


def test_every_durable_step_is_a_stop(sources: dict[str, Planned]) -> None:
    """Each failpoint that the code of a write names is passed by the jobs of these tests."""
    passed: set[str] = set()
    for kind, modes in MODES.items():
        with output(kind, sources) as model:
            first = model.start(Job("ab", mode=modes[0], grouped=True)).writer
            model.advance(first, len(stops(kind, sources, Job("a"))) // 2)
            model.run(Job("a", mode=modes[0]))  # while the first one holds the lease
            model.finish(first)
            model.run(Job("a", version=2, mode=modes[-1]))
            passed.update(site for _, site, _ in model.world.trace)
    passed |= {site.rpartition(".")[0] for site in passed}
    files = [path for folder in ("outputs", "storage") for path in (SOURCE / folder).rglob("*.py")]
    named = {a or b for path in files if path.stem not in OTHERS for a, b in SITE.findall(path.read_text("utf-8"))}
    assert len(named) > 15
    assert named - passed == set()
