"""Which parts of earlier writes a job keeps, and which of its chunks remain to be done.

A part that is published in a folder is checked by its size, so that an increment does not read what it keeps; a part
that an interrupted write left is read, because its writer may have been killed while it wrote it. To overwrite means to
check all of them by content, and to try failed rows again.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.outputs.compatibility import JobSpec
from torchlake.outputs.parts import Part, PartFolder, part_name, part_of_entry
from torchlake.outputs.records import parts_of
from torchlake.outputs.target import Target
from torchlake.outputs.transaction import Transaction
from torchlake.storage.folders import folder_at
from torchlake.storage.urls import is_url
from torchlake.tables.plan import Chunk, samples_of


def damage(target: Target, record: Mapping[str, Any], *, thorough: bool) -> str | None:
    """Return what is wrong with the first damaged part of a folder, by size or, if `thorough`, by sha256."""
    place = parts_of(target, record)
    sizes = _sizes(place)
    for part in record["parts"]:
        if sizes.get(part["name"]) != part["bytes"]:
            return f"{part['name']} is missing or truncated"
        if thorough and not _is_unchanged((place, part_of_entry(part))):
            return f"{part['name']} has changed since it was written"
    return None


def keep_sound_parts(write: Transaction, published: JobSpec | None) -> None:
    """Set `done` and `pending`: keep parts of the folder's last commit and sound ones of this write.

    Where a lock keeps other writers out, unsound parts are deleted. Elsewhere nothing is, because another writer may
    have taken over: a damaged part is replaced by its content.
    """
    folder, spread, thorough = write.parts, write.request.spread, write.request.allowed.overwrite
    expected = {part_name(write.plan, chunk, write.job.fingerprint): chunk for chunk in write.plan.chunks}
    if write.target.staged:
        _remove_orphans(write, expected)
    place, sizes, kept = "", dict[str, int](), list[Part]()
    if published is not None and published.record is not None:
        place = parts_of(write.target, published.record)
        sizes = _sizes(place)
        kept = _published_parts(write, published.record, expected, place, sizes)
    covered = {chunk for part in kept for chunk in part.all_chunks}
    if place != folder.location:  # all commits to a bucket have their parts in one folder, which is listed once
        sizes = _sizes(folder.location)
    samples = samples_of(write.job.fingerprint)
    staged = [
        (folder, name, chunk.index, chunk.rows * samples)
        for name, chunk in expected.items()
        if f"{folder.below}{name}" in sizes and chunk.index not in covered
    ]
    size = sum(sizes[f"{folder.below}{one[1]}"] for one in staged)
    found = spread(_read_staged, staged, size=size, name="check finished chunks")
    unsound = []
    for (_, name, *_), part in zip(staged, found, strict=True):
        # To overwrite is to try failed rows again, so their chunk must become pending. The file has to go, because the
        # first part of a name wins in `PartFolder.store`.
        if part is None or (thorough and part.failed and write.state.locks):
            unsound.append(f"{folder.below}{name}")
        else:
            kept.append(part)
    if unsound and write.state.locks:
        with write.state.exclusive():
            folder_at(folder.location).delete(unsound)
    write.removed += len(unsound)
    covered = {chunk for part in kept for chunk in part.all_chunks}
    write.done = kept
    write.pending = tuple(chunk for chunk in write.plan.chunks if chunk.index not in covered)


def _remove_orphans(write: Transaction, expected: Mapping[str, Chunk]) -> None:
    """Delete what is not a part of this job from its staging folder."""
    with write.state.exclusive():
        for path in list(Path(write.parts.location).iterdir()):
            # A link could point to a file that somebody else changes after it was verified here.
            if path.name not in expected or path.is_symlink() or not path.is_file():
                atomic_io.remove([path])
                write.removed += 1


def _published_parts(
    write: Transaction, record: Mapping[str, Any], expected: Mapping[str, Chunk], place: str, sizes: Mapping[str, int]
) -> list[Part]:
    """Return the parts of a folder's last commit, in `place`, that belong to this job; staged parts are links to
    them."""
    thorough = write.request.allowed.overwrite
    found = [
        part
        for part in map(part_of_entry, record["parts"])
        if expected.keys() >= {name.rpartition("/")[2] for name in part.members or [part.name]}
        and sizes.get(part.name) == part.bytes
        and not (thorough and part.failed)
    ]
    if thorough:
        size = sum(part.bytes for part in found)
        checked = write.request.spread(
            _is_unchanged, [(place, part) for part in found], size=size, name="check finished chunks"
        )
        found = [part for part, unchanged in zip(found, checked, strict=True) if unchanged]
    if not write.target.staged:
        return found
    # Only a link to the published file is certain to have the recorded content. A file of that name that was staged
    # before, or copied where the file system has no hard links, is read and checked by the caller.
    return [part for part in found if _is_linked(f"{place}/{part.name}", f"{write.parts.location}/{part.name}")]


def _is_linked(source: str, target: str) -> bool:
    """Hard-link a file unless there is one; return whether it is a link. Without hard links it is copied."""
    if os.path.exists(target):
        return os.path.samefile(source, target)
    try:
        os.link(source, target)
        return True
    except OSError:
        atomic_io.write_bytes(Path(target), Path(source).read_bytes(), site="part")
        return False


def _is_unchanged(one: tuple[str, Part]) -> bool:
    place, part = one
    if not is_url(place):
        return atomic_io.sha256_file(Path(place, part.name)) == part.sha256
    content = folder_at(place).content(part.name)
    return content is not None and hashlib.sha256(content).hexdigest() == part.sha256


def _read_staged(one: tuple[PartFolder, str, int, int]) -> Part | None:
    folder, name, chunk, rows = one
    return folder.find(name, chunk, rows)


def _sizes(location: str) -> dict[str, int]:
    """Return the size of each file in a folder, in bytes, by name.

    One pass over a local folder: looking up 100,000 parts by path took ten seconds.
    """
    if is_url(location):
        return folder_at(location).sizes()
    entries = os.scandir(location) if os.path.isdir(location) else ()
    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
