"""The texts of chunks, kept as they end: what the journal and the attempt's log get while a model writes.

    tokens of an answer (W,) int32   the records of `journal.py`
    rows left, tokens written        the notes of `poison_rows.py`: progress, and suspects

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
from torchlake.runtimes import EMPTY, Ended, Text, Writer

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

    def __init__(
        self, location: str, chunks: Sequence[tuple[str, WrittenRows]], attempt: Attempt | Attempts, *, logprobs: bool
    ) -> None:
        self.journals: list[Journal] = []
        self.known: dict[int, Text] = {}
        self._logprobs = logprobs
        self.begun: dict[int, Text] = {}
        self._starts: list[int] = list(accumulate((one.count for _, one in chunks), initial=0))
        for start, (name, one) in zip(self._starts, chunks, strict=False):
            journal = Journal(location, name, dict(zip(one.rows.tolist(), marks(one.features), strict=True)))
            self.journals.append(journal)
            self.known |= {start + row: _text(answer, logprobs) for row, answer in journal.known.items()}
            self.begun |= {start + row: _text(answer, logprobs) for row, answer in journal.begun.items()}
        self.tokens = 0
        "Tokens written in this attempt."
        self._attempt = attempt
        self._ended = 0
        "Those of texts that have ended."
        self._kept: dict[int, int] = {}
        "How many tokens of a row that has not ended this attempt has kept."
        self._saved = self._noted = time.monotonic()
        if self.known:
            with attempt.running("score", sorted(self.known)):  # they count as progress
                pass
            attempt.idle()

    def _at(self, row: int) -> tuple[Journal, int]:
        """Return the journal of a row's chunk, and its number there."""
        number = bisect_right(self._starts, row) - 1
        return self.journals[number], row - self._starts[number]

    def report(self, writer: Writer, ended: Sequence[Ended]) -> None:
        """Keep the texts that have ended and, now and then, what is written of the others in the writer."""
        self._attempt.advance()
        for one in ended:
            self.known[one.row] = one.text
            self._ended += self._new(one.row, one.text)
            journal, number = self._at(one.row)
            journal.append(number, _record(one.text, self._logprobs))
        now = time.monotonic()
        if now - self._saved > PIECE_S:
            self._saved = now
            for row in writer.rows:
                self._keep(row, writer.text(row))
        if now - self._noted > NOTE_S:
            self._noted = now
            self.tokens = self._ended + sum(self._new(row, writer.text(row)) for row in writer.rows)
            self._attempt.narrow(sorted(writer.rows), self.tokens)

    def _new(self, row: int, text: Text) -> int:
        """Return how many tokens of a text are of this attempt."""
        return int((text.tokens >= 0).sum()) - len(self.begun.get(row, EMPTY).tokens)

    def _keep(self, row: int, text: Text) -> None:
        kept = self._kept.get(row, 0)
        if len(text.tokens) > kept:  # not what is written again after an exception
            journal, number = self._at(row)
            record = _record(text, self._logprobs)
            start = kept * len(record) // len(text.tokens)
            journal.extend(number, start, record[start:])
            self._kept[row] = len(text.tokens)


def _record(text: Text, logprobs: bool) -> bytes:
    """Return tokens as bytes, with `logprobs` each beside its log-probability."""
    columns = [text.tokens.astype("<i4")]
    if logprobs:
        known = np.zeros(len(text.tokens)) if text.logprobs is None else text.logprobs
        columns.append(known.astype("<f4").view("<i4"))
    return np.stack(columns, axis=1).tobytes()


def _text(record: bytes, logprobs: bool) -> Text:
    columns = np.frombuffer(record, "<i4").reshape(-1, 1 + logprobs)
    return Text(tokens=columns[:, 0], logprobs=columns[:, 1].copy().view("<f4") if logprobs else None)


@contextmanager
def kept(
    location: str, chunks: Sequence[tuple[str, WrittenRows]], attempt: Attempt | Attempts, *, logprobs: bool = False
) -> Iterator[Writing]:
    """Yield the `Writing` of chunks whose parts are written in the block; after an error the next attempt has it."""
    writing = Writing(location, chunks, attempt, logprobs=logprobs)
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
