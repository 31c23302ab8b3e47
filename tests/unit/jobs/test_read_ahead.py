"""Chunks are read ahead, and share batches if they are ready; one that may have a poison row runs alone."""

import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from torchlake.jobs.worker import read_ahead
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.jobs.worker.read_ahead import More, Ready, Workspace, reading_ahead
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.jobs.worker.task_progress import TaskProgress
from torchlake.outputs.parts import PartFolder
from torchlake.storage.versions import Version
from torchlake.tables.plan import Chunk

ROWS = 3


def chunk(number: int) -> Chunk:
    place = {"file": "in", "name": "in", "version": Version(0, 0), "sha256": "", "format": "parquet"}
    return Chunk(
        index=number, **place, row_groups=(0, 1), first_row=number * ROWS, rows=ROWS, schema=pa.schema([]).serialize()
    )


def items(count: int) -> Iterator[tuple[Chunk, str]]:
    return ((chunk(number), f"part-{number}") for number in range(count))


def worker(
    folder: Path, groups: list[list[int]], *, most: int, read: Any = None, first: Callable[[], Any] = int
) -> Any:
    """A worker that notes which chunks were written together; `first` is called before the first of them is written."""
    (folder / "table").mkdir(parents=True, exist_ok=True)

    def reading(one: Chunk, attempt: Attempt) -> int:
        return one.index if read is None else read(one)

    def write(group: Sequence[Ready[int]], more: More[int]) -> Generator[tuple[Ready[int], int], None, None]:
        if not groups:
            first()
        groups.append([one.chunk.index for one in group])
        return ((one, one.read) for one in group)

    space = Workspace(journal=str(folder / "journal"), parts=PartFolder(location=str(folder / "table")))
    return reading_ahead(space, 60.0, read=reading, write=write, lost=lambda part: part.chunk, most=most)


@pytest.mark.parametrize("most", [1, 3])
def test_results_are_in_order_and_groups_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    submitted: list[Future[Any]] = []
    first_alone, last_ahead = threading.Event(), threading.Event()

    class Noting(ThreadPoolExecutor):
        def submit(self, *given: Any, **named: Any) -> Future[Any]:
            future = super().submit(*given, **named)
            submitted.append(future)
            if len(submitted) == 1 + most:
                last_ahead.set()
            return future

    def read(one: Chunk) -> int:
        assert one.index == 0 or first_alone.wait(60), "the first chunk was not written"
        return one.index

    def all_read() -> None:
        first_alone.set()
        assert last_ahead.wait(60), f"{len(submitted)} of {1 + most} chunks were submitted"
        wait(submitted[: 1 + most])

    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Noting)
    groups: list[list[int]] = []
    assert list(worker(tmp_path, groups, most=most, read=read, first=all_read)(items(10))) == list(range(10))
    assert [number for group in groups for number in group] == list(range(10))
    assert groups[0] == [0]
    assert groups[1] == list(range(1, 1 + most))
    assert max(map(len, groups)) == most
    assert list((tmp_path / "journal").iterdir()) == []


class Hasty(ThreadPoolExecutor):
    """What the main thread submits runs, as far as it can, before `submit` returns."""

    def submit(self, *given: Any, **named: Any) -> Future[Any]:
        future = super().submit(*given, **named)
        if threading.current_thread() is threading.main_thread():
            wait([future], timeout=0.1)
        return future


def test_chunks_stay_in_order_however_threads_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Hasty)
    work = worker(tmp_path, [], most=2, read=lambda one: one.index)
    assert list(work(items(6))) == list(range(6))


def test_a_chunk_with_suspects_shares_nothing(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir(parents=True)
    killed = Attempt(tmp_path / "journal", 2, ROWS, 60.0)
    with killed.running("score", [1]):
        state = killed.path.read_text()
    killed.close()
    dead = json.loads(state.split("\n")[0]) | {"pid": 2**22 + 1}
    killed.path.write_text(f'{json.dumps(dead)}\n["score", [1]]\n')
    read: list[int] = []
    groups: list[list[int]] = []

    def reading(one: Chunk) -> int:
        if one.index > 2:
            assert [2] in groups, "it is read after the chunk before it is written"
        read.append(one.index)
        return one.index

    assert list(worker(tmp_path, groups, most=2, read=reading)(items(5))) == list(range(5))
    assert [2] in groups


def test_an_error_ends_all_attempts(tmp_path: Path) -> None:
    def reading(one: Chunk) -> int:
        if one.index == 4:
            raise RuntimeError("unreadable")
        return one.index

    with pytest.raises(RuntimeError, match="unreadable"):
        list(worker(tmp_path, [], most=3, read=reading)(items(6)))
    assert list((tmp_path / "journal").iterdir()) == []


def test_work_gets_further_chunks_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()

    def write(group: Sequence[Ready[int]], more: More[int]) -> Generator[tuple[Ready[int], int], None, None]:
        mine = list(group)
        while len(mine) < 5:  # each is read within milliseconds
            mine += more()
        for one in mine[::-1]:
            assert one.attempt.path.exists()
            yield one, one.read
            assert not one.attempt.path.exists()

    space = Workspace(journal=str(tmp_path / "journal"), parts=PartFolder(location=str(tmp_path / "table")))
    work = reading_ahead(
        space, 60.0, read=lambda one, attempt: one.index, write=write, lost=lambda part: part.chunk, most=2
    )
    assert list(work(items(5))) == [4, 3, 2, 1, 0]


def test_the_logs_of_chunks_in_one_batch_name_their_own_rows(tmp_path: Path) -> None:
    attempts = [Attempt(tmp_path, number, ROWS, 60.0) for number in range(3)]
    counted = TaskProgress(tmp_path / "none")
    counted._folder = tmp_path
    together = Attempts(attempts)

    def last() -> list[Any]:
        return [json.loads(one.path.read_text().split("\n")[-2]) for one in attempts]

    with together.running("score", [8, 0, 2, 7]):
        assert [last()[0], last()[2]] == [["score", [0, 2], 0], ["score", [1, 2], 0]]
        together.advance()
        together.now([0, 7], {0: 4, 2: 5, 7: 1})
        assert [last()[0], last()[2]] == [["score", [0], 9], ["score", [1], 1]]
        assert counted.rows() == 2
        together.now([7, 4])
        assert last() == [[], ["score", [1], 0], ["score", [1], 1]]
        assert counted.rows() == 3
    together.idle()
    assert last() == [[], [], []]
    assert counted.rows() == 5
    for one in attempts:
        one.close()


def test_a_chunk_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    attempts = [Attempt(tmp_path, number, ROWS, 60.0) for number in range(3)]
    for one in attempts:
        one.suspects["score"] = {1}
    together = Attempts(attempts[:2], times=2)
    assert together.suspects == {2, 3, 8, 9}
    together.leave(0)
    assert together.suspects == {8, 9}
    assert together.join(attempts[2:]) == 12
    together.now([6, 12, 17])
    assert [json.loads(one.path.read_text().split("\n")[-2]) for one in attempts[1:]] == [
        ["score", [0], 0],
        ["score", [0, 2], 0],
    ]
    together.leave(6)
    together.leave(12)
    assert together.suspects == set()
    for one in attempts:
        one.close()
