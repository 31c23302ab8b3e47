"""One model in one process: tokenized rows in; a prediction or a named error for each row out.

    sort by length -> batches of a token budget -> forward -> original order

For text generation a writer gets the rows (`jobs/worker/texts.py`), and the budget includes the tokens that it may
write.

A row never affects another one: `jobs/worker/isolation.py` halves a batch that raises until the failing row is alone,
and `jobs/worker/poison_rows.py` finds rows that kill or hang the process. After a batch that does not fit into memory,
later ones start smaller.

Sorting costs one argsort per chunk and saves the padding. Rows with equal inputs are computed once, because tables
repeat themselves; that costs a hash per row. Sampled texts are the exception.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import length_batches
from torchlake.data.features import INPUT_IDS, first_equal
from torchlake.errors import TaskError, Unavailable, UsageError
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.jobs.worker.texts import Budget, Prompt, Texts
from torchlake.jobs.worker.writing import Writing
from torchlake.models import folders
from torchlake.models.load import is_mapped
from torchlake.runtimes import EMPTY, Ended, Forward, Text, Writer, _products
from torchlake.scoring.rows import ReadyRows, RowReader, ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import REFERENCE, device, foreign_python
from torchlake.scoring.workers.collating import Prepared, prepare
from torchlake.scoring.workers.output import NO_ROWS, ScoredRows, assembled, non_finite_rows

log = logging.getLogger(__name__)

# A few hundred tokens keep a core busy and fit into its caches; a GPU needs thousands.
BATCH_TOKENS = {"cpu": 1024, "cuda": 32768}
# Each step of generation reads all weights for one token per row, so many rows share that cost. The limit is the
# memory of the key-value cache.
CACHED_TOKENS = {"cpu": 8192, "cuda": 65536}
MAX_BATCH_ROWS = 1024


@dataclass(kw_only=True)
class Scorer:
    """One model in one process. `batch_tokens` shrinks when memory runs out, and stays small."""

    settings: ScoringSettings
    raw: bool = False
    "Whether answers are the model's outputs, not probabilities."
    reader: RowReader = field(init=False)
    spec: TaskSpec = field(init=False)
    batch_tokens: int = field(init=False)
    device: str = field(init=False)
    files: Mapping[Path, os.stat_result] = field(init=False)
    "The files that the model may map."
    distinct: int = field(init=False, default=0)
    "The number of rows that were computed: equal ones once."
    tokens: int = field(init=False, default=0)
    "Their tokens."
    padded_tokens: int = field(init=False, default=0)
    written: int = field(init=False, default=0)
    "The tokens that the model wrote."
    seconds: float = field(init=False, default=0.0)
    "Seconds of forward passes."
    waited: float = field(init=False, default=0.0)
    "Seconds in which the model waited for the inputs of a batch."
    startup: dict[str, float] = field(init=False)
    "Seconds of each step up to the end of the first batch."

    def __post_init__(self) -> None:
        folder = Path(self.settings.model)
        began = time.perf_counter()
        self.device = device()
        imported = time.perf_counter()
        self.reader = RowReader(settings=self.settings)
        self.spec, self.task, self.processor = self.reader.spec, self.reader.task, self.reader.processor
        tokenizer_loaded = time.perf_counter()
        generation = self.settings.generation
        # Decided here, not by the driver: the driver may have no GPU while this worker has one.
        load = REFERENCE if self.settings.exact and self.device != "cpu" else self.settings.runtime
        self.runtime = runtime_name(load)
        if isinstance(load, str):
            named = plugins.load("runtimes", load)
            load = named.load if generation is None else named.open_writer
        options: dict[str, Any] = {} if generation is None else {"options": generation}
        if (python := foreign_python(self.settings)) is not None:
            options["python"] = python
        elif self.settings.gpus_per_process > 1:
            from torchlake.runtimes import _sharded  # it imports torch, which the driver does not need

            open_sharded = _sharded.load_sharded if generation is None else _sharded.open_sharded_writer
            load = partial(open_sharded, number=self.settings.gpus_per_process)
        self.files = folders.mapped_files(folder) if is_mapped() and self.device == "cpu" else {}
        with _products.keeping(self.settings.products):
            loaded: Any = load(folder, self.spec, device=self.device, **options)
        if generation is not None and not hasattr(loaded, "step"):
            raise UsageError(
                f"runtime {self.runtime}: a function for text generation returns a Writer, as open_writer in "
                f"torchlake/runtimes/__init__.py; it returned {type(loaded).__name__}."
            )
        self.forward: Forward | None = loaded if generation is None else None
        self.writer: Writer | None = None if generation is None else loaded
        if self.settings.model_hash:
            # After loading: a model that was put in the folder before or meanwhile is noticed.
            folders.check_hash(folder, self.settings.model_hash)
        self.startup = {
            "torch": imported - began,
            "tokenizer": tokenizer_loaded - imported,
            "model": time.perf_counter() - tokenizer_loaded,
        }
        budgets = BATCH_TOKENS if generation is None else CACHED_TOKENS
        self.batch_tokens = self.settings.batch_tokens or budgets[self.device]

    def read(self, table: pa.Table, unreadable: dict[int, str]) -> ReadyRows:
        """Prepare the rows of a table, like `RowReader.read`."""
        return self.reader.read(table, unreadable)

    def score(self, work: ReadyRows, attempt: Attempt | None = None) -> pa.Table:
        """Return the task's prediction columns, `truncated` and `error` for all `work.count` rows, in their order."""
        if self.writer is not None:
            with closing(Attempts([] if attempt is None else [attempt], self.settings.samples)) as attempts:
                started = self.start(work, 0, attempts.suspects)
                waiting = [started.prompts]
                for row, result in self.write(
                    lambda: waiting.pop() if waiting else [], None if attempt is None else attempts
                ):
                    started.end(row, result)
            return self.finish(started)
        part, alone, free = self._chosen(work, set() if attempt is None else attempt.suspects["score"])
        # A suspect may kill the process. Alone in its batch it takes no other row with it, and leaves no doubt which
        # it was.
        for row in alone:
            self._run(part, row[None], attempt)
        # A batch that does not fit into memory lowers `batch_tokens` for the next chunk. Those of this one are cut
        # already, and are halved when they fail.
        sizes = {"batch_tokens": self.batch_tokens, "max_rows": MAX_BATCH_ROWS}
        batches = [free[one] for one in length_batches(work.features.lengths[free], **sizes)]
        collate = partial(self._collate, work)
        for prepared in prepare(work.rows, batches, collate, ahead=self.task.collates_ahead):
            self._run(part, prepared.rows, attempt, prepared)
        # Without this, a crash after the last batch, such as while the part is written, would be blamed on its rows.
        if attempt is not None:
            attempt.idle()
        return self.finish(part)

    def close(self) -> None:
        """End the process of a runtime that has one of its own."""
        end = getattr(self.writer, "close", None)
        if end is not None:
            end()

    def start(
        self, work: ReadyRows, first: int, suspects: Set[int] = frozenset(), writing: Writing | None = None
    ) -> ScoredRows:
        """Return rows with their prompts, to be given to `write`; `first` is the number of the first one there.

        `writing` has the texts of earlier attempts.
        """
        generation = self.settings.generation
        assert generation is not None, "the task writes"
        known = {} if writing is None else {row - first: text for row, text in writing.known.items() if row >= first}
        begun = {} if writing is None else writing.begun
        part, alone, free = self._chosen(work, {row - first for row in suspects}, known)
        part.first = first
        for place in (*alone, *free):
            row = int(work.rows[place])
            part.prompts.append(
                Prompt(
                    row=first + row,
                    ids=self._collate(work, place[None])[INPUT_IDS][0],
                    options=work.options[place] if work.options else generation,
                    begun=begun.get(first + row, EMPTY),
                    alone=place in alone,
                )
            )
        part.left = {one.row for one in part.prompts}
        self.padded_tokens += sum(len(one.ids) for one in part.prompts)
        return part

    def write(
        self, more: Callable[[], Sequence[Prompt]], attempts: Attempts | None = None, writing: Writing | None = None
    ) -> Iterator[tuple[int, Ended | str]]:
        """Yield each row of the prompts that `more` returns, with its text or the reason why it has none.

        `writing` keeps the texts as they end.
        """
        assert self.writer is not None, "the task writes"
        budget = Budget(tokens=self.batch_tokens, rows=MAX_BATCH_ROWS)

        def shrink(prompts: Sequence[Prompt]) -> None:
            self._shrink(len(prompts) * max(one.size for one in prompts))
            budget.tokens = self.batch_tokens

        texts = Texts(writer=self.writer, budget=budget, more=more, attempts=attempts, shrink=shrink)
        if writing is not None:
            texts.report = writing.report
        if attempts is not None:
            attempts.elsewhere = getattr(self.writer, "elsewhere", False)
        began = time.perf_counter()
        for row, result in texts.write():
            self.seconds += time.perf_counter() - began
            self.startup.setdefault("first batch", time.perf_counter() - began)
            if isinstance(result, Ended):
                self.written += int((result.text.tokens >= 0).sum())
            yield row, result
            began = time.perf_counter()

    def finish(self, part: ScoredRows) -> pa.Table:
        """Return what `score` returns, of rows that are computed or written. Raises FingerprintError for a mapped
        model that was written over."""
        folders.check_in_place(self.files)
        return assembled(part, self.settings, self.spec, self.task, self.processor, raw=self.raw)

    def _chosen(
        self, work: ReadyRows, suspects: Set[int], known: Mapping[int, Text] = MappingProxyType({})
    ) -> tuple[ScoredRows, np.ndarray, np.ndarray]:
        """Return a part, and the places of its rows that are computed: suspects, and others.

        Of equal rows the first one is computed: one that is known, else the suspect, which runs alone and stands for
        the rows that equal it.
        """
        part = ScoredRows(work=work, errors=dict(work.errors))
        ready = np.flatnonzero(~np.isin(work.rows, list(part.errors)))
        done = np.isin(work.rows[ready], list(known))
        suspected = np.isin(work.rows[ready], list(suspects)) & ~done
        ready = np.concatenate([ready[done], ready[suspected], ready[~done & ~suspected]])
        samples = self.settings.generation is not None and self.settings.generation.temperature > 0
        first = ready if samples or work.options else first_equal(work.features, ready)
        chosen, split = ready[first == ready], np.cumsum([done.sum(), suspected.sum()])
        old, alone, free = (chosen[np.isin(chosen, some)] for some in np.split(ready, split))
        part.texts |= {row: known[row] for row in work.rows[old].tolist()}
        # Rows with errors point to themselves, each other row to the equal one that was computed.
        part.same = np.arange(len(work.rows))
        part.same[ready] = first
        self.distinct += len(alone) + len(free)
        self.tokens += int(work.features.lengths[[*alone, *free]].sum())
        return part, alone, free

    def _collate(self, work: ReadyRows, batch: np.ndarray) -> dict[str, np.ndarray]:
        inputs: dict[str, np.ndarray] = self.task.checked_batch(work.features.arrays, batch, self.processor, self.spec)
        return inputs

    def _run(
        self, part: ScoredRows, batch: np.ndarray, attempt: Attempt | None, prepared: Prepared | None = None
    ) -> None:
        """Add the outputs of one batch, or errors of its rows, to the part."""
        work, errors = part.work, part.errors
        ready, model = None if prepared is None else prepared.inputs, self.forward
        assert model is not None, "the task does not write"

        def forward(rows: np.ndarray) -> None:
            nonlocal ready
            made, ready = ready, None  # only for the batch as a whole; its halves are collated separately
            asked = time.perf_counter()
            # A half gets new inputs: a slice of the batch's would keep the padding of rows that are not in it.
            inputs = self._collate(work, np.searchsorted(work.rows, rows)) if made is None else made()
            began = time.perf_counter()
            out = model(**inputs)
            seconds = time.perf_counter() - began
            self.waited += began - asked
            self.seconds += seconds
            self.startup.setdefault("first batch", seconds)
            self.padded_tokens += padded(rows)
            errors.update(non_finite_rows(rows, out))
            # Last: if anything above raises, the halves of the batch are tried again, and must not find the rows twice.
            reduce = self.task.reduce_all if self.settings.all_probabilities else self.task.reduce_outputs
            part.found.append((rows, reduce(out, inputs, self.spec)))

        def padded(rows: np.ndarray) -> int:
            return len(rows) * int(work.features.lengths[np.searchsorted(work.rows, rows)].max(initial=1))

        run_isolated(
            work.rows[batch],
            forward,
            errors,
            attempt,
            beside=NO_ROWS if prepared is None else prepared.beside,
            passed_on=(TaskError, Unavailable),
            out_of_memory=lambda rows: self._shrink(padded(rows)),
        )

    def _shrink(self, padded: int) -> None:
        """Halve the budget after `padded` tokens did not fit: a chunk's last batch may be far below the limit."""
        self.batch_tokens = max(1, min(self.batch_tokens, padded) // 2)
        log.warning("out of memory: batches now hold at most %d tokens", self.batch_tokens)


def prepare_runtime(settings: ScoringSettings, runtime: str, rows: pa.Table | None = None) -> None:
    """Export a model for a runtime, calibrated on `rows`, into the model folder.

    `rows` are input columns in which no row lacks a value; None if the runtime needs no calibration. Raises the errors
    of the runtime's `prepare`.
    """
    reader, batches = RowReader(settings=settings), []
    if rows is not None:
        made = reader.read(rows, {}).features
        cuts = length_batches(made.lengths, batch_tokens=BATCH_TOKENS["cpu"], max_rows=MAX_BATCH_ROWS)
        inputs = [reader.task.checked_batch(made.arrays, cut, reader.processor, reader.spec) for cut in cuts]
        batches = [(each["input_ids"], each["attention_mask"]) for each in inputs]
    plugins.load("runtimes", runtime).prepare(Path(settings.model), reader.spec, batches)
