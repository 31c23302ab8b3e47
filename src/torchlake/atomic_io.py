"""Write files atomically and durably (temporary file, fsync, rename, fsync of the folder); manifests with sha256.

As in databases, the bytes reach the disk before the name, and the name before anything that refers to it. Readers never
see a partial file; a crash leaves at most a `*.tmp`, which the next run removes. Temporary names are random, because
process ids repeat on other machines and in containers.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchlake.errors import DataError, StorageError, UnsafeError
from torchlake.failpoints import failpoint

MANIFEST = "manifest.json"
WRONG_PATH = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP})
"Errors that more disk space does not fix."


def temporary_path(path: Path) -> Path:
    """Return a unique hidden name beside `path`, for a file or folder that is renamed to `path` when complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def stale_temporaries(path: Path) -> list[Path]:
    """Return the temporary files and folders that killed writers of `path` left behind."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.tmp")
    return [one for one in path.parent.glob(".*.tmp") if ours.fullmatch(one.name)]


def write_bytes(path: Path, content: bytes, *, site: str) -> None:
    """Write `content` to `path` atomically and durably; `site` is the prefix of the failpoints.

    Raises StorageError, with the free space, when the disk is full or the folder was removed.
    """
    _write(path, content, os.replace, site=site)


def write_new_bytes(path: Path, content: bytes, *, site: str) -> bool:
    """Write as `write_bytes` does, but if the file exists, write nothing and return False.

    On a file system without hard links, a file that is created at the same moment is replaced.
    """
    try:
        _write(path, content, _link, site=site)
    except FileExistsError:
        return False
    return True


def move_into_place(building: Path, path: Path, *, site: str) -> None:
    """Rename a complete temporary file of `temporary_path(path)` to `path`, durably. Raises OSError."""
    # The caller may have written the file without a sync. Without it a power failure after the rename can leave an
    # empty file under the final name.
    with open(building, "rb") as file:
        os.fsync(file.fileno())
    failpoint(f"{site}.rename")
    os.replace(building, path)
    sync_folder(path.parent)
    failpoint(f"{site}.done")


def _write(path: Path, content: bytes, rename: Callable[[Path, Path], None], *, site: str) -> None:
    """Write a temporary file and `rename` it to `path`. Raises FileExistsError if `rename` does."""
    building = temporary_path(path)
    try:
        failpoint(f"{site}.write")
        with open(building, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the content before the name: a reader that finds the name finds all bytes
        failpoint(f"{site}.rename")
        rename(building, path)
        sync_folder(path.parent)  # before the caller refers to the file, for example in a commit record
    except FileExistsError:  # not a fault of the storage: another writer was first
        raise
    except OSError as error:
        raise storage_error(error, path, needed=len(content)) from error
    finally:
        building.unlink(missing_ok=True)
    failpoint(f"{site}.done")


def _link(building: Path, path: Path) -> None:
    """Rename the file. Raises FileExistsError if the new name exists."""
    # Of several writers exactly one succeeds: link(2) fails if the name exists, while rename(2) would replace the file.
    try:
        os.link(building, path)
    except FileExistsError:
        raise
    except OSError as error:
        # The file system has no hard links (some network and FUSE file systems). The check narrows the race but does
        # not close it, so callers' contents must be such that either writer's file is valid.
        if path.exists():
            raise FileExistsError(path) from error
        os.replace(building, path)


def make_private_folder(path: Path) -> None:
    """Create a folder in a shared one, such as /tmp, that only this user can read and write.

    Raises StorageError if a link or another user's folder has its name: its owner could read what is stored there, or
    put other files in its place.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StorageError(
            f"{path}: is not a folder of this user, so nothing is stored in it. Remove it, or set TMPDIR to a folder "
            "of your own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:  # an earlier version made it with the permissions of the umask
        path.chmod(0o700)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    # Each new folder is a name in its parent; without a sync there, a power failure can lose the folder with all that
    # was written durably inside it.
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def write_json(path: Path, value: Any, *, site: str) -> None:
    """Write `value` as indented JSON, atomically and durably; see `write_bytes`."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), site=site)


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`. Raises DataError when the file is missing, damaged or nested too deeply."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json(content, path)


def parse_json(content: bytes, place: str | Path) -> Any:
    """Return the JSON value of the file at `place`. Raises DataError when it is damaged or nested too deeply."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON ({error})") from None


