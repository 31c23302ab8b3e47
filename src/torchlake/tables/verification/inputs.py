"""What `verify` notes but does not report as a problem: changed inputs, rows that were not requested, other files."""

import os
from collections.abc import Iterator
from pathlib import Path

from torchlake.errors import TableError
from torchlake.storage.spread import each_file
from torchlake.storage.urls import is_url
from torchlake.storage.versions import ContentChecker
from torchlake.tables.plan import ChunkPlan, InputFile
from torchlake.tables.record import FOLDER


def unchanged_inputs(plan: ChunkPlan, notes: list[str]) -> frozenset[str]:
    """Return the names of unchanged inputs; add a note for each that changed, was removed or has no checksums."""
    unchanged = set()
    remote = any(is_url(one.path) for one in plan.inputs)
    for one, same in zip(plan.inputs, each_file(_is_unchanged, plan.inputs, remote=remote), strict=True):
        if same:
            unchanged.add(one.name)
        elif same is None:
            notes.append(f"{one.path}: the input was removed; its rows cannot be compared.")
        else:
            notes.append(f"{one.path}: the input has changed since the output was committed.")
    bare = sum(one.checksums is False for one in plan.inputs)
    if bare:
        notes.append(f"{bare:,} of {len(plan.inputs):,} input files have no checksums in their pages.")
    return frozenset(unchanged)


def _is_unchanged(one: InputFile) -> bool | None:
    """Return whether a file has the planned content; None if it cannot be read."""
    try:
        return ContentChecker().is_unchanged(one.path, one.version, one.sha256)
    except TableError:
        return None


def selection_note(plan: ChunkPlan) -> str | None:
    """Return a note about which input rows were requested; None if all were."""
    if not plan.asked:
        return None
    asked = ", ".join(f"{name} {value}" for name, value in plan.asked.items())
    left_out = [f"{rows:,} by {reason}" for reason, rows in plan.selection.get("left_out", {}).items()]
    files = plan.selection.get("unread_files", 0)
    left_out += [f"{files:,} files were not read"] * bool(files)
    return f"only selected rows were read ({asked}); left out: {', '.join(left_out) or 'none'}."


def other_files(out: Path, names: set[str]) -> Iterator[str]:
    """Yield the files of a local folder that its record does not list."""
    for folder, folders, listed in os.walk(out):
        folders[:] = [name for name in folders if Path(folder, name) != out / FOLDER]
        for name in sorted(listed):
            path = str(Path(folder, name).relative_to(out))
            if path not in names and not name.startswith((".", "_")):
                yield path
