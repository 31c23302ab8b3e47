"""Checkpoints that are complete or invisible, and never code.

    checkpoints/step_00000120/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/best/step_00000080/   model.safetensors  manifest.json

A checkpoint is built in a hidden `.tmp` sibling, its manifest (size and sha256 of every file) last; one rename makes
it visible. The one before is deleted only after the new one was read back and agreed with its manifest. What a crash
leaves is a `.tmp`, which the next start removes; what a disk corrupts is found by its sha256, set aside as `*.torn` and
named. Tensors are safetensors, the rest is JSON: nothing here can run code when it is read. Price of a save: the bytes
written once and read twice, from the page cache.
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
from safetensors.torch import load_file, save_file

from torchlake import durable
from torchlake.errors import DataError, StorageError, TorchlakeError
from torchlake.failpoints import failpoint

log = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

FOLDER = "checkpoints"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
BEST = "best"
TORN = ".torn"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, verified."""

    path: Path
    state: dict[str, Any]
    "What the training loop stored beside its tensors; `step` at least."


def save(folder: Path, *, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], keep: int) -> Path:
    """Write checkpoint `state["step"]` into `folder`, verify it, then delete all but the newest `keep`.

    `state["best"]`, where it is not None, names the best model's step: best models that no kept checkpoint names are
    deleted too. Raises StorageError when the disk is full or fails; the checkpoints before are untouched then.
    """
    path = folder / _name(state["step"])
    with _publishing(path, "checkpoint") as building:
        _write_tensors(building / MODEL, model, "checkpoint.model")
        _write_tensors(building / OPTIMIZER, optimizer, "checkpoint.optimizer")
        durable.write_json(building / STATE, dict(state), site="checkpoint.state")
    try:
        _prune(folder, keep)
    except OSError as error:
        raise durable.storage_error(error, folder) from error
    return path


def save_best(folder: Path, step: int, model: Tensors, **fields: Any) -> Path:
    """Write the model alone as `folder`/best/step_N; `fields` go into its manifest. Raises as `save` does."""
    path = folder / BEST / _name(step)
    with _publishing(path, "best", **fields) as building:
        _write_tensors(building / MODEL, model, "best.model")
    return path


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


def load_tensors(path: Path, like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; where `like` is given, their names and shapes must be those.

    Raises DataError naming the file and the first tensor that differs.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if like is None:
        return tensors
    for name in sorted({*tensors, *like}):
        found, wanted = (tuple(each[name].shape) if name in each else None for each in (tensors, like))
        if found != wanted:
            raise DataError(f"{path}: tensor {name!r} has the shape {found}, the model wants {wanted}")
    return tensors


def load_best(folder: Path, step: int, like: Tensors) -> dict[str, torch.Tensor]:
    """The best model's tensors, verified. Raises DataError naming the file that is missing or corrupt."""
    path = folder / BEST / _name(step)
    durable.check_manifest(path)
    return load_tensors(path / MODEL, like)


def untied(state: Tensors) -> dict[str, torch.Tensor]:
    """`state` without the tensors that share all their memory with an earlier one: tied weights are stored once."""
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        kept.setdefault((tensor.data_ptr() or id(tensor), tuple(tensor.shape)), name)
    return {name: state[name] for name in kept.values()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as "<parameter>|<field>"; `names` are its parameters', in the order of its groups."""
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}|{field}": tensor for index, fields in state.items() for field, tensor in fields.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Tensors) -> None:
    """Put back what `optimizer_tensors` gave."""
    index = {name: position for position, name in enumerate(names)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("|")
        if name not in index:
            raise DataError(f"{OPTIMIZER}: the model has no parameter {name!r}")
        state.setdefault(index[name], {})[field] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@contextmanager
def _publishing(path: Path, site: str, **fields: Any) -> Iterator[Path]:
    """Build a folder in a hidden sibling; on a clean exit write its manifest, rename it into place and verify it."""
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        durable.remove([building])
        building.mkdir(parents=True)
        yield building
        durable.write_manifest(building, site=f"{site}.manifest", **fields)
        failpoint(f"{site}.rename")
        # Only a step that is trained a second time finds its own name taken, by equal content.
        durable.remove([path])
        os.rename(building, path)
        durable.sync_folder(path.parent)
        failpoint(f"{site}.verify")
        _read_back(path)
    except OSError as error:
        raise durable.storage_error(error, path) from error
    finally:
        durable.remove([building])


def _read_back(path: Path) -> None:
    try:
        durable.check_manifest(path)
    except DataError as error:
        raise StorageError(f"just written, and read back otherwise: {error}. The disk is failing.") from error


def _write_tensors(path: Path, tensors: Tensors, site: str) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        failpoint(f"{site}.write")
        save_file(plain, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in plain.values())
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise durable.storage_error(cause, path, needed) from error
    failpoint(f"{site}.done")


def _prune(folder: Path, keep: int) -> None:
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


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir() and not path.name.endswith(TORN))


def _name(step: int) -> str:
    return f"step_{step:08d}"
