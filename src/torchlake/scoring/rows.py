"""A worker's settings, and rows made ready for the model: checked, tokenized, or a named error.

A row never affects another one: unreadable and empty texts, unknown tokens and prompts without room for an answer
become errors of that row only, and never reach the model (null texts: `tasks/_null_rows.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.config.task_spec import Columns, TaskSpec
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS, Features
from torchlake.errors import UsageError
from torchlake.jobs.worker.read_ahead import Workspace
from torchlake.models import folders
from torchlake.models import load as models
from torchlake.models.generation import GenerationOptions, PromptOptions
from torchlake.models.spec import load_spec
from torchlake.runtimes import Forward, Writer
from torchlake.tables.arrays import from_numpy, is_blank, nulls_as_empty
from torchlake.tasks import PROMPT, TEXT, ColumnOptions, Inputs
from torchlake.tasks._inputs import check_column
from torchlake.tasks._null_rows import NULL_INPUT, read_inputs, rows_of
from torchlake.tasks._prompts import read_prompts, with_examples
from torchlake.tasks._rendering import tell_time
from torchlake.tasks._row_options import OPTIONS, row_options, with_seeds

Runtime = str | Callable[..., Forward | Writer]
"A runtime's name, or a module-level function like a runtime's `load` (text generation: `open_writer`)."


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """Settings of a worker, as plain values, so that every engine can send them."""

    model: str
    "The model folder."
    model_hash: str = ""
    "The model's hash: a process that finds another model in the folder scores nothing. Empty: it is not checked."
    export: str | None = None
    "The hash of the runtime's export, if it needs one."
    runtime: Runtime
    runtime_python: str | None = None
    "The interpreter of a runtime that has its own; None: that of the environment variable."
    versions: Mapping[str, str] = field(default_factory=dict)
    "The versions that the interpreter has."
    task: str | None = None
    "The task that was requested by name; None: the folder's own."
    exact: bool = False
    "Whether the default runtime must be exact: on a GPU, where `varlen` computes in bf16, `eager` runs instead."
    products: Mapping[str, str] | None = None
    "The libraries of fp32 products that the job began with; None: those of the CPU's class."
    text: Columns
    "The column that holds the text, or several; empty for a task without text."
    text_pair: Columns | None = None
    "The column of the second text of a pair."
    inputs: Mapping[str, Columns] = field(default_factory=dict)
    "Columns of the task's other inputs."
    task_options: Mapping[str, Any] = field(default_factory=dict)
    "The options of the task."
    keep: tuple[str, ...]
    "Columns copied from the input to the output, key first."
    key: str | None
    "The key column; None: a generated column `row_id` comes first in the output."
    prefix: str = ""
    "Prefix of the names of the prediction columns."
    all_probabilities: bool = False
    token_counts: bool = False
    "Whether the output has the number of tokens of each row."
    embedding: str = "float32"
    "The form of vectors: float32, int8 or binary."
    ranges: tuple[tuple[float, ...], ...] = ()
    "For int8, the lowest and the highest value of each number of a vector, (2, D)."
    null: str = "error"
    "`error`: rows without text become error rows; `score`: they are scored as the empty string."
    row_timeout_s: float = 600.0
    "Time limit of a forward pass, and of tokenizing one row; see `poison_rows.py`."
    batch_tokens: int | None = None
    "Maximum padded tokens of a batch; None: the default for the device."
    max_length: int | None = None
    "Maximum tokens of a row; None: those of the model."
    explode: bool = False
    "Whether each of a row's answers has a row of its own."
    generation: GenerationOptions | None = None
    "None unless the task is text generation."
    prompts: PromptOptions = field(default_factory=PromptOptions)
    time: str | None = None
    "The time that the chat template gets; None: it does not ask, or gets the time of each call."
    chunks_ahead: int = 1
    "Chunks that a process reads ahead; those that are ready share batches."
    gpus_per_process: int = 1
    "GPUs that share one copy of the model or, on machines without GPUs, ranks; see `runtimes/_sharded.py`."
    workspace: Workspace | None = None
    "Where a chunk job writes; None for frames."

    @cached_property  # it loads a tokenizer
    def spec(self) -> TaskSpec:
        """The model's task with the columns of this job."""
        trained = load_spec(Path(self.model), self.task)
        inputs, options = dict(self.inputs), dict(self.task_options)
        longest, template = self.max_length or trained.max_length, self.prompts.prompt or trained.template
        columns: Any = {"text": self.text, "text_pair": self.text_pair, "inputs": inputs, "template": template}
        return replace(trained, **columns, options=options, max_length=longest)

    @property
    def samples(self) -> int:
        """The number of answers of a row."""
        return 1 if self.generation is None else self.generation.n

    @property
    def column_options(self) -> ColumnOptions:
        """The options that change the prediction columns."""
        return ColumnOptions(
            all_probabilities=self.all_probabilities,
            stop=() if self.generation is None else self.generation.stop,
            marks=self.prompts.marks,
            continues=self.prompts.continue_final_message,
            logprobs=None if self.generation is None else self.generation.logprobs,
            structure=None if self.generation is None else self.generation.structure,
            embedding=self.embedding,
            ranges=self.ranges,
        )


