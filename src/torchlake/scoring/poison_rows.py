"""Which rows kill the process that reads, tokenizes or scores them: two strikes and a row is set aside.

A row can end its process from below Python (a crash in a kernel, the kernel's out-of-memory killer) or never come back.
No exception can be caught then, so the worker notes before each step, in a small file in the journal, which rows of the
chunk it is about to read, to tokenize (all of them at once) or to score (a batch). The next attempt at the chunk finds
the file of the attempt that died, whichever engine runs it:

    first death     the rows of the step that was running become suspects of this step
    second death    one suspect was in the step alone: it is quarantined, and its reason goes into its error column

Suspects of scoring run first, so that the second death costs one row's time and not the chunk's. Rows of a file cannot
be read one at a time: a chunk whose reading ends two more processes ends the job.

A worker reads the next chunk while it scores this one, so one death may leave suspects in two chunks, most of them
innocent. A chunk that has suspects is therefore `alone`: nothing of another chunk runs beside any of its steps, the
second death has one cause, and the innocent pass and are scored.

An engine may run two attempts at the same time (Spark's speculation, a node behind a broken network), so each has a
file of its own, and only that of an attempt which has died counts: on this machine its process is gone; on another one
its heartbeat, the file's time, stands still for `SILENT_S`. Cost: one `write` of a few hundred bytes per step, and
`SILENT_S` where a chunk is tried again on another machine. Nothing is fsynced: the file survives the process, not more.
"""

import faulthandler
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import psutil
import pyarrow as pa

from torchlake.atomic_io import storage_error
from torchlake.errors import TableError
from torchlake.tables.chunks import Chunk
from torchlake.tables.reading import ChunkReader

BEAT_S = 5.0
SILENT_S = 30.0
WHOLE_CHUNK_S = 60.0
"A whole chunk may take this long to be read or tokenized, where a row may take less: it has thousands of rows."
MAX_LOST_READS = 2

Step = Literal["read", "tokenize", "score"]
T = TypeVar("T")


class Strikes:
    """The record of one attempt at a chunk of so many rows, kept in `folder`; rows are positions within the chunk.

    `suspects` of a step are to be alone in it; `quarantined` maps rows that must be in no step again to their reasons;
    `lost_reads` counts the processes that ended while they did nothing but read this chunk. A step may take `limit_s`
    seconds: then its process ends, with its stack in the file `trace`.
    """

    def __init__(self, folder: Path, chunk: int, rows: int, limit_s: float) -> None:
        self.path = folder / f"{chunk}-{secrets.token_hex(6)}.json"
        self.trace = self.path.with_suffix(".trace")
        self.rows, self.limit_s = rows, limit_s
        self.suspects: dict[Step, set[int]] = {step: set() for step in get_args(Step)}
        self.quarantined: dict[int, str] = {}
        self.lost_reads = 0
        try:
            folder.mkdir(exist_ok=True)
            others = sorted(folder.glob(f"{chunk}-*.json"))
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            self._trace = os.open(self.trace, os.O_WRONLY | os.O_CREAT)
            self._ended = threading.Event()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
            dead = list(self._dead(others))
            for attempt in dead:
                self._learn(attempt)
            self._note(
                {
                    "suspects": {step: sorted(rows) for step, rows in self.suspects.items()},
                    "quarantined": self.quarantined,
                    "lost_reads": self.lost_reads,
                    **_self(),
                }
            )
            for attempt in dead:  # what it knew is in this file now
                attempt.unlink(missing_ok=True)
                attempt.with_suffix(".trace").unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, self.path) from error

    @property
    def alone(self) -> bool:
        """Whether nothing of another chunk may run in this process while this chunk does."""
        return any(self.suspects.values())

    @contextmanager
    def running(self, step: Step, rows: Sequence[int] | None = None) -> Iterator[None]:
        """Announce that a step of `rows` (None: of all) begins, and end the process when it takes too long."""
        self._note([step, rows])
        with _watched(self._trace, max(self.limit_s, WHOLE_CHUNK_S) if rows is None else self.limit_s):
            yield

    def idle(self) -> None:
        """Say that no step is running."""
        self._note([])

    def tokenizing(self, make: Callable[[int, int], T]) -> list[T]:
        """What `make(first, stop)` makes of all rows at once or, where they are suspects, of each row alone."""
        if self.suspects["tokenize"]:
            made = []
            for row in range(self.rows):
                with self.running("tokenize", [row]):
                    made.append(make(row, row + 1))
        else:
            with self.running("tokenize"):
                made = [make(0, self.rows)]
        self.idle()
        return made

    def close(self) -> None:
        """The chunk is done, or its attempt has ended in an exception: forget it."""
        self._ended.set()
        os.close(self._file)
        os.close(self._trace)
        self.path.unlink(missing_ok=True)
        self.trace.unlink(missing_ok=True)

    def _note(self, value: Any) -> None:
        try:
            os.write(self._file, (json.dumps(value) + "\n").encode())
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self.path)

    def _dead(self, others: Sequence[Path]) -> Iterator[Path]:
        """The attempts that have died; waits for those of other machines to show which they are."""
        seen: dict[Path, tuple[float, float]] = {}
        undecided = list(others)
        while undecided:
            for other in list(undecided):
                changed = _changed(other)
                state = _state(other)
                if changed is None:
                    undecided.remove(other)  # its chunk is done
                elif state is not None and state.get("machine") == _machine():
                    undecided.remove(other)
                    if not _is_running(state):
                        yield other
                else:
                    first, since = seen.setdefault(other, (changed, time.monotonic()))
                    silent = max(time.monotonic() - since, (_changed(self.path) or 0.0) - changed)
                    if changed != first:
                        undecided.remove(other)
                    elif silent > SILENT_S:
                        undecided.remove(other)
                        yield other
            if undecided:
                time.sleep(0.2)

    def _learn(self, attempt: Path) -> None:
        """Add what a dead attempt knew, and what it was doing."""
        try:
            lines = attempt.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is torn
        except FileNotFoundError:  # another attempt has learned it and keeps it
            return
        if not lines:
            return
        state = json.loads(lines[0])
        self.quarantined |= {int(row): reason for row, reason in state["quarantined"].items()}
        self.lost_reads = max(self.lost_reads, state["lost_reads"])
        for step, rows in state["suspects"].items():
            self.suspects[step].update(rows)
        running: list[Any] = json.loads(lines[-1]) if len(lines) > 1 else []
        if running:
            step, rows = running
            known = set(state["suspects"][step])
            if step == "read" and known:
                self.lost_reads = max(self.lost_reads, state["lost_reads"] + 1)
            elif rows is not None and len(rows) == 1 and rows[0] in known:
                self.quarantined[rows[0]] = _reason(step, attempt.with_suffix(".trace"))
            self.suspects[step].update(range(self.rows) if rows is None else rows)
        for rows in self.suspects.values():
            rows.difference_update(self.quarantined)


