"""Checkpoints that are complete or invisible, and contain no code.

Every rank writes one file of each kind, model and optimizer (`shards.py`), with its size and sha256. When all have,
rank 0 writes the manifest of all files and makes the checkpoint visible in its store, a folder (`store.py`) or a URL
(`object_store.py`). Only after that are older ones deleted (`retention.py`). Files that a crash leaves are not visible,
and the next start removes them; the sha256 detects disk corruption, and the checkpoint is set aside and reported.
Tensors are safetensors and the rest is JSON, so reading cannot run code. Cost of a save: the bytes written once and
read once, rank 0's twice, from the page cache. `async_writer.py` does it in the background.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from torchlake import atomic_io
from torchlake.checkpoints import shards as sharding
from torchlake.checkpoints.location import CheckpointStore
from torchlake.checkpoints.shards import Pieces, Shards, Tensors
from torchlake.checkpoints.store import BEST, STATE, Draft, check_owner, step_name
from torchlake.errors import DataError, StorageError, TorchlakeError, UnsafeError
from torchlake.failpoints import failpoint

MODEL = "model"
OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete, verified checkpoint."""

    path: Path
    "A local folder with its files."
    state: dict[str, Any]
    "The values that the training loop stored besides tensors; at least `step`."


def step_draft(store: CheckpointStore, step: int, **who: Any) -> Draft:
    """Return the draft of checkpoint `step` in `place`."""
    return Draft(store=store, name=step_name(step), site="checkpoint", **who)


def best_draft(store: CheckpointStore, step: int, **who: Any) -> Draft:
    """Return the draft of the best model, which is that of `step`."""
    return Draft(store=store, name=f"{BEST}/{step_name(step)}", site="best", **who)


def write_shard(draft: Draft, kinds: Mapping[str, Pieces]) -> None:
    """Write this rank's pieces of each kind (model, optimizer) into the draft. Raises StorageError."""
    files = {}
    try:
        draft.staging.mkdir(parents=True, exist_ok=True)
        for kind, pieces in kinds.items():
            path = draft.staging / _file_name(kind, draft.rank, draft.world_size)
            _write_tensors(path, pieces, f"{draft.site}.{kind}")
            files[path.name] = atomic_io.size_and_sha256(path)
    except OSError as error:
        raise atomic_io.storage_error(error, draft.path) from error
    atomic_io.write_json(draft.rank_manifest(draft.rank), files, site=f"{draft.site}.note")
    draft.store.upload(draft, files)


def publish(draft: Draft, *, state: Mapping[str, Any] | None = None, **fields: Any) -> None:
    """Verify a draft that all ranks have written, and make it visible; `fields` go into its manifest.

    Raises StorageError when the disk is full or fails, LeaseLost when another trainer has taken over the store; earlier
    checkpoints then stay as they are.
    """
    try:
        manifests = draft.store.rank_manifests(draft)
        files = {name: file for manifest in manifests for name, file in manifest.items()}
        mine = dict(manifests[draft.rank])
        if state is not None:
            atomic_io.write_json(draft.staging / STATE, dict(state), site=f"{draft.site}.state")
            mine[STATE] = files[STATE] = atomic_io.size_and_sha256(draft.staging / STATE)
        draft.store.commit(draft, {**fields, "files": files}, mine)
    except (OSError, DataError, StorageError) as error:
        check_owner(draft.store, draft.attempt)  # a successor may have removed what this launch wrote
        if isinstance(error, OSError):
            raise atomic_io.storage_error(error, draft.path) from error
        raise


def abandon(draft: Draft) -> None:
    """Remove the local files of a draft; the next start removes uploaded ones."""
    atomic_io.remove([draft.staging])


