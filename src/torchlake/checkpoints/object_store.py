"""Checkpoints below a URL, where nothing can be renamed: one conditional write makes a checkpoint visible.

    URL/run.json    the run they belong to, its writer, and the manifests of all visible checkpoints
    URL/step_00000120/5f0c93d1/model-00000-of-00002.safetensors   optimizer-...   state.json   manifest.json
    URL/best/step_00000080/...

A rank writes its files into a hidden folder of the run folder and uploads each from there, below the name of its launch
(the attempt). So no launch replaces a file of another one, and run.json alone decides which files are a checkpoint.

The last launch that started is the writer (`location.py`). Each change of run.json (claim, publish, delete, set aside)
replaces exactly the version that was read, and is made only if that version names this launch. So a launch that was
taken over, and suspended at any place before, can publish nothing. It can delete nothing of its successor either: the
files are listed first, then run.json shows that this launch was still the writer, then only listed files are deleted,
and the successor's files did not exist when they were listed. A checkpoint leaves run.json before its files go.

A store of the version before has no list in run.json, and its manifests are at `step_00000120/manifest.json` (visible)
or `manifest.json.torn` (corrupt). The first claim lists them. The identity of the run is in another field since then,
so that the version before refuses the store instead of removing what it does not see.

To be read, a checkpoint is downloaded into the run folder, which all ranks reach, and verified against its manifest.
Cost: space for one checkpoint in the run folder; a read at start crosses the network twice if the run folder is remote.
After an upload only sizes are checked: the storage verifies what it receives.
"""

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.checkpoints.store import BEST, RUN, STATE, Draft, Files, Owner, check_owner
from torchlake.errors import DataError, MissingExtra, StorageError, TableError, UsageError
from torchlake.failpoints import failpoint
from torchlake.redaction import redacted
from torchlake.storage.folders import Objects, objects_at

LISTED, CORRUPT = "checkpoints", "corrupt"
"Fields of run.json: the manifests of visible checkpoints, and of those that were set aside, by name."
IN_CHECKPOINT = re.compile(rf"(?P<name>(?:{BEST}/)?step_\d+)/(?P<file>.+)")
LISTED_BEFORE = {atomic_io.MANIFEST: LISTED, f"{atomic_io.MANIFEST}.torn": CORRUPT}
"What the version before meant by a file of this name in a checkpoint's folder."

