"""The worker's half of `predict`: rows in, the same rows with predictions or a named error out.

    tokenize -> sort by length -> batches of a token budget -> forward -> original order

A model that writes is asked in the same way: what its runtime gives for a row is then an answer, token ids, instead of
logits, and a batch's budget counts the tokens that may be written too.

A row costs no other row anything. Unreadable and empty texts never reach the model; a batch that raises is halved until
the row that raises is alone; a batch that does not fit into memory is halved too, and later batches start smaller; a
row that ends or hangs the process is found by `poison_rows.py`. Sorting costs one argsort per chunk and saves the
padding.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, length_batches, pad
from torchlake.errors import Interrupted, StorageError, TableError, UsageError, ran_out_of_memory
from torchlake.models import folders
from torchlake.models import load as models
from torchlake.models.generation import NON_FINITE, NOTHING, GenerationOptions
from torchlake.runtimes import Forward
from torchlake.scoring.poison_rows import Strikes
from torchlake.tables.text_columns import is_blank, without_rows

log = logging.getLogger(__name__)

# A few hundred tokens keep a core busy, and its caches hold no more; a GPU wants thousands.
BATCH_TOKENS = {"cpu": 1024, "cuda": 32768}
# Writing reads all weights for one token of each row: many rows share the price. What they take is the cache's memory.
CACHED_TOKENS = {"cpu": 8192, "cuda": 65536}
MAX_BATCH_ROWS = 1024
WORKER_BYTES = 600 << 20
"What a worker takes before it loads a model: Python, torch, transformers."

Runtime = str | Callable[..., Forward]
"""A runtime's name, or a module-level function like a runtime's `load` (of a model that writes: `load_generator`)."""


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """What a worker needs to know; plain values, so that any engine can carry it."""

    model: str
    "The model folder."
    runtime: Runtime
    text: str
    "The column that holds the text."
    keep: tuple[str, ...]
    "Columns carried from the input to the output, key first; `None` in `key` puts a generated `row_id` before them."
    key: str | None
    prefix: str = ""
    "Put before the names of the prediction columns."
    all_probabilities: bool = False
    null: str = "error"
    "`error`: rows without text become error rows; `score`: they are scored as the empty string."
    row_timeout_s: float = 600.0
    "Seconds a forward pass, or the tokenizing of a row alone, may take; `poison_rows.py` says what then happens."
    batch_tokens: int | None = None
    "Padded tokens of a batch, at most; None: what suits the device."
    generation: GenerationOptions | None = None
    "How the model writes; None for a task that does not."
    staging: str = ""
    "Where parts and strikes are written (chunk job only)."


@dataclass(frozen=True, slots=True)
class Work:
    """Rows made ready for the model: `rows` (M,) are the positions, among `count` rows, that can be scored."""

    count: int
    rows: np.ndarray
    tokens: Ragged
    truncated: np.ndarray
    errors: dict[int, str]


@dataclass(kw_only=True)
class TextReader:
    """What makes rows ready for one model; needs its tokenizer, not its weights."""

    settings: ScoringSettings
    spec: TaskSpec = field(init=False)

    def __post_init__(self) -> None:
        folder = Path(self.settings.model)
        self.spec = models.load_spec(folder)
        self.task = plugins.load("tasks", self.spec.task)
        self.tokenizer = models.load_tokenizer(folder)
        self.room = room(folder, self.settings.generation)
        self.embeddings = models.embeddings(folder)

    def tokenize(self, texts: pa.Array, unreadable: dict[int, str]) -> Work:
        """Make a column ready; `unreadable` rows and, unless `null` is `score`, empty ones become errors.

        It holds strings or, for a model that writes, conversations. Of `unreadable` rows nothing is tokenized.
        """
        errors, tokens_of = dict(unreadable), self.task.tokenize
        if self.settings.generation is not None and self.settings.generation.chat:
            texts, bad = self.task.render_chats(
                self.tokenizer, without_rows(texts, unreadable), add_generation_prompt=True
            )
            errors = {**bad, **errors}
            tokens_of = partial(tokens_of, chat=True)
        texts = pc.fill_null(texts, "")
        if self.settings.null == "error":
            for row in pc.indices_nonzero(is_blank(texts)).to_pylist():
                errors.setdefault(row, "null_input")
        rows = np.setdiff1d(np.arange(len(texts)), np.fromiter(errors, dtype=np.int64, count=len(errors)))
        readable = texts.take(pa.array(rows)).to_pylist()
        flat, offsets, cut = tokens_of(self.tokenizer, readable, self.spec)
        tokens = Ragged(flat, offsets)
        for row, reason in beyond_embeddings(tokens, self.embeddings, self.tokenizer).items():
            errors[int(rows[row])] = f"unknown_token: {reason}"
        if self.room is not None:
            for row in np.flatnonzero(tokens.lengths > self.room):
                reason = f"prompt_too_long: {tokens.lengths[row]} tokens, and there is room for {self.room}"
                errors[int(rows[row])] = f"{reason} before the new ones; lower max_new_tokens or shorten it"
        return Work(len(texts), rows, tokens, cut > 0, errors)


@dataclass(kw_only=True)
class Scorer:
    """One model in one process. `batch_tokens` shrinks when memory runs out, and stays small."""

    settings: ScoringSettings
    reader: TextReader = field(init=False)
    spec: TaskSpec = field(init=False)
    batch_tokens: int = field(init=False)
    device: str = field(init=False)
    padded_tokens: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        folder = Path(self.settings.model)
        self.reader = TextReader(settings=self.settings)
        self.spec, self.task, self.tokenizer = self.reader.spec, self.reader.task, self.reader.tokenizer
        self.device = device()
        load, writing = self.settings.runtime, self.settings.generation
        if isinstance(load, str):
            named = plugins.load("runtimes", load)
            load = named.load if writing is None else named.load_generator
        options = {} if writing is None else {"options": writing}
        self.forward: Forward = load(folder, self.spec, device=self.device, **options)
        budgets = BATCH_TOKENS if writing is None else CACHED_TOKENS
        self.batch_tokens = self.settings.batch_tokens or budgets[self.device]

    def tokenize(self, texts: pa.Array, unreadable: dict[int, str]) -> Work:
        """What `TextReader.tokenize` does."""
        return self.reader.tokenize(texts, unreadable)

    def score(self, work: Work, strikes: Strikes | None = None) -> pa.Table:
        """The task's prediction columns, `truncated` and `error`, one row for each of `work.count`, in their order."""
        errors = dict(work.errors)
        answers = self._no_answers(work.count)
        alone = [] if strikes is None else sorted(strikes.suspects["score"])
        singles = [np.flatnonzero(work.rows == row) for row in alone]
        for batch in [single for single in singles if len(single)]:
            self._run(work, batch, answers, errors, strikes)
        free = np.flatnonzero(~np.isin(work.rows, [*alone, *errors]))
        lengths = work.tokens.lengths[free] + self._new_tokens
        for batch in length_batches(lengths, batch_tokens=self.batch_tokens, max_rows=MAX_BATCH_ROWS):
            self._run(work, free[batch], answers, errors, strikes)
        if strikes is not None:
            strikes.idle()
        return self._assemble(work, answers, errors)

    @property
    def _new_tokens(self) -> int:
        """Tokens that may be written for a row."""
        return 0 if self.settings.generation is None else self.settings.generation.max_new_tokens

    def _no_answers(self, rows: int) -> np.ndarray:
        """What the runtime is to fill: logits (B, C) float32 or token ids (B, W) int32."""
        if self.settings.generation is not None:
            return np.full((rows, self._new_tokens), NOTHING, dtype=np.int32)
        return np.full((rows, max(1, len(self.spec.labels))), np.nan, dtype=np.float32)

    def _run(
        self, work: Work, batch: np.ndarray, answers: np.ndarray, errors: dict[int, str], strikes: Strikes | None
    ) -> None:
        """Fill `answers` (or `errors`) for the rows of one batch, halving it as often as it raises."""
        pending = [batch]
        while pending:
            batch = pending.pop()
            rows = work.rows[batch]
            try:
                input_ids, mask = pad(work.tokens, batch, self.tokenizer.pad_token_id)
                began = time.perf_counter()
                with nullcontext() if strikes is None else strikes.running("score", rows.tolist()):
                    out = self.forward(input_ids, mask)
                self.seconds += time.perf_counter() - began
                self.padded_tokens += input_ids.size
            except (Interrupted, StorageError):
                raise
            except Exception as error:
                if _device_is_lost(error):
                    if strikes is not None:
                        os._exit(1)  # no later call would work; the next process finds the row by its strikes
                    raise
                if len(batch) > 1:
                    pending += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                    if ran_out_of_memory(error):
                        self.batch_tokens = max(1, min(self.batch_tokens, input_ids.size) // 2)
                        log.warning("out of memory: batches now hold at most %d tokens", self.batch_tokens)
                else:
                    errors[int(rows[0])] = "out_of_memory" if ran_out_of_memory(error) else _in_words(error)
                continue
            answers[rows] = out
            for row in rows[_non_finite(out)]:
                errors[int(row)] = "non_finite: the model gave NaN or infinity"

    def _assemble(self, work: Work, answers: np.ndarray, errors: dict[int, str]) -> pa.Table:
        scored = np.setdiff1d(np.arange(work.count), np.fromiter(errors, dtype=np.int64, count=len(errors)))
        if self.settings.generation is not None:
            columns = self.task.output_columns(answers[scored], self.tokenizer, self.settings.generation.stop)
        else:
            probabilities = self.task.probabilities(answers[scored], self.spec)
            columns = self.task.output_columns(probabilities, self.spec, self.settings.all_probabilities)
        position = np.full(work.count, -1, dtype=np.int64)
        position[scored] = np.arange(len(scored))
        table = columns.take(pa.array(position, mask=position < 0))
        table = table.rename_columns([self.settings.prefix + name for name in table.column_names])
        truncated = np.zeros(work.count, dtype=bool)
        truncated[work.rows] = work.truncated
        table = table.append_column(pa.field("truncated", pa.bool_()), pa.array(truncated))
        reasons = pa.array([errors.get(row) for row in range(work.count)], pa.string())
        return table.append_column(pa.field("error", pa.string()), reasons)


def beyond_embeddings(tokens: Ragged, embeddings: int | None, tokenizer: Any) -> dict[int, str]:
    """{row: reason} of the rows with a token that the model has no embedding for; ~id stands for a token too.

    A tokenizer may be larger than its model: somebody has added tokens to it, or it has some for images alone. On a GPU
    such a row would end the process.
    """
    if embeddings is None or not len(tokens.values):
        return {}
    ids = np.where(tokens.values < 0, ~tokens.values, tokens.values)
    if ids.max() < embeddings:
        return {}
    found: dict[int, str] = {}
    for place in np.flatnonzero(ids >= embeddings):
        row = int(np.searchsorted(tokens.offsets, place, side="right")) - 1
        name = tokenizer.convert_ids_to_tokens(int(ids[place]))
        found.setdefault(row, f"token {name!r} has the id {ids[place]}, and the model has {embeddings:,} embeddings")
    return found


def within(errors: dict[int, str], first: int, stop: int) -> dict[int, str]:
    """The errors of the rows from `first` to before `stop`, counted from `first`."""
    return {row - first: reason for row, reason in errors.items() if first <= row < stop}


def check_text(schema: pa.Schema, text: str, where: str) -> None:
    """Raise TableError when the table of `schema` has no column `text`, or one that holds no strings."""
    if text not in schema.names:
        raise TableError(
            f"{where}: there is no text column {text!r}; it has: {', '.join(schema.names)}. Name it with text=."
        )
    kind = schema.field(text).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_text(kind) for is_text in texts):
        raise TableError(f"{where}: the text column {text!r} holds {kind}, not strings; name another with text=.")