def set_default_modes(files: Iterable[Path]) -> None:
    """Give files of one folder the mode of a newly created file: safetensors creates files for the owner only.

    The mode is taken from a probe file, because reading the umask would change it for the whole process.
    """
    mode: int | None = None
    for file in files:
        if mode is None:
            probe = temporary_path(file)
            with open(probe, "xb") as created:
                mode = stat.S_IMODE(os.fstat(created.fileno()).st_mode)
            probe.unlink()
        if stat.S_IMODE(file.stat().st_mode) != mode:
            file.chmod(mode)


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, which makes the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def error_number(error: Exception) -> int | None:
    """Return the operating system's number of an error; libraries in Rust have it in their message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


def storage_error(error: Exception, path: Path, needed: int | None = None) -> StorageError:
    """Return an error with the path, the cause, the bytes needed and free, and what to do."""
    again = "run the same command again: finished work is kept."
    reason = getattr(error, "strerror", None) or error
    if error_number(error) in WRONG_PATH:
        return StorageError(f"{path}: {reason}. Name another folder, or make this one writable, and {again}")
    existing = next((parent for parent in [path, *path.parents] if os.path.exists(parent)), Path("/"))
    free = shutil.disk_usage(existing).free
    size = "" if needed is None else f" {needed:,} bytes were to be written,"
    return StorageError(
        f"{path}: {reason};{size} {free:,} bytes are free there. Make room (or restore the folder) and {again}"
    )


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_and_sha256(path: Path) -> dict[str, Any]:
    """Return a file's entry in a manifest."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def write_manifest(folder: Path, *, site: str, without: Sequence[str] = (), **fields: Any) -> dict[str, Any]:
    """Record the size and sha256 of every file under `folder`, except those named in `without`, in its `manifest.json`,
    written last; return it."""
    files = {
        path.relative_to(folder).as_posix(): size_and_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, *without) and not path.name.endswith(".tmp")
    }
    manifest = {**fields, "files": files}
    write_json(folder / MANIFEST, manifest, site=site)
    return manifest


def read_manifest(folder: Path, *, named: str | None = None) -> dict[str, Any]:
    """Return the manifest of `folder`, called `named` in messages. Raises DataError when it is missing or damaged."""
    manifest = read_json(folder / MANIFEST)
    path = f"{named or folder}/{MANIFEST}"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise DataError(f"{path}: not a manifest")
    for name, expected in manifest["files"].items():
        if not isinstance(expected, dict) or not expected.keys() >= {"bytes", "sha256"}:
            raise DataError(f"{path}: is damaged: it has no size and sha256 of {name!r}")
    return manifest


def check_manifest(
    folder: Path, *, kind: str = "", named: str | None = None, hashed: Callable[[Path], str] = sha256_file
) -> dict[str, Any]:
    """Check the files of `folder` whose names begin with `kind` against its manifest; return the manifest.

    Raises DataError naming the first file that is missing or differs in size or sha256; `folder` is called `named`.
    """
    manifest = read_manifest(folder, named=named)
    for name, expected in manifest["files"].items():
        if not Path(name).name.startswith(kind):
            continue
        path, shown = safe_join(folder, name), f"{named or folder}/{name}"
        if not path.is_file():
            raise DataError(f"{shown}: missing, but listed in {MANIFEST}")
        if path.stat().st_size != expected["bytes"]:
            raise DataError(f"{shown}: {path.stat().st_size:,} bytes, but {expected['bytes']:,} in {MANIFEST}")
        if hashed(path) != expected["sha256"]:
            raise DataError(f"{shown}: its sha256 differs from that in {MANIFEST}; the file is corrupt or was edited")
    return manifest


def safe_join(folder: Path, name: str) -> Path:
    """Return `folder / name`. Raises UnsafeError for a name that leads out of the folder."""
    path = folder / name
    if os.path.isabs(name) or ".." in Path(name).parts or not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeError(f"{folder}: the name {name!r} leads out of the folder; refused")
    return path


def digest(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def remove(paths: Iterable[Path]) -> None:
    """Delete files and folders, if they exist."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
