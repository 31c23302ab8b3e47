"""The worker of a job by an endpoint: chunks are read ahead, their rows asked, and their answers written.

    read a chunk, read its journal -> questions, after those of the chunks before -> answers, each kept in the journal
    -> Parquet part

A chunk's rows are asked as soon as it is read, so requests of several chunks are open together. A kill loses the open
requests only: the next attempt at the chunk finds all others in the journal.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from torchlake.errors import StorageError
from torchlake.failpoints import failpoint
from torchlake.jobs.worker.journal import MARK, Journal
from torchlake.jobs.worker.poison_rows import Attempt, read_chunk
from torchlake.jobs.worker.read_ahead import More, Ready, WrittenChunk, examples_of, reading_ahead
from torchlake.runtimes._http.answers import Answer, answer_of
from torchlake.runtimes._http.requests import Begun
from torchlake.runtimes.http import Asking, Question
from torchlake.scoring.endpoint.budget import Amount, Asked, SpendingBudget
from torchlake.scoring.endpoint.rows import EndpointSettings, answer_columns, read_rows
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader

NOTE_S = 1.0
"Seconds between two notes of progress."
SETTLED = b"settled"
"After the notes of a row's batches: what the last one has taken for the row is in the account."


@dataclass(frozen=True)
class UnfinishedChunk:
    """A worker's report on a chunk whose other rows were not asked, because a limit was reached."""

    left: int
    reached: str
    "The limit."


Report = WrittenChunk | UnfinishedChunk