def check_prompts(
    schema: pa.Schema, text: str, where: str, task: ModuleType, tokenizer: Path, *, chat: bool = False
) -> bool:
    """Whether the texts of a task that writes are conversations: by the column's type, or JSON because `chat` says so.

    Raises TableError as `check_text` does, UsageError when the tokenizer's folder has no chat template.
    """
    if not (text in schema.names and task.is_chat(schema.field(text).type)):
        check_text(schema, text, where)
        if not chat:
            return False
    if not folders.has_chat_template(tokenizer):
        raise UsageError(
            f"{where}: {text!r} holds conversations, and the tokenizer in {tokenizer} has no chat template "
            f"({folders.CHAT_TEMPLATE}). Give a model that was tuned on conversations, or a column of texts."
        )
    return True


def room(folder: Path, options: GenerationOptions | None) -> int | None:
    """Tokens that a prompt may have beside those that may be written; None where nothing limits it."""
    positions = None if options is None else models.positions(folder)
    return None if options is None or positions is None else positions - options.max_new_tokens


def worker_memory(model: str) -> int:
    """Bytes that one process takes to score with a model."""
    return WORKER_BYTES + 2 * folders.weight_bytes(Path(model))


def runtime_name(runtime: Runtime) -> str:
    """What records call a runtime: its name, or a function's module and name."""
    return runtime if isinstance(runtime, str) else f"{runtime.__module__}:{runtime.__qualname__}"


