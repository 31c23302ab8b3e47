"""Sharded tensors: what each rank stores of a sharded model, and how any number of ranks reads it.

    rank 0: rows 0..511 of a weight  ┐                                   ┌ rows 0..341
    rank 1: rows 512..1023           ┴ safetensors, one file per rank -> ┼ rows 342..683     read on three ranks
                                                                         └ rows 684..1023

A piece is a range of rows (a tensor's first dimension), as `fully_shard` splits them. Each file's header states which
rows of which tensors it holds, so a set of files is self-describing; a reader maps them and copies only the rows it
needs. Tensors that every rank holds whole are divided among the ranks, so that all write at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, Shard

from torchlake.errors import DataError

PIECES = "pieces"
"The header key of a file's partial tensors: {name: [first row, shape of the whole]}, as JSON."

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor, or all of it."""

    tensor: torch.Tensor
    "(R, ...)"
    first: int
    "The first row's position in the whole tensor."
    shape: tuple[int, ...]
    "Shape of the whole tensor."

    def copied(self) -> "Piece":
        """Return a copy in main memory, which keeps its values while training continues."""
        return Piece(self.tensor.detach().to("cpu", copy=True).contiguous(), self.first, self.shape)


Pieces = dict[str, Piece]


def whole(tensors: Tensors) -> Pieces:
    """Return each tensor as one piece."""
    return {name: Piece(tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items()}


def local_shard(tensors: Tensors, *, rank: int, world_size: int) -> Pieces:
    """Return the pieces that `rank` stores of tensors that have the same names on all ranks.

    These are its rows of sharded tensors (DTensors), and about an equal share, in bytes, of the tensors that every rank
    has whole.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    mine = whole({name: plain[name] for name, owner in _owners(plain, world_size).items() if owner == rank})
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and _is_first_copy(tensor):
            first, rows = local_rows(tensor)
            if rows:
                mine[name] = Piece(tensor.to_local(), first, tuple(tensor.shape))
    return mine


def local_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the first row of a sharded tensor on this rank, and the number of rows; split as `torch.chunk` does."""
    rows = tensor.shape[0]
    first, count = 0, rows
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0 or count != rows:
                raise DataError(
                    f"a tensor is sharded as {tensor.placements}, but checkpoints store only rows over one dimension"
                )
            coordinate = tensor.device_mesh.get_local_rank(dimension)
            size = -(-rows // tensor.device_mesh.size(dimension))
            first = min(rows, coordinate * size)
            count = min(rows, first + size) - first
    return first, count


def in_rows(tensor: torch.Tensor) -> bool:
    """Return whether a rank's part is a range of rows; tensor parallelism also splits columns, or rows twice."""
    parts = [each for each in getattr(tensor, "placements", ()) if not each.is_replicate()]
    return all(each == Shard(0) for each in parts) and len(parts) <= 1


def as_part(local: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return the tensor of which `local` is this rank's part, sharded as `like` is."""
    shared: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return shared


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of `whole`, sharded as `like` is: over the last dimension of the mesh first."""
    part, mesh = whole, like.device_mesh
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = like.placements[dimension]
        if not placement.is_replicate():
            parts = part.chunk(mesh.size(dimension), placement.dim)
            place = mesh.get_local_rank(dimension)
            part = parts[place] if place < len(parts) else part.narrow(placement.dim, 0, 0)
    return part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole


def _is_first_copy(tensor: DTensor) -> bool:
    """Return whether this rank is the first of those with the same rows (hybrid sharding)."""
    return all(
        tensor.device_mesh.get_local_rank(dimension) == 0
        for dimension, placement in enumerate(tensor.placements)
        if not isinstance(placement, Shard)
    )


def _owners(tensors: Tensors, world_size: int) -> dict[str, int]:
    """Return which rank stores which tensor: the largest first, each on the least loaded rank; equal on all ranks."""
    load = [0] * world_size
    owners = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owner = load.index(min(load))
        load[owner] += tensors[name].nbytes
        owners[name] = owner
    return owners


def header(pieces: Pieces) -> dict[str, str]:
    """Return the safetensors header of a file of these pieces."""
    partial = {
        name: [piece.first, list(piece.shape)]
        for name, piece in pieces.items()
        if tuple(piece.tensor.shape) != piece.shape
    }
    # A file without tensors can only be read if its header is not empty.
    return {"format": "pt", **({PIECES: json.dumps(partial)} if partial else {})}


@dataclass(frozen=True, slots=True)
class _Segment:
    file: Any
    path: Path
    first: int
    rows: int


class Shards:
    """The tensors of a set of files, whole again, for any number of writers. Made by `open_shards`."""

    def __init__(self, files: Sequence[tuple[Path, Any]]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._segments: dict[str, list[_Segment]] = {}
        for path, file in files:
            partial = _partial(path, file)
            for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
                held = tuple(file.get_slice(name).get_shape())
                first, shape = partial.get(name, (0, held))
                if self.shapes.setdefault(name, shape) != shape or held[1:] != shape[1:]:
                    raise DataError(f"{path}: tensor {name!r} has the shape {shape}, but not in another file")
                rows = held[0] if held else 1
                self._segments.setdefault(name, []).append(_Segment(file, path, first, rows))
        for name, segments in self._segments.items():
            segments.sort(key=lambda segment: segment.first)
            ends = [segment.first + segment.rows for segment in segments]
            shape = self.shapes[name]
            if [segment.first for segment in segments] != [0, *ends[:-1]] or ends[-1] != (shape[0] if shape else 1):
                raise DataError(f"{segments[0].path.parent}: rows of the tensor {name!r} are missing or duplicate")

    def read(self, name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """Return `rows` rows of a tensor from `first` on, by default all of it, as a new tensor."""
        shape = self.shapes[name]
        if not shape:
            (segment,) = self._segments[name]
            tensor: torch.Tensor = segment.file.get_tensor(name)
            return tensor
        end = shape[0] if rows is None else first + rows
        parts = []
        for segment in self._segments[name]:
            begin, stop = max(first, segment.first), min(end, segment.first + segment.rows)
            if begin < stop:
                parts.append(segment.file.get_slice(name)[begin - segment.first : stop - segment.first])
        if not parts:
            empty: torch.Tensor = self._segments[name][0].file.get_slice(name)[:0]
            return empty
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_like(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is sharded as `like` is."""
        if not isinstance(like, DTensor):
            return self.read(name).to(like.device)
        if in_rows(like):
            local = self.read(name, *local_rows(like)).to(like.device)
        else:
            local = local_part(self.read(name), like).to(like.device)
        return as_part(local, like)

    def check(self, like: Tensors) -> None:
        """Compare names and shapes with a model's. Raises DataError naming the first tensor that differs."""
        where = next(iter(self._segments.values()))[0].path.parent if self._segments else "the checkpoint"
        for name in sorted({*self.shapes, *like}):
            found, wanted = self.shapes.get(name), tuple(like[name].shape) if name in like else None
            if found != wanted:
                raise DataError(f"{where}: tensor {name!r} has the shape {found}, but {wanted} in the model")


@contextmanager
def open_shards(files: Sequence[Path]) -> Iterator[Shards]:
    """Open the tensors of safetensors files, memory-mapped.

    Raises DataError naming a file that cannot be read, and when the files are not one set.
    """
    with ExitStack() as stack:
        handles = []
        for path in files:
            try:
                opening: Any = safe_open(path, framework="pt")
                handles.append((path, stack.enter_context(opening)))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path}: cannot be read ({error})") from error
        yield Shards(handles)


def _partial(path: Path, file: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    try:
        said = json.loads((file.metadata() or {}).get(PIECES, "{}"))
        return {name: (int(first), tuple(int(size) for size in shape)) for name, (first, shape) in said.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: the header entry of its pieces cannot be read ({error})") from None
