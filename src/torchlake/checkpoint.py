"""Checkpoints that are complete or invisible, and never code.

    checkpoints/step_00000120/   model*.safetensors  optimizer*.safetensors  state.json  manifest.json
    checkpoints/best/step_00000080/   model*.safetensors  manifest.json

Every rank writes its own file of each kind (`sharding.py`), into a hidden `.tmp` sibling that they share, and notes its
size and sha256 beside it. When all have, rank 0 writes the manifest of all files, and one rename makes the checkpoint
visible. The one before is deleted only after the new one was read back and agreed with its manifest. What a crash
leaves is a `.tmp`, which the next start removes; what a disk corrupts is found by its sha256, set aside as `*.torn` and
named. Tensors are safetensors, the rest is JSON: nothing here can run code when it is read. Price of a save: the bytes
written once and read once, rank 0's twice, from the page cache. `checkpoint_writer.py` does it beside the training.
"""

import logging
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

from torchlake import durable, sharding
from torchlake.errors import DataError, StorageError, TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.sharding import Pieces, Shards, Tensors

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state.json"
BEST = "best"
TORN = ".torn"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, verified."""

    path: Path
    state: dict[str, Any]
    "What the training loop stored beside its tensors; `step` at least."


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint in the making, as one of its ranks sees it."""

    path: Path
    "Where it will be."
    site: str
    "What failpoints call it."
    attempt: str
    "Of two attempts at the same checkpoint, which; all ranks of one say the same."
    rank: int = 0
    world_size: int = 1

    @property
    def building(self) -> Path:
        """The hidden folder in which it is built."""
        return self.path.with_name(f".{self.path.name}.{self.attempt}.tmp")

    def note(self, rank: int) -> Path:
        """Where a rank notes the files that it wrote."""
        return self.building / f".rank_{rank:05d}.json"


def at_step(folder: Path, step: int, **who: Any) -> Draft:
    """The draft of checkpoint `step` in `folder`."""
    return Draft(path=folder / _name(step), site="checkpoint", **who)


def best_at_step(folder: Path, step: int, **who: Any) -> Draft:
    """The draft of the best model, that of `step`."""
    return Draft(path=folder / BEST / _name(step), site="best", **who)


def write_share(draft: Draft, kinds: Mapping[str, Pieces]) -> None:
    """Write this rank's pieces of each kind (model, optimizer) into the draft. Raises StorageError."""
    files = {}
    try:
        draft.building.mkdir(parents=True, exist_ok=True)
        for kind, pieces in kinds.items():
            path = draft.building / _file_name(kind, draft.rank, draft.world_size)
            _write_tensors(path, pieces, f"{draft.site}.{kind}")
            files[path.name] = durable.described(path)
    except OSError as error:
        raise durable.storage_error(error, draft.path) from error
    durable.write_json(draft.note(draft.rank), files, site=f"{draft.site}.note")


def publish(draft: Draft, *, state: Mapping[str, Any] | None = None, **fields: Any) -> Path:
    """Make a draft that all ranks have written to visible, and read it back; `fields` go into its manifest.

    Raises StorageError when the disk is full or fails; the checkpoints before are untouched then.
    """
    try:
        notes = [durable.read_json(draft.note(rank)) for rank in range(draft.world_size)]
        files = {name: file for note in notes for name, file in note.items()}
        mine = dict(notes[draft.rank])
        if state is not None:
            durable.write_json(draft.building / STATE, dict(state), site=f"{draft.site}.state")
            mine[STATE] = files[STATE] = durable.described(draft.building / STATE)
        durable.remove(draft.note(rank) for rank in range(draft.world_size))
        manifest = {**fields, "files": files}
        durable.write_json(draft.building / durable.MANIFEST, manifest, site=f"{draft.site}.manifest")
        failpoint(f"{draft.site}.rename")
        # Only a step that is trained a second time finds its own name taken, by equal content.
        durable.remove([draft.path])
        os.rename(draft.building, draft.path)
        durable.sync_folder(draft.path.parent)
        failpoint(f"{draft.site}.verify")
        _read_back(draft.path, files, mine)
    except OSError as error:
        raise durable.storage_error(error, draft.path) from error
    return draft.path