def prepare_runtime(model: str, runtime: str, texts: pa.Array) -> None:
    """Let a runtime make of the model what it keeps in the model folder, calibrated on the batches of `texts`.

    `texts` is a string array without nulls; it may be empty where the runtime calibrates nothing. Raises what the
    runtime's `prepare` does.
    """
    folder = Path(model)
    spec = models.load_spec(folder)
    tokenizer = models.load_tokenizer(folder)
    tokens = Ragged(*plugins.load("tasks", spec.task).tokenize(tokenizer, texts.to_pylist(), spec)[:2])
    cuts = length_batches(tokens.lengths, batch_tokens=BATCH_TOKENS["cpu"], max_rows=MAX_BATCH_ROWS)
    batches = [pad(tokens, cut, tokenizer.pad_token_id) for cut in cuts]
    plugins.load("runtimes", runtime).prepare(folder, spec, batches)


def device() -> str:
    """Where a model is scored: "cuda" where torch finds a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _non_finite(out: np.ndarray) -> np.ndarray:
    """(B,) bool: rows for which the model gave NaN or infinity."""
    if np.issubdtype(out.dtype, np.integer):
        return np.asarray((out == NON_FINITE).any(axis=1))
    return np.asarray(~np.isfinite(out).all(axis=1))


def _device_is_lost(error: Exception) -> bool:
    """After such an error every later call on the device fails too: it says nothing about the row."""
    return type(error).__name__ == "AcceleratorError" and not ran_out_of_memory(error)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
