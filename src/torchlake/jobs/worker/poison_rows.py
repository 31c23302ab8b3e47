"""Crash isolation: find the rows that kill or hang the process that reads, tokenizes or scores them.

A crash in a kernel, the kernel's out-of-memory killer or an endless loop raises no exception. So before each step the
worker writes to a small file, the log of its attempt at a chunk, which rows it will read, tokenize (all of them at
once) or score (a batch). The next attempt at the chunk, on any engine, reads the log of the attempt that died:

    first death     the rows of the step that was running become suspects of this step
    second death    a suspect was in the step alone: it is quarantined, with the reason in its error column

Suspects are scored first, so the second death costs the time of one row, not of the chunk. Rows of a file cannot be
read one at a time: if reading a chunk kills two more processes, the job fails.

A worker reads the next chunk while it scores the current one, so a death may leave suspects, most of them innocent, in
two chunks. A chunk with suspects therefore runs `alone`, with nothing of another chunk beside it: the second death then
has one possible cause, and innocent rows are scored.

An engine may run two attempts at the same time (Spark's speculation, a node behind a broken network), so each attempt
has its own file, which counts only once the attempt is dead: on this machine its process has exited; on another machine
its heartbeat, the file's modification time, has stopped for `SILENT_S`. Cost: one `write` of a few hundred bytes per
step, and `SILENT_S` if a chunk is retried on another machine. Nothing is synced to disk: a log only has to survive its
process.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pyarrow as pa

from torchlake.atomic_io import storage_error
from torchlake.errors import TableError
from torchlake.jobs.worker import time_limit
from torchlake.storage.liveness import ProcessIdentity, is_running, this_process
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader

BEAT_S = 5.0
SILENT_S = 30.0
WHOLE_CHUNK_S = 60.0
"Minimum time limit for reading or tokenizing a whole chunk, which has thousands of rows."
MAX_LOST_READS = 2

Step = Literal["read", "tokenize", "score", "elsewhere"]
T = TypeVar("T")


class Attempt:
    """One attempt at a chunk, logged in `folder`; rows are positions within the chunk.

    `suspects` of a step must be alone in it; `quarantined` maps rows that are never tried again to their reasons;
    `lost_reads` counts the processes that died while they were only reading this chunk. If a step takes longer than
    `limit_s` seconds, the process exits and its stack is in the file `trace`.
    """

    def __init__(self, folder: Path, chunk: int, rows: int, limit_s: float) -> None:
        self.path = folder / f"{chunk}-{secrets.token_hex(6)}.json"
        self.trace = self.path.with_suffix(".trace")
        self.rows, self.limit_s = rows, limit_s
        self.suspects: dict[Step, set[int]] = {step: set() for step in get_args(Step)}
        self.quarantined: dict[int, str] = {}
        self.lost_reads = 0
        self._step: Step = "score"
        self._latest = self._beaten = 0.0
        try:
            folder.mkdir(exist_ok=True)
            # Listed before this attempt has a log, so that it does not wait for itself, nor for attempts that begin
            # later, which in turn wait for this one if they have to.
            others = sorted(folder.glob(f"{chunk}-*.json"))
            self._draft = self.path.with_suffix(".draft")
            self._file = os.open(self._draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            self._trace = os.open(self.trace, os.O_WRONLY | os.O_CREAT)
            # All dead attempts count, not only the last one: with speculation two may have died at the same time, each
            # with other suspects.
            dead = list(self._dead(others))
            for path in dead:
                self._learn(path)
            process = this_process()
            self._note(
                {
                    "suspects": {step: sorted(rows) for step, rows in self.suspects.items()},
                    "quarantined": self.quarantined,
                    "lost_reads": self.lost_reads,
                    # By these a later attempt finds out whether this process still runs.
                    "machine": process.machine,
                    "pid": process.pid,
                    "started": process.created,
                }
            )
            # The log gets its name only now that its first line is written. A log without that line does not tell its
            # machine, so a later attempt would have to wait for its heartbeat instead of looking for its process.
            os.rename(self._draft, self.path)
            self._ended = threading.Event()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
            # After the rename: if this process is killed before it, the next attempt still finds the old logs. Killed
            # between the two, it learns the same suspects twice, which changes nothing.
            for path in dead:
                path.unlink(missing_ok=True)
                path.with_suffix(".trace").unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, self.path) from error

    @property
    def alone(self) -> bool:
        """Whether no other chunk may run in this process at the same time."""
        return any(self.suspects.values())

    @contextmanager
    def running(
        self, step: Step, rows: Sequence[int] | None = None, of: int = 0, tokens: int | None = None
    ) -> Iterator[None]:
        """Log that a step of `rows` (None: all rows) begins; exit the process if it takes too long.

        `of` is the number of rows of the batch, if it has rows of other chunks, too. `tokens`: the step continues with
        other rows; see `narrow`. Rows that are "elsewhere" are in another process, which is watched there: they have no
        limit here, and are not to blame for a death.
        """
        self._step = step
        # Before the step and without buffering: after the step the process may be dead, and its last line is the only
        # thing that tells which rows it was working on.
        self._note([step, rows] if tokens is None else [step, rows, tokens])
        limit_s = max(self.limit_s, WHOLE_CHUNK_S) if rows is None else self.limit_s
        # Each row alone would have the limit, so a batch that shows progress has it for each of its rows.
        self._latest = time.monotonic() + limit_s * max(1, of, len(rows or ()))
        self._beaten = 0.0
        with nullcontext() if step == "elsewhere" else time_limit.watched(self._trace, limit_s):
            yield

    def advance(self) -> None:
        """Count the time limit of the running step from now, because its rows advance: a token, an answer."""
        now = time.monotonic()
        if now - self._beaten > min(1.0, self.limit_s / 10):  # each time starts a thread
            self._beaten = now
            time_limit.extend(self._trace, min(now + self.limit_s, self._latest))

    def narrow(self, rows: Sequence[int], tokens: int) -> None:
        """Log that only these of the scored rows are left, and how many tokens this attempt has written."""
        self._note([self._step, rows, tokens])

    def idle(self) -> None:
        """Log that no step is running."""
        self._note([])

    def tokenizing(self, make: Callable[[int, int], T]) -> list[T]:
        """Return the results of `make(first, stop)`: one for all rows or, if there are suspects, one for each row."""
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
        """Delete the log: the chunk is done, or the attempt ended with an exception."""
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
        """Yield the logs of dead attempts; for attempts on other machines, wait for their heartbeat."""
        seen: dict[Path, tuple[float, float]] = {}
        undecided = list(others)
        while undecided:
            for other in list(undecided):
                changed, running = _changed(other), _is_running(other)
                if changed is None:
                    undecided.remove(other)  # the log was deleted: its chunk is done, or another attempt has read it
                elif running is not None:
                    # A live attempt on this machine is left alone: both may score the chunk, and the first part wins.
                    # To suspect its rows would mark innocent ones, which are then scored one by one.
                    undecided.remove(other)
                    if not running:
                        yield other
                else:
                    # The process is on another machine, so only its heartbeat shows whether it is alive. Clocks of
                    # machines may differ, so each measure uses one clock: how long this process has seen no change,
                    # and the storage's time of this attempt's draft minus that of the log, which saves the wait for a
                    # log that is already old.
                    first, since = seen.setdefault(other, (changed, time.monotonic()))
                    silent = max(time.monotonic() - since, (_changed(self._draft) or 0.0) - changed)
                    if changed != first:
                        undecided.remove(other)
                    elif silent > SILENT_S:
                        undecided.remove(other)
                        yield other
            if undecided:
                time.sleep(0.2)

    def _learn(self, path: Path) -> None:
        """Add what a dead attempt knew, and the step that it was running."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # text after the last newline is incomplete
        except FileNotFoundError:  # another attempt has read it
            return
        if not lines:
            return
        state = json.loads(lines[0])
        self.quarantined |= {int(row): reason for row, reason in state["quarantined"].items()}
        self.lost_reads = max(self.lost_reads, state["lost_reads"])
        for step, rows in state["suspects"].items():
            self.suspects[step].update(rows)
        # An attempt that was idle when it died (killed by the scheduler, or with its machine) accuses no row.
        running: list[Any] = json.loads(lines[-1]) if len(lines) > 1 else []
        if running and running[0] != "elsewhere":
            step, rows = running[:2]
            known = set(state["suspects"][step])
            if step == "read" and known:
                # Rows of a file cannot be read one by one, so a read that kills again can only be counted.
                self.lost_reads = max(self.lost_reads, state["lost_reads"] + 1)
            elif rows is not None and len(rows) == 1 and rows[0] in known:
                # Only the second death of a row that was already suspect, and alone, is proof. The first one may have
                # been a coincidence: a machine that was shut down, or memory that another process took.
                self.quarantined[rows[0]] = _reason(step, path.with_suffix(".trace"))
            self.suspects[step].update(range(self.rows) if rows is None else rows)
        # Quarantined rows are error rows from now on; left among the suspects, they would keep the chunk running alone.
        for rows in self.suspects.values():
            rows.difference_update(self.quarantined)


