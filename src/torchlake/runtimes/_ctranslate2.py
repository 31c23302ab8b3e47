"""CTranslate2 on CPUs: write texts with a converted model, and score given ones.

Rows go in and come out as ids, which `vocabulary.json` turns into the tokens that the library reads. A batch is written
by one call of the library, which takes the most likely token of each row; it reports each token to a callback. The
callback ends rows: at an end token, a stop string, or the row's own limit. A row that has ended leaves the batch at
once. The library reads the part of the prompts that all rows of a batch have at once, and the rest of the longer ones
token by token beside the texts of the shorter ones, so that rows of a batch should have prompts of similar lengths.

The library has no function that returns the scores of the next token and takes one in (a call for each token would read
the prompt again), so texts are not sampled.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.config import load_config
from torchlake.models.generation import NON_FINITE, GenerationOptions, settings_for
from torchlake.runtimes import EMPTY, Forward, LogProbs, Report, Text, Writer, _ctranslate2_export, _exports
from torchlake.runtimes._writing.row import Row

COMPUTED = {"max_new_tokens", "stop", "chat", "language"}
"The options of `GenerationOptions` that it computes; others must have their default."
STEP_ROWS = 12
"A step costs about as much as this number of its rows, because it reads all weights."
SCORED_TOKENS = 1024
WAIT_S = 0.002


def cannot_write(options: GenerationOptions) -> str | None:
    """Return why it cannot write with these options, or None."""
    default = GenerationOptions()
    names = {one.name for one in fields(options)} - COMPUTED
    other = sorted(name for name in names if getattr(options, name) != getattr(default, name))
    if not other:
        return None
    return f"it takes the most likely token, and does not compute {', '.join(other)}; 'eager' does"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The functions of the runtime `name`, whose weights are of `kind` ("float32", "int8")."""

    name: str
    kind: str

    def prepare(self, folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Convert the model into its folder. Raises UsageError if that fails, StorageError, and the errors of
        `models.load_model`."""
        _ctranslate2_export.prepare(folder, spec, self.name, self.kind)

    def load(self, folder: Path, spec: TaskSpec, *, device: str) -> Forward:
        """Load the export for the scores of texts. Raises UsageError on a GPU, and without one of these weights."""
        return Converted(folder, spec, self.name, self.kind, device).scores

    def load_log_probs(self, folder: Path, spec: TaskSpec, *, device: str) -> LogProbs:
        """Load the export for the log-probabilities of answers. Raises the errors of `load`."""
        return Converted(folder, spec, self.name, self.kind, device).log_probs

    def open_writer(self, folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
        """Load the export for text generation. Raises the errors of `load`."""
        return ConvertedWriter(Converted(folder, spec, self.name, self.kind, device), options)


class Converted:
    """A converted model in this process. Raises UsageError on a GPU, and without an export of these weights."""

    def __init__(self, folder: Path, spec: TaskSpec, name: str, kind: str, device: str) -> None:
        if device != "cpu":
            raise UsageError(f"The runtime {name!r} runs on CPUs only; on a GPU use 'eager'.")
        if reason := _ctranslate2_export.refusal(folder):
            raise UsageError(f"The runtime {name!r} cannot run {folder}: {reason}")
        place = _exports.export_folder(folder, name, calibrated=False, task=spec.task)
        self.name, self.folder, self.apart = name, folder, bool(load_config(folder).is_encoder_decoder)
        self.names = np.array(_ctranslate2_export.vocabulary(place), dtype=object)
        held = [_ctranslate2_export.opened(place, reads_apart=self.apart, kind=kind)]
        # Its threads must end before the interpreter does, or the process aborts at its end.
        finalize(self, held.clear)
        self._held = held

    @property
    def model(self) -> Any:
        """The library's model."""
        return self._held[0]

    def scores(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Return the logits (B, L, V) of texts (B, L)."""
        from ctranslate2 import StorageView

        sent = [np.ascontiguousarray(each, np.int32) for each in (input_ids, attention_mask.sum(axis=1))]
        logits: np.ndarray = np.array(self.model.forward_batch(*map(StorageView.from_array, sent)))
        return logits

    def log_probs(self, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probability of each token of the answers, which follow the prompts."""
        reads, options = self.named(prompts), {"max_input_length": 0, "batch_type": "tokens"}
        if self.apart:  # the library adds the end token
            made = self.model.score_batch(reads, self.named(answers), max_batch_size=SCORED_TOKENS, **options)
            return [np.array(one.log_probs)[: len(own)] for one, own in zip(made, answers, strict=True)]
        whole = [[*first, *then] for first, then in zip(reads, self.named(answers), strict=True)]
        made = self.model.score_batch(whole, max_batch_size=SCORED_TOKENS, **options)
        return [
            np.array(one.log_probs)[len(one.log_probs) - len(own) :] for one, own in zip(made, answers, strict=True)
        ]

    def named(self, rows: Iterable[Any]) -> list[list[str]]:
        """Return rows of ids as the library reads them."""
        return [self.names[np.asarray(row, np.int64)].tolist() for row in rows]


class ConvertedWriter:
    """A Writer by a converted model: batches of prompts, each written by one call of the library."""

    refills = False

    def __init__(self, converted: Converted, options: GenerationOptions) -> None:
        if reason := cannot_write(options):
            raise UsageError(reason)
        self._tokenizer, own = settings_for(converted.folder, options)
        size = len(converted.names)  # the library takes ids above the model's for others
        self._ends = [token for token in own["eos_token_id"] if token is not None and token < size]
        if not self._ends:
            raise UsageError(
                f"The runtime {converted.name!r} cannot run {converted.folder}: the model has no end token among its "
                "embeddings (eos_token_id of generation_config.json, or the tokenizer's): use 'eager'"
            )
        self._converted, self._first = converted, own.get("forced_bos_token_id")
        # An end that is forced on rows that reach the limit is not part of the answer: the rows end before it.
        self._unwritten = int(own.get("forced_eos_token_id") is not None)
        refused = [[token] for token in own.get("suppress_tokens", ())] + list(own.get("bad_words_ids", ()))
        refused = [tokens for tokens in refused if max(tokens) < size]
        self._options = {"suppress_sequences": converted.named(refused)} if refused else {}
        self._rows: dict[int, Row] = {}

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that have not ended."""
        return list(self._rows)

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row. Raises UsageError for options that the library does not compute."""
        if reason := cannot_write(options):
            raise UsageError(reason)
        self._rows[row] = Row(
            number=row,
            prompt=ids,
            options=options,
            ends=self._ends,
            tokenizer=self._tokenizer,
            tokens=begun.tokens.tolist(),
            limit=options.max_new_tokens - self._unwritten,
        )

    def text(self, row: int) -> Text:
        """Return what is written of a row that has not ended."""
        return self._rows[row].text

    def step(self, report: Report) -> None:
        """Write a batch: the shortest prompt, and those that are not much longer."""

        def tell() -> None:
            ended = [row.ended for row in self._rows.values() if row.reason is not None]
            for one in ended:
                del self._rows[one.row]
            report(ended)

        try:
            if self._converted.apart and self._first is not None:
                for row in self._rows.values():
                    if row.reason is None and not row.tokens:
                        row.take(self._first)
            running = [row for row in self._rows.values() if row.reason is None]
            if running:
                with closing(_Taking(tell)) as taking:
                    (self._write_apart if self._converted.apart else self._write)(running, taking)
            tell()
        except BaseException:
            self._rows.clear()
            raise

    def _write(self, running: Sequence[Row], taking: "_Taking") -> None:
        """Write the rows with the shortest prompts."""
        sizes = [len(row.prompt) + len(row.tokens) for row in running]
        # Refused tokens would also be refused in the rest of a prompt.
        new = 0 if self._options else max(row.limit - len(row.tokens) for row in running)
        most = longest_beside(sizes, new)
        rows = [row for row, size in zip(running, sizes, strict=True) if size <= most]
        reads = [np.concatenate([row.prompt, row.tokens]) for row in rows]
        taking.begin(rows, [0] * len(rows))
        _wait(
            self._converted.model.generate_batch,
            self._converted.named(reads),
            max_batch_size=max(map(len, reads)) * len(rows),  # all of them at once
            batch_type="tokens",
            max_length=max(row.limit - len(row.tokens) for row in rows),
            include_prompt_in_result=False,
            end_token=self._ends,
            return_scores=True,
            callback=taking,
            **self._options,
        )

    def _write_apart(self, rows: Sequence[Row], taking: "_Taking") -> None:
        """Write the rows of an encoder-decoder; what they have already is the beginning of its answer."""
        reads = [row.prompt for row in rows]
        taking.begin(rows, [len(row.tokens) for row in rows])
        _wait(
            self._converted.model.translate_batch,
            self._converted.named(reads),
            target_prefix=self._converted.named([row.tokens for row in rows]),
            max_batch_size=max(map(len, reads)) * len(rows),
            batch_type="tokens",
            beam_size=1,
            max_input_length=0,
            max_decoding_length=max(row.limit for row in rows),
            min_decoding_length=0,
            end_token=self._ends,
            return_scores=True,
            callback=taking,
            **self._options,
        )


def _wait(method: Callable[..., Any], rows: list[list[str]], **options: Any) -> None:
    """Call a method of the library, and handle signals meanwhile. Raises what its callback raises."""
    running = method(rows, asynchronous=True, **options)
    while not all(one.done() for one in running):
        time.sleep(WAIT_S)
    for one in running:
        one.result()


def longest_beside(sizes: Sequence[int], new: int) -> int:
    """Return the size of the longest prompt that is best written in a batch with the shortest one.

    `sizes` are those of all prompts, and an answer has up to `new` tokens. A batch of prompts of unequal sizes has a
    step for each token by which the longest one is longer; another batch has the steps of its texts.
    """
    if min(sizes) == 1:  # beside a prompt of one token, the library takes the rest of the others for answers
        return 1
    distinct, counts = np.unique(sizes, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts * distinct)]), np.concatenate([[0], np.cumsum(counts)])
    best, first = np.zeros(len(distinct) + 1), np.zeros(len(distinct), np.int64)
    for start in range(len(distinct) - 1, -1, -1):
        # The cost of a batch from here to each longer size, and of the batches after it.
        left = distinct[start:] - distinct[start]
        rest = before[0][start + 1 :] - before[0][start] - distinct[start] * (before[1][start + 1 :] - before[1][start])
        cost = STEP_ROWS * (left + new) + rest + best[start + 1 :]
        first[start] = start + int(cost.argmin())
        best[start] = cost.min()
    return int(distinct[first[0]])


class _Taking:
    """The library's callback: gives each row its tokens, and ends it."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
        self._rows: Sequence[Row] = ()
        self._left: Sequence[int] = ()
        self._step = 0

    def begin(self, rows: Sequence[Row], left: Sequence[int]) -> None:
        """Begin with rows, of which `left` tokens each are called with before the first new one."""
        self._rows, self._left = rows, left

    def close(self) -> None:
        """Forget the rows: the library's thread may be the last that holds this, and must not be what ends itself."""
        self._rows, self._tell = (), None

    def __call__(self, made: Any) -> bool:
        """Take a token of a row; return whether the row ends."""
        if self._tell is None:  # the caller was interrupted
            return True
        if made.step != self._step:
            self._step = made.step
            self._tell()
        row = self._rows[made.batch_id]
        if made.step < self._left[made.batch_id]:
            return False
        row.take(made.token_id if np.isfinite(made.log_prob) else NON_FINITE)
        return row.reason is not None
