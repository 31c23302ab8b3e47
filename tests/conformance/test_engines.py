"""The promise of an engine: what every file in `engines/` keeps, whatever starts its processes."""

import json
import os
import signal
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import engine_work as work
from sweeps import sweep
from torchlake import engines, plugins
from torchlake.engines import Engine, Resources, _ray_train, _spark_distributor
from torchlake.errors import Diverged, Interrupted, RankFailed, TableError, TooManyErrors, UsageError
from torchlake.processes import hardware
from torchlake.tables import keys
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import check_key
from torchlake.tables.table import open_table

LAUNCHERS = {"torch_distributor": "spark", "torch_trainer": "ray"}
"The engines' own launchers of groups; what one cannot do is said in `UNSUPPORTED` of its module."
LOCAL_ONLY = {
    "test_an_error_of_ours_in_a_rank_comes_back_as_itself",
    "test_an_error_of_ours_in_a_worker_comes_back_as_itself",
    "test_a_worker_is_made_once_per_process",
    "test_chunks_and_results_may_be_any_picklable_value",
    "test_much_is_spread_over_processes_and_comes_back_in_order",
    "test_of_a_range_as_many_ranks_start_as_there_is_room_for",
    "test_processes_share_the_cores_and_may_have_several_each",
    "test_ranks_run_at_the_same_time",
    "test_results_come_while_others_are_worked_on",
    "test_the_first_rank_to_fail_is_the_error",
    "test_there_may_be_more_processes_than_chunks",
    "test_workers_that_cannot_start_end_the_job",
}
"Quick on the local engine alone: each needs seconds on a cluster, and others test what differs there."


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test is of every engine. `make test` has each on the local one and, in turn, on one of the others."""
    fixture = next((name for name in ("engine", "launcher") if name in metafunc.fixturenames), None)
    if fixture is None:
        return
    others = [name for name in plugins.names("engines") if name != "local"]
    tests = [name for name in vars(metafunc.module) if name.startswith("test_")]
    quick = (
        {"local"}
        if metafunc.function.__name__ in LOCAL_ONLY
        else {"local", others[tests.index(metafunc.function.__name__) % len(others)]}
    )
    names = [*plugins.names("engines"), *(LAUNCHERS if fixture == "launcher" else ())]
    metafunc.parametrize(fixture, sweep(names, quick=quick), indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engine under test, with two processes."""
    return _made(request, request.param)


@pytest.fixture
def launcher(request: pytest.FixtureRequest) -> Engine:
    """The same, with each way of an engine to launch ranks."""
    name = LAUNCHERS.get(request.param)
    if name is None:
        return _made(request, request.param)
    made = _made(request, name, launcher=request.param)
    never = _spark_distributor.UNSUPPORTED if name == "spark" else _ray_train.UNSUPPORTED
    reason = never.get(request.function.__name__.removeprefix("test_"))
    if reason is not None:
        pytest.skip(reason)
    return made


def _made(request: pytest.FixtureRequest, name: str, **options: Any) -> Engine:
    if name != "local":
        request.getfixturevalue(name)
    made: Engine = getattr(plugins.load("engines", name), name.title())(processes=2, **options)
    return made


def test_every_chunk_has_one_result(engine: Engine) -> None:
    with closing(engine.run_chunks(work.squares, range(25))) as results:
        assert sorted(results) == [chunk * chunk for chunk in range(25)]


def test_there_may_be_no_chunks(engine: Engine) -> None:
    assert list(engine.run_chunks(work.no_worker, [])) == []


def test_there_may_be_more_processes_than_chunks(engine: Engine) -> None:
    assert list(engine.run_chunks(work.squares, [3], resources=Resources(processes=2))) == [9]


def test_chunks_and_results_may_be_any_picklable_value(engine: Engine) -> None:
    chunks = [{"file": Path("a.parquet"), "rows": (0, 10)}, None, "", b"\x00" * 3_000_000]
    results = list(engine.run_chunks(lambda: lambda chunks: ([chunk] for chunk in chunks), chunks))
    assert sorted(map(repr, results)) == sorted(repr([chunk]) for chunk in chunks)


