"""Which job an output or an interrupted write belongs to, and which of its parts a new job may keep.

A job is a plan and a fingerprint. The same job is resumed or already complete; another one is refused with a list of
the differences, unless the user allows replacing it. Files that did not change keep their chunks, and so their parts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import DataError, FingerprintError, OutputError
from torchlake.outputs.parts import schema_in_words
from torchlake.outputs.staging import folders as staging
from torchlake.tables.plan import Chunk, InputFile, Plan, plan_from_json
from torchlake.tables.record import COMMIT, PLAN, output_path, read_commit


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

    plan: Plan
    fingerprint: dict[str, Any]
    record: dict[str, Any] | None = None
    "The commit record of a published output."
    environments: Sequence[dict[str, str]] = ()
    "Library versions that its parts were written with."


def published_job(out: Path) -> JobSpec | None:
    """Return the job of the output at `out`, or None. Raises OutputError if something other than an output is there."""
    if not out.exists():
        if out.is_symlink():
            raise OutputError(f"{out}: is a symbolic link to itself. Give another output.")
        return None
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; an output is a folder. Give another output.")
    if os.path.ismount(out):
        raise OutputError(f"{out}: is a mount point, which no rename can replace; give a folder in it: {out / 'table'}")
    if (out / COMMIT).is_file():
        record = read_commit(out)
        environments = record.get("environments", [])
        return _job(out / PLAN, record["fingerprint"])._replace(record=record, environments=environments)
    if any(out.iterdir()):
        raise OutputError(
            f"{out}: holds files that torchlake did not write ({COMMIT} is missing). Give another output."
        )
    return None


def planned_inputs(output: str | Path) -> list[InputFile]:
    """Return the input files of earlier plans of `output`: `plan_chunks` reuses the sha256 of unchanged ones.

    Missing and unreadable plans are ignored.
    """
    out = output_path(output)
    known: list[InputFile] = []
    for plan in (out / PLAN, staging.staging_of(out) / staging.PLAN):
        try:
            known += plan_from_json(atomic_io.read_json(plan)).inputs
        except DataError:
            continue
    return known


def recorded_fingerprint(output: str | Path) -> dict[str, Any]:
    """Return the settings of the interrupted write of `output`, else of the output itself; empty if neither exists."""
    out = output_path(output)
    for path in (staging.staging_of(out) / staging.PLAN, out / COMMIT):
        try:
            fingerprint = atomic_io.read_json(path)["fingerprint"]
        except (DataError, KeyError, TypeError):
            continue
        if isinstance(fingerprint, dict):
            return fingerprint
    return {}


def interrupted_job(folder: Path) -> JobSpec | None:
    """Return the job of an interrupted write, or None."""
    path = folder / staging.PLAN
    if not path.is_file():
        return None
    value = atomic_io.read_json(path)
    return _job(path, value["fingerprint"])._replace(environments=value.get("environments", []))


def _job(plan: Path, fingerprint: dict[str, Any]) -> JobSpec:
    try:
        return JobSpec(plan_from_json(atomic_io.read_json(plan)), fingerprint)
    except DataError as error:
        raise OutputError(f"{plan}: {error}. Remove its folder, or give another output.") from error


def is_complete(out: Path, published: JobSpec | None, job: JobSpec, *, thorough: bool) -> bool:
    """Return whether `published` is the result of `job` and has all parts, by sha256 if `thorough`, else by size."""
    if published is None or differences(published, job) or any(input_changes(published.plan, job.plan)):
        return False
    return _damage(out, published, thorough=thorough) is None


def _damage(out: Path, published: JobSpec, *, thorough: bool) -> str | None:
    assert published.record is not None, "every published output has a record"
    sizes = file_sizes(out)
    for part in published.record["parts"]:
        if sizes.get(part["name"]) != part["bytes"]:
            return f"{part['name']} is missing or truncated"
        if thorough and atomic_io.sha256_file(out / part["name"]) != part["sha256"]:
            return f"{part['name']} has changed since it was written"
    return None


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each regular file in a folder, in bytes, by name.

    One pass over the folder: looking up 100,000 parts by path took ten seconds.
    """
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)}


def check_replaceable(out: Path, published: JobSpec | None, job: JobSpec, allowed: AllowedChanges) -> None:
    """Raise unless the job may replace or extend the published output, which is not the job's complete result."""
    if published is None or allowed.overwrite:
        return
    refuse_differences(f"{out}", published, job, "replaces it", allowed)
    if not any(input_changes(published.plan, job.plan)):
        damage = _damage(out, published, thorough=False)
        raise OutputError(f"{out}: is damaged: {damage}. --overwrite writes it again.")


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


def resumable_job(folder: Path, interrupted: JobSpec | None, job: JobSpec, allowed: AllowedChanges) -> JobSpec | None:
    """Return the interrupted write if it may be resumed; with `allowed.overwrite` another job's write is removed."""
    if interrupted is None:
        return None
    try:
        refuse_differences(f"{folder}: an interrupted write", interrupted, job, "discards it", allowed)
    except FingerprintError:
        if not allowed.overwrite:
            raise
        staging.clear_job(folder)
        return None
    return interrupted


def differences(old: JobSpec, new: JobSpec) -> list[str]:
    """Return the differences of fingerprints and columns, as "name: old -> new"."""
    before, after = old.fingerprint, new.fingerprint
    names = [*before, *(name for name in after if name not in before)]
    found = [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]
    # Compare types, not their names: the names of map and list types depend on the library that wrote the file.
    if not old.plan.schema.equals(new.plan.schema):
        found.append(f"input columns: {schema_in_words(old.plan.schema)} -> {schema_in_words(new.plan.schema)}")
    asked, asks = old.plan.asked, new.plan.asked
    for name in dict.fromkeys([*asked, *asks]):
        if asked.get(name) != asks.get(name):
            found.append(f"{name}: {asked.get(name)!r} -> {asks.get(name)!r}")
    return found


def input_changes(old: Plan, new: Plan) -> tuple[list[str], list[str], list[str]]:
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


def merge(old: Plan, new: Plan) -> Plan:
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
