"""Which rows kill the process that scores them: two strikes and a row is set aside.

A row can end its process from below Python (a crash in a kernel, the kernel's out-of-memory killer) or never come back.
No exception can be caught then, so the worker says before each batch, in a small file beside the chunk's part, which
rows it is about to run. Whoever runs the chunk next, on whatever engine, finds the file of the attempt that died:

    first death     the rows that were running become suspects; suspects run first, and one at a time
    second death    one suspect was running alone: it is quarantined, and its reason is written into its error column

Running suspects first keeps the price low: the second death costs one row's time, not the chunk's. The file is not
fsynced: it has to survive the process, not the machine. Price: one `write` of a few hundred bytes per batch.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from torchlake.durable import storage_error


class Strikes:
    """The record of one chunk's attempts, kept in `path`; rows are positions within the chunk.

    `suspects` are to be run alone, before the others; `quarantined` maps rows that must not be run to their reasons.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = path.with_suffix(".trace")
        self.suspects: list[int] = []
        self.quarantined: dict[int, str] = {}
        if path.exists():
            self._read_dead_attempt()
        state = {"suspects": self.suspects, "quarantined": self.quarantined}
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(state) + "\n", encoding="utf-8")
        except OSError as error:
            raise storage_error(error, path) from error
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def running(self, rows: Sequence[int]) -> None:
        """Say that `rows` are run next; the empty sequence says that none is running any more."""
        os.write(self._file, (json.dumps([int(row) for row in rows]) + "\n").encode())

    def close(self) -> None:
        """The chunk is done: forget its attempts."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)
        self.trace.unlink(missing_ok=True)

    def _read_dead_attempt(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is torn
        if not lines:
            return
        state = json.loads(lines[0])
        self.suspects = state["suspects"]
        self.quarantined = {int(row): reason for row, reason in state["quarantined"].items()}
        running: list[int] = json.loads(lines[-1]) if len(lines) > 1 else []
        hung = self.trace.exists() and self.trace.stat().st_size > 0
        self.trace.unlink(missing_ok=True)
        if len(running) == 1 and running[0] in self.suspects:
            row = running[0]
            self.suspects = [suspect for suspect in self.suspects if suspect != row]
            self.quarantined[row] = "timeout: gave no answer, twice" if hung else "killed_process: twice"
        else:
            self.suspects = sorted({*self.suspects, *running})