def test_a_worker_is_made_once_per_process(engine: Engine, tmp_path: Path) -> None:
    made_in = list(engine.run_chunks(partial(work.counting, tmp_path), range(12)))
    makers = [path.name for path in tmp_path.iterdir()]
    assert {pid for pid, _ in made_in} <= {int(name.split("-")[0]) for name in makers}
    assert {made for _, made in made_in} == {1}
    assert str(os.getpid()) not in {name.split("-")[0] for name in makers}


def test_chunks_are_handed_out_when_they_are_pulled(engine: Engine, tmp_path: Path) -> None:
    # Chunk 0 ends after all others were worked on, so whoever has it cannot hold another one. The result of the last of
    # the others is on its way at that moment.
    results = engine.run_chunks(partial(work.last_is_zero, tmp_path, 10), range(10))
    assert 0 in list(results)[-2:]


def test_results_come_while_others_are_worked_on(engine: Engine, tmp_path: Path) -> None:
    # Chunk 1 ends only after the consumer has seen the result of chunk 0.
    with closing(engine.run_chunks(partial(work.one_after_seen, tmp_path / "seen"), range(2))) as results:
        assert next(results) == 0
        (tmp_path / "seen").touch()
        assert list(results) == [1]


def test_a_worker_may_pull_one_ahead_from_a_thread(engine: Engine) -> None:
    assert sorted(engine.run_chunks(work.prefetching, range(11))) == [chunk * chunk for chunk in range(11)]


