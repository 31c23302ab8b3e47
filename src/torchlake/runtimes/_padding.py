"""The rows of a batch without padding: tokens and positions in one line, with the length of each row."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch without padding."""

    ids: np.ndarray
    "(T,) int64"
    positions: np.ndarray
    "(T,) int64"
    lengths: np.ndarray
    "(B,) int64"

    @property
    def starts(self) -> np.ndarray:
        """The index of each row's first token, (B,) int64."""
        starts: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def length_groups(self) -> list[tuple[int, int]]:
        """The (rows, length) of each run of consecutive rows of equal length."""
        edges = np.flatnonzero(np.diff(self.lengths, prepend=-1, append=-1))
        return list(zip(np.diff(edges).tolist(), self.lengths[edges[:-1]].tolist(), strict=True))


def remove_padding(padding_id: int | None, input_ids: np.ndarray, attention_mask: np.ndarray) -> PackedRows:
    """Remove the padding from ids (B, L), which are padded on the right; `padding_id` as in `Encoder`."""
    real = attention_mask != 0
    if padding_id is None:
        positions = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
    else:
        counted = input_ids != padding_id
        positions = np.cumsum(counted, axis=1) * counted + padding_id
    return PackedRows(input_ids[real], positions[real], real.sum(axis=1))
