"""Copies of a rank's tensors in main memory, which keep their values while training continues.

    training   step n | forward, backward of step n + 1 | wait | update n + 1
    copies            | weights and moments ............|

A GPU copies on its own stream into page-locked memory, beside the next forward and backward pass, which only read
weights. The next update waits on the device until the copies are done; the host waits for nothing. torch keeps freed
page-locked memory for the next checkpoint, and rounds the memory of each tensor up to a power of 2. Tensors in main
memory are copied at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchlake.checkpoints.shards import Piece, Pieces


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """Copies that may not have finished yet."""

    kinds: Mapping[str, Pieces]
    copied: torch.cuda.Event | None
    "Recorded after the copies from a GPU; None: they are done."

    def hold_updates(self) -> None:
        """Let the current stream's next work, an update of the copied tensors, wait for the copies."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def wait(self) -> None:
        """Wait until the copies are done."""
        if self.copied is not None:
            self.copied.synchronize()


def take(kinds: Mapping[str, Pieces]) -> StateCopy:
    """Start copying the pieces of each kind."""
    if not any(piece.tensor.is_cuda for pieces in kinds.values() for piece in pieces.values()):
        copies = {kind: {name: piece.copied() for name, piece in pieces.items()} for kind, pieces in kinds.items()}
        return StateCopy(kinds=copies, copied=None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copies = {kind: {name: _streamed(piece) for name, piece in pieces.items()} for kind, pieces in kinds.items()}
        copied = torch.cuda.Event()
        copied.record()
    return StateCopy(kinds=copies, copied=copied)


def _streamed(piece: Piece) -> Piece:
    """Return a copy that the current stream makes."""
    if not piece.tensor.is_cuda:
        return piece.copied()
    tensor = piece.tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream())
    return Piece(copy, piece.first, piece.shape)
