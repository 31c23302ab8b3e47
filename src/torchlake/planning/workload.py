"""What a job makes its ranks compute, from the lengths of some rows: padding, micro-batches, the slowest rank.

    lengths -> epoch_batches -> micro_batches, as in training -> tokens with padding, operations, largest share

A table larger than the sample is represented by rows drawn from it with replacement, as many as training sorts at once
(a window of 32 batches): with fewer rows the batches would show too much padding. Cost: two argsorts.
"""

import math
from dataclasses import dataclass

import numpy as np

from torchlake.data import batching, order
from torchlake.planning import costs
from torchlake.planning.terms import Cluster, ComputeSettings, Memory, Parameters, Shape, Sharding, StepTime, Traffic

TAIL = 0.9
"Quantile above which lengths are assumed to be exponentially distributed."
EULER = 0.5772
"The expected maximum of m exponential variables is (ln m + 0.5772) times their mean."


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its training rows: everything that determines what a rank needs."""

    shape: Shape
    parameters: Parameters
    setting: ComputeSettings
    lengths: np.ndarray
    "(N,) int64, the number of tokens of each representative row."
    longest: int
    "The number of tokens of the table's longest row, possibly an estimate."
    batch_size: int
    micro_batch_tokens: int
    seed: int
    by_length: bool = True
    "Whether the rows of a batch have about the same length."


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A step of the slowest rank, on average over the batches."""

    flops: float
    micro_batches: float
    accumulates: bool
    "Whether any step has several micro-batches."


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Shares of the computed tokens that are padding."""

    sorted: float
    "The share in training: rows sorted in windows, micro-batches padded to their longest row."
    arrival: float
    "The share with micro-batches of the same size in the table's order, each padded to its longest row."
    max_length: float
    "The share with every row padded to the maximum length."


def representative_lengths(lengths: np.ndarray, *, rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Return lengths (M,) that represent `rows` rows; this is `lengths` (N,) itself if it has all of them."""
    if len(lengths) >= rows:
        return lengths
    count = min(rows, batch_size * order.WINDOW_BATCHES)
    return lengths[np.random.default_rng(seed).integers(0, len(lengths), max(count, 1))]


def longest_row(lengths: np.ndarray, *, rows: int, limit: int) -> int:
    """Estimate the longest of `rows` rows from a sample: at least the sample's longest, at most `limit`.

    Above the 90 % quantile, lengths are assumed to be exponentially distributed with the sample's mean excess (peaks
    over threshold with shape 0: Pickands 1975).
    """
    longest = int(lengths.max())
    if len(lengths) >= rows:
        return longest
    threshold = np.quantile(lengths, TAIL)
    excess = lengths[lengths > threshold] - threshold
    if not len(excess):
        return longest
    beyond = len(excess) * rows / len(lengths)
    expected = float(threshold) + float(excess.mean()) * (math.log(beyond) + EULER)
    return max(longest, min(limit, math.ceil(expected)))


def padding(case: Workload, arrival: np.ndarray, *, ranks: int, max_length: int) -> Padding:
    """Return the shares of padding on `ranks` ranks; `arrival` (N,) are lengths in the table's order."""
    sizes, computed, tokens = [], 0, 0
    for batch in _batches(case):
        lengths = case.lengths[batch]
        tokens += int(lengths.sum())
        for share in _shares(case, lengths, ranks):
            sizes += [len(rows) for rows in share]
            computed += batching.padded_tokens(lengths, share)
    typical = max(1, round(sum(sizes) / max(1, sum(map(bool, sizes)))))
    groups = [arrival[first : first + typical] for first in range(0, len(arrival), typical)]
    unsorted = sum(len(rows) * int(rows.max()) for rows in groups)
    return Padding(
        sorted=1 - tokens / computed,
        arrival=1 - float(arrival.sum()) / unsorted,
        max_length=1 - float(arrival.mean()) / max_length,
    )


def work(case: Workload, ranks: int) -> StepWork:
    """Return the work of the slowest of `ranks` ranks: the first one, because the longest rows are dealt first."""
    per_token = costs.token_flops(case.parameters, case.shape, case.setting)
    per_pair = costs.pair_flops(case.shape, case.setting)
    flops, cuts = [], []
    for batch in _batches(case):
        lengths = case.lengths[batch]
        share = _shares(case, lengths, ranks)[0]
        padded = [(len(rows), int(lengths[rows].max(initial=1))) for rows in share]
        flops.append(sum(rows * (longest * per_token + longest**2 * per_pair) for rows, longest in padded))
        cuts.append(len(share))
    return StepWork(flops=float(np.mean(flops)), micro_batches=float(np.mean(cuts)), accumulates=max(cuts) > 1)


def largest_micro_batch(case: Workload, ranks: int) -> tuple[int, int]:
    """Return the rows, and tokens per row, of the largest possible micro-batch of a rank."""
    share = math.ceil(case.batch_size / ranks)
    lengths = {*map(int, np.unique(case.lengths)), case.longest}
    shapes = [(min(share, max(1, case.micro_batch_tokens // max(1, length))), max(1, length)) for length in lengths]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def memory_on(case: Workload, sharding: Sharding, ranks: int) -> Memory:
    """Return the memory on each of `ranks` ranks at the largest micro-batch."""
    rows, length = largest_micro_batch(case, ranks)
    kept = costs.activation_bytes(case.shape, rows, length, case.setting)
    return costs.memory(
        sharding,
        case.parameters,
        case.setting,
        ranks=ranks,
        activations=kept + costs.working_bytes(case.shape, rows * length, case.setting),
        accumulates=math.ceil(case.batch_size / ranks) > rows,
    )


def time_on(case: Workload, sharding: Sharding, ranks: int, cluster: Cluster) -> tuple[StepTime, Traffic]:
    """Return the time of an average step on `ranks` ranks, and what they exchange in it."""
    done = work(case, ranks)
    exchanged = costs.traffic(sharding, case.parameters, case.setting, micro_batches=done.micro_batches)
    return costs.step_time(exchanged, ranks=ranks, computing=done.flops / cluster.flops, cluster=cluster), exchanged


def _batches(case: Workload) -> list[np.ndarray]:
    return order.epoch_batches(
        case.lengths, batch_size=case.batch_size, seed=case.seed, epoch=0, by_length=case.by_length
    )


def _shares(case: Workload, lengths: np.ndarray, ranks: int) -> list[list[np.ndarray]]:
    """Return the micro-batches of the ranks; of more ranks than rows, those of the ranks that have a row."""
    return batching.micro_batches(
        lengths,
        world_size=min(ranks, len(lengths)),
        micro_batch_tokens=case.micro_batch_tokens,
        save_padding=not case.by_length and not case.setting.gpu,
    )
