"""Scoring in the calling process: `load`, which returns a model as a function of texts.

Callers in threads and coroutines share batches (`serving/batching.py`): one thread tokenizes the rows of the calls that
wait, and another one computes them. A caller in a thread tokenizes its own rows if no other one does.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.arguments import check_arguments, refuse_unknown
from torchlake.config.options import GenerationArguments, PredictOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import Features
from torchlake.display import Shown, shown
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.jobs.worker.isolation import device_is_lost
from torchlake.models.load import reading_into_memory
from torchlake.scoring.options.call import AS_LOADED, CallOptions, scorer_of, spec_of
from torchlake.scoring.options.given import PROMPTS
from torchlake.scoring.options.job import with_export
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.options.table import checked_input
from torchlake.scoring.rows import ReadyRows, Runtime, ScoringSettings
from torchlake.scoring.scorer import Scorer
from torchlake.scoring.values import table_of
from torchlake.scoring.workers.calls import Answered, GivenRows, answered, compute, read
from torchlake.scoring.workers.output import folded
from torchlake.serving.batching import CLOSED, Batcher, Call, Part
from torchlake.tables.sources.frames import Frame, is_frame, to_arrow
from torchlake.tasks import TEXT

log = logging.getLogger(__name__)

Text = str | None | Sequence[Mapping[str, str]] | Mapping[str, Any]
"A string, None, or (text generation) a conversation: messages with `role` and `content`; or a mapping of columns."
Answer = dict[str, Any]


READ_ROWS = 64
"Rows that are tokenized together."
NO_FEATURES = Features(arrays={}, lengths=np.zeros(0, dtype=np.int64), cut=np.zeros(0, dtype=np.int64))


@shown
class Model:
    """A loaded model: a function from texts to answers. Threads and coroutines share it and its batches.

    An answer has the names and values of the columns that `predict` writes: for classification `label`, `score`,
    `truncated` and `error`; for text generation `generated_text` and others.
    """

    def __init__(self, settings: ScoringSettings) -> None:
        with reading_into_memory():
            scorer = Scorer(settings=settings)
        self._scorer: Scorer | None = scorer
        self._settings = settings
        self.spec: TaskSpec = scorer.spec
        self.runtime: str = scorer.runtime
        self.sha: str = settings.model_hash
        self.folder: str = settings.model
        inputs = plugins.load("tasks", self.spec.task).inputs.values()
        self._reads_together = settings.generation is None and set(inputs) <= {TEXT}
        self._reading = reading = threading.Lock()  # a tokenizer has settings that one call at a time changes

        def read_parts(parts: Sequence[Part]) -> list[Any]:
            works = [call.work for call, _ in parts]
            with reading:
                return read(scorer, works) if isinstance(works[0], GivenRows) else [work() for work in works]

        self.reader = Batcher(read_parts, lambda: READ_ROWS, done="read")
        self.batcher = Batcher(partial(compute, scorer), lambda: scorer.batch_tokens, lost=device_is_lost)
        # Neither they nor their threads have a reference to this object, so a model that is dropped is freed.
        for each in (self.reader, self.batcher):
            weakref.finalize(self, each.close, wait=False)

    @overload
    def __call__(self, texts: str) -> Answer: ...  # type: ignore[overload-overlap]  # a string is iterable, too
    @overload
    def __call__(self, texts: Iterable[Text] | Frame | Mapping[str, Iterable[Any]]) -> list[Answer]: ...
    def __call__(self, texts: str | Iterable[Text] | Frame | Mapping[str, Iterable[Any]]) -> Answer | list[Answer]:
        """Return one answer for each text, in their order; for a single string its answer.

        For a model that reads several columns, a row is a mapping with their names. A pandas, polars or pyarrow frame
        has the columns that `predict` reads, and so does a mapping of lists. Input that cannot be scored (None, NaN,
        empty, invalid Unicode) has an `error`, like a row of a table. Raises UsageError for values of another form, and
        TableError for a frame without the model's columns.
        """
        if isinstance(texts, str):
            return self([texts])[0]
        return self._answers(self.score(*self.to_table(texts)))

    @overload
    async def acall(self, texts: str) -> Answer: ...  # type: ignore[overload-overlap]
    @overload
    async def acall(self, texts: Iterable[Text] | Frame | Mapping[str, Iterable[Any]]) -> list[Answer]: ...
    async def acall(self, texts: str | Iterable[Text] | Frame | Mapping[str, Iterable[Any]]) -> Answer | list[Answer]:
        """Return what a call returns, without blocking the event loop; a call that is cancelled is not computed."""
        if isinstance(texts, str):
            return (await self.acall([texts]))[0]
        return self._answers(await self.ascore(*self.to_table(texts)))

    def _answers(self, scored: Answered) -> list[Answer]:
        answers: list[Answer] = folded(scored.table, self._settings).to_pylist()
        return answers

    def embed(self, texts: Iterable[Text] | Frame | Mapping[str, Iterable[Any]]) -> np.ndarray:
        """Return the vectors of texts, (N, D) float32; those of rows with an error are NaN.

        Raises UsageError for a model of another task, and the errors of a call.
        """
        task = plugins.load("tasks", self.spec.task)
        if "embedding" not in task.output_schema(self.spec).names or self._settings.embedding != "float32":
            raise UsageError(f"embed: the model's task is {self.spec.task}; its answers are those of a call.")
        vectors: np.ndarray = task.read_answers(self.score(*self.to_table(texts)).table, self.spec)
        return vectors

    def close(self) -> None:
        """Free the model's memory.

        Calls in other threads finish first if their rows have been read, else they raise UsageError.
        """
        self.reader.close()
        self.batcher.close()
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()

    def to_table(self, texts: Any) -> tuple[pa.Table, dict[int, str]]:
        """Return the rows of a call as a table of the model's columns, and errors of invalid ones.

        Raises UsageError and TableError.
        """
        table, unreadable = (to_arrow(texts), {}) if is_frame(texts) else table_of(texts, self.spec)
        checked_input(self._settings, self.spec, table.schema, "the frame" if is_frame(texts) else "the rows")
        return table.select(list(self.spec.input_columns)), unreadable

    def score(self, table: pa.Table, unreadable: dict[int, str], view: CallOptions = AS_LOADED) -> Answered:
        """Score the rows of a table, which has the model's columns, together with those of other callers."""
        given = self._given(table, unreadable, view)
        if self._reading.acquire(blocking=False):  # in this thread: a switch to another one takes longer
            try:
                (call,) = read(self._open_scorer(), [given.work])
            finally:
                self._reading.release()
            given.ended = time.perf_counter()
        else:
            ((_, call),) = self.reader.result(given)
        return answered(given, call, self.batcher.result(call))

    async def ascore(
        self,
        table: pa.Table,
        unreadable: dict[int, str],
        view: CallOptions = AS_LOADED,
        *,
        patience: float | None = None,
    ) -> Answered:
        """Score like `score`, without blocking the event loop.

        Raises TimeoutError if no row has been computed after `patience` seconds in the queues, and RowTimeout for rows
        that were given up.
        """
        given = self._given(table, unreadable, view)
        ((_, call),) = await self.reader.aresult(given, patience)
        left = patience and max(0.0, patience - (given.started - given.arrived))
        return answered(given, call, await self.batcher.aresult(call, left))

    def _given(self, table: pa.Table, unreadable: dict[int, str], view: CallOptions) -> Call:
        """Return a call for the thread that tokenizes, which takes it whole."""
        kind: Any = (view, table.schema) if self._reads_together else object()
        return Call(GivenRows(table, unreadable, view), np.array([len(table)]), kind=kind)

    def _open_scorer(self) -> Scorer:
        if self._scorer is None:
            raise UsageError(CLOSED)
        return self._scorer

    async def tokens(
        self, texts: Sequence[str], *, special: bool, patience: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Return the tokens of each text: `id`, `text`, `special`, and `start` and `stop` in characters.

        Raises TimeoutError like `ascore`.
        """
        if self._scorer is None or not hasattr(self._scorer.processor, "backend_tokenizer"):
            raise UsageError("The model has no tokenizer of texts.")
        backend = self._scorer.processor.backend_tokenizer

        def encode() -> list[Any]:
            backend.no_truncation()
            backend.no_padding()
            found: list[Any] = backend.encode_batch(texts, add_special_tokens=special)
            return found

        ((_, encodings),) = await self.reader.aresult(Call(encode, np.array([READ_ROWS]), kind=object()), patience)
        return [
            [
                {"id": number, "text": name, "special": True, "start": None, "stop": None}
                if mark
                else {"id": number, "text": text[start:stop], "special": False, "start": start, "stop": stop}
                for number, name, mark, (start, stop) in zip(
                    each.ids, each.tokens, each.special_tokens_mask, each.offsets, strict=True
                )
            ]
            for text, each in zip(texts, encodings, strict=True)
        ]

    def with_options(self, task_options: Mapping[str, Any]) -> TaskSpec:
        """Return the task with other options. Raises UsageError for those that it does not have."""
        return spec_of(self.spec, CallOptions(task_options=task_options))

    @property
    def batch_tokens(self) -> int:
        """The tokens of a batch."""
        return 0 if self._scorer is None else self._scorer.batch_tokens

    def failed(self, rows: int, reason: str, view: CallOptions = AS_LOADED) -> pa.Table:
        """Return the answer of rows that all have the same error."""
        scorer = self._scorer
        if scorer is None:
            raise UsageError(CLOSED)
        nothing = ReadyRows(rows, np.zeros(0, dtype=np.int64), NO_FEATURES, dict.fromkeys(range(rows), reason))
        return (scorer if view is AS_LOADED else scorer_of(scorer, view)).score(nothing)

    def _shown(self) -> Shown:
        classes = f", {len(self.spec.labels):,} classes" if self.spec.labels else ""
        closed = ", closed" if self._scorer is None else ""
        folder = self._settings.model.removeprefix(f"{os.getcwd()}{os.sep}")
        return f"{self.spec.task}{classes}, {self.runtime}{closed} -> {folder}", []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def load(
    model: str | Path,
    *,
    text_pair: str | None = None,
    task: Any = None,
    task_options: Mapping[str, Any] | None = None,
    runtime: Runtime | None = None,
    all_probabilities: bool = False,
    null: Literal["error", "score"] = "error",
    max_length: int | None = None,
    batch_tokens: int | None = None,
    **generation: Unpack[GenerationArguments],
) -> Model:
    """Load a model into this process, as a function of texts.

        classify = tl.load("runs/reviews/model")
        classify(["great film", "a bore"])      # [{"label": "good", "score": 0.98, "truncated": False, ...}, ...]
        classify("great film")                  # {"label": "good", ...}

    The options are those of `predict`, and so are the answers. For a cross-encoder of others, `text_pair` names the
    second text: `load(model, text_pair="passage")([{"text": "a query", "passage": "its answer"}])`. Threads share the
    model and its batches, and `await classify.acall(texts)` does the same in an event loop; `close()`, or a `with`
    block, frees its memory. The weights are read into memory: what happens to their files later changes nothing. Of an
    embedding model, `embed(texts)` returns a NumPy array (N, D). Text that crashes or hangs a kernel crashes or hangs
    this process: score untrusted text with `predict`.
    """
    refuse_unknown("load", generation, GenerationArguments.__annotations__)
    given: dict[str, Any] = {"null": null, "batch_tokens": batch_tokens, "max_length": max_length}
    prompts = {name: generation[name] for name in PROMPTS if name in generation}  # type: ignore[literal-required]
    named = {"all_probabilities": all_probabilities, "task_options": task_options or {}}
    check_arguments({**given, **named}, PredictOptions.__annotations__)
    settings, _, _ = scoring_settings(
        model,
        runtime,
        {name: value for name, value in generation.items() if name not in PROMPTS},
        prompts=prompts,
        text_pair=text_pair,
        task=task,
        task_options=task_options,
        all_probabilities=all_probabilities,
        **given,
    )
    return Model(with_export(settings, Local()))