def test_processes_share_the_cores_and_may_have_several_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine.processes = None  # the number is the engine's own choice here, of as many as there are chunks
    cores = hardware.cores()
    everything = set(engine.run_chunks(work.threads, range(2), resources=Resources(threads=10_000)))
    assert len({pid for pid, _ in everything}) == 1
    assert {int(threads) for _, threads in everything} == {cores}
    shared = set(engine.run_chunks(work.threads, range(2), resources=Resources(processes=2, threads=10_000)))
    assert {int(threads) for _, threads in shared} == {max(1, cores // 2)}, "a number that is given is the number"
    with pytest.raises(UsageError, match="threads must be 1 or more, not 0"):
        list(engine.run_chunks(work.squares, range(3), resources=Resources(threads=0)))


def test_a_worker_ends_in_order(engine: Engine, tmp_path: Path) -> None:
    running = engine.run_chunks(partial(work.with_an_end, tmp_path), range(4), resources=Resources(processes=1))
    assert sorted(running) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]


def test_a_worker_that_dies_is_replaced(engine: Engine, tmp_path: Path) -> None:
    results = list(engine.run_chunks(partial(work.dies_once_each, tmp_path, {2, 5, 7}), range(10)))
    assert set(results) == set(range(10))
    assert sorted(results) == sorted(set(results)), "a result was handed over, so its chunk must not run again"


def test_a_chunk_that_keeps_killing_ends_the_job(engine: Engine) -> None:
    with pytest.raises(RankFailed, match=r"'poison'.*SIGKILL") as caught:
        list(engine.run_chunks(work.poisoned, ["a", "poison", "b"]))
    assert caught.value.signal == signal.SIGKILL


def test_workers_that_cannot_start_end_the_job(engine: Engine) -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        list(engine.run_chunks(work.dies_at_start, range(3)))
    assert caught.value.signal == signal.SIGKILL


def test_an_exception_in_a_worker_brings_its_traceback(engine: Engine) -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError") as caught:
        list(engine.run_chunks(work.dividing, [1, 0]))
    assert "in _dividing_worker" in caught.value.traceback
    assert caught.value.signal is None


def test_an_error_of_ours_in_a_worker_comes_back_as_itself(engine: Engine) -> None:
    with pytest.raises(TooManyErrors, match=r"^9 of 10 rows$"):
        list(engine.run_chunks(work.gives_up, [1, 0]))


def test_an_exception_while_making_the_worker_is_not_retried(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="no model here"):
        list(engine.run_chunks(partial(work.fails_to_make, tmp_path), range(3), resources=Resources(processes=1)))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("spoil", sweep(["few", "many", "early"], quick={"many"}))
def test_one_result_per_chunk_is_enforced(engine: Engine, spoil: str) -> None:
    with pytest.raises(RankFailed, match="results for"):
        list(engine.run_chunks(partial(work.miscounting, spoil), range(3), resources=Resources(processes=1)))


def test_much_is_spread_over_processes_and_comes_back_in_order(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing the input, checking a key, checking finished chunks and `verify`: those of a predict with a key."""
    items = list(range(20))
    assert list(engine.spread(str, items, size=0, name="here")) == [str(item) for item in items]
    with closing(engine.spread(work.process_of, items, size=engines.SPREAD_BYTES, name="there")) as results:
        found = list(results)
    assert [item for item, _ in found] == items
    assert os.getpid() not in {pid for _, pid in found}
    with closing(engine.spread(work.process_of, items, size=engines.SPREAD_BYTES, name="there")) as results:
        assert next(results)[0] == 0  # closing it cancels the rest

    for number, first in enumerate((0, 70)):
        path = tmp_path / "in" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [f"key {first + row}" for row in range(100)]}), path)
    table = open_table(tmp_path / "in", columns=["id"])
    monkeypatch.setattr(engines, "SPREAD_BYTES", 0)
    monkeypatch.setattr(keys, "ITEM_ROWS", 60)
    plan = plan_chunks(table, columns=["id"], chunk_rows=30, spread=engine.spread)
    assert plan == plan_chunks(table, columns=["id"], chunk_rows=30)
    with pytest.raises(TableError, match=r"'key 70' in .*0.parquet row 70 and .*1.parquet row 0"):
        check_key(table, plan, "id", spread=engine.spread, scratch=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_launch_returns_the_value_of_rank_0(launcher: Engine) -> None:
    assert launcher.launch(lambda a, b: (os.environ["RANK"], a + b), 2, 3) == ("0", 5)


def test_ranks_have_the_variables_of_torchrun(launcher: Engine, tmp_path: Path) -> None:
    launcher.launch(work.write_environment, tmp_path)
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in "01")
    for rank, variables in enumerate((zero, one)):
        assert variables["RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "2"
        assert int(variables["LOCAL_RANK"]) < int(variables["LOCAL_WORLD_SIZE"])
        assert int(variables["GROUP_RANK"]) >= 0
        assert int(variables["OMP_NUM_THREADS"]) >= 1
    assert zero["MASTER_ADDR"] == one["MASTER_ADDR"]
    assert zero["MASTER_PORT"] == one["MASTER_PORT"]


def test_of_a_range_as_many_ranks_start_as_there_is_room_for(launcher: Engine) -> None:
    assert launcher.launch(work.world_size, processes=(1, 2)) == launcher.num_ranks((1, 2)) <= launcher.capacity(2) <= 2
    assert launcher.num_ranks((5, 6)) in (5, 6)
    with pytest.raises(UsageError, match="the minimum must come first"):
        launcher.launch(work.world_size, processes=(3, 2))


def test_ranks_run_at_the_same_time(launcher: Engine, tmp_path: Path) -> None:
    assert launcher.launch(work.meet, tmp_path) == "met"


def test_the_first_rank_to_fail_is_the_error(launcher: Engine, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with KeyError: 'the cause'") as caught:
        launcher.launch(work.rank_1_fails_first, tmp_path)
    assert caught.value.rank == 1
    assert "in rank_1_fails_first" in caught.value.traceback


def test_a_rank_that_fails_stops_those_that_wait_for_it(launcher: Engine) -> None:
    with pytest.raises(RankFailed, match="rank 0 failed"):
        launcher.launch(work.rank_0_fails)


def test_a_killed_rank_is_named_with_its_signal(launcher: Engine) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL") as caught:
        launcher.launch(work.rank_1_is_killed)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


def test_an_error_of_ours_in_a_rank_comes_back_as_itself(launcher: Engine) -> None:
    with pytest.raises(Diverged, match=r"^the loss is not finite$"):
        launcher.launch(work.raises, Diverged("the loss is not finite"))
    with pytest.raises(Interrupted) as caught:
        launcher.launch(work.raises, Interrupted("saved", signum=signal.SIGINT))
    assert caught.value.exit_code == 130


def test_functions_that_cannot_travel_are_refused(launcher: Engine) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        launcher.launch(lambda: lock)
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        list(launcher.run_chunks(partial(work.holding, lock), range(3)))


def test_a_number_of_processes_below_one_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="processes must be 1 or more, not 0"):
        engine.launch(os.getpid, processes=0)
    with pytest.raises(UsageError, match="processes must be 1 or more, not -1"):
        list(engine.run_chunks(work.squares, range(3), resources=Resources(processes=-1)))