def runtime_name(runtime: Runtime) -> str:
    """Return a runtime's name in records; for a function its module and name."""
    return runtime if isinstance(runtime, str) else f"{runtime.__module__}:{runtime.__qualname__}"


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows ready for the model: M of `count` rows can be scored, the others have an error."""

    count: int
    rows: np.ndarray
    "(M,) int64: their positions among the `count` rows."
    features: Features
    "The features of the M rows."
    errors: dict[int, str]
    "{position: reason}"
    options: Sequence[GenerationOptions] = ()
    "Of a task that writes the options of the M rows; empty: they are the job's."


@dataclass(kw_only=True)
class RowReader:
    """Prepares rows for one model; loads its tokenizer, not its weights."""

    settings: ScoringSettings
    spec: TaskSpec = field(init=False)

    def __post_init__(self) -> None:
        folder = Path(self.settings.model)
        self.spec = self.settings.spec
        self.task = plugins.load("tasks", self.spec.task)
        self.processor: Any = self.task.load_processor(folder, self.spec, scoring=True)
        if self.settings.prompts.chat_template is not None:
            self.processor.chat_template = self.settings.prompts.chat_template
        if self.settings.time is not None:
            tell_time(self.processor, self.settings.time)
        continues = self.task.inputs.get("text") == PROMPT  # its answer shares the model's positions with the prompt
        self.max_prompt = max_prompt_tokens(folder, self.settings.generation) if continues else None
        self.embeddings = models.embeddings(folder)

    def read(self, table: pa.Table, unreadable: dict[int, str]) -> ReadyRows:
        """Prepare the rows of a table.

        `unreadable` rows, and ones that lack an input unless `null` is "score", become errors and never reach the task.
        """
        if self.settings.generation is not None and self.task.inputs["text"] == PROMPT:
            inputs, errors, options = self._prompts(table, unreadable)
        else:
            inputs, errors = read_inputs(table, self.task.inputs, self.spec, unreadable, null=self.settings.null)
            options = {}
            if self.settings.prompts.examples:
                inputs["text"] = with_examples(inputs["text"], self.settings.prompts)
        rows = np.arange(len(table))
        if errors:
            rows = np.setdiff1d(rows, np.fromiter(errors, dtype=np.int64, count=len(errors)))
        made = self.task.features(rows_of(inputs, rows), self.processor, self.spec, **options)
        if made.errors:
            errors |= {int(rows[row]): reason for row, reason in made.errors.items()}
            good = np.setdiff1d(np.arange(len(rows)), list(made.errors))
            rows, made = rows[good], made.take(good)
        own = self._own_options(table, rows, errors)
        self._find_unfit(rows, made, errors, own)
        return self._answers(table, ReadyRows(len(table), rows, made, errors, own))

    def _own_options(self, table: pa.Table, rows: np.ndarray, errors: dict[int, str]) -> list[GenerationOptions]:
        """Return the options of the rows if the table has them; add those that are bad to `errors`."""
        job, named = self.settings.generation, self.spec.inputs.get(OPTIONS)
        if job is None or named is None:
            return []
        values = table[str(named)].to_pylist()
        made, bad = row_options([values[row] for row in rows], job)
        runtime = self.settings.runtime
        refusal = getattr(plugins.load("runtimes", runtime), "cannot_write", None) if isinstance(runtime, str) else None
        if refusal is not None:
            bad |= {row: f"bad_options: {why}" for row, one in enumerate(made) if (why := refusal(one)) is not None}
        for row, reason in bad.items():
            errors.setdefault(int(rows[row]), reason)
        return made

    def _answers(self, table: pa.Table, ready: ReadyRows) -> ReadyRows:
        """Return rows with a position for each of their answers, which have seeds of their own."""
        job = self.settings.generation
        if job is None or (job.n == 1 and job.seed_by == "text"):
            return ready
        keys = None
        if job.seed_by == "key":
            keys = table[str(self.settings.key)].take(from_numpy(ready.rows)).to_pylist()
        own = with_seeds(ready.options or [job] * len(ready.rows), keys, job.n)
        places = np.arange(len(ready.rows)).repeat(job.n)
        return ReadyRows(
            ready.count * job.n,
            (ready.rows[:, None] * job.n + np.arange(job.n)).ravel(),
            ready.features.take(places),
            {row * job.n + answer: reason for row, reason in ready.errors.items() for answer in range(job.n)},
            own,
        )

    def _prompts(self, table: pa.Table, unreadable: dict[int, str]) -> tuple[Inputs, dict[int, str], dict[str, Any]]:
        """Return the prompts, with conversations rendered as texts; errors; options of the task's `features`."""
        generation = self.settings.generation
        assert generation is not None, "prompts are for generation"
        texts, errors, chat = read_prompts(
            table, unreadable, self.processor, self.spec, self.settings.prompts, chat=generation.chat
        )
        texts = nulls_as_empty(texts)
        if self.settings.null == "error":
            for row in pc.indices_nonzero(is_blank(texts)).to_pylist():
                errors.setdefault(row, NULL_INPUT)
        return {"text": texts}, errors, {"chat": chat}

    def _find_unfit(
        self, rows: np.ndarray, made: Features, errors: dict[int, str], own: Sequence[GenerationOptions]
    ) -> None:
        """Add errors for rows that the model has no embedding or too few positions for."""
        for name in self.task.token_arrays:
            tokens = made.arrays.get(name)
            if isinstance(tokens, Ragged):
                for row, reason in beyond_embeddings(tokens, self.embeddings, self.processor).items():
                    errors[int(rows[row])] = f"unknown_token: {reason}"
        tokens = made.arrays.get(INPUT_IDS)
        if self.max_prompt is not None and isinstance(tokens, Ragged):
            job = self.settings.generation
            more = [0 if job is None else one.max_new_tokens - job.max_new_tokens for one in own]
            room = self.max_prompt - np.array(more or [0], np.int64)
            for row in np.flatnonzero(tokens.lengths > room).tolist():
                left = max(0, int(room[row if own else 0]))
                reason = f"prompt_too_long: {tokens.lengths[row]} tokens, and there is room for {left}"
                errors.setdefault(int(rows[row]), f"{reason} before the new ones; lower max_new_tokens or shorten it")


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


def check_prompts(
    schema: pa.Schema, text: str, where: str, task: Any, tokenizer: Path | None, spec: TaskSpec, *, name: str = "text"
) -> bool:
    """Return whether the prompts are conversations: by the column's type, or as JSON strings if `spec` says so.

    `name` is that of the input; `tokenizer` is None if another template renders them. Raises the TableError of
    `check_column`, and UsageError if the tokenizer has no chat template.
    """
    if not (text in schema.names and task.holds_chats(schema.field(text).type, spec)):
        check_column(schema, name, text, TEXT, where)
        if not spec.rows.chat:
            return False
    if tokenizer is not None and folders.chat_template(tokenizer) is None:
        raise UsageError(
            f"{where}: {text!r} holds conversations, but the tokenizer in {tokenizer} has no chat template "
            f"({folders.CHAT_TEMPLATE}). Use a model that was tuned on conversations, or a column of text."
        )
    return True


def max_prompt_tokens(folder: Path, options: GenerationOptions | None) -> int | None:
    """Return how many tokens a prompt may have if `max_new_tokens` must fit as well; None: no limit."""
    positions = None if options is None else models.positions(folder)
    return None if options is None or positions is None else positions - options.max_new_tokens
