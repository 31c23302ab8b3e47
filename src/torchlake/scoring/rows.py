"""What a worker needs to know, and rows made ready for the model: checked, tokenized, or a named error.

A row never affects another one: unreadable and empty texts, unknown tokens and prompts without room for an answer
become errors of their own row and never reach the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.chunk_jobs.read_ahead import Workspace
from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged
from torchlake.errors import TableError, UsageError
from torchlake.models import folders
from torchlake.models import load as models
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import Forward
from torchlake.tables.arrays import from_numpy, is_blank, nulls_as_empty, without_rows

Runtime = str | Callable[..., Forward]
"A runtime's name, or a module-level function like a runtime's `load` (text generation: `load_generator`)."


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """Settings of a worker, as plain values, so that every engine can send them."""

    model: str
    "The model folder."
    runtime: Runtime
    exact: bool = False
    "The runtime is the default and must be exact: on a GPU, where `varlen` computes in bf16, `eager` runs instead."
    text: str
    "The column that holds the text."
    keep: tuple[str, ...]
    "Columns copied from the input to the output, key first."
    key: str | None
    "None: a generated column `row_id` comes first in the output."
    prefix: str = ""
    "Prefix of the names of the prediction columns."
    all_probabilities: bool = False
    null: str = "error"
    "`error`: rows without text become error rows; `score`: they are scored as the empty string."
    row_timeout_s: float = 600.0
    "Time limit of a forward pass, and of tokenizing one row; see `poison_rows.py`."
    batch_tokens: int | None = None
    "Maximum padded tokens of a batch; None: the default for the device."
    generation: GenerationOptions | None = None
    "None unless the task is text generation."
    gpus_per_process: int = 1
    "GPUs that share one copy of the model or, on machines without GPUs, ranks; see `runtimes/_sharded.py`."
    workspace: Workspace | None = None
    "Where a chunk job writes; None for frames."


def runtime_name(runtime: Runtime) -> str:
    """Return a runtime's name in records; of a function its module and name."""
    return runtime if isinstance(runtime, str) else f"{runtime.__module__}:{runtime.__qualname__}"


@dataclass(frozen=True, slots=True)
class Work:
    """Tokenized rows: M of `count` rows can be scored, the others have an error."""

    count: int
    rows: np.ndarray
    "(M,) int64: their positions among the `count` rows."
    tokens: Ragged
    truncated: np.ndarray
    "(M,) bool"
    errors: dict[int, str]
    "{position: reason}"


@dataclass(kw_only=True)
class TextReader:
    """Tokenizes rows for one model; loads its tokenizer, not its weights."""

    settings: ScoringSettings
    spec: TaskSpec = field(init=False)

    def __post_init__(self) -> None:
        folder = Path(self.settings.model)
        self.spec = models.load_spec(folder)
        self.task = plugins.load("tasks", self.spec.task)
        # A task that generates text also decodes, and needs the templates of transformers' tokenizer.
        load = models.load_tokenizer if self.task.PACKED else models.load_text_tokenizer
        self.tokenizer: Any = load(folder)
        self.max_prompt = max_prompt_tokens(folder, self.settings.generation)
        self.embeddings = models.embeddings(folder)

    def tokenize(self, texts: pa.Array, unreadable: dict[int, str]) -> Work:
        """Tokenize a column of strings or, for text generation, conversations.

        `unreadable` rows, and empty ones unless `null` is "score", become errors and are not tokenized.
        """
        errors, tokens_of = dict(unreadable), self.task.tokenize
        generation = self.settings.generation
        if generation is not None and (generation.chat or pa.types.is_nested(texts.type)):
            texts, bad = self.task.render_chats(
                self.tokenizer, without_rows(texts, unreadable), add_generation_prompt=True
            )
            errors = {**bad, **errors}
            tokens_of = partial(tokens_of, chat=True)
        texts = nulls_as_empty(texts)
        if self.settings.null == "error":
            for row in pc.indices_nonzero(is_blank(texts)).to_pylist():
                errors.setdefault(row, "null_input")
        rows = np.setdiff1d(np.arange(len(texts)), np.fromiter(errors, dtype=np.int64, count=len(errors)))
        readable = texts.take(from_numpy(rows)).to_pylist()
        flat, offsets, cut = tokens_of(self.tokenizer, readable, self.spec)
        tokens = Ragged(flat, offsets)
        for row, reason in beyond_embeddings(tokens, self.embeddings, self.tokenizer).items():
            errors[int(rows[row])] = f"unknown_token: {reason}"
        if self.max_prompt is not None:
            for row in np.flatnonzero(tokens.lengths > self.max_prompt):
                reason = f"prompt_too_long: {tokens.lengths[row]} tokens, and there is room for {self.max_prompt}"
                errors[int(rows[row])] = f"{reason} before the new ones; lower max_new_tokens or shorten it"
        return Work(len(texts), rows, tokens, cut > 0, errors)


def beyond_embeddings(tokens: Ragged, embeddings: int | None, tokenizer: Any) -> dict[int, str]:
    """Return {row: reason} for rows with a token that has no embedding; ~id counts as id.

    A tokenizer may be larger than its model, if tokens were added to it or are for images only. On a GPU such a row
    would end the process.
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
    """Return the errors of rows `first` to `stop` (exclusive), with positions relative to `first`."""
    return {row - first: reason for row, reason in errors.items() if first <= row < stop}


def check_text(schema: pa.Schema, text: str, where: str) -> None:
    """Raise TableError if the table has no column `text`, or it does not hold strings."""
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
    """Return whether the prompts are conversations: by the column's type, or as JSON strings if `chat` is set.

    Raises TableError as `check_text` does, and UsageError if the tokenizer's folder has no chat template.
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


def max_prompt_tokens(folder: Path, options: GenerationOptions | None) -> int | None:
    """Return how many tokens a prompt may have if `max_new_tokens` must fit too; None: no limit."""
    positions = None if options is None else models.positions(folder)
    return None if options is None or positions is None else positions - options.max_new_tokens