def read_chunk(reader: ChunkReader, chunk: Chunk, strikes: Strikes) -> tuple[pa.Table, dict[int, str]]:
    """What `reader.read` gives, quarantined rows with their reasons among those that cannot be read.

    Raises what `reader.read` does, and TableError when the reading has ended its process too often.
    """
    if strikes.lost_reads >= MAX_LOST_READS:
        raise TableError(
            f"{chunk.file}: the rows {chunk.first_row:,} to {chunk.first_row + chunk.rows - 1:,} cannot be read: "
            f"{strikes.lost_reads + 1} processes that tried died, or took more than "
            f"{max(strikes.limit_s, WHOLE_CHUNK_S):g} s. Write the file again, leave it out, or give each process more "
            "memory."
        )
    with strikes.running("read"):
        table, unreadable = reader.read(chunk)
    return table, {**unreadable, **strikes.quarantined}


_watching = threading.Lock()
_deadlines: dict[int, float] = {}
"When the steps that run have to be done, by the open file that takes the stack otherwise."


@contextmanager
def _watched(trace: int, limit_s: float) -> Iterator[None]:
    """End the process when what is inside takes longer; two threads may be inside at the same time.

    The watchdog is faulthandler's: a C thread that needs no interpreter lock, so a hang inside a kernel is found too. A
    process has one, which is set to the first of the deadlines.
    """
    with _watching:
        _deadlines[trace] = time.monotonic() + limit_s
        _watch_the_first()
    try:
        yield
    finally:
        with _watching:
            del _deadlines[trace]
            _watch_the_first()


def _watch_the_first() -> None:
    if _deadlines:
        trace, deadline = min(_deadlines.items(), key=lambda item: item[1])
        faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.001), exit=True, file=trace)
    else:
        faulthandler.cancel_dump_traceback_later()


def _reason(step: Step, trace: Path) -> str:
    """Why a row is quarantined that was in that step alone for the second time."""
    hung = trace.exists() and trace.stat().st_size > 0
    reason = "timeout: gave no answer, twice" if hung else "killed_process: twice"
    return f"{reason}, while it was tokenized" if step == "tokenize" else reason


def _self() -> dict[str, Any]:
    """What says later whether this process still runs."""
    return {"machine": _machine(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _machine() -> str:
    """This machine, and which of its lists of processes (containers have their own) the pid is in."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _is_running(state: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(state["pid"])
        return process.create_time() == state["started"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _state(attempt: Path) -> dict[str, Any] | None:
    """The first line; None where it is not whole, as of a process that was killed before it had written it."""
    try:
        first, newline, _ = attempt.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    return json.loads(first) if newline else None


def _changed(path: Path) -> float | None:
    """When the file was written to, by its storage's clock. Opening it makes a network file system look again."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
