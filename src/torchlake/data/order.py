"""The order of rows: a function of (lengths, batch size, seed, epoch) alone.

    shuffle all rows -> windows of 32 batches -> sort each window by length, cut into batches -> shuffle the batches

If a row's loss depends on the rows beside it, as with in-batch negatives, windows are not sorted: the neighbors would
be of its length, and a model would learn less from them.

It does not depend on the engine, the number of ranks or interruptions, so a resumed run finds its position by counting.
Sorting inside a window removes nearly all padding: the rows of one batch span about 1/32 of the window's lengths. A
wider window would save little more, and would put the same long rows together in every epoch.

Random numbers are the raw output of Philox, a counter-based generator whose stream numpy guarantees; the methods of
`numpy.random.Generator` may change between releases. Cost: two argsorts per epoch, about 0.2 s per million rows.
"""

import numpy as np

from torchlake.errors import DataError

WINDOW_BATCHES = 32
SPLIT_STREAM = 2**64 - 1
"The stream for `split`, in place of an epoch's number."
SHUFFLE_STREAM = 2**63
"Added to an epoch's number: the stream for `shuffled`."


def epoch_batches(
    lengths: np.ndarray, *, batch_size: int, seed: int, epoch: int, by_length: bool = True
) -> list[np.ndarray]:
    """Return the batches of one epoch: int64 row numbers, every row of `lengths` (N,) exactly once.

    `by_length`: rows of a batch have about the same length; otherwise they are drawn at random.
    All batches have `batch_size` rows except one with the remainder. Its rows are drawn before sorting: otherwise it
    would always have the longest rows, and rows of a short batch have more weight.
    """
    lengths = np.asarray(lengths)
    rng = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    shuffled = _permutation(rng, len(lengths))
    whole = len(shuffled) - len(shuffled) % batch_size
    batches = [] if whole == len(shuffled) else [shuffled[whole:]]
    window_rows = batch_size * WINDOW_BATCHES
    for first in range(0, whole, window_rows):
        window = shuffled[first : min(first + window_rows, whole)]
        if by_length:
            window = window[np.argsort(lengths[window], kind="stable")]
        batches.extend(np.split(window, len(window) // batch_size))
    return [batches[index] for index in _permutation(rng, len(batches))]


def shuffled(rows: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return the row numbers `rows` (N,) int64 in the order in which an epoch packs them."""
    rng = np.random.Philox(key=np.array([seed, SHUFFLE_STREAM + epoch], dtype=np.uint64))
    return np.asarray(rows[_permutation(rng, len(rows))])


def split(
    rows: int, fraction: float, seed: int, classes: np.ndarray | None = None, first: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers 0 to `rows` - 1 into (training rows, validation rows), each sorted and not empty.

    With `classes` (rows,) int64 the split is stratified: a class with two or more rows has rows on both sides, as far
    as there are enough validation rows, larger classes first. A class with one row is trained on. `first` (rows,)
    int64 is the first row with the same input (None: all differ): such rows stay on one side, and count as of one
    class, that of the first; only if all rows have the same input, they are split like others. Raises DataError when
    there are fewer than two rows.
    """
    if rows < 2:
        raise DataError(
            f"validation: {{fraction: {fraction}}} needs at least 2 rows, the training table has {rows}; "
            "give more rows, a validation table, or validation: null"
        )
    shuffled = _permutation(np.random.Philox(key=np.array([seed, SPLIT_STREAM], dtype=np.uint64)), rows)
    validation = min(max(1, round(rows * fraction)), rows - 1)
    if first is None and classes is None:
        return np.sort(shuffled[validation:]), np.sort(shuffled[:validation])
    copies = np.ones(rows, np.int64) if first is None else np.bincount(first, minlength=rows)
    inputs = shuffled[copies[shuffled] > 0]  # each input at its first row
    if len(inputs) < 2:
        return split(rows, fraction, seed, classes)
    sizes, of = copies[inputs], np.zeros(len(inputs), np.int64) if classes is None else classes[inputs]
    most = _rows_beside_one_input(of, sizes)
    if not most.any():
        of = np.zeros_like(of)
        most = _rows_beside_one_input(of, sizes)
    totals = np.bincount(of, sizes).astype(np.int64)
    held_out = np.zeros(rows, bool)
    held_out[inputs[_first_of_each(of, sizes, _validation_counts(totals, most, fraction, validation))]] = True
    held_out = held_out if first is None else held_out[first]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def fold(
    rows: int,
    number: int,
    folds: int,
    seed: int,
    classes: np.ndarray | None = None,
    first: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers 0 to `rows` - 1 without those of fold `number`, and those of the fold, each sorted.

    `number` counts from 1. Every row is in one fold, and folds differ by at most one row; with `classes` (rows,) int64
    also in the rows of each class. Rows with the same `first` (see `split`) are in one fold, unless there are fewer
    inputs than folds; folds then differ by more. Raises DataError if there are fewer rows than folds.
    """
    if rows < folds:
        raise DataError(
            f"folds: {folds} folds need at least {folds} rows, but the training table has {rows}; use fewer folds"
        )
    dealt = _permutation(np.random.Philox(key=np.array([seed, SPLIT_STREAM], dtype=np.uint64)), rows)
    copies = None if first is None else np.bincount(first, minlength=rows)
    if copies is not None and np.count_nonzero(copies) >= folds:
        dealt = dealt[copies[dealt] > 0]
        dealt = dealt[np.argsort(-copies[dealt], kind="stable")]
    else:
        first = None
    if classes is not None:
        dealt = dealt[np.argsort(classes[dealt], kind="stable")]
    held_out = np.zeros(rows, dtype=bool)
    held_out[dealt[number - 1 :: folds]] = True
    held_out = held_out if first is None else held_out[first]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _rows_beside_one_input(classes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return how many rows of each class, (C,), can be held out at most: all but those of its most frequent input."""
    largest = np.zeros(int(classes.max()) + 1, np.int64)
    np.maximum.at(largest, classes, sizes)
    most: np.ndarray = np.bincount(classes, sizes).astype(np.int64) - largest
    return most


def _validation_counts(sizes: np.ndarray, most: np.ndarray, fraction: float, total: int) -> np.ndarray:
    """Return how many validation rows each class has, (C,), from the classes' sizes and most validation rows (C,).

    There are `total` in all, unless too few classes have two inputs.

    Each class has its fraction rounded down, at least one row and never all; missing rows go to the classes furthest
    below their fraction. If there are too many, classes with more than one row lose rows first.
    """
    total = min(total, int(most.sum()))
    exact = sizes * fraction
    counts = np.clip(np.floor(exact).astype(np.int64), np.minimum(1, most), most)
    while (missing := total - int(counts.sum())) > 0:
        able = np.flatnonzero(counts < most)
        counts[able[np.argsort((counts - exact)[able], kind="stable")[:missing]]] += 1
    while (over := int(counts.sum()) - total) > 0:
        able = np.flatnonzero(counts > 1) if (counts > 1).any() else np.flatnonzero(counts)
        counts[able[np.argsort((exact - counts)[able], kind="stable")[:over]]] -= 1
    return counts


def _first_of_each(classes: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mark inputs of each class in `classes` (N,), as (N,) bool: the first ones, until they have `counts` (C,) rows.

    `sizes` (N,) are the rows of each input. Inputs with more rows than `counts` are skipped; of a class with no others,
    the smallest one is marked.
    """
    by_class = np.argsort(classes, kind="stable")
    own, size = classes[by_class], sizes[by_class]
    starts = np.searchsorted(own, np.arange(len(counts)))
    fitting = np.where(size <= counts[own], size, 0)
    sums = np.concatenate([[0], np.cumsum(fitting)])
    chosen = (fitting > 0) & (sums[:-1] - sums[starts[own]] < counts[own])
    without = (counts > 0) & ~np.isin(np.arange(len(counts)), own[chosen])
    chosen[np.lexsort((size, own))[starts[without]]] = True
    found = np.zeros(len(classes), dtype=bool)
    found[by_class] = chosen
    return found


def _permutation(rng: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(rng.random_raw(count), kind="stable")