def read_chunk(reader: ChunkReader, chunk: Chunk, attempt: Attempt) -> tuple[pa.Table, dict[int, str]]:
    """Read a chunk as `reader.read` does, with quarantined rows and their reasons among the unreadable ones.

    Raises as `reader.read`, and TableError if reading has killed too many processes.
    """
    if attempt.lost_reads >= MAX_LOST_READS:
        raise TableError(
            f"{chunk.file}: the {chunk.where} cannot be read: {attempt.lost_reads + 1} processes died while reading, "
            f"or took longer than {max(attempt.limit_s, WHOLE_CHUNK_S):g} s. Write the file again, leave it out, or "
            "give each process more memory."
        )
    with attempt.running("read"):
        table, unreadable = reader.read(chunk)
    return table, {**unreadable, **attempt.quarantined}


def _reason(step: Step, trace: Path) -> str:
    """Return the reason for quarantining a row whose process died twice in that step."""
    hung = trace.exists() and trace.stat().st_size > 0
    reason = "timeout: gave no answer, twice" if hung else "killed_process: twice"
    return f"{reason}, while it was tokenized" if step == "tokenize" else reason


def _is_running(attempt: Path) -> bool | None:
    """Return whether the process of a log runs; None if it is on another machine, or was killed in the first line."""
    try:
        first, newline, _ = attempt.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    state = json.loads(first) if newline else {}
    return is_running(ProcessIdentity(state["machine"], state["pid"], state["started"])) if state else None


def _changed(path: Path) -> float | None:
    """Return the modification time by the storage's clock. Opening the file makes a network file system refresh it."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
