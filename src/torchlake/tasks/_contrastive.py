"""Losses of pairs of embeddings, and how well embeddings find each other.

    pairs, triplets       each text's second text should be nearer than all second and third texts of the batch
                          (in-batch negatives; Henderson et al. 2017; van den Oord et al. 2018)
    pairs with a number   the cosine of both should be the number

The formulas are those of sentence-transformers' MultipleNegativesRankingLoss and CosineSimilarityLoss. B rows of V
texts each: the first text, the second, and of triplets the third; vectors have D numbers. How a batch is computed that
does not fit into memory (GradCache) is in `training/step.py`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake.tasks._inputs import PAIR

if TYPE_CHECKING:
    import torch

FURTHER = {PAIR: ("pair_ids", "pair_mask"), "negative": ("negative_ids", "negative_mask")}
"The inputs of a training row besides its first text, and the arguments of `Embedder` that they become."
SCALE = 20.0
"The factor of cosines before the softmax: a temperature of 0.05."
CUTOFFS = (1, 10)
"Recall is measured in these numbers of first documents."
CLOSE = 1e-6
"Similarities that differ by less count as equal: vectors of equal texts differ by rounding."
ROWS_AT_ONCE = 1024


def ranking_loss(outputs: "torch.Tensor") -> "torch.Tensor":
    """Return the summed cross entropy () of finding each row's second text, from outputs (B, V, D) of a whole batch."""
    import torch
    from torch.nn import functional

    unit = functional.normalize(outputs.float(), dim=-1)
    candidates = unit[:, 1:].transpose(0, 1).flatten(0, 1)  # all second texts, then all third texts
    similar = unit[:, 0] @ candidates.T * SCALE
    return functional.cross_entropy(similar, torch.arange(len(unit), device=unit.device), reduction="sum")


def similarity_loss(outputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """Return the summed squared error () of the cosines of outputs (B, 2, D) as estimates of targets (B,)."""
    from torch.nn import functional

    cosines = functional.cosine_similarity(outputs[:, 0].float(), outputs[:, 1].float(), dim=-1)
    return functional.mse_loss(cosines, targets.float(), reduction="sum")


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine (N,) of the first two vectors of each row (N, V, D)."""
    unit = _unit(vectors[:, :2])
    return np.asarray((unit[:, 0] * unit[:, 1]).sum(axis=-1))


def found_shares(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """Return `found_among` for vectors (N, V, D); third texts are among the others."""
    unit = _unit(vectors)
    return found_among(unit[:, 0], unit[:, 1:].transpose(1, 0, 2).reshape(-1, unit.shape[-1]))


def found_among(first: Any, candidates: Any) -> dict[str, np.ndarray]:
    """Return for each row, (N,), whether its second text is found by its first one, among all others of the table.

    `recall_at_k`: whether it is among the k nearest; `mrr_at_10`: the reciprocal of its rank, 0 beyond 10. Texts that
    are equally near, such as copies, have a random order: the value is the mean over all orders. Both are vectors of
    length 1, dense or of scipy; the candidates (M, D) begin with the second texts. Cost: N x M products of D numbers,
    1,024 rows at a time.
    """
    count = first.shape[0]
    nearer, equal = np.zeros((2, count), dtype=np.int64)
    for start in range(0, count, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, count))
        found = first[rows] @ candidates.T
        similar = found if isinstance(found, np.ndarray) else found.toarray()
        own = similar[np.arange(len(rows)), rows][:, None]
        nearer[rows] = (similar > own + CLOSE).sum(axis=1)
        equal[rows] = (np.abs(similar - own) <= CLOSE).sum(axis=1)
    shares = {f"recall_at_{k}": np.clip((k - nearer) / equal, 0, 1) for k in CUTOFFS}
    last = CUTOFFS[-1]
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, last + 1))])
    sums = harmonic[np.minimum(nearer + equal, last)] - harmonic[np.minimum(nearer, last)]
    return {**shares, f"mrr_at_{last}": sums / equal}


def ranks(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each row's second text among all, from 1, and the row of the nearest one: (N,) and (N,).

    Of texts that are equally near, the row's own comes first.
    """
    unit = _unit(vectors)
    found, nearest = np.zeros((2, len(unit)), dtype=np.int64)
    for first in range(0, len(unit), ROWS_AT_ONCE):
        rows = np.arange(first, min(first + ROWS_AT_ONCE, len(unit)))
        similar = unit[rows, 0] @ unit[:, 1].T
        own = similar[np.arange(len(rows)), rows][:, None]
        found[rows] = (similar > own + CLOSE).sum(axis=1) + 1
        nearest[rows] = np.where(found[rows] == 1, rows, similar.argmax(axis=1))
    return found, nearest


def similarity_metrics(similar: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the correlations of similarities (N,) with numbers (N,): of their ranks, and linear; NaN if undefined."""
    from scipy import stats

    if len(similar) < 2 or np.ptp(similar) == 0 or np.ptp(targets) == 0:
        return {"spearman": float("nan"), "pearson": float("nan")}
    return {
        "spearman": float(stats.spearmanr(similar, targets).statistic),
        "pearson": float(stats.pearsonr(similar, targets).statistic),
    }


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors with length 1; a vector of zeros stays one."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-12))
