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
SPLIT = 2**64 - 1
"The split's stream: where an epoch's number stands in the key, and no epoch's number."
LAID = 2**63
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


def laid(rows: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """The row numbers `rows` (N,) int64 in the order in which an epoch lays them end to end."""
    rng = np.random.Philox(key=np.array([seed, LAID + epoch], dtype=np.uint64))
    return np.asarray(rows[_permutation(rng, len(rows))])


def split(rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers 0 to `rows` - 1 as (training rows, validation rows), each sorted and neither empty.

    Raises DataError when there are not two rows to split.
    """
    if rows < 2:
        raise DataError(
            f"validation: {{fraction: {fraction}}} needs at least 2 rows, the training table has {rows}; "
            "give more rows, a validation table, or validation: null"
        )
    shuffled = _permutation(np.random.Philox(key=np.array([seed, SPLIT], dtype=np.uint64)), rows)
    validation = min(max(1, round(rows * fraction)), rows - 1)
    return np.sort(shuffled[validation:]), np.sort(shuffled[:validation])


def _permutation(rng: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(rng.random_raw(count), kind="stable")
