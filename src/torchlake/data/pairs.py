"""Pairs of answers in one micro-batch: a row has two, and both are computed together.

    rows, each chosen ++ rejected -> answers, 2 B -> lines, by best fit -> the places whose next token is summed

An answer is a prompt and what follows it; tokens of the prompt are stored as ~id, below zero. Where attention stays
within restarted positions, several answers share a line (`bins.py`); else each has its own. Lines are made for a
micro-batch, so their length is that of its longest answer, or a multiple of it where that leaves less empty.
"""

from dataclasses import dataclass

import numpy as np

from torchlake.data.batching import Ragged, ranges
from torchlake.data.bins import Bins, one_per_block, pack_whole
from torchlake.data.packing import input_ids_of

CHOSEN, REJECTED, PROMPT = range(3)
"The sums of a pair: the tokens of each answer, and those of the prompt before the chosen one."
SUMS = 3
FULL = 20 / 21
"Share of the lines' tokens above which longer lines, whose attention costs more, are not tried."


@dataclass(frozen=True, slots=True)
class PairBatch:
    """The lines of B pairs: M lines of L tokens, in which n tokens are predicted."""

    ids: np.ndarray
    "(M, L) int64, padded on the right."
    mask: np.ndarray
    "(M, L) int64."
    positions: np.ndarray
    "(M, L) int64, restarting with each answer and with the padding."
    places: np.ndarray
    "(n,) int64, the place in the flattened lines before each predicted token."
    targets: np.ndarray
    "(n,) int64, the predicted tokens."
    slots: np.ndarray
    "(n,) int64, the sum of each token among SUMS * B, pair after pair."
    columns: np.ndarray
    "(n,) int64, its position in its answer."


def answers_of(pairs: Ragged, split: np.ndarray) -> Ragged:
    """Return the answers (2 B rows, chosen and rejected in turn) of pairs, whose first `split` (B,) are the chosen."""
    offsets = np.empty(2 * len(pairs) + 1, dtype=np.int64)
    offsets[::2] = pairs.offsets
    offsets[1::2] = pairs.offsets[:-1] + split
    return Ragged(pairs.values, offsets)


def lines_of(answers: Ragged, length: int, *, isolates: bool) -> Bins:
    """Put answers into lines of at most `length` tokens; each is alone in its line unless attention `isolates`."""
    longest = int(answers.lengths.max(initial=1))
    if not isolates:
        return one_per_block(answers, longest)
    total, best = int(answers.lengths.sum()), None
    for width in (longest, 2 * longest, 4 * longest):
        lines = pack_whole(answers, np.arange(len(answers)), width)
        if best is None or (width <= length and padded_tokens(lines) < padded_tokens(best)):
            best = lines
        if total >= FULL * padded_tokens(best):
            break
    assert best is not None, "the first width is tried"
    return best


def padded_tokens(lines: Bins) -> int:
    """Return the tokens of the lines, padding included."""
    return len(lines) * int(lines.lengths_of(np.arange(len(lines))).max(initial=0))


def pair_batch(lines: Bins, pad_id: int, *, with_prompts: bool) -> PairBatch:
    """Return the batch of some lines; `with_prompts`: the chosen answers' prompts are predicted as well."""
    every = np.arange(len(lines))
    ids, mask = lines.padded(every, pad_id)
    lengths = np.minimum(lines.tokens.lengths_of(lines.order), lines.length)
    answer, column = np.repeat(lines.order, lengths), ranges(np.zeros_like(lengths), lengths)
    real = np.flatnonzero(mask)
    stored = ids.ravel()[real]
    pair, rejected = answer // 2, answer % 2 == 1
    learned = stored >= 0
    predicted = np.flatnonzero((column > 0) & (learned | (with_prompts & ~rejected)))
    sums = np.where(learned, np.where(rejected, REJECTED, CHOSEN), PROMPT)
    return PairBatch(
        ids=input_ids_of(ids),
        mask=mask,
        positions=lines.positions_of(every),
        places=real[predicted - 1],
        targets=input_ids_of(stored[predicted]),
        slots=(SUMS * pair + sums)[predicted],
        columns=column[predicted],
    )
