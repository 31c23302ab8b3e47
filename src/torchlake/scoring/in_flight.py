"""Rows that workers have scored of chunks that are not finished, read from the journals that `poison_rows.py` writes.

Workers note each batch there before it runs, whichever engine started them, so no channel of its own is needed. What is
counted is for showing only: a network file system may show it late. Cost: the reading of what was added since.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class _Journal:
    """One attempt at a chunk: how much of its file was read, and what that said."""

    read: int = 0
    running: list[int] = field(default_factory=list)
    "Rows of the batch that runs; they are done when the next line appears."
    scored: set[int] = field(default_factory=set)


class InFlight:
    """The journals in `folder` that did not exist before this; `rows()` is to be called from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._old = set(_names(folder))
        self._journals: dict[str, _Journal] = {}

    def rows(self) -> int:
        """Rows scored in the chunks that are being scored now; of several attempts at a chunk those of the furthest."""
        names = [name for name in _names(self._folder) if name not in self._old]
        self._journals = {name: self._journals.get(name, _Journal()) for name in names}
        furthest: dict[str, int] = {}
        for name, journal in self._journals.items():
            self._read(name, journal)
            chunk = name.partition("-")[0]
            furthest[chunk] = max(furthest.get(chunk, 0), len(journal.scored))
        return sum(furthest.values())

    def _read(self, name: str, journal: _Journal) -> None:
        try:
            with open(self._folder / name, "rb") as file:
                file.seek(journal.read)
                added = file.read()
        except OSError:  # its chunk is finished
            return
        whole = added[: added.rfind(b"\n") + 1]
        first = journal.read == 0
        journal.read += len(whole)
        for line in whole.splitlines()[1 if first and whole else 0 :]:  # the first line says who writes
            journal.scored.update(journal.running)
            note = json.loads(line)
            journal.running = note[1] if note and note[0] == "score" and note[1] is not None else []


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return []