class OpenChunk:
    """The answers of a chunk, as they come; `journal` keeps them. It asks the runtime: see `Asker` there."""

    def __init__(self, journal: Journal, asked: dict[int, Asked], budget: SpendingBudget) -> None:
        self.journal, self._asked, self._budget = journal, asked, budget
        self.answers = {row: answer_of(kept) for row, kept in journal.known.items()}
        self.skipped = 0
        self.error: BaseException | None = None
        self._aside: dict[int, Amount] = {}
        "What open requests may take."
        notes = (begun.removesuffix(SETTLED) for begun in journal.begun.values())
        self._notes, self._kept = max(notes, key=len, default=b""), dict[int, int]()
        "Batches, the latest last, and the bytes of that which this attempt has kept for rows."
        self._ended = threading.Event()
        self._check()

    def questions(self, name: str) -> list[Question]:
        """Return the requests of the rows that the journal does not have."""
        stem = PurePath(name).stem.removeprefix("part-")
        left = [(row, one) for row, one in self._asked.items() if row not in self.answers]
        return [Question(self, row, f"{stem}-{row}", one.body, one.tokens) for row, one in left]

    def begin(self, row: int, *, lost: bool = True) -> bool:
        """Set aside what a request may take; what one that was lost may have taken stays in the account."""
        self._settle(row, None if lost else Answer(error="batch: not begun"))
        most = self._budget.set_aside(self._asked[row])
        if most is not None:
            self._aside[row] = most
        return most is not None

    def may_get_room(self) -> bool:
        """Return whether a row may be asked later."""
        return self._budget.may_get_room()

    def keep(self, row: int, answer: Answer) -> None:
        """Keep an answer before its slot is free; one that may come out better is not kept for the next attempt."""
        if answer.final:
            self.journal.append(row, answer.to_bytes())
        elif self._notes:  # or the next attempt at the batch would settle it again
            self.journal.extend(row, 0, self._notes + SETTLED)
        failpoint("answer.settle")
        self._settle(row, answer)
        self.answers[row] = answer
        self._check()

    def skip(self, row: int) -> None:
        """Count a row that is not asked."""
        self._settle(row, None)
        self._budget.give_up()
        self.skipped += 1
        self._check()

    @property
    def written(self) -> int:
        """The tokens of its answers."""
        return sum(one.generated_tokens or 0 for one in list(self.answers.values()))

    def known_batch(self) -> Begun | None:
        """Return the batch that an earlier attempt has begun; what it may take is in the account."""
        if not self._notes:
            return None
        settled = {row for row, begun in self.journal.begun.items() if begun == self._notes + SETTLED}
        note, rows = json.loads(self._notes.splitlines()[-1]), self._asked.keys() - self.answers.keys() - settled
        self._budget.adopt(len(rows))
        # Other rows may have had their answers, and their part of the most, in an attempt between.
        self._aside = dict.fromkeys(rows, Amount().plus(Amount(*note["most"]), 1 / note["rows"]))
        return Begun(note["file"], note["batch"], frozenset(settled))

    def note_batch(self, begun: Begun) -> None:
        """Keep a batch, after those before it, as the beginning of the first row that has no answer."""
        most = reduce(Amount.plus, self._aside.values(), Amount())
        rows = len(self._asked) - len(self.answers)
        note = {"file": begun.file, "batch": begun.batch, "most": [most.cost, most.tokens], "rows": rows}
        self._notes += json.dumps(note).encode() + b"\n"
        row = next(row for row in self._asked if row not in self.answers)
        kept = self._kept.get(row, 0)
        self.journal.extend(row, kept, self._notes[kept:])
        self._kept[row] = len(self._notes)

    def _settle(self, row: int, answer: Answer | None) -> None:
        if row in self._aside:
            self._budget.settle(self._aside.pop(row), self._asked[row], answer)

    def fail(self, error: BaseException) -> None:
        """Let `wait` raise the error, unless there is nothing to wait for."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def wait(self, attempt: Attempt) -> None:
        """Wait for all answers, and note progress. Raises what ended the requests."""
        noted: set[int] = set()
        while True:
            ended = self._ended.wait(NOTE_S)
            if self.error is not None:
                raise self.error
            new = self.answers.keys() - noted
            if new:
                noted |= new
                with attempt.running("score", sorted(new)):
                    pass
                # No row is suspect if this process dies: requests are not work of its own.
                attempt.narrow([], self.written)
            if ended:
                return

    def _check(self) -> None:
        if len(self.answers) + self.skipped == len(self._asked):
            self._ended.set()


@dataclass(frozen=True)
class ReadRows:
    """A chunk whose rows are being asked."""

    table: pa.Table
    errors: dict[int, str]
    open: OpenChunk


Reports = Generator[tuple[Ready[ReadRows | None], Report], None, None]


def make_endpoint_worker(
    settings: EndpointSettings,
) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[Report]]:
    """Return a worker that has the rows of (chunk, part name) pairs asked, and yields a report for each."""
    reader, workspace = ChunkReader(settings.columns), settings.workspace
    assert workspace is not None, "a job has a workspace"
    budget = SpendingBudget(settings.budget, settings.price, workspace.rows)
    asking = Asking(settings.endpoint, settings.limits)
    opened: list[OpenChunk] = []
    names: dict[int, str] = {}

    def start(chunk: Chunk, attempt: Attempt) -> ReadRows | None:
        if budget.reached is not None:
            return None
        table, unreadable = read_chunk(reader, chunk, attempt)
        asked, errors = read_rows(table, unreadable, settings)
        attempt.idle()
        name = names[chunk.index]
        journal = Journal(workspace.rows, name, {row: mark(one.body) for row, one in asked.items()})
        found = OpenChunk(journal, asked, budget)
        opened.append(found)
        questions = found.questions(name)
        if settings.batch_api and questions:
            asking.add_batch(questions, found.known_batch, found.note_batch)
        else:
            asking.add(questions)
        return ReadRows(table, errors, found)

    def write(one: Ready[ReadRows | None]) -> Report:
        if one.read is None:
            return UnfinishedChunk(one.chunk.rows, str(budget.reached))
        one.read.open.wait(one.attempt)
        opened.remove(one.read.open)
        return written(one, one.read, settings, str(budget.reached))

    def write_each(group: Sequence[Ready[ReadRows | None]], more: More[ReadRows | None]) -> Reports:
        for one in group:
            yield one, write(one)

    work = reading_ahead(
        workspace,
        settings.row_timeout_s,
        read=start,
        write=write_each,
        lost=lambda part: WrittenChunk(part=part),
        most=settings.chunks_ahead,
    )

    def worker(items: Iterator[tuple[Chunk, str]]) -> Iterator[Report]:
        try:
            yield from work(_noted(items, names))
        except BaseException:
            asking.close()  # nothing is appended to a journal that is closed
            for one in opened:
                with suppress(StorageError):  # the first error is the cause
                    one.journal.close()
            raise
        finally:
            budget.flush()  # other tasks may follow in this process

    return worker


def written(one: Ready[Any], rows: ReadRows, settings: EndpointSettings, reached: str) -> Report:
    """Write the part of a chunk whose requests have ended, unless rows are left because a limit was `reached`."""
    assert settings.workspace is not None, "a job has a workspace"
    if rows.open.skipped:
        rows.open.journal.close()
        return UnfinishedChunk(rows.open.skipped, reached)
    made = answer_columns(settings, [rows.open.answers.get(row) for row in range(one.chunk.rows)], rows.errors)
    columns = {"row_id": row_ids(one.chunk)} if settings.key is None else {}
    columns |= {name: rows.table[name] for name in settings.keep}
    output = pa.table({**columns, **{name: made[name] for name in made.column_names}})
    part = settings.workspace.parts.write(one.name, output, chunk=one.chunk.index)
    rows.open.journal.remove()
    return WrittenChunk(part=part, examples=examples_of(one.chunk, made["error"]), written=rows.open.written)


def _noted(items: Iterator[tuple[Chunk, str]], names: dict[int, str]) -> Iterator[tuple[Chunk, str]]:
    """Yield the chunks with the names of their parts, which are put into `names`."""
    for chunk, name in items:
        names[chunk.index] = name
        yield chunk, name


def mark(body: bytes) -> bytes:
    """Return the hash of a row's request, by which its answer is found again."""
    return hashlib.blake2b(body, digest_size=MARK).digest()
