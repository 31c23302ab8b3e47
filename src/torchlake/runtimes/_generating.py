"""Text generation by transformers' `generate` with its key-value cache: one token of every row per step.

    prompts, padding moved to the left -> generate -> answers, as in torchlake/models/generation.py

An encoder-decoder (T5, BART) reads its prompts as they are, and its answer begins with a separate start token.

Rows of a batch do not influence each other. With padding on the left all prompts end at the same position; the mask
excludes the padding, and positions count from each row's own first token. Sampling uses a counter-based generator
keyed by a hash of the job's seed and the row's tokens. So the output is the same in another batch, process or attempt
(except for fp32 rounding if two tokens are almost equally likely), and equal rows get equal texts. A finished row
keeps its place in the batch until the last one ends, but is reported at once. A row that an earlier attempt has begun
is continued: its tokens are read with the prompt, which costs about as much as one step.

Cost of stop strings: the text of every row is decoded again at each step, some microseconds per token.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchlake.errors import DataError, ran_out_of_memory
from torchlake.models.config import decoder_start, in_words
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
from torchlake.runtimes import Forward

AGREEMENT = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"Relative to the largest logit: above rounding, below the effect of other positions."


def generator(
    model: Any,
    folder: Path,
    options: GenerationOptions,
    *,
    ends: Sequence[int] = (),
    while_training: bool = False,
    together: bool = False,
) -> Forward:
    """Return the Forward that answers prompts with `model`, loaded from `folder` and already on its device.

    `ends`: the end tokens, in place of the folder's. `while_training`: tensors stay usable for gradients. `together`:
    all ranks compute as many tokens, because they gather weights together; each has one prompt at a time if padding
    matters.
    """
    without_gradients: Any = torch.no_grad if while_training else torch.inference_mode
    tokenizer, own = load_tokenizer(folder), settings_of(folder)
    reads_apart = bool(model.config.is_encoder_decoder)
    if reads_apart and "decoder_start_token_id" not in own:
        own["decoder_start_token_id"] = own["bos_token_id"] if "bos_token_id" in own else decoder_start(model.config)
    if options.language is not None:
        own["forced_bos_token_id"] = language_token(folder, options.language)
    ends = own["eos_token_id"] = list(ends) or end_tokens(own, tokenizer)
    # What the folder says about sampling (temperature, penalties) is not used: no job file shows those settings.
    model.generation_config = GenerationConfig()
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        **{"bos_token_id": tokenizer.bos_token_id, **own, "pad_token_id": tokenizer.pad_token_id},
    )

    def generate(input_ids: np.ndarray, attention_mask: np.ndarray, watch: Watch | None = None) -> np.ndarray:
        ids, mask = input_ids, attention_mask
        if not reads_apart:
            ids, mask = left_padded(input_ids, attention_mask, tokenizer.pad_token_id)
        before = 1 if reads_apart else ids.shape[1]  # tokens of the output that are not the answer
        choosing = _Choosing(options, draws(input_ids, attention_mask, options), before, model.device)
        stopping = _Stopping(tokenizer, options, ends, (len(ids), before))

        def answers_of(written: np.ndarray, places: np.ndarray) -> np.ndarray:
            answers = _answers(written[places], ends, stopping.lengths[places], options.max_new_tokens)
            answers[choosing.non_finite.cpu().numpy()[places]] = NON_FINITE
            return answers

        if watch is not None:
            stopping.watch, stopping.answers = watch, answers_of
        texts = {"input_ids": ids, "attention_mask": mask} | _begun(own, ids, mask, watch, apart=reads_apart)
        with without_gradients():
            out = model.generate(
                **{name: torch.from_numpy(each).to(model.device) for name, each in texts.items()},
                generation_config=config if watch is None else _continuing(config, watch.begun.shape[1]),
                logits_processor=[choosing],
                stopping_criteria=[stopping] if options.stop or watch is not None else [],
                synced_gpus=together,
            )
        written = out[:, before:].cpu().numpy()
        if own.get("forced_eos_token_id") is not None and written.shape[1] == options.max_new_tokens:
            written = written[:, :-1]  # without the end that is forced on rows that reach the limit
        return answers_of(written, np.arange(len(written)))

    with without_gradients():
        padding_matters = not reads_apart and _reads_padding(model, config, together=together)
    return _in_parts(generate, one_by_one=together) if padding_matters else generate


def _begun(
    own: Mapping[str, Any], ids: np.ndarray, mask: np.ndarray, watch: Watch | None, *, apart: bool
) -> dict[str, np.ndarray]:
    """Return the inputs of the model, besides prompts (B, L), or in their place, with the texts that were begun."""
    if watch is None or not watch.begun.shape[1]:
        return {}
    begun = watch.begun.astype(np.int64)
    if apart:
        start = np.full((len(begun), 1), own["decoder_start_token_id"], np.int64)
        return {"decoder_input_ids": np.concatenate([start, begun], axis=1)}
    return {
        "input_ids": np.concatenate([ids, begun], axis=1),
        "attention_mask": np.concatenate([mask, np.ones_like(begun)], axis=1),
    }


def _continuing(config: GenerationConfig, begun: int) -> GenerationConfig:
    """Return the settings for texts of which `begun` tokens are written."""
    if not begun:
        return config
    changes = {"max_new_tokens": config.max_new_tokens - begun, "begin_suppress_tokens": None}
    return GenerationConfig(**{**config.to_diff_dict(), **changes})


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


def _in_parts(generate: Forward, *, one_by_one: bool) -> Forward:
    """Return `generate` for prompts of one length after the other, or one prompt after the other."""

    def generate_each(input_ids: np.ndarray, attention_mask: np.ndarray, watch: Watch | None = None) -> np.ndarray:
        lengths = attention_mask.sum(axis=1)
        parts, places = [], []
        groups = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        for rows in np.arange(len(lengths))[:, None] if one_by_one else groups:
            length = lengths[rows[0]]
            own = {} if watch is None else {"watch": watch.of(rows)}
            parts.append(
                generate(input_ids=input_ids[rows, :length], attention_mask=attention_mask[rows, :length], **own)
            )
            if watch is not None:  # the next part may take long
                watch.report(watch.rows[rows], np.ones(len(rows), bool), parts[-1].__getitem__)
            places.append(rows)
        answers: np.ndarray = np.concatenate(parts)[np.argsort(np.concatenate(places))]
        return answers

    return generate_each


def left_padded(input_ids: np.ndarray, attention_mask: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Move the padding of token ids and mask, (B, L) int64, from the right to the left."""
    mask = attention_mask[:, ::-1].copy()
    ids = np.full_like(input_ids, pad_id)
    ids[mask == 1] = input_ids[attention_mask == 1]
    return ids, mask


