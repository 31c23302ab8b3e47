"""Exports of a model by runtimes (a graph, a calibration), stored in the model folder.

    <model>/runtimes/<runtime>/{its files, manifest.json}

An export is valid while its manifest is: it has the hash of the weights that were exported, and the sha256 of every
file. After another training, or with a changed or incomplete file, the export counts as absent. It is not part of the
model's hash. It has a separate hash, because its predictions differ; the fingerprint of a scored table includes it.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from torchlake import atomic_io
from torchlake.errors import DataError, StorageError, UsageError, pip_install
from torchlake.failpoints import failpoint
from torchlake.models import folders
from torchlake.outputs.staging.folders import exchange
from torchlake.processes import hardware
from torchlake.runtimes import first_reason

FOLDER = "runtimes"
FORMAT = 2
"Increased when runtimes would compute older exports differently than measured; those then count as absent."

CLASSIFIES = "text_classification"
"The task of exports that do not name one."
MAX_WEIGHT_BYTES = 2_000_000_000
"An ONNX file is a protocol buffer, which is limited to 2 GiB."


def current(folder: Path, name: str, task: str = CLASSIFIES) -> Path | None:
    """Return the folder of the runtime's export of the model in `folder`; None if there is no export of these weights,
    this task and this format.

    Cost: one read of its files.
    """
    place = folder / FOLDER / name
    if not (place / atomic_io.MANIFEST).is_file():
        return None
    try:
        manifest = atomic_io.check_manifest(place)
    except DataError:
        return None
    if manifest.get("format") != FORMAT or manifest.get("task", CLASSIFIES) != task:
        return None
    return place if manifest.get("weights") == folders.model_hash(folder) else None


def identity(folder: Path, name: str) -> str | None:
    """Return the sha256 over the runtime's export, or None if there is none."""
    place = folder / FOLDER / name / atomic_io.MANIFEST
    return atomic_io.digest(atomic_io.read_json(place).get("files")) if place.is_file() else None


@contextmanager
def making(
    folder: Path, name: str, *, rows: int, versions: Mapping[str, str], task: str = CLASSIFIES
) -> Iterator[Path]:
    """Yield an empty folder for an export, which atomically replaces an older one when the block ends.

    `rows` is the number of the user's rows that it was calibrated on, `versions` are those of the libraries. If two
    processes write the same export at once, both finish and the later one stays. Raises StorageError.
    """
    parent = folder / FOLDER
    try:
        parent.mkdir(exist_ok=True)
        temporary, lock = _begin(parent, name)
    except OSError as error:
        raise StorageError(
            f"{parent}: {error.strerror}. The runtime {name!r} stores its export of the model there: copy the model "
            "to a folder that you can write to, and use the copy."
        ) from error
    try:
        yield temporary
        atomic_io.set_default_modes(path for path in temporary.rglob("*") if path.is_file())
        atomic_io.write_manifest(
            temporary,
            site="export",
            format=FORMAT,
            runtime=name,
            task=task,
            weights=folders.model_hash(folder),
            rows=rows,
            versions=dict(versions),
        )
        failpoint("export.rename")
        _put_in_place(temporary, parent / name)
    except OSError as error:
        raise atomic_io.storage_error(error, parent / name) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _begin(parent: Path, name: str) -> tuple[Path, int]:
    """Return a new locked folder and the descriptor of its lock. Remove the folders of killed processes."""
    entrance = os.open(parent, os.O_RDONLY)
    try:
        # Until the folder is locked, another process would consider it abandoned.
        locks = _lock(entrance, wait=True)
        for left in parent.glob(f".{name}.*.tmp"):
            if locks and _is_abandoned(left):
                atomic_io.remove([left])
        temporary = parent / f".{name}.{uuid4().hex[:12]}.tmp"
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY)
        _lock(descriptor)
        return temporary, descriptor
    finally:
        os.close(entrance)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock a folder. Returns False if another process has locked it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, place: Path) -> None:
    """Rename to the final name; an older export then has the temporary name."""
    older = temporary / "older"
    while not _renamed(temporary, place) and not exchange(temporary, place):
        # This file system cannot exchange names: between the two renames there is no export.
        with suppress(FileNotFoundError):  # another process has just written the same export
            os.rename(place, older)
            shutil.rmtree(older)
    atomic_io.sync_folder(place.parent)


def _renamed(temporary: Path, place: Path) -> bool:
    """Rename the folder. Returns False if a folder with content has that name."""
    try:
        os.rename(temporary, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def refusal(folder: Path, *, extra: str, libraries: tuple[str, ...], quantized: bool = False) -> str | None:
    """Return why the model cannot be exported, or its export (`quantized`: in 8 bits) not run here, or None."""
    size = folders.weight_bytes(folder)
    missing = next((library for library in libraries if find_spec(library) is None), None)
    return first_reason(
        model=f"its weights take {size / 1e9:.1f} GB, but an ONNX file holds 2 GB: use 'varlen' or 'eager'"
        if size > MAX_WEIGHT_BYTES
        else None,
        machine=hardware.int8_refusal() if quantized else None,
        library=missing and f"the library {missing!r} is not installed: {pip_install(f'torchlake[{extra}]')}",
    )


def export_folder(folder: Path, name: str, *, calibrated: bool, task: str) -> Path:
    """Return the folder of the runtime's export. Raises UsageError if there is none for these weights."""
    export = current(folder, name, task)
    if export is None:
        why = ", calibrated on rows like those to score" if calibrated else ""
        raise UsageError(
            f"{folder}: there is no export of these weights for the runtime {name!r}. Make one{why}: "
            f"torchlake optimize {folder} --sample TABLE"
        )
    return export


def versions(*libraries: str) -> dict[str, str]:
    """Return the versions of these libraries, torch and transformers."""
    return {library: version(library) for library in (*libraries, "torch", "transformers")}