def newest(store: CheckpointStore, attempt: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint in `store`, verified, and a message for each one that was corrupt.

    Returns (None, []) when none was ever written. Corrupt ones are set aside. Raises DataError when all checkpoints are
    corrupt, instead of silently restarting from the beginning; StorageError when the store cannot be reached; LeaseLost
    when the launch `attempt` is no longer the writer.
    """
    store.remove_incomplete(attempt)
    problems: list[str] = []
    for name in reversed(store.list_complete()):
        try:
            path = store.fetch(name)
            return Checkpoint(path=path, state=atomic_io.read_json(path / STATE)), problems
        # A damaged manifest may contain anything.
        except (DataError, UnsafeError, KeyError, TypeError, AttributeError) as error:
            problem = (
                str(error) if isinstance(error, TorchlakeError) else f"{store}/{name}/{atomic_io.MANIFEST}: is damaged"
            )
            aside = store.set_aside(name, attempt)
            problems.append(f"{problem}. It was set aside as {aside}; an older checkpoint is used, if there is one.")
    if store.has_corrupt():
        raise DataError(
            " ".join([*problems, f"{store}: no checkpoint of this run is usable. Restore one from a copy, or"])
            + f" delete {store} to train from the beginning."
        )
    return None, problems


@contextmanager
def open_tensors(path: Path, kind: str) -> Iterator[Shards]:
    """Open a checkpoint's tensors of one kind, `MODEL` or `OPTIMIZER`. Raises DataError."""
    files = sorted(path.glob(f"{kind}*.safetensors"))
    if not files:
        raise DataError(f"{path}: has no {kind}*.safetensors")
    with sharding.open_shards(files) as shards:
        yield shards


def best_path(store: CheckpointStore, step: int) -> Path:
    """Return the folder of the best model of `step`, verified. Raises DataError naming a missing or corrupt file."""
    return store.fetch(f"{BEST}/{step_name(step)}", MODEL)


def step_path(store: CheckpointStore, step: int, kind: str = MODEL) -> Path:
    """Return the folder of checkpoint `step` with its tensors of a kind ("" for all), verified. Raises DataError."""
    return store.fetch(step_name(step), kind)


def load_model(path: Path, like: Tensors) -> dict[str, torch.Tensor]:
    """Return a checkpoint's whole model; names and shapes must match `like`. Raises DataError naming what differs."""
    with open_tensors(path, MODEL) as shards:
        shards.check(like)
        return {name: shards.read(name) for name in like}


def load_field(path: Path, field: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a field of a checkpoint's optimizer for the parameters that have it. Raises DataError."""
    with open_tensors(path, OPTIMIZER) as shards:
        return {name: shards.read(f"{name}|{field}") for name in names if f"{name}|{field}" in shards.shapes}


def load_into(path: Path, weights: Tensors) -> None:
    """Copy a checkpoint's model into tensors in main memory, one by one. Raises DataError naming what differs."""
    with open_tensors(path, MODEL) as shards:
        shards.check(weights)
        for name, tensor in weights.items():
            tensor.copy_(shards.read(name))


def untied(state: Tensors) -> dict[str, torch.Tensor]:
    """Return `state` without tensors that share all their memory with an earlier one: tied weights are stored once."""
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        kept.setdefault((_address(tensor) or id(tensor), tuple(tensor.shape)), name)
    return {name: state[name] for name in kept.values()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors as "<parameter>|<field>"; `names` are its parameters in its groups' order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors: dict[str, torch.Tensor] = {}
    shared: set[int] = set()
    for name, parameter in zip(names, parameters, strict=True):
        for field, value in optimizer.state.get(parameter, {}).items():
            if value is None:  # sgd without momentum
                continue
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            # bitsandbytes has one table of codes for all parameters, but a safetensors file stores each tensor once.
            tensors[f"{name}|{field}"] = tensor.clone() if id(tensor) in shared else tensor
            shared.add(id(tensor))
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], stored: Shards) -> None:
    """Load the tensors that `optimizer_tensors` returned, on each rank its part. Raises DataError for another model."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for key in stored.shapes:
        name, _, field = key.rpartition("|")
        if name not in indices:
            raise DataError(f"{OPTIMIZER}*.safetensors: the model has no parameter {name!r}")
        index = indices[name]
        tensor = stored.read_like(key, parameters[index]) if stored.shapes[key] else stored.read(key)
        # A count that is not a tensor in the optimizer is stored as a whole number.
        state.setdefault(index, {})[field] = tensor.item() if tensor.dtype is torch.int64 else tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def _write_tensors(path: Path, pieces: Pieces, site: str) -> None:
    plain = {name: piece.tensor.detach().cpu().contiguous() for name, piece in pieces.items()}
    try:
        failpoint(f"{site}.write")
        save_file(plain, path, metadata=sharding.header(pieces))
        atomic_io.set_default_modes([path])
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in plain.values())
        raise atomic_io.storage_error(error, path, needed) from error
    failpoint(f"{site}.done")


def _file_name(kind: str, rank: int, world_size: int) -> str:
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"