Lists = dict[str, dict[str, str]]


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

    @property
    def objects(self) -> Objects:
        """Its files. Raises TableError or MissingExtra for a storage that cannot be opened."""
        return objects_at(self.url)

    def check(self) -> None:
        """Raise UsageError or MissingExtra for an unknown kind of storage, without connecting to it."""
        try:
            self.objects.check()
        except MissingExtra as error:
            raise MissingExtra(f"train.checkpoint_folder: {error}") from None
        except TableError as error:
            raise UsageError(f"train.checkpoint_folder: {error}") from None

    def path(self, name: str) -> Path:
        return self.scratch / name

    def upload(self, draft: Draft, files: Files) -> None:
        for name in [*files, draft.rank_manifest(draft.rank).name]:
            failpoint(f"{draft.site}.upload")
            self.objects.put_file(f"{draft.name}/{draft.attempt}/{name}", draft.staging / name)
            atomic_io.remove([draft.staging / name])

    def rank_manifests(self, draft: Draft) -> list[dict[str, Any]]:
        folder = f"{draft.name}/{draft.attempt}"
        return [self.read_json(f"{folder}/{draft.rank_manifest(rank).name}") for rank in range(draft.world_size)]

    def commit(self, draft: Draft, manifest: dict[str, Any], mine: Files) -> None:
        if STATE in mine:
            self.objects.put_file(f"{draft.name}/{draft.attempt}/{STATE}", draft.staging / STATE)
        # Before the checkpoint becomes visible: sizes find uploads that a failing storage lost, and the caller deletes
        # older checkpoints afterwards.
        files = {f"{draft.attempt}/{name}": expected for name, expected in manifest["files"].items()}
        failpoint(f"{draft.site}.verify")
        sizes = self.objects.sizes(draft.name)
        for name, expected in files.items():
            size = sizes.get(f"{draft.name}/{name}")
            if size != expected["bytes"]:
                raise StorageError(
                    f"{self}/{draft.name}/{name}: {'is missing' if size is None else f'has {size:,} bytes'} right "
                    f"after {expected['bytes']:,} bytes were written. The storage is failing."
                )
        path = f"{draft.name}/{draft.attempt}/{atomic_io.MANIFEST}"
        self.objects.write(
            path, _encoded({**manifest, "attempt": draft.attempt, "files": files}), site=f"{draft.site}.manifest"
        )
        failpoint(f"{draft.site}.rename")

        def publish(listed: Lists) -> None:
            listed[LISTED][draft.name] = path
            listed[CORRUPT].pop(draft.name, None)

        self._change(draft.attempt, publish, site=f"{draft.site}.publish")
        # The ranks' manifests, and files of earlier attempts at this step. Not before run.json, which may have listed
        # those files until now.
        wanted = {path, *(f"{draft.name}/{name}" for name in files)}
        self.objects.delete([name for name in sizes if name not in wanted])
        atomic_io.remove([draft.staging])
        self.delete_fetched()  # every rank has written its shard, so it has finished reading

    def list_complete(self, within: str = "") -> list[str]:
        return sorted(name for name in self._lists()[LISTED] if posixpath.dirname(name) == within)

    def read_state(self, name: str) -> Any:
        return self.read_json(f"{name}/{self.read_manifest(name)['attempt']}/{STATE}")

    def read_manifest(self, name: str) -> Any:
        return self.read_json(self._manifest(name))

    def delete(self, name: str, attempt: str) -> None:
        sizes = self.objects.sizes(name)
        before = self._change(attempt, lambda listed: listed[LISTED].pop(name), site="checkpoint.unlist")
        # Not the whole folder of the step, into which other ranks of this launch may be uploading it again.
        folder = posixpath.dirname(before[LISTED][name])
        self.objects.delete([one for one in sizes if one.startswith(f"{folder}/")])

    def remove_incomplete(self, attempt: str) -> None:
        atomic_io.remove([self.scratch])
        sizes = self.objects.sizes()
        lists = self._lists(check_owner(self, attempt).found.content)  # after the listing; see the top
        kept = {posixpath.dirname(manifest) for listed in lists.values() for manifest in listed.values()}
        folders = {name: posixpath.dirname(name) for name in sizes if IN_CHECKPOINT.fullmatch(name)}
        # The manifests of the version before are one folder further up.
        self.objects.delete([name for name, at in folders.items() if not kept & {at, posixpath.dirname(at)}])

    def fetch(self, name: str, kind: str = "") -> Path:
        target, shown, manifest_name = self.scratch / "fetched" / name, f"{self}/{name}", self._manifest(name)
        try:
            atomic_io.remove([target])
            target.mkdir(parents=True)
            content = self._read(manifest_name)
            self._decoded(manifest_name, content)  # an error names the object, not the copy
            (target / atomic_io.MANIFEST).write_bytes(content)
            manifest = atomic_io.read_manifest(target, named=f"{self}/{posixpath.dirname(manifest_name)}")
            wanted = [one for one in manifest["files"] if posixpath.basename(one).startswith(kind)]
            for one, path in [(one, atomic_io.safe_join(target, one)) for one in wanted]:
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # check_manifest names it
                    self.objects.download(f"{name}/{one}", path)
        except OSError as error:  # of the run folder
            raise atomic_io.storage_error(error, target) from error
        atomic_io.check_manifest(target, kind=kind, named=shown)
        return atomic_io.safe_join(target, manifest["attempt"])

    def delete_fetched(self) -> None:
        atomic_io.remove([self.scratch / "fetched"])

    def set_aside(self, name: str, attempt: str) -> str:
        def move(listed: Lists) -> None:
            listed[CORRUPT][name] = listed[LISTED].pop(name)

        self._change(attempt, move, site="checkpoint.set_aside")
        return f"{CORRUPT} in {RUN}"

    def has_corrupt(self) -> bool:
        return bool(self._lists()[CORRUPT])

    def is_used(self) -> bool:
        return any(RUN not in name for name in self.objects.sizes())

    def read_owner(self) -> Owner | None:
        found = self.objects.read(RUN)
        if found is None:
            return None
        run = self._decoded(RUN, found.content)
        if not isinstance(run, dict):
            return Owner(None, None, found)
        return Owner(run.get("run", run.get("belongs")), run.get("attempt"), found)

    def write_owner(self, before: Owner | None, belongs: Mapping[str, Any], attempt: str) -> bool:
        found = None if before is None else before.found
        lists = {LISTED: {}, CORRUPT: {}} if found is None else self._lists(found.content)
        content = _encoded({"format": 2, "run": dict(belongs), "attempt": attempt, **lists})
        return self.objects.replace(RUN, content, found, site="checkpoint.claim")

    def read_json(self, name: str) -> Any:
        """Return the JSON value of a file. Raises DataError, StorageError."""
        return self._decoded(name, self._read(name))

    def _change(self, attempt: str, change: Callable[[Lists], object], *, site: str) -> Lists:
        """Change the lists in run.json; return them as they were. Raises LeaseLost unless `attempt` is the writer."""
        while True:
            owner = check_owner(self, attempt)
            before = self._lists(owner.found.content)
            after = {kind: dict(listed) for kind, listed in before.items()}
            change(after)
            content = _encoded({"format": 2, "run": owner.belongs, "attempt": attempt, **after})
            if self.objects.replace(RUN, content, owner.found, site=site):
                return before

    def _lists(self, content: bytes | None = None) -> Lists:
        """Return the lists in run.json; those of the version before, which has none, by its files."""
        if content is None:
            found = self.objects.read(RUN)
            content = b"{}" if found is None else found.content
        run = self._decoded(RUN, content)
        if isinstance(run, dict) and LISTED in run:
            return {LISTED: dict(run[LISTED]), CORRUPT: dict(run[CORRUPT])}
        lists: Lists = {LISTED: {}, CORRUPT: {}}
        for match in map(IN_CHECKPOINT.fullmatch, self.objects.sizes()):
            if match is not None and match["file"] in LISTED_BEFORE:
                lists[LISTED_BEFORE[match["file"]]][match["name"]] = match[0]
        return lists

    def _manifest(self, name: str) -> str:
        """Return the name of a visible checkpoint's manifest."""
        try:
            return self._lists()[LISTED][name]
        except KeyError:
            raise DataError(f"{self}/{name}: no such checkpoint") from None

    def _read(self, name: str) -> bytes:
        found = self.objects.read(name)
        if found is None:
            raise DataError(f"{self}/{name}: no such file")
        return found.content

    def _decoded(self, name: str, content: bytes) -> Any:
        return atomic_io.parse_json(content, f"{self}/{name}")


def _encoded(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
