"""Which job an output or an interrupted write belongs to, and what of it a new job may keep.

A job is a plan and a fingerprint. The same job goes on or is done; another one is refused with what differs, unless the
user says which of the two is meant to stay. Files that did not change keep their chunks, and so their parts.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import durable
from torchlake.errors import DataError, FingerprintError, OutputError
from torchlake.tables import staging
from torchlake.tables.chunks import Chunk, InputFile, Plan, plan_from_json
from torchlake.tables.committed import COMMIT, PLAN, output_path, read_commit


class Job(NamedTuple):
    """What an output is the result of."""

    plan: Plan
    fingerprint: dict[str, Any]
    record: dict[str, Any] | None = None
    "The commit record, where the result is published."


def present_job(out: Path) -> Job | None:
    """The job whose result lies at `out`; None when nothing does. Raises OutputError for what is not ours."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; an output is a folder. Give another output.")
    if os.path.ismount(out):
        raise OutputError(f"{out}: is a mount point, which no rename can replace; give a folder in it: {out / 'table'}")
    if (out / COMMIT).is_file():
        record = read_commit(out)
        return _job(out / PLAN, record["fingerprint"])._replace(record=record)
    if any(out.iterdir()):
        raise OutputError(
            f"{out}: holds files that torchlake did not write ({COMMIT} is missing). Give another output."
        )
    return None


def known_inputs(output: str | Path) -> list[InputFile]:
    """The input files of earlier plans of `output`, so that `plan_chunks` need not hash again what did not change.

    A plan that is missing or cannot be read is passed over.
    """
    out = output_path(output)
    known: list[InputFile] = []
    for plan in (out / PLAN, staging.staging_of(out) / staging.PLAN):
        try:
            known += plan_from_json(durable.read_json(plan)).inputs
        except DataError:
            continue
    return known


def stored_job(folder: Path) -> Job | None:
    """The job of an interrupted write."""
    path = folder / staging.PLAN
    return _job(path, durable.read_json(path)["fingerprint"]) if path.is_file() else None


def _job(plan: Path, fingerprint: dict[str, Any]) -> Job:
    try:
        return Job(plan_from_json(durable.read_json(plan)), fingerprint)
    except DataError as error:
        raise OutputError(f"{plan}: {error}. Remove its folder, or give another output.") from error


def is_done(out: Path, present: Job | None, job: Job, *, thorough: bool) -> bool:
    """Whether `present` is the result of `job`, and all of it is there (by sha256 when `thorough`, else by size)."""
    if present is None or differences(present, job) or input_changes(present.plan, job.plan):
        return False
    return _damage(out, present, thorough=thorough) is None


def _damage(out: Path, present: Job, *, thorough: bool) -> str | None:
    assert present.record is not None, "only what is published has a record"
    # One pass over the folder: looking up each of 10^5 parts by its path took ten seconds. Links are no parts.
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(out) if entry.is_file(follow_symlinks=False)}
    for part in present.record["parts"]:
        if sizes.get(part["name"]) != part["bytes"]:
            return f"{part['name']} is missing or cut short"
        if thorough and durable.sha256_file(out / part["name"]) != part["sha256"]:
            return f"{part['name']} is not what was written"
    return None


def refuse_other(out: Path, present: Job | None, job: Job, *, overwrite: bool, accept: bool) -> None:
    """Raise unless the job may be written where `present` lies."""
    if present is None or overwrite:
        return
    _refuse_differences(f"{out}", present, job, "replaces it", accept)
    if not input_changes(present.plan, job.plan):
        raise OutputError(f"{out}: is damaged: {_damage(out, present, thorough=False)}. --overwrite writes it anew.")


def _refuse_differences(where: str, other: Job, job: Job, overwriting: str, accept: bool) -> None:
    different = differences(other, job)
    if different:
        raise FingerprintError(
            f"{where}: belongs to another job:\n  " + "\n  ".join(different) + f"\n--overwrite {overwriting}; "
            "or give another output, or the earlier settings."
        )
    changes = input_changes(other.plan, job.plan)
    if changes and not accept:
        raise FingerprintError(
            f"{where}: the input has changed since:\n  " + "\n  ".join(changes) + "\n--accept-new-input keeps the rows "
            f"of files that did not change and does only the others; --overwrite {overwriting} and starts anew."
        )


def stored_or_cleared(folder: Path, stored: Job | None, job: Job, *, overwrite: bool, accept: bool) -> Job | None:
    """The interrupted write when it may go on; cleared away when `overwrite` says so."""
    if stored is None:
        return None
    if overwrite and (differences(stored, job) or (input_changes(stored.plan, job.plan) and not accept)):
        staging.clear(folder)
        return None
    _refuse_differences(f"{folder}: an interrupted write", stored, job, "discards it", accept)
    return stored


def differences(old: Job, new: Job) -> list[str]:
    """The entries of the fingerprints that differ, as "name: old -> new", and the columns where they do."""
    before = old.fingerprint | {"input columns": _columns(old.plan)}
    after = new.fingerprint | {"input columns": _columns(new.plan)}
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]


def input_changes(old: Plan, new: Plan) -> list[str]:
    """The input files that were added, removed or rewritten, each as a sentence."""
    before, after = {one.name: one for one in old.inputs}, {one.name: one for one in new.inputs}
    changes = [f"{one.path}: new ({one.rows:,} rows)" for name, one in after.items() if name not in before]
    changes += [f"{one.path}: no longer there ({one.rows:,} rows)" for name, one in before.items() if name not in after]
    changes += [
        f"{one.path}: rewritten ({before[name].rows:,} rows -> {one.rows:,} rows)"
        for name, one in after.items()
        if name in before and before[name].sha256 != one.sha256
    ]
    return changes


def merge(old: Plan, new: Plan) -> Plan:
    """The plan of `new`'s input with `old`'s chunks for the files that did not change, numbers kept.

    Chunks of other files get numbers after those, so that every kept part keeps its name.
    """
    before = {one.name: one.sha256 for one in old.inputs}
    kept = {one.name: one for one in new.inputs if before.get(one.name) == one.sha256}
    schema = new.schema.serialize().to_pybytes()
    chunks: list[Chunk] = [
        replace(chunk, file=kept[chunk.name].path, schema=schema) for chunk in old.chunks if chunk.name in kept
    ]
    number = max((chunk.index for chunk in old.chunks), default=-1) + 1
    fresh = [chunk for chunk in new.chunks if chunk.name not in kept]
    chunks += [replace(chunk, index=number + place) for place, chunk in enumerate(fresh)]
    return Plan(inputs=new.inputs, chunks=tuple(chunks), schema=new.schema, rows=new.rows)


def _columns(plan: Plan) -> dict[str, str]:
    return {field.name: str(field.type) for field in plan.schema}
