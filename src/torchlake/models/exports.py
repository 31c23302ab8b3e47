"""What a runtime made of a model once, an exported graph or a calibration, kept in the model's own folder.

    <model>/runtimes/<runtime>/{its files, manifest.json}

An export counts while its manifest is true: it names the hash of the weights it was made from, and the sha256 of every
file. A model that was trained again, a file that was touched or half written make it as good as absent. It is no part
of the model's own hash: the answers it gives differ, so it has an identity of its own, which goes into a scored table's
fingerprint.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from torchlake import atomic_io
from torchlake.errors import DataError, StorageError
from torchlake.failpoints import failpoint
from torchlake.models import folders
from torchlake.tables.output.staging import exchange

FOLDER = "runtimes"
FORMAT = 2
"Raised when a runtime would compute older exports otherwise than they were measured; those count as absent."


def current(folder: Path, name: str) -> Path | None:
    """The folder of the runtime's export of the model in `folder`; None where there is none of these very weights
    and of this format.

    Cost: one read of its files.
    """
    place = folder / FOLDER / name
    if not (place / atomic_io.MANIFEST).is_file():
        return None
    try:
        manifest = atomic_io.check_manifest(place)
    except DataError:
        return None
    if manifest.get("format") != FORMAT:
        return None
    return place if manifest.get("weights") == folders.model_hash(folder) else None


def identity(folder: Path, name: str) -> str | None:
    """The sha256 that stands for the bytes of the runtime's export; None where there is none."""
    place = folder / FOLDER / name / atomic_io.MANIFEST
    return atomic_io.fingerprint(atomic_io.read_json(place).get("files")) if place.is_file() else None


@contextmanager
def making(folder: Path, name: str, *, rows: int, versions: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder to write an export into; it takes the place of an older one, whole, when the block is left.

    `rows` is how many of the user's rows it was calibrated on, `versions` those of the libraries that made it. Of two
    processes that make the same one at once both finish, and the later one's stays. Raises StorageError.
    """
    parent = folder / FOLDER
    try:
        parent.mkdir(exist_ok=True)
        temporary, lock = _begin(parent, name)
    except OSError as error:
        raise StorageError(
            f"{parent}: {error.strerror}. The runtime {name!r} keeps what it makes of a model there: copy the model to "
            "a folder that can be written, and name that."
        ) from error
    try:
        yield temporary
        atomic_io.set_default_modes(path for path in temporary.rglob("*") if path.is_file())
        atomic_io.write_manifest(
            temporary,
            site="export",
            format=FORMAT,
            runtime=name,
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
    """An empty folder of this process, and the descriptor that holds its lock; folders of killed ones are removed."""
    entrance = os.open(parent, os.O_RDONLY)
    try:
        # Between making a folder and locking it, nobody may take it for an abandoned one.
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
    """Lock a folder; False where another process holds it, or the file system has no locks."""
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
    """Rename to the final name; after that, an older export stands under the temporary one."""
    older = temporary / "older"
    while not _renamed(temporary, place) and not exchange(temporary, place):
        # No exchange on this file system: between two renames there is a moment without an export.
        with suppress(FileNotFoundError):  # another process that makes the same was quicker
            os.rename(place, older)
            shutil.rmtree(older)
    atomic_io.sync_folder(place.parent)


def _renamed(temporary: Path, place: Path) -> bool:
    """Whether the folder could have the name; it cannot where a full one has it."""
    try:
        os.rename(temporary, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
