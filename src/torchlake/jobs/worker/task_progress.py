"""Count the rows scored in unfinished chunks: how tasks report progress, on Spark and every other engine.

Workers log each batch before it runs in the attempt logs of `poison_rows.py`, so progress needs no other channel. The
count is only for display: with a network file system it may be late. Cost: reading the lines added since the last
count.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class _Log:
    """The log of one attempt at a chunk, as far as it has been read."""

    read: int = 0
    "Number of bytes that were read."
    running: list[int] = field(default_factory=list)
    "Number of rows of the current batch; they are scored when the next line appears."
    scored: set[int] = field(default_factory=set)
    tokens: int = 0
    "Number of tokens that were written."


class TaskProgress:
    """The attempt logs in `folder` that are newer than this object; call `rows()` from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._old = set(_names(folder))
        self._logs: dict[str, _Log] = {}
        self.written = 0
        "Tokens that were written in finished chunks."
        self._tokens = 0
        "Those of unfinished ones, when they were counted last."
        self._first: tuple[float, int] | None = None

    def speed(self) -> Sequence[str]:
        """Return the tokens per second of a model that writes, as of the last `rows`; empty for others."""
        tokens, now = self._tokens + self.written, time.monotonic()
        if self._first is None or tokens < self._first[1]:
            self._first = (now, tokens) if tokens else None
            return ()
        rate = (tokens - self._first[1]) / max(now - self._first[0], 1e-6)
        return [f"{rate:,.0f} tokens/s"] if rate else ()

    def rows(self) -> int:
        """Return the number of rows scored in unfinished chunks, by the furthest attempt at each chunk."""
        names = [name for name in _names(self._folder) if name not in self._old]
        self._logs = {name: self._logs.get(name, _Log()) for name in names}
        furthest: dict[str, tuple[int, int]] = {}
        for name, attempt in self._logs.items():
            self._read(name, attempt)
            chunk = name.partition("-")[0]
            furthest[chunk] = max(furthest.get(chunk, (0, 0)), (len(attempt.scored), attempt.tokens))
        self._tokens = sum(tokens for _, tokens in furthest.values())
        return sum(rows for rows, _ in furthest.values())

    def _read(self, name: str, attempt: _Log) -> None:
        try:
            with open(self._folder / name, "rb") as file:
                file.seek(attempt.read)
                added = file.read()
        except OSError:  # the log is deleted when its chunk is finished
            return
        whole = added[: added.rfind(b"\n") + 1]
        first = attempt.read == 0
        attempt.read += len(whole)
        for line in whole.splitlines()[1 if first and whole else 0 :]:  # the first line is the attempt's state
            note = json.loads(line)
            running = note[1] if note and note[0] in ("score", "elsewhere") and note[1] is not None else []
            goes_on = len(note) > 2  # the same step, with fewer rows
            attempt.scored.update(set(attempt.running).difference(running if goes_on else []))
            attempt.running = running
            attempt.tokens = note[2] if goes_on else attempt.tokens


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return []
