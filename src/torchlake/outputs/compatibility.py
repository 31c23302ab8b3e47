"""Which job an output or an interrupted write belongs to, and which of its parts a new job may keep.

A job is a plan and a fingerprint. The same job is resumed or already complete; another one is refused with a list of
the differences, unless the user allows replacing it. Files that did not change keep their chunks, and so their parts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchlake.errors import FingerprintError
from torchlake.outputs.parts import schema_in_words
from torchlake.tables.formats.types import shortened
from torchlake.tables.plan import Chunk, ChunkPlan


@dataclass(frozen=True, kw_only=True)
class AllowedChanges:
    """What may be replaced in the output or the interrupted write of another job."""

    overwrite: bool = False
    new_input: bool = False
    "Keep the parts of unchanged files; process new and rewritten ones."
    removed_input: bool = False
    "Drop the rows of files that are no longer in the input."


class JobSpec(NamedTuple):
    """The input and the settings of an output."""

    plan: ChunkPlan
    fingerprint: dict[str, Any]
    record: dict[str, Any] | None = None
    "The commit record of a published output."
    environments: Sequence[dict[str, str]] = ()
    "Library versions that its parts were written with."


def refuse_differences(where: str, other: JobSpec, job: JobSpec, overwriting: str, allowed: AllowedChanges) -> None:
    """Raise FingerprintError listing the differences that are not allowed; `overwriting` says what --overwrite does."""
    different = differences(other, job)
    if different:
        raise FingerprintError(
            f"{where}: belongs to another job:\n  " + "\n  ".join(different) + f"\n--overwrite {overwriting}; "
            "or give another output, or the earlier settings."
        )
    added, removed, rewritten = input_changes(other.plan, job.plan)
    new = [] if allowed.new_input else added + rewritten
    gone = [] if allowed.removed_input else removed
    if not new and not gone:
        return
    advice = []
    if new:
        advice.append("--accept-new-input keeps the rows of unchanged files and processes only the others.")
    if gone:
        advice.append("--accept-removed-input drops the rows of files that were removed.")
    raise FingerprintError(
        f"{where}: the input has changed since:\n  "
        + "\n  ".join(new + gone)
        + f"\n{' '.join(advice)} --overwrite {overwriting} and starts again."
    )


def is_same(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two jobs have the same rows; their chunks may have other numbers."""
    return not differences(one, other) and not any(input_changes(one.plan, other.plan))


def has_same_rows(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two jobs have the same rows, in whatever chunks. Cost: the numbers of all selected rows."""
    return not differences(one, other) and _rows_of_files(one.plan) == _rows_of_files(other.plan)


def _rows_of_files(plan: ChunkPlan) -> dict[str, tuple[str, str, str]]:
    """Return what identifies the rows of each file; `InputFile.selected` depends on the chunks' ranges, too."""
    selected = {one.name: hashlib.sha256() for one in plan.inputs if one.selected}
    for chunk in plan.chunks:
        if chunk.name in selected:
            selected[chunk.name].update(chunk.numbers.tobytes())
    rows = {name: found.hexdigest() for name, found in selected.items()}
    return {one.name: (one.sha256, one.view, rows.get(one.name, "")) for one in plan.inputs}


def continued(earlier: JobSpec, job: JobSpec) -> JobSpec:
    """Return the job with the chunks of an earlier one for files that did not change, and the libraries of both."""
    new = [one for one in job.environments if one not in earlier.environments]
    return JobSpec(merge(earlier.plan, job.plan), job.fingerprint, None, [*earlier.environments, *new])


def differences(old: JobSpec, new: JobSpec) -> list[str]:
    """Return the differences of fingerprints and columns, as "name: old -> new"."""
    before, after = old.fingerprint, new.fingerprint
    names = [*before, *(name for name in after if name not in before)]
    found = [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]
    # Compare types, not their names: the names of map and list types depend on the library that wrote the file. So does
    # the size of offsets: a file that polars or a DELETE by deltalake has written has other types of strings.
    if not shortened(old.plan.schema).equals(shortened(new.plan.schema)):
        found.append(f"input columns: {schema_in_words(old.plan.schema)} -> {schema_in_words(new.plan.schema)}")
    asked, asks = old.plan.asked, new.plan.asked
    for name in dict.fromkeys([*asked, *asks]):
        if asked.get(name) != asks.get(name):
            found.append(f"{name}: {asked.get(name)!r} -> {asks.get(name)!r}")
    return found


def input_changes(old: ChunkPlan, new: ChunkPlan) -> tuple[list[str], list[str], list[str]]:
    """Return the input files that were added, removed and rewritten, with a phrase about each."""
    before, after = ({one.name: one for one in plan.inputs} for plan in (old, new))
    return (
        [f"{one.path}: new ({one.rows:,} rows)" for one in new.inputs if one.name not in before],
        [f"{one.path}: removed ({one.rows:,} rows)" for one in old.inputs if one.name not in after],
        [
            f"{one.path}: rewritten ({before[one.name].rows:,} rows -> {one.rows:,} rows)"
            for one in new.inputs
            if one.name in before and before[one.name].content != one.content
        ],
    )


def merge(old: ChunkPlan, new: ChunkPlan) -> ChunkPlan:
    """Return the plan of `new`'s input, with `old`'s chunks and chunk numbers for files that did not change.

    Chunks of other files get higher numbers, so that every kept part keeps its name.
    """
    before = old.content_of
    kept = {one.name: one for one in new.inputs if before.get(one.name) == one.content}
    chunks: list[Chunk] = [
        replace(chunk, file=kept[chunk.name].path, version=kept[chunk.name].version, schema=new.serialized)
        for chunk in old.chunks
        if chunk.name in kept
    ]
    number = max((chunk.index for chunk in old.chunks), default=-1) + 1
    fresh = [chunk for chunk in new.chunks if chunk.name not in kept]
    chunks += [replace(chunk, index=number + place) for place, chunk in enumerate(fresh)]
    return replace(new, chunks=tuple(chunks))
