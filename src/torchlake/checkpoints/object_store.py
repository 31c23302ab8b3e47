"""Checkpoints below an fsspec URL: object stores, and other storage without an atomic rename.

    URL/run.json                                  the run they belong to, and the current writer (location.py)
    URL/step_00000120/manifest.json               written last: the checkpoint exists once it does
    URL/step_00000120/5f0c93d1/model-00000-of-00002.safetensors   optimizer-00000-of-00002.safetensors   state.json
    URL/best/step_00000080/...

A rank writes its files into a hidden folder of the run folder and uploads each from there. They are stored under the
name of the attempt, so uploads of a rank that was presumed dead never mix with its successor's. Deletion starts with
the manifest. To be read, a checkpoint is downloaded into the run folder, which all ranks reach, and verified against
its manifest. Cost: space for one checkpoint in the run folder; a read at start crosses the network twice if the run
folder is remote. After an upload only sizes are checked: the storage verifies what it receives.
"""

import json
import logging
import posixpath
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchlake import atomic_io
from torchlake.checkpoints.store import BEST, RUN, STATE, Draft, Files
from torchlake.errors import DataError, MissingExtra, StorageError, TableError, UsageError
from torchlake.failpoints import failpoint
from torchlake.redaction import USER, redacted
from torchlake.storage.urls import check_url, filesystem_of, missing_library

log = logging.getLogger(__name__)

PAUSES_S = (0.5, 3.0)
"Seconds before each retry; most fsspec file systems have already retried by then."
SET_ASIDE = f"{atomic_io.MANIFEST}.torn"
IN_CHECKPOINT = re.compile(rf"((?:{BEST}/)?step_\d+)/.+")

T = TypeVar("T")


class _NotFound(DataError):
    """A missing file."""


