"""Texts by transformers' `generate`: all rows of a batch begin together, and a row keeps its place to the end.

    prompts, padded on the left -> generate -> answers, one token of every row per step

An encoder-decoder (T5, BART) reads its prompts as they are, and its answer begins with a separate start token.

Rows of a batch do not influence each other. With padding on the left all prompts end at the same position; the mask
excludes the padding, and positions count from each row's own first token. A row that an earlier attempt has begun is
continued: its tokens are read with the prompt, which costs about as much as one step.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from torchlake.errors import DataError, ran_out_of_memory
from torchlake.models.config import in_words
from torchlake.models.generation import NON_FINITE, GenerationOptions, settings_for, start_token
from torchlake.runtimes import EMPTY, Report, Text
from torchlake.runtimes._writing.processors import Choosing, Finite, Stopping
from torchlake.runtimes._writing.row import Row

AGREEMENT = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"Relative to the largest logit: above rounding, below the effect of other positions."
SEARCHED = {"cpu": 32, "cuda": 256}
"The most beams of a batch: its rows end, and are kept, together."
SEARCH_S = 10.0
"Seconds that a batch of beams takes if several rows are in it: what a kill loses."


class StaticWriter:
    """A Writer whose rows are written in batches.

    `ends`: the end tokens, in place of the folder's. `while_training`: tensors stay usable for gradients. `together`:
    all ranks compute as many tokens, because they gather weights together; each has one prompt at a time if padding
    matters.
    """

    refills = False

    def __init__(
        self,
        model: Any,
        folder: Path,
        options: GenerationOptions,
        *,
        ends: Sequence[int] = (),
        while_training: bool = False,
        together: bool = False,
    ) -> None:
        self._without_gradients: Any = torch.no_grad if while_training else torch.inference_mode
        self._model, self._together = model, together
        self._tokenizer, self._own = settings_for(folder, options)
        self._apart = bool(model.config.is_encoder_decoder)
        if self._apart:
            self._own["decoder_start_token_id"] = start_token(folder, model.config)
        self._own["eos_token_id"] = self.ends = list(ends) or self._own["eos_token_id"]
        # An end that is forced on rows that reach the limit does not belong to the text: the rows end before it.
        self._unwritten = int(self._own.pop("forced_eos_token_id", None) is not None)
        # What the folder says about sampling (temperature, penalties) is not used: no job file shows those settings.
        model.generation_config = GenerationConfig()
        self._rows: dict[int, Row] = {}
        self._search_s: float | None = None
        "Seconds for a token of a row's beams, in the last batch of them."

    @cached_property
    def padding_matters(self) -> bool:
        """Whether prompts of one length only are written together."""
        if self._apart:
            return False
        with self._without_gradients():
            return _reads_padding(self._model, self._config(2), together=self._together)

    def check(self) -> None:
        """Raise DataError for a model that cannot write."""
        assert self.padding_matters in (True, False)

    @property
    def settings(self) -> set[str]:
        """The names of the model's settings for writing."""
        return {*self._own, *(["forced_eos_token_id"] if self._unwritten else [])}

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that have not ended."""
        return list(self._rows)

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row."""
        self._rows[row] = self.row_of(row, ids, options, begun)

    def row_of(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text) -> Row:
        """Return what a writer knows of a row."""
        made = Row(
            number=row,
            prompt=ids,
            options=options,
            ends=self.ends,
            tokenizer=self._tokenizer,
            tokens=begun.tokens.tolist(),
            reads_apart=self._apart,
            logprobs=None if begun.logprobs is None else begun.logprobs.tolist(),
            limit=options.max_new_tokens - self._unwritten,
        )
        if not self._apart:  # else the model may force the first token
            made.force()
        return made

    def text(self, row: int) -> Text:
        """Return what is written of a row that has not ended."""
        return self._rows[row].text

    def step(self, report: Report) -> None:
        """Write a batch: the rows of which as many tokens are written already, the longest texts first."""
        rows = self._batch()
        try:
            (self._write if rows[0].options.num_beams == 1 else self._search)(rows, report)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()

    def _batch(self) -> list[Row]:
        def likeness(row: Row) -> tuple[int, ...]:
            own: tuple[int, ...] = (-len(row.tokens), len(row.prompt) if self.padding_matters else 0)
            if row.options.num_beams > 1:  # the best beam depends on how long it may be
                own = (*own, row.limit)
            return (*own, row.number) if self.padding_matters and self._together else own

        first = min(map(likeness, self._rows.values()))
        alike = [row for row in self._rows.values() if likeness(row) == first]
        beams = alike[0].options.num_beams
        most = SEARCHED["cpu" if self._model.device.type == "cpu" else "cuda"] // beams
        if not self._together:  # all ranks have as many batches
            known = self._search_s
            most = min(most, 0 if known is None else int(SEARCH_S / (known * max(1, alike[0].limit))))
        return alike if beams == 1 else alike[: max(1, most)]

    def _write(self, rows: Sequence[Row], report: Report) -> None:
        def tell() -> None:
            ended = [row.ended for row in rows if row.reason is not None and row.number in self._rows]
            for one in ended:
                del self._rows[one.row]
            report(ended)

        begun, most = len(rows[0].tokens), max(row.limit for row in rows)
        if begun >= most or all(row.reason is not None for row in rows):
            tell()
            return
        choosing = Choosing(rows)
        with self._without_gradients():
            self._model.generate(
                **{name: torch.from_numpy(each).to(self._model.device) for name, each in self._inputs(rows).items()},
                generation_config=self._config(most, begun),
                logits_processor=[choosing],
                stopping_criteria=[Stopping(choosing, tell)],
                synced_gpus=self._together,
            )

    def _search(self, rows: Sequence[Row], report: Report) -> None:
        """Write a batch by beam search: of each row the beam with the highest mean log-probability."""
        own = rows[0].options
        config = self._config(max(row.limit for row in rows))
        config.update(
            num_beams=own.num_beams,
            eos_token_id=[*rows[0].ends],
            min_new_tokens=own.min_new_tokens or None,
            repetition_penalty=None if own.repetition_penalty == 1 else own.repetition_penalty,
            return_dict_in_generate=True,
            output_scores=own.logprobs is not None,
        )
        finite, began = Finite(len(rows), own.num_beams, rows[0].ends[0]), time.monotonic()

        def advance(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            report([])
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        with self._without_gradients():
            sent = {name: torch.from_numpy(each).to(self._model.device) for name, each in self._inputs(rows).items()}
            found = self._model.generate(
                **sent,
                generation_config=config,
                logits_processor=[finite],
                stopping_criteria=[advance],
                synced_gpus=self._together,
            )
            before = 1 if self._apart else sent["input_ids"].shape[1]
            steps = max(1, found.sequences.shape[1] - before)
            self._search_s = (time.monotonic() - began) / steps / len(rows)
            logprobs: Any = [()] * len(rows)
            if own.logprobs is not None:
                logprobs = self._model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
        for number, (row, tokens) in enumerate(zip(rows, found.sequences[:, before:].tolist(), strict=True)):
            for place, token in enumerate([NON_FINITE] if finite.bad[number] else tokens):
                if row.reason is None:
                    row.logprob = float(logprobs[number][place]) if own.logprobs is not None else 0.0
                    row.take(token)
            del self._rows[row.number]
        report([row.ended for row in rows])

    def _inputs(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return the inputs of `generate`: prompts (B, L), and the texts that were begun."""
        begun = np.array([row.tokens for row in rows], np.int64).reshape(len(rows), -1)
        ids, mask = padded([row.prompt for row in rows], self._tokenizer.pad_token_id, left=not self._apart)
        if not begun.shape[1]:
            return {"input_ids": ids, "attention_mask": mask}
        if self._apart:
            start = np.full((len(begun), 1), self._own["decoder_start_token_id"], np.int64)
            begun = np.concatenate([start, begun], axis=1)
            return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": begun}
        return {
            "input_ids": np.concatenate([ids, begun], axis=1),
            "attention_mask": np.concatenate([mask, np.ones_like(begun)], axis=1),
        }

    def _config(self, most: int, begun: int = 0) -> GenerationConfig:
        """Return the settings for texts of up to `most` tokens, of which `begun` are written."""
        changes = {"begin_suppress_tokens": None} if begun else {}
        tokens = {"bos_token_id": self._tokenizer.bos_token_id, **self._own, **changes}
        return GenerationConfig(
            max_new_tokens=most - begun, do_sample=False, **{**tokens, "pad_token_id": self._tokenizer.pad_token_id}
        )


def _reads_padding(model: Any, config: GenerationConfig, *, together: bool) -> bool:
    """Return whether padding before a prompt changes the logits of the two tokens after it.

    It does in XLNet, and in the decoders of BART and similar models, whose positions begin at the padding.
    """
    size = model.get_input_embeddings().weight.shape[0]
    changes = {"max_new_tokens": 2, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    first = GenerationConfig(**{**config.to_diff_dict(), **changes})

    def logits(ids: list[list[int]], mask: list[list[int]]) -> torch.Tensor:
        sent = [torch.tensor(each, device=model.device) for each in (ids, mask)]
        options: dict[str, Any] = {"generation_config": first, "synced_gpus": together}
        made: Any = model.generate(input_ids=sent[0], attention_mask=sent[1], **options)
        return torch.stack(made.logits, dim=1).float()

    long, short = ([number * 7 % size for number in range(1, length + 1)] for length in (11, 5))
    padding = len(long) - len(short)
    masks = [[1] * len(long), [0] * padding + [1] * len(short)]
    try:
        alone = logits([short], [[1] * len(short)])[0]
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        if ran_out_of_memory(error):
            raise
        raise DataError(f"a model of type {model.config.model_type!r} cannot generate: {in_words(error)}") from error
    try:
        beside = logits([long, [first.pad_token_id] * padding + short], masks)[1]
    except (ValueError, IndexError):  # it computes prompts without padding only
        return True
    return not bool((alone - beside).abs().max() <= AGREEMENT[model.dtype] * max(1.0, float(alone.abs().max())))


def padded(prompts: Sequence[np.ndarray], pad_id: int, *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as one array, and its mask, both (B, L) int64."""
    width = max(map(len, prompts))
    ids, mask = np.full((len(prompts), width), pad_id), np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask
