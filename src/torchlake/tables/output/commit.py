"""Exactly once: even if processes are killed, the output is the old table or the whole new one, each row once.

    plan.json first -> parts, each named by a hash of its content's causes -> commit.json -> one rename

Engines run a chunk at least once; this module makes that harmless. A second attempt writes the same bytes under the
same name; a part counts only through the commit record; one writer at a time holds the lease, and a writer that lost
it cannot publish. The same call after a crash keeps every sound part and asks only for the rest. Price: one fsync and
rename per part, and reading the staged parts once when a job is resumed.
"""

import base64
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import LeaseLost, Locked, OutputError, StorageError
from torchlake.processes.hardware import cores
from torchlake.tables.chunks import Chunk, Plan, plan_to_json
from torchlake.tables.output import staging
from torchlake.tables.output.compatibility import (
    AllowedChanges,
    JobSpec,
    check_replaceable,
    differences,
    interrupted_job,
    is_complete,
    merge,
    published_job,
    resumable_job,
    sizes_in,
)
from torchlake.tables.output.lease import Lease, acquire, locked
from torchlake.tables.output.parts import TABLE, Part, part_name, read_part, write_part
from torchlake.tables.record import COMMIT, FOLDER, PLAN, output_path
from torchlake.tables.sources.versions import ContentChecker

NO_CHANGES = AllowedChanges()
MOST_READERS = 8
"Threads that read staged parts, each with one part in memory."