@dataclass(frozen=True)
class ObjectStore:
    """A folder below a URL; see FolderStore for its methods."""

    url: str = field(repr=False)
    "The URL, which may contain a password; `str` leaves it out."
    scratch: Path
    "A folder that all ranks reach, for uploads and downloads."
    external: bool = True

    def __str__(self) -> str:
        return str(redacted(self.url))

    def check(self) -> None:
        """Raise UsageError or MissingExtra for an unknown kind of storage, without connecting to it."""
        import fsspec

        try:
            fsspec.get_filesystem_class(check_url(self.url, to_write=True))
        except ImportError as error:
            raise MissingExtra(f"train.checkpoint_folder: {self}: {missing_library(self.url, error)}") from None
        except TableError as error:
            raise UsageError(f"train.checkpoint_folder: {error}") from None

    def path(self, name: str) -> Path:
        return self.scratch / name

    def upload(self, draft: Draft, files: Files) -> None:
        for name in [*files, draft.rank_manifest(draft.rank).name]:
            failpoint(f"{draft.site}.upload")
            self._put(draft.staging / name, f"{draft.name}/{draft.attempt}/{name}")
            atomic_io.remove([draft.staging / name])

    def rank_manifests(self, draft: Draft) -> list[dict[str, Any]]:
        return [self._json(_rank_manifest(draft, rank)) for rank in range(draft.world_size)]

    def commit(self, draft: Draft, manifest: dict[str, Any], mine: Files) -> None:
        if STATE in mine:
            self._put(draft.staging / STATE, f"{draft.name}/{draft.attempt}/{STATE}")
        # Before the manifest makes the checkpoint visible: sizes find uploads that a failing storage lost, and the
        # caller deletes older checkpoints afterwards.
        listed = {f"{draft.attempt}/{name}": expected for name, expected in manifest["files"].items()}
        failpoint(f"{draft.site}.verify")
        sizes = self._sizes()
        for name, expected in listed.items():
            size = sizes.get(f"{draft.name}/{name}")
            if size != expected["bytes"]:
                raise StorageError(
                    f"{self}/{draft.name}/{name}: {'is missing' if size is None else f'has {size:,} bytes'} right "
                    f"after {expected['bytes']:,} bytes were written. The storage is failing."
                )
        path = draft.staging / atomic_io.MANIFEST
        full = {**manifest, "attempt": draft.attempt, "files": listed}
        atomic_io.write_json(path, full, site=f"{draft.site}.manifest")
        failpoint(f"{draft.site}.rename")
        self._put(path, f"{draft.name}/{atomic_io.MANIFEST}")
        # Delete the ranks' manifests, and files of earlier attempts at this step. Not before the manifest, which may
        # replace one of an earlier attempt that lists these files and was visible until now.
        wanted = {f"{draft.name}/{name}" for name in (*listed, atomic_io.MANIFEST)}
        self._delete([name for name in sizes if name.startswith(f"{draft.name}/") and name not in wanted])
        atomic_io.remove([draft.staging])
        self.delete_fetched()  # every rank has written its shard, so it has finished reading

    def list_complete(self, within: str = "") -> list[str]:
        manifest = re.compile(posixpath.join(within, rf"step_\d+/{re.escape(atomic_io.MANIFEST)}"))
        return sorted(posixpath.dirname(name) for name in self._sizes() if manifest.fullmatch(name))

    def read_state(self, name: str) -> Any:
        manifest = self._json(f"{name}/{atomic_io.MANIFEST}")
        return self._json(f"{name}/{manifest['attempt']}/{STATE}")

    def delete(self, name: str) -> None:
        # The manifest goes first and alone: a crash in between must not leave a visible checkpoint without its files.
        self._delete([f"{name}/{atomic_io.MANIFEST}"])
        self._delete([one for one in self._sizes() if one.startswith(f"{name}/")])

    def remove_incomplete(self) -> None:
        atomic_io.remove([self.scratch])
        names = list(self._sizes())
        visible = {posixpath.dirname(name) for name in names if name.endswith(f"/{atomic_io.MANIFEST}")}
        kept = visible | {posixpath.dirname(name) for name in names if name.endswith(f"/{SET_ASIDE}")}
        found = [(match[1], name) for name in names if (match := IN_CHECKPOINT.fullmatch(name))]
        self._delete([name for checkpoint, name in found if checkpoint not in kept])

    def fetch(self, name: str, kind: str = "") -> Path:
        target, shown = self.scratch / "fetched" / name, f"{self}/{name}"
        atomic_io.remove([target])
        target.mkdir(parents=True)
        (target / atomic_io.MANIFEST).write_bytes(self._read(f"{name}/{atomic_io.MANIFEST}"))
        manifest = atomic_io.read_manifest(target, named=shown)
        wanted = [one for one in manifest["files"] if posixpath.basename(one).startswith(kind)]
        targets = [atomic_io.safe_join(target, one) for one in wanted]
        for path in targets:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._retry(
                name, lambda fs, path: fs.get([f"{path}/{one}" for one in wanted], [str(one) for one in targets])
            )
        except FileNotFoundError:
            log.debug("%s: some files are missing", shown)  # check_manifest names them
        atomic_io.check_manifest(target, kind=kind, named=shown)
        return atomic_io.safe_join(target, manifest["attempt"])

    def delete_fetched(self) -> None:
        atomic_io.remove([self.scratch / "fetched"])

    def set_aside(self, name: str) -> str:
        self._retry(name, lambda fs, path: fs.mv(f"{path}/{atomic_io.MANIFEST}", f"{path}/{SET_ASIDE}"))
        return f"{name}/{SET_ASIDE}"

    def has_corrupt(self) -> bool:
        return any(name.endswith(f"/{SET_ASIDE}") for name in self._sizes())

    def is_used(self) -> bool:
        return any(name != RUN for name in self._sizes())

    def read_json(self, name: str) -> Any:
        try:
            return self._json(name)
        except _NotFound:
            return None

    def write_json(self, name: str, value: Any, *, site: str) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        atomic_io.write_json(self.scratch / name, value, site=site)
        self._put(self.scratch / name, name)

    def _sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below the URL, by its name."""

        def found(fs: Any, path: str) -> dict[str, int]:
            top = path.rstrip("/")
            return {posixpath.relpath(one, top): int(info["size"]) for one, info in fs.find(top, detail=True).items()}

        try:
            return self._retry("", found)
        except FileNotFoundError:
            return {}

    def _json(self, name: str) -> Any:
        content = self._read(name)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self}/{name}: not valid JSON ({error})") from None

    def _read(self, name: str) -> bytes:
        try:
            content: bytes = self._retry(name, lambda fs, path: fs.cat_file(path))
            return content
        except FileNotFoundError:
            raise _NotFound(f"{self}/{name}: no such file") from None

    def _put(self, path: Path, name: str) -> None:
        try:
            self._retry(name, lambda fs, there: fs.put_file(str(path), there))
        except FileNotFoundError as error:
            raise self._failure(name, error) from None

    def _delete(self, names: list[str]) -> None:
        try:
            if names:
                self._retry("", lambda fs, path: fs.rm([f"{path}/{name}" for name in names]))
        except FileNotFoundError:
            log.debug("%s: some of %d files had already been deleted", self, len(names))

    def _retry(self, name: str, call: Callable[[Any, str], T]) -> T:
        """Return `call(file system, path)` for the file `name`, repeated after errors that may be transient.

        Raises FileNotFoundError, and StorageError naming URL and cause for all other errors.
        """
        for pause in PAUSES_S:
            try:
                return self._call(name, call)
            except StorageError as error:
                log.warning("%s Trying again.", str(error).splitlines()[0])
                time.sleep(pause)
        return self._call(name, call)

    def _call(self, name: str, call: Callable[[Any, str], T]) -> T:
        try:
            fs, root = filesystem_of(self.url)
            # fsspec caches listings in each process, but other ranks, in other processes, change the folder.
            fs.invalidate_cache()
            return call(fs, posixpath.join(root.rstrip("/"), name).rstrip("/"))
        except FileNotFoundError:
            raise
        except Exception as error:  # from any library
            raise self._failure(name, error) from None

    def _failure(self, name: str, error: Exception) -> StorageError:
        cause = self._without_secrets(error) or type(error).__name__
        return StorageError(
            f"{posixpath.join(str(self), name).rstrip('/')}: {cause}. "
            "Check that the storage can be reached and written to, and run the same command again: finished work is "
            "kept."
        )

    def _without_secrets(self, error: Exception) -> str:
        """Return the text of an error without the user and password of the URL."""
        text = str(error)
        if user := USER.match(self.url):
            for secret in (user[2], user[2].partition(":")[2] or user[2]):
                text = text.replace(secret, "[redacted]")
        return str(redacted(text))


def _rank_manifest(draft: Draft, rank: int) -> str:
    return f"{draft.name}/{draft.attempt}/{draft.rank_manifest(rank).name}"
