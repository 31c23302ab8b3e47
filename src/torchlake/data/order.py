"""Which row when: a function of (lengths, batch size, seed, epoch) and of nothing else.

    shuffle all rows -> windows of 32 batches -> sort each window by length, cut into batches -> shuffle the batches

Neither the engine, nor the number of ranks, nor where a run was interrupted has a part in it, so a resumed run finds
its place by counting. Sorting inside a window removes nearly all padding: the rows of one batch span about 1/32 of the
window's lengths. A wider window would save hardly more and would put the same long rows together in every epoch.

Random numbers are the raw output of Philox, a counter-based generator whose stream numpy guarantees; the methods of
`numpy.random.Generator` may change from one release to the next. An epoch costs two argsorts: about 0.2 s per million
rows.
"""

import numpy as np

from torchlake.errors import DataError

WINDOW_BATCHES = 32
SPLIT_STREAM = 2**64 - 1
"The split's stream: where an epoch's number stands in the key, and no epoch's number."
SHUFFLE_STREAM = 2**63
"Added to an epoch's number: the stream that decides in which order rows are laid end to end."


def epoch_batches(lengths: np.ndarray, *, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of one epoch: arrays of row numbers int64, every row of `lengths` (N,) exactly once.

    All batches have `batch_size` rows but one, which has the rest. Its rows are drawn before anything is sorted: cut
    off a sorted window it would always hold the longest rows, and each row of a short batch weighs more.
    """
    lengths = np.asarray(lengths)
    rng = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    shuffled = _permutation(rng, len(lengths))
    whole = len(shuffled) - len(shuffled) % batch_size
    batches = [] if whole == len(shuffled) else [shuffled[whole:]]
    window_rows = batch_size * WINDOW_BATCHES
    for first in range(0, whole, window_rows):
        window = shuffled[first : min(first + window_rows, whole)]
        window = window[np.argsort(lengths[window], kind="stable")]
        batches.extend(np.split(window, len(window) // batch_size))
    return [batches[index] for index in _permutation(rng, len(batches))]


def shuffled(rows: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """The row numbers `rows` (N,) int64 in the order in which an epoch lays them end to end."""
    rng = np.random.Philox(key=np.array([seed, SHUFFLE_STREAM + epoch], dtype=np.uint64))
    return np.asarray(rows[_permutation(rng, len(rows))])


def split(rows: int, fraction: float, seed: int, classes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers 0 to `rows` - 1 as (training rows, validation rows), each sorted and neither empty.

    With `classes` (rows,) int64, the class of each row, every class has its share of the validation rows, and a class
    of two rows or more has rows on both sides, as far as there are validation rows for that: larger classes first. A
    class of one row is trained on. Raises DataError when there are not two rows to split.
    """
    if rows < 2:
        raise DataError(
            f"validation: {{fraction: {fraction}}} needs at least 2 rows, the training table has {rows}; "
            "give more rows, a validation table, or validation: null"
        )
    shuffled = _permutation(np.random.Philox(key=np.array([seed, SPLIT_STREAM], dtype=np.uint64)), rows)
    validation = min(max(1, round(rows * fraction)), rows - 1)
    if classes is not None:
        sizes = np.bincount(classes)
        if (sizes > 1).any():
            held_out = _first_of_each(classes[shuffled], sizes, _validation_counts(sizes, fraction, validation))
            return np.sort(shuffled[~held_out]), np.sort(shuffled[held_out])
    return np.sort(shuffled[validation:]), np.sort(shuffled[:validation])


def _validation_counts(sizes: np.ndarray, fraction: float, total: int) -> np.ndarray:
    """(C,) validation rows of classes of these sizes (C,), `total` together unless too few classes have two rows.

    Each has its fraction rounded down, at least one and never all of its rows; what is missing goes to those furthest
    below their fraction. Where there are too few, a class keeps its only one longest, the larger class longer.
    """
    most = np.maximum(sizes - 1, 0)
    total = min(total, int(most.sum()))
    exact = sizes * fraction
    seats = np.clip(np.floor(exact).astype(np.int64), np.minimum(1, most), most)
    while (missing := total - int(seats.sum())) > 0:
        able = np.flatnonzero(seats < most)
        seats[able[np.argsort((seats - exact)[able], kind="stable")[:missing]]] += 1
    while (over := int(seats.sum()) - total) > 0:
        able = np.flatnonzero(seats > 1) if (seats > 1).any() else np.flatnonzero(seats)
        seats[able[np.argsort((exact - seats)[able], kind="stable")[:over]]] -= 1
    return seats


def _first_of_each(classes: np.ndarray, sizes: np.ndarray, seats: np.ndarray) -> np.ndarray:
    """(N,) bool: the first `seats` (C,) places of each class among `classes` (N,), whose classes have these sizes."""
    by_class = np.argsort(classes, kind="stable")
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(classes)) - np.repeat(starts, sizes)
    chosen = np.zeros(len(classes), dtype=bool)
    chosen[by_class] = place < np.repeat(seats, sizes)
    return chosen


def _permutation(rng: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(rng.random_raw(count), kind="stable")
