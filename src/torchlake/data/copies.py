"""Which rows are copies of one another, and the rows to train and to validate on.

    hashes of each row -> the first row with the same input -> training rows | validation rows

Equal inputs are found by their 64-bit hashes, the same on every engine and in every process. Two different inputs among
100 million share a hash with a probability of 1 in 4,000; their rows would stay on one side of the split, and nothing
else. Cost: a sort of 8 bytes per row, and more only for rows that are copies.
"""

import numpy as np

from torchlake.config.job import Job
from torchlake.config.sections.data import Fold, Fraction
from torchlake.data import order
from torchlake.tables.hashes import Words, combined

BLOCK = 1 << 20
Division = tuple[np.ndarray, np.ndarray | None]
"Training rows and validation rows, both sorted; None: there is no validation, or it is another table."


def first_rows(hashes: Words) -> np.ndarray | None:
    """Return for each row the first row with the same hash, (N,) int64; None if all hashes differ."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return None
    del ordered
    rows = np.flatnonzero(is_shared(hashes, repeated))
    _, first, group = np.unique(hashes[rows], return_index=True, return_inverse=True)
    found = np.arange(len(hashes))
    found[rows] = rows[first[group]]
    return found


def is_shared(hashes: Words, others: Words) -> np.ndarray:
    """Return (N,) bool: which of the hashes are among `others`."""
    ordered, found = np.unique(others), np.zeros(len(hashes), bool)
    for at in range(0, len(hashes), BLOCK) if len(ordered) else ():
        found[at : at + BLOCK] = _is_among(hashes[at : at + BLOCK], ordered)
    return found


def divide(job: Job, classes: np.ndarray | None, hashes: Words) -> Division:
    """Divide the rows of a training table as `data.validation` and `data.deduplicate` say.

    `hashes` (N, C + 1) are those of the input columns and of the target, `classes` (N,) int64 those of a stratified
    split. Rows with the same inputs, or pairs of answers to the same prompt, stay on one side; `deduplicate` leaves out
    rows whose inputs and target an earlier row has. Raises the errors of `order.split` and `fold`.
    """
    kept, share = np.arange(len(hashes)), job.data.validation
    if job.data.deduplicate and (first := first_rows(combined(hashes))) is not None:
        kept = np.flatnonzero(first == kept)
    if not isinstance(share, Fraction | Fold):
        return kept, None
    inputs = hashes[kept, : 1 if job.task == "preference" and job.data.text else -1]
    same = first_rows(combined(inputs))
    own = None if classes is None else classes[kept]
    if isinstance(share, Fold):
        training, held_out = order.fold(len(kept), share.fold, share.folds, job.train.seed, own, same)
    else:
        training, held_out = order.split(len(kept), share.fraction, job.train.seed, own, same)
    return kept[training], kept[held_out]


def _is_among(hashes: Words, ordered: Words) -> np.ndarray:
    places = np.searchsorted(ordered, hashes)
    places[places == len(ordered)] = 0
    return np.asarray(ordered[places] == hashes)
