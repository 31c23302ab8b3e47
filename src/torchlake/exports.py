"""What a runtime made of a model once, an exported graph or a calibration, kept in the model's own folder.

    <model>/runtimes/<runtime>/{its files, manifest.json}

An export counts while its manifest is true: it names the hash of the weights it was made from, and the sha256 of every
file. A model that was trained again, a file that was touched or half written make it as good as absent. It is no part
of the model's own hash: the answers it gives differ, so it has an identity of its own, which goes into a scored table's
fingerprint.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torchlake import durable, model_folders
from torchlake.errors import DataError, StorageError
from torchlake.failpoints import failpoint

FOLDER = "runtimes"


def current(folder: Path, name: str) -> Path | None:
    """The folder of the runtime's export of the model in `folder`; None where there is none of these very weights.

    Price: one read of its files.
    """
    place = folder / FOLDER / name
    if not (place / durable.MANIFEST).is_file():
        return None
    try:
        manifest = durable.check_manifest(place)
    except DataError:
        return None
    return place if manifest.get("weights") == model_folders.model_hash(folder) else None


def identity(folder: Path, name: str) -> str | None:
    """The sha256 that stands for the bytes of the runtime's export; None where there is none."""
    place = folder / FOLDER / name / durable.MANIFEST
    return durable.fingerprint(durable.read_json(place).get("files")) if place.is_file() else None


@contextmanager
def making(folder: Path, name: str, *, rows: int, versions: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder to write an export into; it takes the place of an older one, whole, when the block is left.

    `rows` is how many of the user's rows it was calibrated on, `versions` those of the libraries that made it. Of two
    processes that make the same one at once both finish, and the later one's stays. Raises StorageError.
    """
    parent = folder / FOLDER
    try:
        parent.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent))
    except OSError as error:
        raise StorageError(
            f"{parent}: {error.strerror}. The runtime {name!r} keeps what it makes of a model there: copy the model to "
            "a folder that can be written, and name that."
        ) from error
    try:
        yield temporary
        durable.write_manifest(
            temporary,
            site="export",
            format=1,
            runtime=name,
            weights=model_folders.model_hash(folder),
            rows=rows,
            versions=dict(versions),
        )
        failpoint("export.rename")
        _put_in_place(temporary, parent / name)
    except OSError as error:
        raise durable.storage_error(error, parent / name) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, place: Path) -> None:
    while True:
        try:
            os.rename(temporary, place)
            break
        except OSError:
            # A folder cannot be renamed over a full one: move that away first, under a name that nobody reads.
            if not place.exists():
                raise
            older = Path(tempfile.mkdtemp(suffix=".tmp", dir=place.parent, prefix=".older."))
            try:
                os.rename(place, older / "export")
            except FileNotFoundError:
                pass  # another process that makes the same was quicker
            finally:
                shutil.rmtree(older, ignore_errors=True)
    durable.sync_folder(place.parent)
