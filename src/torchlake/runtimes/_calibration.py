"""Ranges of 8 bits for the inputs of linear layers, calibrated once on the user's rows.

    x (T, I) -> x / s -> 8 bits, one range for all tokens -> product with s * W in 8 bits, a scale per output -> fp32
    x (T, 4) of the loudest channels  ----------------------> product with W in fp32 ------------------------->  +

Encoders have a few channels that are tens of times larger than the rest at a few tokens; one range for all would leave
the rest only a few of its 256 steps. Part of that magnitude is moved into the weights, channel by channel (Xiao et al.
2022, SmoothQuant). Each layer chooses how much: of a few exponents, the one whose quantized product is closest to the
exact one on a sample of tokens (Lin et al. 2023, AWQ). If it halves the remaining error, the four largest channels stay
in fp32 (Dettmers et al. 2022, LLM.int8). The range is that of all calibration tokens, widened if they are few.

Percentiles would clip the very channels that carry a sentence's summary (docs/explanation/decisions/runtimes.md).
Cost: a pass over the calibration rows, then a dozen matrix products per layer on about 512 tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np

from torchlake.errors import UsageError

Batches = Sequence[tuple[np.ndarray, np.ndarray]]

EXPONENTS = (0.5, 0.65, 0.8, 0.95)
LOUD_CHANNELS = 4
MIN_ERROR_RATIO = 2.0
"Channels stay in fp32 if that divides a layer's squared error by this factor."
MAX_PLAIN_ERROR_RATIO = 1.5
"The largest factor in squared error that is accepted for skipping smoothing, which saves a pass over x."
SAMPLE_TOKENS = 512
MARGIN = 4.0
"The widening for unseen extremes: 130 calibration tokens widen every range by a third, 8,000 by a twentieth."
TOKENS_AT_ONCE = 512
"Tokens of a calibration batch; all linear inputs are in memory, 130 MB for roberta-base."


@dataclass
class ActivationStats:
    """The inputs of a linear layer: each channel's range over all tokens, and a sample of tokens."""

    low: np.ndarray
    "(I,)"
    high: np.ndarray
    "(I,)"
    sample: list[np.ndarray] = field(default_factory=list)
    "The sample: (S, I) in total."
    tokens: int = 0

    def add(self, values: np.ndarray, sample: np.ndarray) -> None:
        """Add inputs (T, I), and some of them (S, I) to the sample."""
        self.low, self.high = np.minimum(self.low, values.min(axis=0)), np.maximum(self.high, values.max(axis=0))
        self.tokens += len(values)
        if sum(map(len, self.sample)) < SAMPLE_TOKENS:
            self.sample.append(sample[:SAMPLE_TOKENS])

    def widened(self) -> "ActivationStats":
        """Return the same with ranges widened for unseen rows."""
        more = np.float32(1 + MARGIN / np.sqrt(self.tokens))
        return ActivationStats(self.low * more, self.high * more, self.sample, self.tokens)


def empty_stats(channels: int) -> ActivationStats:
    """Return the stats of zero tokens."""
    return ActivationStats(np.full(channels, np.inf, np.float32), np.full(channels, -np.inf, np.float32))


def num_rows(batches: Batches) -> int:
    """Return the number of rows in the batches."""
    return sum(len(ids) for ids, _ in batches)


def mean_row_length(batches: Batches) -> float:
    """Return the mean row length weighted by tokens, which attention's time depends on."""
    lengths = np.concatenate([mask.sum(axis=1) for _, mask in batches])
    return float(np.square(lengths).sum() / lengths.sum())


def check_rows(folder: Path, batches: Batches) -> None:
    """Raise UsageError if there are no calibration rows."""
    if not batches:
        raise UsageError(
            f"{folder}: 8-bit ranges are computed from rows like those to score, and there are none. Pass some: "
            f"torchlake optimize {folder} --sample TABLE"
        )


def split_batches(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the same rows in batches of at most `TOKENS_AT_ONCE` padded tokens, or one row."""
    for ids, mask in batches:
        count = max(1, TOKENS_AT_ONCE // ids.shape[1])
        for first in range(0, len(ids), count):
            yield ids[first : first + count], mask[first : first + count]


def smoothing(seen: ActivationStats, weight: np.ndarray, *, plain_is_faster: bool = False) -> np.ndarray:
    """Return the divisor of each channel (I,) before rounding; infinity for channels that stay in fp32.

    `weight` is (I, O), of all layers that share x. `plain_is_faster`: prefer ones (no smoothing) unless the error is
    too large.
    """
    sample = np.concatenate(seen.sample)
    loudness = np.maximum(np.abs(seen.low), np.abs(seen.high))

    def best_of(quiet: np.ndarray) -> tuple[float, np.ndarray]:
        exact = sample @ np.where(quiet[:, None], weight, np.float32(0))

        def error(smooth: np.ndarray) -> float:
            scale, zero = uint8_grid(seen.low / smooth, seen.high / smooth)
            x = (np.clip(np.rint(sample * (1 / (smooth * scale))) + zero, 0, 255) - zero) * scale
            rounded, scales = round_weights(scaled(weight, smooth))
            return float(np.square((x @ rounded.astype(np.float32)) * scales - exact).mean())

        tried = [(error(smooth), smooth) for smooth in _candidates(loudness, weight, quiet)]
        best = min(tried, key=itemgetter(0))
        return tried[0] if plain_is_faster and quiet.all() and tried[0][0] < best[0] * MAX_PLAIN_ERROR_RATIO else best

    quiet = np.ones(len(loudness), dtype=bool)
    error, smooth = best_of(quiet)
    if len(loudness) > LOUD_CHANNELS:
        quiet[np.argsort(loudness)[-LOUD_CHANNELS:]] = False
        other_error, other = best_of(quiet)
        if other_error < error / MIN_ERROR_RATIO:
            return other
    return smooth


def _candidates(loudness: np.ndarray, weight: np.ndarray, quiet: np.ndarray) -> Iterator[np.ndarray]:
    """Yield no smoothing, then smoothing by each exponent; (I,) float32, infinity for channels not in `quiet`."""
    heavy = np.abs(weight).max(axis=1)
    loud, heavy = (np.maximum(values, values[quiet].max() * 1e-3 + 1e-12) for values in (loudness, heavy))
    yield np.where(quiet, np.float32(1), np.float32(np.inf))
    for exponent in EXPONENTS:
        smooth = loud**exponent / heavy ** (1 - exponent)
        yield np.where(quiet, smooth / np.exp(np.log(smooth[quiet]).mean()), np.inf).astype(np.float32)


def scaled(weight: np.ndarray, smooth: np.ndarray) -> np.ndarray:
    """Return the weights (I, O) that compensate for the division of x."""
    return weight * np.where(np.isinf(smooth), np.float32(0), smooth)[:, None]


def uint8_grid(low: np.ndarray, high: np.ndarray) -> tuple[np.float32, np.uint8]:
    """Return scale and zero point of uint8 for all channels' ranges, with an exact zero."""
    least, largest = min(float(low.min()), 0.0), max(float(high.max()), 0.0)
    scale = np.float32((largest - least) / 255 or 1.0)
    return scale, np.uint8(np.clip(np.rint(-least / scale), 0, 255))


def round_weights(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (I, O) as int8, and the scale (O,) of each output."""
    scales = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    scales[scales == 0] = 1.0
    return np.clip(np.rint(weight / scales), -127, 127).astype(np.int8), scales
