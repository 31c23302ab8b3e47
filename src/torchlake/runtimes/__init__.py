"""What executes a forward pass when scoring; one file per runtime. Read `eager.py` first.

A runtime is a module with

    TOLERANCE: float            largest allowed difference of a probability from `eager`'s
    tasks: tuple[str, ...] | None   the tasks that it computes; None: every task
    never: dict[str, str]       reasons for some of the others: task name -> reason; refused before any work
    TOKEN_TYPES: bool           whether it computes pairs of texts with token types
    refusal(folder) -> str | None
                                why it cannot run this model here, as `first_reason` orders it; cheap, without torch
    load(folder, spec, *, device) -> Forward
                                raises UsageError for an unsupported device

for text generation

    open_writer(folder, spec, *, device, options) -> Writer
                                `options`: the job's `GenerationOptions`. Rows may have others, except `language`
    writer_refusal(folder) -> str | None
                                `refusal` of a model that writes, where it differs
    cannot_write(options) -> str | None
                                why it cannot write with these options; a runtime without it can with all
    load_log_probs(folder, spec, *, device) -> LogProbs
                                if `load` returns no scores of answers, or at a greater cost

for an engine in an interpreter of its own (`_foreign/`)

    PYTHON: str                 the environment variable that names the interpreter
    versions(path, *, imported) -> dict[str, str]
                                raises UsageError if the interpreter does not have the engine
    open_writer                 also gets `python`, a `ForeignPython`

and for an export that `_exports.py` stores in the model folder

    CALIBRATED: bool            whether the export needs the user's rows
    prepare(folder, spec, batches) -> None
                                `batches`: (input_ids, attention_mask) pairs of the user's rows

A `Forward` takes a batch as the task's `collate` makes it, by keyword: of texts `input_ids` and `attention_mask`, both
(B, L) int64 in main memory, B at least 1, padded on the right, and for pairs `token_type_ids`. It returns the model's
outputs, (B, C) float32 in main memory ((B, L, V) for a language model). It is called from one thread at a
time. The result of a row depends neither on other rows nor on padding, except for fp32 rounding: an 8-bit runtime takes
its scales from calibration or from each token, never from the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from torchlake.errors import UsageError
from torchlake.models.generation import NOTHING, GenerationOptions

Forward = Callable[..., np.ndarray]
LogProbs = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], list[np.ndarray]]
"Returns the log-probability of each token of the answers that follow prompts; rows of token ids in, rows out."


@dataclass(frozen=True, kw_only=True)
class Text:
    """The answer to a row as far as it is written, as in torchlake/models/generation.py."""

    tokens: np.ndarray
    "(W,) int32, without NOTHING; END is last if the model ended the text, and NON_FINITE is the only one."
    logprobs: np.ndarray | None = None
    "(W,) float32, the log-probability of each token; None: not asked for."


EMPTY = Text(tokens=np.zeros(0, np.int32))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A row whose answer is complete."""

    row: int
    text: Text
    reason: str
    "`stop`: at an end token or a stop string; `length`: at `max_new_tokens`; `failed`: see `error`."
    error: str | None = None
    "Why the row has no text; such a row is an error row."


@dataclass(frozen=True, kw_only=True)
class ForeignPython:
    """Where an engine with an interpreter of its own runs."""

    path: str
    devices: int = 1
    "GPUs that share one copy of the model."
    silent_s: float = 600.0
    "Seconds without an answer after which its process is ended."
    versions: Mapping[str, str] = field(default_factory=dict)
    "Those that the job began with; empty: any."


Report = Callable[[Sequence[Ended]], None]
"Gets the rows that have ended since the last report, perhaps none."


class Writer(Protocol):
    """Writes the answers of the rows that it has; used from one thread.

        writer.add(...) for some rows
        while writer.rows: writer.step(report)      between steps more rows may be added, if it `refills`

    The text of a row does not depend on the other rows, nor on when it was added.
    """

    refills: bool
    "Whether rows may be added while others are written; else only to an empty writer."
    # A writer may also have `elsewhere = True`: its rows are in another process. It finds by itself those that kill
    # that process, and takes as many rows as it gets. And `shared(ids, options)`: how many first tokens of a row it has
    # once for all rows.

    @property
    def rows(self) -> Sequence[int]:
        """The numbers of the rows that were added and have not ended."""

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row: its prompt (L,) int64, L at least 1, its own options, and what an earlier attempt has written.

        The text continues `begun`, which has fewer than `max_new_tokens` tokens. Computes nothing.
        """

    def step(self, report: Report) -> None:
        """Write one or more tokens of the rows; call `report` after every token.

        `report` may call `text`, but not `add`. After an exception, also one of `report`, the writer is empty.
        """

    def text(self, row: int) -> Text:
        """Return what is written of a row that has not ended, `begun` included."""


def write_all(writer: Writer, prompts: Sequence[np.ndarray], options: GenerationOptions) -> np.ndarray:
    """Return the answers (B, W) int32 to prompts, each (L,) int64, of a writer that has no other rows."""
    written = np.full((len(prompts), options.max_new_tokens), NOTHING, np.int32)

    def report(ended: Sequence[Ended]) -> None:
        for one in ended:
            written[one.row, : len(one.text.tokens)] = one.text.tokens

    for row, ids in enumerate(prompts):
        writer.add(row, ids, options)
    while writer.rows:
        writer.step(report)
    return written


def check_here(name: str, folder: Path, device: str, reason: str | None = None) -> None:
    """Raise UsageError on a GPU, and if there is a `reason` why a runtime for CPUs cannot run the model here."""
    if device != "cpu":
        raise UsageError(f"The runtime {name!r} runs on CPUs only; on a GPU use 'varlen' or 'compiled'.")
    if reason is not None:
        raise UsageError(f"The runtime {name!r} cannot run {folder}: {reason}")


def first_reason(*, model: str | None = None, machine: str | None = None, library: str | None = None) -> str | None:
    """Return the reason that lasts longest: the model's on every machine, then this machine's, then a library's."""
    return model or machine or library