def abandon(draft: Draft) -> None:
    """Remove what was written of a draft."""
    durable.remove([draft.building])


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the best models that no kept one names. Raises StorageError."""
    try:
        complete = _complete(folder)
        old, kept = complete[:-keep], complete[-keep:]
        named = {_name(best["step"]) for path in kept if (best := durable.read_json(path / STATE)["best"]) is not None}
        old += [path for path in _complete(folder / BEST) if path.name not in named]
        for path in old:
            failpoint("checkpoint.prune")
            # A folder half deleted must not look like a torn checkpoint.
            leaving = path.with_name(f".{path.name}.old.tmp")
            os.replace(path, leaving)
            durable.remove([leaving])
    except OSError as error:
        raise durable.storage_error(error, folder) from error


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint in `folder`, verified, and a sentence about every one that was not.

    (None, []) when none was ever written. Those that fail are renamed `*.torn`. Raises DataError when there were
    checkpoints and all of them are corrupt: starting afresh would throw the run away unasked.
    """
    durable.remove([*folder.glob(".*.tmp"), *(folder / BEST).glob(".*.tmp")])
    problems: list[str] = []
    for path in reversed(_complete(folder)):
        try:
            durable.check_manifest(path)
            return Checkpoint(path=path, state=durable.read_json(path / STATE)), problems
        except (TorchlakeError, KeyError, TypeError, AttributeError) as error:  # a damaged manifest has any shape
            torn = path.with_name(path.name + TORN)
            durable.remove([torn])
            os.replace(path, torn)
            said = str(error) if isinstance(error, TorchlakeError) else f"{path / durable.MANIFEST}: is damaged"
            problems.append(f"{said}. Set aside as {torn.name}; an older checkpoint is used, if there is one.")
    if any(folder.glob(f"*{TORN}")):
        raise DataError(
            " ".join([*problems, f"{folder}: no checkpoint of this run is usable. Bring one back from a copy, or"])
            + f" delete the folder {folder.parent} to train from the beginning."
        )
    return None, problems


@contextmanager
def opened(path: Path, kind: str) -> Iterator[Shards]:
    """The tensors of a checkpoint of one kind, `MODEL` or `OPTIMIZER`, whoever wrote them. Raises DataError."""
    files = sorted(path.glob(f"{kind}*.safetensors"))
    if not files:
        raise DataError(f"{path}: holds no {kind}*.safetensors")
    with sharding.opened(files) as shards:
        yield shards


def best_path(folder: Path, step: int) -> Path:
    """The best model's folder, verified. Raises DataError naming the file that is missing or corrupt."""
    path = folder / BEST / _name(step)
    durable.check_manifest(path)
    return path


def step_path(folder: Path, step: int) -> Path:
    """The folder of checkpoint `step`."""
    return folder / _name(step)


def load_model(path: Path, like: Tensors) -> dict[str, torch.Tensor]:
    """A checkpoint's model, whole; names and shapes must be those of `like`. Raises DataError naming what differs."""
    with opened(path, MODEL) as shards:
        shards.check(like)
        return {name: shards.read(name) for name in like}


def untied(state: Tensors) -> dict[str, torch.Tensor]:
    """`state` without the tensors that share all their memory with an earlier one: tied weights are stored once."""
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        kept.setdefault((_address(tensor) or id(tensor), tuple(tensor.shape)), name)
    return {name: state[name] for name in kept.values()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as "<parameter>|<field>"; `names` are its parameters', in the order of its groups."""
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}|{field}": tensor for index, fields in state.items() for field, tensor in fields.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], stored: Shards) -> None:
    """Put back what `optimizer_tensors` gave, on this rank its part of it. Raises DataError for another model's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key in stored.shapes:
        name, _, field = key.rpartition("|")
        if name not in places:
            raise DataError(f"{OPTIMIZER}*.safetensors: the model has no parameter {name!r}")
        index = places[name]
        tensor = stored.read_like(key, parameters[index]) if stored.shapes[key] else stored.read(key)
        state.setdefault(index, {})[field] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def _read_back(path: Path, files: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise StorageError unless every file is there in its size, and this rank's own with their sha256."""
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"] or (name in mine and durable.described(file) != expected):
            raise StorageError(f"{file}: just written, and read back otherwise. The disk is failing.")


def _write_tensors(path: Path, pieces: Pieces, site: str) -> None:
    plain = {name: piece.tensor.detach().cpu().contiguous() for name, piece in pieces.items()}
    try:
        failpoint(f"{site}.write")
        save_file(plain, path, metadata=sharding.header(pieces))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in plain.values())
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise durable.storage_error(cause, path, needed) from error
    failpoint(f"{site}.done")


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir() and not path.name.endswith(TORN))


def _file_name(kind: str, rank: int, world_size: int) -> str:
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def _name(step: int) -> str:
    return f"step_{step:08d}"
