"""CTranslate2 on CPUs: write texts with a converted model, and score given ones.

Rows go in and come out as ids, which `vocabulary.json` turns into the tokens that the library reads. A batch is written
by one call of the library, which takes the most likely token of each row; it reports each token to a callback. The
callback decides what ends a row: an end token, a stop string, or the limit. It has to, because the library reads only
the part of the prompts that all rows of a batch have, and writes the rest of them as if it were an answer: prompts may
contain end tokens. A row that has ended leaves the batch at once.

The library has no function that returns the scores of the next token and takes one in (a call for each token would read
the prompt again), so texts are not sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.config import load_config
from torchlake.models.generation import (
    END,
    NON_FINITE,
    NOTHING,
    GenerationOptions,
    Watch,
    decoded,
    end_tokens,
    language_token,
    settings_of,
    stop_place,
)
from torchlake.models.load import load_tokenizer
from torchlake.runtimes import Forward, LogProbs, _ctranslate2_export, _exported

COMPUTED = {"max_new_tokens", "stop", "chat", "language"}
"The options of `GenerationOptions` that it computes; others must have their default."
NEVER = 2**30
"An end token that no model has: the callback ends rows."
SPREAD = 1.5
"Prompts of a batch that are longer than this many times the shortest one are written in a batch of their own."
SCORED_TOKENS = 1024


def cannot_write(options: GenerationOptions) -> str | None:
    """Return why it cannot write with these options, or None."""
    default = GenerationOptions()
    names = {one.name for one in fields(options)} - COMPUTED
    other = sorted(name for name in names if getattr(options, name) != getattr(default, name))
    if not other:
        return None
    return f"it takes the most likely token, and does not compute {', '.join(other)}; 'eager' does"


class Converted:
    """A converted model in this process. Raises UsageError on a GPU, and without an export of these weights."""

    def __init__(self, folder: Path, spec: TaskSpec, name: str, kind: str, device: str) -> None:
        if device != "cpu":
            raise UsageError(f"The runtime {name!r} runs on CPUs only; on a GPU use 'eager'.")
        if reason := _ctranslate2_export.refusal(folder):
            raise UsageError(f"The runtime {name!r} cannot run {folder}: {reason}")
        place = _exported.export_folder(folder, name, calibrated=False, task=spec.task)
        self.folder, self.apart = folder, bool(load_config(folder).is_encoder_decoder)
        self.names = np.array(_ctranslate2_export.vocabulary(place), dtype=object)
        self.model = _ctranslate2_export.opened(place, reads_apart=self.apart, kind=kind)

    def scores(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Return the logits (B, L, V) of texts (B, L)."""
        from ctranslate2 import StorageView

        sent = [np.ascontiguousarray(each, np.int32) for each in (input_ids, attention_mask.sum(axis=1))]
        logits: np.ndarray = np.array(self.model.forward_batch(*map(StorageView.from_array, sent)))
        return logits

    def log_probs(self, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probability of each token of the answers, which follow the prompts."""
        reads, options = self._named(prompts), {"max_input_length": 0, "batch_type": "tokens"}
        if self.apart:  # the library adds the end token
            made = self.model.score_batch(reads, self._named(answers), max_batch_size=SCORED_TOKENS, **options)
            return [np.array(one.log_probs)[: len(own)] for one, own in zip(made, answers, strict=True)]
        whole = [[*first, *then] for first, then in zip(reads, self._named(answers), strict=True)]
        made = self.model.score_batch(whole, max_batch_size=SCORED_TOKENS, **options)
        return [np.array(one.log_probs)[len(one.log_probs) - len(own) :] for one, own in zip(made, answers, strict=True)]

    def generator(self, options: GenerationOptions) -> Forward:
        """Return the Forward that answers prompts."""
        if reason := cannot_write(options):
            raise UsageError(reason)
        own, tokenizer = settings_of(self.folder), load_tokenizer(self.folder)
        if options.language is not None:
            own["forced_bos_token_id"] = language_token(self.folder, options.language)
        rules = _Rules(options, tokenizer, frozenset(end_tokens(own, tokenizer)), own.get("forced_eos_token_id") is not None)
        refused = [[token] for token in own.get("suppress_tokens", ())] + list(own.get("bad_words_ids", ()))
        named = {"suppress_sequences": self._named(map(np.array, refused))} if refused else {}
        forced = [] if own.get("forced_bos_token_id") is None else [own["forced_bos_token_id"]]

        def generate(input_ids: np.ndarray, attention_mask: np.ndarray, watch: Watch | None = None) -> np.ndarray:
            lengths = attention_mask.sum(axis=1)
            answers = np.full((len(lengths), options.max_new_tokens), NOTHING, np.int32)
            # Refused tokens would also be refused while the rest of a prompt is written.
            for rows in _alike(lengths, 1.0 if refused else SPREAD):
                begun = np.zeros((len(rows), 0), np.int32) if watch is None else watch.begun[rows]
                some = None if watch is None else watch.of(rows)
                prompts = [input_ids[row, : lengths[row]] for row in rows]
                answers[rows] = self._write(prompts, begun, _Progress(rules, some, begun), forced, named)
                if some is not None:  # the next rows may take long
                    some.report(some.rows, np.ones(len(rows), bool), answers[rows].__getitem__)
            return answers

        return generate

    def _write(
        self,
        prompts: Sequence[np.ndarray],
        begun: np.ndarray,
        progress: "_Progress",
        forced: Sequence[int],
        options: Mapping[str, Any],
    ) -> np.ndarray:
        """Return the answers (B, W) to prompts, of which `begun` (B, K) is written."""
        if self.apart:
            first = np.array([forced] * len(begun), np.int32).reshape(len(begun), -1) if begun.shape[1] == 0 else begun
            progress.begin(first, np.full(len(first), first.shape[1]))
            if progress.limit > first.shape[1]:
                self.model.translate_batch(
                    self._named(prompts),
                    target_prefix=self._named(first),
                    beam_size=1,
                    max_input_length=0,
                    max_decoding_length=progress.limit,
                    min_decoding_length=0,
                    end_token=[NEVER],
                    return_scores=True,
                    callback=progress,
                    **options,
                )
            return progress.answers(np.arange(len(begun)))
        reads = [np.concatenate([prompt, own]) for prompt, own in zip(prompts, begun, strict=True)]
        lengths = np.array([len(each) for each in reads])
        progress.begin(begun, lengths - lengths.min())
        self.model.generate_batch(
            self._named(reads),
            max_batch_size=int(lengths.sum() + lengths.max() * len(lengths)),  # all of them at once
            batch_type="tokens",
            max_length=int(lengths.max() - lengths.min()) + progress.limit - begun.shape[1],
            include_prompt_in_result=False,
            end_token=[NEVER],
            return_scores=True,
            callback=progress,
            **options,
        )
        return progress.answers(np.arange(len(begun)))

    def _named(self, rows: Any) -> list[list[str]]:
        return [self.names[np.asarray(row, np.int64)].tolist() for row in rows]


@dataclass(frozen=True)
class _Rules:
    """What ends texts."""

    options: GenerationOptions
    tokenizer: Any
    ends: frozenset[int]
    forced_end: bool
    "Whether the model's end token is forced at the limit: it takes the place of the last token."


class _Progress:
    """The callback of a batch: keeps the tokens of its rows, decides what ends them, and reports to the watch."""

    def __init__(self, rules: _Rules, watch: Watch | None, begun: np.ndarray) -> None:
        self.rules, self.watch = rules, watch
        self.limit = rules.options.max_new_tokens - rules.forced_end
        self.written: list[list[int]] = []
        self.over = np.zeros(len(begun), bool)
        self.ended, self.non_finite = self.over.copy(), self.over.copy()
        self.step = 0

    def begin(self, written: np.ndarray, left: np.ndarray) -> None:
        """Begin with the tokens `written` (B, K), and `left` (B,) tokens of each prompt that the library writes."""
        self.written, self.left = written.tolist(), left.tolist()

    def __call__(self, made: Any) -> bool:
        """Take one token of one row; return whether the row ends."""
        if made.step != self.step:
            self.step = made.step
            if self.watch is not None:
                self.watch.report(self.watch.rows, self.over, self.answers)
        row = made.batch_id
        if made.step < self.left[row]:
            return False
        self.non_finite[row] |= not np.isfinite(made.log_prob)
        if made.token_id in self.rules.ends:
            self.ended[row] = self.over[row] = True
            return True
        own, stop = self.written[row], self.rules.options.stop
        own.append(made.token_id)
        stopped = bool(stop) and stop_place(decoded(self.rules.tokenizer, own), stop) is not None
        self.over[row] = stopped or len(own) >= self.limit
        return bool(self.over[row])

    def answers(self, places: np.ndarray) -> np.ndarray:
        """Return the answers (M, W) int32 of some rows as far as they are written."""
        found = np.full((len(places), self.rules.options.max_new_tokens), NOTHING, np.int32)
        for answer, row in zip(found, places.tolist(), strict=True):
            tokens = self.written[row] + [END] * bool(self.ended[row])
            answer[: len(tokens)] = tokens
            if self.non_finite[row]:
                answer[:] = NON_FINITE
        return found


def _alike(lengths: np.ndarray, spread: float) -> list[np.ndarray]:
    """Return the rows in groups whose longest prompt has at most `spread` times the tokens of the shortest one."""
    order = np.argsort(lengths, kind="stable")
    groups: list[list[int]] = []
    for row in order.tolist():
        if groups and lengths[row] <= spread * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [np.array(group) for group in groups]
