"""The texts of chunks, kept as they end: what the journal and the attempt's log get while a model writes.

    tokens of an answer (W,) int32   the records of `journal.py`
    rows left, tokens written        the notes of `poison_rows.py`: progress, and suspects

Every `PIECE_S` the tokens of the rows that have not ended are kept, too: one row may take minutes.
"""

import hashlib
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from torchlake.data.batching import Ragged
from torchlake.data.features import Features
from torchlake.errors import StorageError
from torchlake.jobs.worker.journal import MARK, Journal
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.runtimes import EMPTY, Ended, Text, Writer

PIECE_S = 10.0
NOTE_S = 1.0
"Seconds between two notes of progress."


class Writing:
    """The texts of chunks whose rows are in one writer, numbered from chunk to chunk, as `attempts` numbers them.

    Its methods raise StorageError.
    """

    def __init__(self, location: str, attempts: Attempts, *, logprobs: bool) -> None:
        self.known: dict[int, Text] = {}
        "Texts that have ended."
        self._logprobs = logprobs
        self.begun: dict[int, Text] = {}
        "What earlier attempts have written of others."
        self._location, self._attempts = location, attempts
        self._journals: dict[int, Journal] = {}
        "Those of the chunks in work, by the number of their first row, ascending."
        self._tokens: dict[int, int] = {}
        "How many tokens of each text this attempt has written."
        self._kept: dict[int, bytes] = {}
        "What this attempt has kept of rows that have not ended."
        self._saved = self._noted = time.monotonic()

    def enter(self, first: int, name: str, rows: np.ndarray, features: Features) -> None:
        """Take a chunk with the name of its part, and what its journal knows.

        `first` is its first row, `rows` (N,) are those that are written, as the chunk numbers them, with their inputs.
        """
        journal = Journal(self._location, name, dict(zip(rows.tolist(), marks(features), strict=True)))
        self._journals[first] = journal
        known = {first + row: _text(answer, self._logprobs) for row, answer in journal.known.items()}
        self.known |= known
        self.begun |= {first + row: _text(answer, self._logprobs) for row, answer in journal.begun.items()}
        self._attempts.count(sorted(known))

    def leave(self, first: int) -> None:
        """Remove the journal of the chunk with this first row: its part is written."""
        self._journals.pop(first).remove()
        self._attempts.leave(first)
        end = next((one for one in self._journals if one > first), math.inf)
        held: list[dict[int, Any]] = [self.known, self.begun, self._tokens, self._kept]
        for rows in held:
            for row in [row for row in rows if first <= row < end]:
                del rows[row]

    def close(self) -> None:
        """End the attempts at the chunks that are left; the next ones have what was kept."""
        for journal in self._journals.values():
            with suppress(StorageError):  # the first error is the cause
                journal.close()

    def report(self, writer: Writer, ended: Sequence[Ended]) -> None:
        """Keep the texts that have ended and, now and then, what is written of the others in the writer."""
        self._attempts.advance()
        for one in (each for each in ended if each.error is None):
            self.known[one.row] = one.text
            self._tokens[one.row] = self._new(one.row, one.text)
            journal, number = self._at(one.row)
            journal.append(number, _record(one.text, self._logprobs))
        now = time.monotonic()
        if now - self._saved > PIECE_S:
            self._saved = now
            for row in writer.rows:
                self._keep(row, writer.text(row))
        if now - self._noted > NOTE_S:
            self._noted = now
            self._tokens |= {row: self._new(row, writer.text(row)) for row in writer.rows}
            self._attempts.now(writer.rows, self._tokens)

    def _at(self, row: int) -> tuple[Journal, int]:
        """Return the journal of a row's chunk, and its number there."""
        firsts = [*self._journals]
        first = firsts[bisect_right(firsts, row) - 1]
        return self._journals[first], row - first

    def _new(self, row: int, text: Text) -> int:
        """Return how many tokens of the text are of this attempt."""
        return int((text.tokens >= 0).sum()) - len(self.begun.get(row, EMPTY).tokens)

    def _keep(self, row: int, text: Text) -> None:
        kept, record = self._kept.get(row, b""), _record(text, self._logprobs)
        if kept.startswith(record):  # also the beginning of a row that is written again after an exception
            return
        start = len(kept) if record.startswith(kept) else 0  # written again, it may have become another text
        journal, number = self._at(row)
        journal.extend(number, start, record[start:])
        self._kept[row] = record


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


def marks(features: Features) -> list[bytes]:
    """Return a hash of each row's inputs."""
    hashes = [hashlib.blake2b(digest_size=MARK) for _ in range(len(features))]
    for array in features.arrays.values():
        for row, one in enumerate(hashes):
            own = array.values[array.offsets[row] : array.offsets[row + 1]] if isinstance(array, Ragged) else array[row]
            one.update(np.ascontiguousarray(own).tobytes() + b"/")
    return [one.digest() for one in hashes]
