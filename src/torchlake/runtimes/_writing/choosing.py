"""Which token comes next: the scores of every row in, a token of every row out.

    scores (B, V) -> penalties -> tokens that the row's grammar allows -> temperature, top_k, top_p, min_p -> the row's
    own draw -> tokens (B,)

Each row has its own options and draws, so its tokens do not depend on the rows beside it. Rows of equal options are
computed together.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchlake.models.generation import NON_FINITE, STUCK, GenerationOptions
from torchlake.runtimes._writing import grammar
from torchlake.runtimes._writing.row import Row

Changes = tuple[int, np.ndarray, np.ndarray]
"A row's place, tokens (T,) int64, and what is done to their scores, (T,) float64."


def choose(scores: torch.Tensor, rows: Sequence[Row]) -> np.ndarray:
    """Return the next token of each row, (B,) int64, from the scores (B, V); NON_FINITE where a score is NaN or
    infinity, STUCK where the row's grammar allows no token that the model may write."""
    # The maximum is NaN if any score is.
    finite = torch.isfinite(scores.amax(-1)).cpu().numpy()
    given = scores
    scores, stuck = masked(penalized(scores, rows), rows)
    tokens = np.empty(len(rows), np.int64)
    groups: dict[GenerationOptions, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(_settings(row.options), []).append(place)
    for options, places in groups.items():
        some = scores if len(places) == len(rows) else scores[places]
        drawn = [rows[place].drawn[len(rows[place].tokens)] for place in places] if options.temperature else []
        tokens[places] = _chosen(some, options, np.array(drawn)).cpu().numpy()
    tokens[stuck] = STUCK
    if any(row.logprobs is not None for row in rows):
        chosen = torch.from_numpy(tokens.clip(min=0))[:, None].to(given.device)
        found = given.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        for row, logprob in zip(rows, found, strict=True):
            row.logprob = logprob
    tokens[~finite] = NON_FINITE
    return tokens


def penalized(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return the scores with the penalties of tokens that were there before, and without ends that come too early."""
    repeated, counted, early = list[Changes](), list[Changes](), list[Changes]()
    for place, row in enumerate(rows):
        own = row.options
        if own.repetition_penalty != 1:
            seen = np.unique(np.array(row.tokens if row.reads_apart else [*row.prompt, *row.tokens], np.int64))
            repeated.append((place, seen, np.full(len(seen), own.repetition_penalty)))
        if row.tokens and (own.presence_penalty != 0 or own.frequency_penalty != 0):
            numbers, counts = np.unique(np.array(row.tokens, np.int64), return_counts=True)
            counted.append((place, numbers, own.presence_penalty + own.frequency_penalty * counts))
        if len(row.tokens) < own.min_new_tokens:
            early.append((place, np.array(row.ends, np.int64), np.full(len(row.ends), -np.inf)))
    if not (repeated or counted or early):
        return scores
    changed = scores.float().clone()
    if repeated:
        at, factors = _together(repeated, changed)
        some = changed[at]
        changed[at] = torch.where(some < 0, some * factors, some / factors)
    if counted:
        at, less = _together(counted, changed)
        changed[at] -= less
    if early:
        at, nothing = _together(early, changed)
        changed[at] = nothing
    return changed


def _together(changes: Sequence[Changes], like: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return all places and tokens, and all values, on the device of the scores: a few kernels for all rows."""
    places = np.repeat([place for place, _, _ in changes], [len(tokens) for _, tokens, _ in changes])
    tokens, values = (np.concatenate([change[part] for change in changes]) for part in (1, 2))
    at = (torch.from_numpy(places).to(like.device), torch.from_numpy(tokens).to(like.device))
    return at, torch.from_numpy(values).to(like)


def look_ahead(rows: Sequence[Row]) -> None:
    """Begin to compute the masks of the rows' next tokens, beside the model."""
    grammar.start([row.guide for row in rows if row.guide is not None and row.reason is None])


def masked(scores: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, np.ndarray]:
    """Return the scores with -inf for tokens that a row's grammar excludes, and whether no other is left, (B,) bool.

    A row for which the model itself allows one token only, such as the language at the start, keeps it.
    """
    stuck = np.zeros(len(rows), bool)
    places = [place for place, row in enumerate(rows) if row.guide is not None]
    if not places:
        return scores, stuck
    guides = [row.guide for row in rows if row.guide is not None]
    masks = torch.from_numpy(grammar.allowed(guides, scores.shape[1])).to(scores.device)
    some = scores if len(places) == len(rows) else scores[places]
    found = some.masked_fill(~masks, -torch.inf)
    none = found.amax(-1) == -torch.inf
    if none.any():
        forced = none & ((some > -torch.inf).sum(-1) == 1)
        found = torch.where(forced[:, None], some, found)
        stuck[places] = (none & ~forced).cpu().numpy()
    if len(places) < len(rows):
        scores = scores.clone()
        scores[places] = found
        return scores, stuck
    return found, stuck


def _settings(options: GenerationOptions) -> GenerationOptions:
    """Return the options by which rows are computed together: without those that are a row's own."""
    return replace(options, seed=0, stop=(), max_new_tokens=1, structure=None)


def _chosen(scores: torch.Tensor, options: GenerationOptions, drawn: np.ndarray) -> torch.Tensor:
    """Return the tokens (B,) of rows with equal options; `drawn` (B,) are their numbers for this token."""
    if options.temperature == 0:
        return torch.argmax(scores, -1)
    warpers: list[Any] = [TemperatureLogitsWarper(float(options.temperature))]
    if options.top_k is not None:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        warpers.append(MinPLogitsWarper(options.min_p))
    possible: Any = scores.float()
    for warper in warpers:
        possible = warper(None, possible)
    below = possible.double().softmax(-1).cumsum(-1)
    wanted = torch.from_numpy(drawn).to(below.device)[:, None] * below[:, -1:]
    chosen: torch.Tensor = (below < wanted).sum(-1).clamp_(max=scores.shape[1] - 1)
    return chosen