def draws(input_ids: np.ndarray, attention_mask: np.ndarray, options: GenerationOptions) -> np.ndarray:
    """Return uniform random numbers in (0, 1), (B, W) float64, determined by each row's tokens and the seed."""
    drawn = np.empty((len(input_ids), options.max_new_tokens))
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        own = ids[mask == 1].astype("<i8").tobytes()
        digest = hashlib.sha256(options.seed.to_bytes(8, "little") + own).digest()
        raw = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(options.max_new_tokens)
        drawn[row] = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    return drawn


class _Choosing(LogitsProcessor):
    """Masks all tokens of a row except the sampled one; masks nothing at temperature 0."""

    def __init__(self, options: GenerationOptions, drawn: np.ndarray, prompt: int, device: torch.device) -> None:
        self.prompt = prompt
        self.drawn = torch.from_numpy(drawn).to(device)
        self.non_finite = torch.zeros(len(drawn), dtype=torch.bool, device=device)
        self.greedy = options.temperature == 0
        self.warpers: list[Any] = [] if self.greedy else [TemperatureLogitsWarper(float(options.temperature))]
        if options.top_k is not None:
            self.warpers.append(TopKLogitsWarper(options.top_k))
        if options.top_p is not None and options.top_p < 1:
            self.warpers.append(TopPLogitsWarper(options.top_p))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # The maximum is NaN if any score is.
        self.non_finite |= ~torch.isfinite(scores.amax(-1))
        if self.greedy:
            return scores
        possible: Any = scores.float()
        for warper in self.warpers:
            possible = warper(input_ids, possible)
        below = possible.double().softmax(-1).cumsum(-1)
        step = input_ids.shape[1] - self.prompt
        chosen = (below < self.drawn[:, step : step + 1] * below[:, -1:]).sum(-1, keepdim=True)
        alone: Any = torch.full_like(scores, -torch.inf).scatter_(1, chosen.clamp_(max=scores.shape[1] - 1), 0.0)
        return alone  # type: ignore[no-any-return]


class _Stopping(StoppingCriteria):
    """Ends each row at its first stop string, and reports; `lengths` (B,) are the tokens up to a stop string, or -1."""

    watch: Watch | None = None
    answers: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __init__(self, tokenizer: Any, options: GenerationOptions, ends: Sequence[int], shape: tuple[int, ...]) -> None:
        self.tokenizer, self.stop, self.ends = tokenizer, options.stop, ends
        self.prompt, self.most = shape[1], options.max_new_tokens
        self.lengths = np.full(shape[0], -1)
        self.over = np.zeros(shape[0], dtype=bool)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.Tensor:
        written = input_ids[:, self.prompt :].cpu().numpy()
        self.over |= np.isin(written[:, -1], self.ends)  # generate ends them
        for row in np.flatnonzero(~self.over) if self.stop else []:
            if stop_place(decoded(self.tokenizer, written[row]), self.stop) is not None:
                self.over[row], self.lengths[row] = True, written.shape[1]
        if self.watch is not None and written.shape[1] < self.most:  # else all of them end
            self.watch.report(self.watch.rows, self.over, partial(self.answers, written))
        return torch.from_numpy(self.over.copy()).to(input_ids.device)


def _answers(written: np.ndarray, ends: Sequence[int], stopped: np.ndarray, width: int) -> np.ndarray:
    """Convert the output of `generate` (B, up to `width`), including padding after the end, to answers (B, `width`)."""
    answers = np.full((len(written), width), NOTHING, dtype=np.int32)
    ended = np.isin(written, ends)
    for row, tokens in enumerate(written):
        if stopped[row] >= 0:
            tokens = tokens[: stopped[row]]
        elif ended[row].any():
            tokens = np.append(tokens[: ended[row].argmax()], END)
        answers[row, : len(tokens)] = tokens
    return answers