@dataclass(kw_only=True)
class WriteTransaction:
    """A write in progress, or, when `complete`, an output that needs no work."""

    output: Path
    staging: Path
    "For `write_part`; `journal/` in it belongs to the workers."
    job: JobSpec
    complete: bool = False
    record: dict[str, Any] | None = None
    "The commit record, once there is one."
    pending: tuple[Chunk, ...] = ()
    "Chunks without a sound part."
    done: list[Part] = field(default_factory=list)
    "Sound parts of earlier runs."
    removed: int = 0
    "Files found in the staging folder that belonged to nothing."
    schema: pa.Schema | None = None
    quarantined: Sequence[tuple[str, str]] = ()
    lease: Lease | None = None

    @property
    def plan(self) -> Plan:
        """The plan that holds: the stored one's chunks for files that were planned before."""
        return self.job.plan

    def commit(self, parts: Sequence[Part], provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Publish `parts`, one for each chunk of the plan; returns the commit record.

        Raises LeaseLost when another writer has taken over, FingerprintError when an input file changed meanwhile,
        StorageError when the disk is full or the staging folder is gone.
        """
        assert self.lease is not None, "a write is committed once, inside its `with`"
        parts = self._with_schema_part(sorted(parts, key=lambda part: part.chunk))
        self._check_inputs()
        try:
            with locked(self.staging):
                self.lease.check()
                fenced = staging.fence(self.staging)
                self._keep_only(fenced, parts)
                record = self._record(parts, pq.read_schema(fenced / parts[0].name), provenance)
                (fenced / FOLDER).mkdir()
                atomic_io.write_bytes(fenced / PLAN, (self.staging / staging.PLAN).read_bytes(), site="commit.plan")
                atomic_io.write_json(fenced / COMMIT, record, site="commit")
                staging.publish(self.staging, self.output)
        except LeaseLost:
            if self.staging.exists() or (self.output / COMMIT).exists():
                raise
            raise StorageError(f"{self.staging}: gone, and every part in it; run the same command again.") from None
        except OSError as error:
            raise atomic_io.storage_error(error, self.output) from error
        self.complete, self.record = True, record
        self.close()
        return record

    def close(self) -> None:
        """Give the lease back; after a commit, remove the staging folder."""
        if self.lease is None:
            return
        lease, self.lease = self.lease, None
        if self.complete:
            _remove_staging(self.staging, lease)
        else:
            lease.release()

    def _with_schema_part(self, parts: list[Part]) -> list[Part]:
        """The parts; of a table without rows, one empty part, so that readers see the columns."""
        expected = [(chunk.index, chunk.rows) for chunk in sorted(self.plan.chunks, key=lambda chunk: chunk.index)]
        assert [(part.chunk, part.rows) for part in parts] == expected, "every chunk has one part with all its rows"
        if parts:
            return parts
        assert self.schema is not None, "a table without rows needs the output's schema"
        return [write_part(self.staging, "part-00000-empty.parquet", self.schema.empty_table(), chunk=0)]

    def _record(self, parts: Sequence[Part], schema: pa.Schema, provenance: Mapping[str, Any]) -> dict[str, Any]:
        schema = schema.remove_metadata()
        return {
            "format": 1,
            "plan": self.plan.id,
            "fingerprint": self.job.fingerprint,
            "rows": sum(part.rows for part in parts),
            "failed": sum(part.failed for part in parts),
            "parts": [asdict(part) for part in parts],
            "schema": {column.name: str(column.type) for column in schema},
            "arrow_schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
            "environments": self.job.environments,
            "quarantined": [list(one) for one in self.quarantined],
            "removed": self.removed,
            "provenance": dict(provenance),
            "committed": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _check_inputs(self) -> None:
        unchanged = ContentChecker()
        for one in self.plan.inputs:
            # Each of its rows was read from the version that was planned, so it may be gone by now.
            unchanged.check(one.path, one.version, one.sha256, may_be_gone=True)

    def _keep_only(self, fenced: Path, parts: Sequence[Part]) -> None:
        """Remove what is not a part of this job (a late worker's file), and make sure that every part is there."""
        sizes = {part.name: part.bytes for part in parts}
        atomic_io.remove(path for path in fenced.iterdir() if path.name not in sizes)
        for name, size in sizes.items():
            if not (fenced / name).is_file() or (fenced / name).stat().st_size != size:
                raise StorageError(f"{fenced / name}: the part is gone or cut short; run the same command again.")


@contextmanager
def write_transaction(
    output: str | Path,
    *,
    plan: Plan,
    fingerprint: Mapping[str, Any],
    schema: pa.Schema | None = None,
    quarantined: Sequence[tuple[str, str]] = (),
    environment: Mapping[str, str] | None = None,
    allowed: AllowedChanges = NO_CHANGES,
    lease_s: float = 60.0,
) -> Iterator[WriteTransaction]:
    """Write the result of `plan` under `fingerprint` (everything else that decides its bytes) to the folder `output`.

    `schema` is the output's, for a table without rows; `quarantined` files are noted in the record. An output of the
    same job is `complete`; an interrupted one goes on; what else may happen is `allowed`: to replace an output of
    another job, or a damaged one, to do only the chunks of files that are new, to drop those of files that are gone.
    `environment` (versions of libraries) is added to those that the record names for kept parts.

    Raises before any work: FingerprintError (the output or the interrupted write belongs to another job, or the input
    changed), Locked (another writer is at work), OutputError (not ours to write to, or no room), UsageError (an URL).
    """
    job = JobSpec(plan, json.loads(json.dumps(dict(fingerprint))), environments=[dict(environment or {})])
    write = _begin(output_path(output), job, allowed, lease_s)
    write.schema, write.quarantined = schema, quarantined
    try:
        yield write
    finally:
        write.close()


def _begin(out: Path, job: JobSpec, allowed: AllowedChanges, lease_s: float) -> WriteTransaction:
    folder = staging.staging_of(out)
    finished = WriteTransaction(output=out, staging=folder, job=job, complete=True)
    try:
        staging.vacuum(out)
        present = published_job(out)
        done = is_complete(out, present, job, thorough=allowed.overwrite)
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be looked at: {error.strerror}: {error.filename}. Give an output in a folder that this "
            "user can read and write, or change the folder's permissions."
        ) from error
    if done and present is not None:
        finished.record = present.record
        if not folder.exists():
            return finished
    else:
        check_replaceable(out, present, job, allowed)
    try:
        lease = acquire(folder, lease_s)
    except Locked:
        if done:
            return finished  # the writer that finished it is still clearing up, or is writing another job
        raise
    try:
        return _begin_leased(out, folder, job, lease, allowed)
    except BaseException as error:
        if (folder / staging.PLAN).exists():
            lease.release()
        else:
            _remove_staging(folder, lease)
        if isinstance(error, OSError):
            kind = OutputError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
            raise kind(f"{out}: cannot be prepared: {error.strerror}: {error.filename}") from error
        raise


def _begin_leased(out: Path, folder: Path, job: JobSpec, lease: Lease, allowed: AllowedChanges) -> WriteTransaction:
    """What `_begin` does once no other writer can interfere."""
    staging.repair(folder, out)
    present = published_job(out)
    done = is_complete(out, present, job, thorough=allowed.overwrite)
    stored = interrupted_job(folder)
    published = stored is not None and is_complete(out, present, stored, thorough=False)
    if stored is None or published:  # nothing, or what a writer left that died after its commit
        staging.clear_job(folder)
        stored = None
    if done and present is not None:
        if stored is None:
            _remove_staging(folder, lease)
        else:
            lease.release()  # another job's interrupted write: not ours to remove
        return WriteTransaction(output=out, staging=folder, job=job, complete=True, record=present.record)
    check_replaceable(out, present, job, allowed)
    stored = resumable_job(folder, stored, job, allowed)
    base = stored or present
    if base is not None and not differences(base, job):
        environments = [*base.environments, *(one for one in job.environments if one not in base.environments)]
        job = JobSpec(merge(base.plan, job.plan), job.fingerprint, environments=environments)
    staging.reopen(folder)
    content = plan_to_json(job.plan) | {"fingerprint": job.fingerprint, "environments": job.environments}
    atomic_io.write_bytes(folder / staging.PLAN, json.dumps(content).encode(), site="plan")
    write = WriteTransaction(output=out, staging=folder, job=job, lease=lease)
    _keep_sound_parts(write, present, thorough=allowed.overwrite)
    _check_room(write)
    return write


def _keep_sound_parts(write: WriteTransaction, present: JobSpec | None, *, thorough: bool) -> None:
    """Sort the staged files into sound parts and debris; link in the parts that the present output shares.

    A published part counts by its record and its size, so that an increment does not read what it keeps. When
    `thorough` it counts by its bytes, and parts in which rows failed are debris.
    """
    table = write.staging / TABLE
    expected = {part_name(write.plan, chunk, write.job.fingerprint): chunk for chunk in write.plan.chunks}
    for path in list(table.iterdir()):
        if path.name not in expected or path.is_symlink() or not path.is_file():
            atomic_io.remove([path])
            write.removed += 1
    sound = _link_published(write, present, expected, thorough=thorough)
    staged = sorted(path for path in table.iterdir() if path.name not in sound)

    def read(path: Path) -> Part | None:
        return read_part(path, expected[path.name].index, expected[path.name].rows)

    with ThreadPoolExecutor(min(cores(), MOST_READERS)) as threads:  # to decode and to hash needs no interpreter lock
        for path, part in zip(staged, threads.map(read, staged), strict=True):
            if part is None or (thorough and part.failed):
                path.unlink()
                write.removed += 1
            else:
                sound[part.name] = part
    write.done = list(sound.values())
    kept = {part.chunk for part in write.done}
    write.pending = tuple(chunk for chunk in write.plan.chunks if chunk.index not in kept)


def _link_published(
    write: WriteTransaction, present: JobSpec | None, expected: Mapping[str, Chunk], *, thorough: bool
) -> dict[str, Part]:
    """Give the published parts that belong to this job a second name among the staged ones; by name."""
    if present is None or present.record is None:
        return {}
    sizes, linked = sizes_in(write.output), {}
    for part in (Part(**entry) for entry in present.record["parts"]):
        source, target = write.output / part.name, write.staging / TABLE / part.name
        if part.name not in expected or sizes.get(part.name) != part.bytes:
            continue
        if thorough and (part.failed or atomic_io.sha256_file(source) != part.sha256):
            continue
        if target.samefile(source) if target.exists() else _link(source, target):
            linked[part.name] = part  # what was staged before, or is a copy, is read
    return linked


def _link(source: Path, target: Path) -> bool:
    """A second name for the same bytes; False for a copy, where the file system has no hard links."""
    try:
        os.link(source, target)
        return True
    except OSError:
        atomic_io.write_bytes(target, source.read_bytes(), site="part")
        return False


def _check_room(write: WriteTransaction) -> None:
    """Refuse a job that certainly does not fit: 8 bytes a row is less than any output takes."""
    needed = 8 * sum(chunk.rows for chunk in write.pending)
    free = shutil.disk_usage(write.staging).free
    if free < needed:
        raise OutputError(f"{write.output}: needs at least {needed:,} bytes, {free:,} are free there; make room first.")


def _remove_staging(folder: Path, lease: Lease) -> None:
    """Remove the staging folder, unless it is another writer's by now."""
    try:
        with locked(folder):
            lease.check()
            staging.remove_staging(folder)
    except (LeaseLost, OSError):
        pass  # another writer's, or not removable: the table is published all the same
    lease.stop()
