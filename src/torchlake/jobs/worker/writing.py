"""The texts of chunks, kept as they end: what the journal and the attempt's log get while a model writes.

    answers (W,) int32, without NOTHING at the end   the records of `journal.py`
    rows left, tokens written                        the notes of `poison_rows.py`: progress, and suspects

Every `PIECE_S` the tokens of the rows that have not ended are kept, too: one row may take minutes.
"""

import hashlib
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Protocol

import numpy as np

from torchlake.data.batching import Ragged
from torchlake.data.features import Features
from torchlake.errors import StorageError
from torchlake.jobs.worker.journal import MARK, Journal
from torchlake.jobs.worker.poison_rows import Attempt, Attempts
from torchlake.models.generation import NOTHING, Answers, Watch

PIECE_S = 10.0
NOTE_S = 1.0
"Seconds between two notes of progress."


class WrittenRows(Protocol):
    """The rows of a chunk that are written."""

    @property
    def count(self) -> int:
        """The number of rows of the chunk."""

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows that are written, (N,) int64."""

    @property
    def features(self) -> Features:
        """Their inputs."""


class Writing:
    """The texts of chunks whose rows share batches, numbered from chunk to chunk; each has the name of its part.

    Raises StorageError, as do its methods.
    """

    def __init__(self, location: str, chunks: Sequence[tuple[str, WrittenRows]], attempt: Attempt | Attempts) -> None:
        self.journals: list[Journal] = []
        self.known: dict[int, np.ndarray] = {}
        self.begun: dict[int, np.ndarray] = {}
        self._starts: list[int] = list(accumulate((one.count for _, one in chunks), initial=0))
        for start, (name, one) in zip(self._starts, chunks, strict=False):
            journal = Journal(location, name, dict(zip(one.rows.tolist(), marks(one.features), strict=True)))
            self.journals.append(journal)
            self.known |= {start + row: np.frombuffer(answer, "<i4") for row, answer in journal.known.items()}
            self.begun |= {start + row: np.frombuffer(answer, "<i4") for row, answer in journal.begun.items()}
        self.tokens = 0
        "Tokens written in this attempt."
        self._attempt = attempt
        self._kept: dict[int, int] = {}
        "How many tokens of a row that has not ended this attempt has kept."
        self._left: set[int] = set()
        "Rows of the batch that have not ended."
        self._saved = self._noted = time.monotonic()
        if self.known:
            with attempt.running("score", sorted(self.known)):  # they count as progress
                pass
            attempt.idle()

    def _at(self, row: int) -> tuple[Journal, int]:
        """Return the journal of a row's chunk, and its number there."""
        number = bisect_right(self._starts, row) - 1
        return self.journals[number], row - self._starts[number]

    def watch(self, rows: np.ndarray) -> Watch:
        """Return the watch of a batch; all of its rows have as many tokens that were written before."""
        self._left = set(rows.tolist())
        begun = np.array([self.begun.get(row, ()) for row in rows.tolist()], np.int32).reshape(len(rows), -1)
        return Watch(self._report, rows, begun)

    def finish(self, rows: np.ndarray, answers: np.ndarray) -> None:
        """Keep the answers (B, W) of rows (B,) that have ended."""
        for row, answer in zip(rows.tolist(), answers, strict=True):
            if row not in self.known:
                self.known[row] = answer[answer != NOTHING]
                journal, number = self._at(row)
                journal.append(number, self.known[row].astype("<i4").tobytes())

    def _report(self, rows: np.ndarray, ended: np.ndarray, answers: Answers) -> None:
        self._attempt.advance()
        self._left -= set(rows[ended].tolist())
        running = np.array([row not in self.known for row in rows.tolist()], bool)
        self.tokens += int(running.sum())
        new = running & ended
        if new.any():
            self.finish(rows[new], answers(np.flatnonzero(new)))
        now = time.monotonic()
        if now - self._saved > PIECE_S:
            self._saved = now
            self._keep(rows[~ended].tolist(), answers(np.flatnonzero(~ended)))
        if now - self._noted > NOTE_S:
            self._noted = now
            self._attempt.narrow(sorted(self._left), self.tokens)  # a batch may be written in several parts

    def _keep(self, rows: Sequence[int], answers: np.ndarray) -> None:
        for row, answer in zip(rows, answers, strict=True):
            tokens, kept = answer[answer != NOTHING].astype("<i4"), self._kept.get(row, 0)
            # Not of a row whose model gave NaN, and not what is written again after memory ran out.
            if len(tokens) > kept and (tokens >= 0).all():
                journal, number = self._at(row)
                journal.extend(number, 4 * kept, tokens[kept:].tobytes())
                self._kept[row] = len(tokens)


@contextmanager
def kept(location: str, chunks: Sequence[tuple[str, WrittenRows]], attempt: Attempt | Attempts) -> Iterator[Writing]:
    """Yield the `Writing` of chunks whose parts are written in the block; after an error the next attempt has it."""
    writing = Writing(location, chunks, attempt)
    try:
        yield writing
    except BaseException:
        for journal in writing.journals:
            with suppress(StorageError):  # the first error is the cause
                journal.close()
        raise
    for journal in writing.journals:
        journal.remove()


def marks(features: Features) -> list[bytes]:
    """Return a hash of each row's inputs."""
    hashes = [hashlib.blake2b(digest_size=MARK) for _ in range(len(features))]
    for array in features.arrays.values():
        for row, one in enumerate(hashes):
            own = array.values[array.offsets[row] : array.offsets[row + 1]] if isinstance(array, Ragged) else array[row]
            one.update(np.ascontiguousarray(own).tobytes() + b"/")
    return [one.digest() for one in hashes]


def by_begun(rows: np.ndarray, begun: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Return rows (N,) in groups of as many tokens that were written before, the longest texts first."""
    lengths = np.array([len(begun.get(row, ())) for row in rows.tolist()], np.int64)
    return [rows[lengths == length] for length in np.unique(lengths)[::-1]]
