"""Which job an output or an interrupted write belongs to, and what of it a new job may keep.

A job is a plan and a fingerprint. The same job goes on or is done; another one is refused with what differs, unless the
user says which of the two is meant to stay. Files that did not change keep their chunks, and so their parts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import DataError, FingerprintError, OutputError
from torchlake.tables.chunks import Chunk, InputFile, Plan, plan_from_json
from torchlake.tables.output import staging
from torchlake.tables.output.parts import schema_in_words
from torchlake.tables.record import COMMIT, PLAN, output_path, read_commit


@dataclass(frozen=True, kw_only=True)
class AllowedChanges:
    """What the caller allows to happen to an output or an interrupted write that is not of this very job."""

    overwrite: bool = False
    new_input: bool = False
    "Keep the parts of files that did not change, and do the others."
    removed_input: bool = False
    "Drop the rows of files that left the input."


class JobSpec(NamedTuple):
    """What an output is the result of."""

    plan: Plan
    fingerprint: dict[str, Any]
    record: dict[str, Any] | None = None
    "The commit record, where the result is published."
    environments: Sequence[dict[str, str]] = ()
    "In which its parts were made."


def published_job(out: Path) -> JobSpec | None:
    """The job whose result lies at `out`; None when nothing does. Raises OutputError for what is not ours."""
    if not out.exists():
        if out.is_symlink():
            raise OutputError(f"{out}: is a symbolic link that leads to itself. Give another output.")
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
    """The input files of earlier plans of `output`, so that `plan_chunks` need not hash again what did not change.

    A plan that is missing or cannot be read is passed over.
    """
    out = output_path(output)
    known: list[InputFile] = []
    for plan in (out / PLAN, staging.staging_of(out) / staging.PLAN):
        try:
            known += plan_from_json(atomic_io.read_json(plan)).inputs
        except DataError:
            continue
    return known


def interrupted_job(folder: Path) -> JobSpec | None:
    """The job of an interrupted write."""
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


def is_complete(out: Path, present: JobSpec | None, job: JobSpec, *, thorough: bool) -> bool:
    """Whether `present` is the result of `job`, and all of it is there (by sha256 when `thorough`, else by size)."""
    if present is None or differences(present, job) or input_changes(present.plan, job.plan):
        return False
    return _damage(out, present, thorough=thorough) is None


def _damage(out: Path, present: JobSpec, *, thorough: bool) -> str | None:
    assert present.record is not None, "only what is published has a record"
    sizes = sizes_in(out)
    for part in present.record["parts"]:
        if sizes.get(part["name"]) != part["bytes"]:
            return f"{part['name']} is missing or cut short"
        if thorough and atomic_io.sha256_file(out / part["name"]) != part["sha256"]:
            return f"{part['name']} is not what was written"
    return None


def sizes_in(folder: Path) -> dict[str, int]:
    """The bytes of each file in a folder; links are left out.

    One pass over the folder: looking up each of 10^5 parts by its path took ten seconds.
    """
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)}


def check_replaceable(out: Path, present: JobSpec | None, job: JobSpec, allowed: AllowedChanges) -> None:
    """Raise unless the job may be written where `present` lies."""
    if present is None or allowed.overwrite:
        return
    _refuse_differences(f"{out}", present, job, "replaces it", allowed)
    if not input_changes(present.plan, job.plan):
        raise OutputError(f"{out}: is damaged: {_damage(out, present, thorough=False)}. --overwrite writes it again.")


def _refuse_differences(where: str, other: JobSpec, job: JobSpec, overwriting: str, allowed: AllowedChanges) -> None:
    different = differences(other, job)
    if different:
        raise FingerprintError(
            f"{where}: belongs to another job:\n  " + "\n  ".join(different) + f"\n--overwrite {overwriting}; "
            "or give another output, or the earlier settings."
        )
    refused = []
    if not allowed.new_input:
        refused += [*_added(other.plan, job.plan), *_rewritten(other.plan, job.plan)]
    removed = [] if allowed.removed_input else _removed(other.plan, job.plan)
    if not refused and not removed:
        return
    advice = []
    if refused:
        advice.append("--accept-new-input keeps the rows of files that did not change and does only the others.")
    if removed:
        advice.append("--accept-removed-input drops the rows of files that are no longer there.")
    raise FingerprintError(
        f"{where}: the input has changed since:\n  "
        + "\n  ".join(refused + removed)
        + f"\n{' '.join(advice)} --overwrite {overwriting} and starts again."
    )


def resumable_job(folder: Path, stored: JobSpec | None, job: JobSpec, allowed: AllowedChanges) -> JobSpec | None:
    """The interrupted write when it may go on; cleared away when `overwrite` says so."""
    if stored is None:
        return None
    try:
        _refuse_differences(f"{folder}: an interrupted write", stored, job, "discards it", allowed)
    except FingerprintError:
        if not allowed.overwrite:
            raise
        staging.clear_job(folder)
        return None
    return stored


def differences(old: JobSpec, new: JobSpec) -> list[str]:
    """The entries of the fingerprints that differ, as "name: old -> new", and the columns where they do."""
    before, after = old.fingerprint, new.fingerprint
    names = [*before, *(name for name in after if name not in before)]
    found = [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]
    # Types, not their names: those of maps and lists depend on the library that wrote the file.
    if not old.plan.schema.equals(new.plan.schema):
        found.append(f"input columns: {schema_in_words(old.plan.schema)} -> {schema_in_words(new.plan.schema)}")
    return found


def input_changes(old: Plan, new: Plan) -> list[str]:
    """The input files that were added, removed or rewritten, each as a sentence."""
    return [*_added(old, new), *_removed(old, new), *_rewritten(old, new)]


def _added(old: Plan, new: Plan) -> list[str]:
    names = {one.name for one in old.inputs}
    return [f"{one.path}: new ({one.rows:,} rows)" for one in new.inputs if one.name not in names]


def _removed(old: Plan, new: Plan) -> list[str]:
    names = {one.name for one in new.inputs}
    return [f"{one.path}: no longer there ({one.rows:,} rows)" for one in old.inputs if one.name not in names]


def _rewritten(old: Plan, new: Plan) -> list[str]:
    before = {one.name: one for one in old.inputs}
    return [
        f"{one.path}: rewritten ({before[one.name].rows:,} rows -> {one.rows:,} rows)"
        for one in new.inputs
        if one.name in before and before[one.name].sha256 != one.sha256
    ]


def merge(old: Plan, new: Plan) -> Plan:
    """The plan of `new`'s input with `old`'s chunks for the files that did not change, numbers kept.

    Chunks of other files get numbers after those, so that every kept part keeps its name.
    """
    before = {one.name: one.sha256 for one in old.inputs}
    kept = {one.name: one for one in new.inputs if before.get(one.name) == one.sha256}
    chunks: list[Chunk] = [
        replace(chunk, file=kept[chunk.name].path, version=kept[chunk.name].version, schema=new.serialized)
        for chunk in old.chunks
        if chunk.name in kept
    ]
    number = max((chunk.index for chunk in old.chunks), default=-1) + 1
    fresh = [chunk for chunk in new.chunks if chunk.name not in kept]
    chunks += [replace(chunk, index=number + place) for place, chunk in enumerate(fresh)]
    return Plan(inputs=new.inputs, chunks=tuple(chunks), serialized=new.serialized, rows=new.rows)
