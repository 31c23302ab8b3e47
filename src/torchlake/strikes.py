"""Which rows kill the process that scores them: two strikes and a row is set aside.

A row can end its process from below Python (a crash in a kernel, the kernel's out-of-memory killer) or never come back.
No exception can be caught then, so the worker notes before each batch, in a small file in the journal, which rows it is
about to run. The next attempt at the chunk, on whatever engine, finds the file of the attempt that died:

    first death     the rows that were running become suspects; suspects run first, and one at a time
    second death    one suspect was running alone: it is quarantined, and its reason is written into its error column

Running suspects first keeps the price low: the second death costs one row's time, not the chunk's.

An engine may run two attempts at the same time (Spark's speculation, a node behind a broken network), so each has a
file of its own, and only that of an attempt which has died counts: on this machine its process is gone; on another one
its heartbeat, the file's time, stands still for `SILENT_S`. Price: one `write` of a few hundred bytes per batch, and
`SILENT_S` where a chunk is tried again on another machine. Nothing is fsynced: the file survives the process, not more.
"""

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from torchlake.durable import storage_error

BEAT_S = 5.0
SILENT_S = 30.0


class Strikes:
    """The record of one chunk's attempts, kept in `folder`; rows are positions within the chunk.

    `suspects` are to be run alone, before the others; `quarantined` maps rows that must not be run to their reasons.
    """

    def __init__(self, folder: Path, chunk: int) -> None:
        self.path = folder / f"{chunk}-{secrets.token_hex(6)}.json"
        self.trace = self.path.with_suffix(".trace")
        self.suspects: list[int] = []
        self.quarantined: dict[int, str] = {}
        try:
            folder.mkdir(exist_ok=True)
            others = sorted(folder.glob(f"{chunk}-*.json"))
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            self._ended = threading.Event()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
            dead = list(self._dead(others))
            for attempt in dead:
                self._learn(attempt)
            state = {"suspects": self.suspects, "quarantined": self.quarantined, **_self()}
            os.write(self._file, (json.dumps(state) + "\n").encode())
            for attempt in dead:  # what it knew is in this file now
                attempt.unlink(missing_ok=True)
                attempt.with_suffix(".trace").unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def running(self, rows: Sequence[int]) -> None:
        """Say that `rows` are run next; the empty sequence says that none is running any more."""
        os.write(self._file, (json.dumps([int(row) for row in rows]) + "\n").encode())

    def close(self) -> None:
        """The chunk is done: forget this attempt."""
        self._ended.set()
        os.close(self._file)
        self.path.unlink(missing_ok=True)
        self.trace.unlink(missing_ok=True)

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
        suspects = set(state["suspects"])
        self.quarantined |= {int(row): reason for row, reason in state["quarantined"].items()}
        running: list[int] = json.loads(lines[-1]) if len(lines) > 1 else []
        trace = attempt.with_suffix(".trace")
        if len(running) == 1 and running[0] in suspects:
            hung = trace.exists() and trace.stat().st_size > 0
            self.quarantined[running[0]] = "timeout: gave no answer, twice" if hung else "killed_process: twice"
        self.suspects = sorted({*self.suspects, *suspects, *running} - self.quarantined.keys())


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
