"""Exactly once: even if processes are killed, the output is the old table or the whole new one, each row once.

    plan.json first -> parts, each named by a hash of its inputs and settings -> commit.json -> one rename

Engines run a chunk at least once. A second attempt finds the first one's part under the same name; a part counts only
through the commit record; one writer at a time holds the lease, and a writer that lost it cannot publish. The same call
after a crash keeps every sound part and returns only the other chunks as pending. Cost: one fsync and rename per part,
and one read of the staged parts when a job is resumed.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import LeaseLost, Locked, OutputError, StorageError
from torchlake.outputs.compatibility import (
    AllowedChanges,
    JobSpec,
    check_replaceable,
    differences,
    file_sizes,
    interrupted_job,
    is_complete,
    merge,
    published_job,
    resumable_job,
)
from torchlake.outputs.grouping import grouped
from torchlake.outputs.parts import TABLE, Part, PartFolder, part_name, part_of_entry
from torchlake.outputs.records import check_inputs, check_parts, commit_record
from torchlake.outputs.staging import folders as staging
from torchlake.storage.lease import Lease, acquire
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.plan import Chunk, Plan, plan_to_json
from torchlake.tables.record import COMMIT, FOLDER, PLAN, output_path

NO_CHANGES = AllowedChanges()


@dataclass(kw_only=True)
class WriteTransaction:
    """A write in progress, or, if `complete`, an output that needs no work."""

    output: Path
    staging: Path
    "The folder of the write in progress; workers log their attempts in its folder `journal`."
    job: JobSpec
    complete: bool = False
    record: dict[str, Any] | None = None
    "The commit record, once there is one."
    pending: tuple[Chunk, ...] = ()
    "Chunks without a sound part."
    done: list[Part] = field(default_factory=list)
    "Sound parts of earlier runs."
    removed: int = 0
    "Orphan files deleted from the staging folder."
    schema: pa.Schema | None = None
    quarantined: Sequence[tuple[str, str]] = ()
    lease: Lease | None = None
    target_file_size: int | None = None
    spread: Spread = in_process

    @property
    def parts(self) -> PartFolder:
        """Where workers write the parts."""
        return PartFolder(location=str((self.staging / TABLE).absolute()))

    @property
    def title(self) -> str:
        """A short name, for an engine's user interface."""
        return self.output.name

    @property
    def committed_in(self) -> str:
        """Where the parts in the record are."""
        return str(self.output)

    @property
    def plan(self) -> Plan:
        """The plan in effect: files that were planned before keep their stored chunks."""
        return self.job.plan

    def commit(self, parts: Sequence[Part], provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Publish `parts`, one for each chunk of the plan; return the commit record.

        Raises LeaseLost when another writer has taken over, FingerprintError when an input file changed meanwhile,
        StorageError when the disk is full or the staging folder was removed.
        """
        assert self.lease is not None, "commit() is called once, inside the `with` block"
        parts = self._with_schema_part(sorted(parts, key=lambda part: part.chunk))
        # Each chunk's file was checked when it was read. A file that changed since would make an output whose rows come
        # from two versions of the table, so all files are compared once more, as late as their rows can be refused.
        check_inputs(self.plan)
        parts = grouped(self.parts, parts, size=self.target_file_size, spread=self.spread)
        try:
            # The lock is held until the rename is done. A writer that takes the lease over needs the lock, so it cannot
            # begin between the check of the token and the rename. If this process is suspended here, a new writer gives
            # up after LOCK_WAIT_S and names it, instead of publishing beside it.
            with self.lease.exclusive():
                # Late workers (a speculative copy, a task of a lost node) write by path. After the rename their path
                # leads nowhere and their write fails; otherwise they could add or replace a file between `_keep_only`
                # and the rename that publishes.
                fenced = staging.fence(self.staging)
                self._keep_only(fenced, parts)
                record = commit_record(
                    self.job,
                    parts,
                    pq.read_schema(fenced / parts[0].name),
                    provenance,
                    quarantined=self.quarantined,
                    removed=self.removed,
                )
                # Plan and record are inside before the rename, so the output never exists without them. After a crash
                # up to the rename, `reopen` moves the folder back, and the next run keeps its parts.
                (fenced / FOLDER).mkdir()
                atomic_io.write_bytes(fenced / PLAN, (self.staging / staging.PLAN).read_bytes(), site="commit.plan")
                atomic_io.write_json(fenced / COMMIT, record, site="commit")
                staging.publish(self.staging, self.output)
        except LeaseLost:
            # `locked` reports a missing staging folder as a lost lease, because a successor removes it when it has
            # published. Without an output there was no successor: the folder was deleted.
            if self.staging.exists() or (self.output / COMMIT).exists():
                raise
            raise StorageError(
                f"{self.staging}: was deleted, with all finished parts; run the same command again."
            ) from None
        except OSError as error:
            raise atomic_io.storage_error(error, self.output) from error
        # The rename has made the commit. What follows is only cleaning up, so a crash or an error there must not make
        # the job look unfinished: the next run finds the output complete and removes the staging folder.
        self.complete, self.record = True, record
        self.close()
        return record

    def close(self) -> None:
        """Release the lease; after a commit, remove the staging folder."""
        if self.lease is None:
            return
        lease, self.lease = self.lease, None
        if self.complete:
            staging.remove_leased(self.staging, lease)
        else:
            lease.release()

    def _with_schema_part(self, parts: list[Part]) -> list[Part]:
        """Return the parts, or one empty part if there are none, so that readers see the columns."""
        check_parts(self.plan, parts)
        if parts:
            return parts
        assert self.schema is not None, "a table without rows needs the output's schema"
        empty = pa.Table.from_batches([], self.schema)
        return [self.parts.write("part-00000-empty.parquet", empty, chunk=0)]

    def _keep_only(self, fenced: Path, parts: Sequence[Part]) -> None:
        """Delete files that are not parts of this job (from late workers). Raises StorageError if a part is missing.

        Parts whose rows are in larger files are moved: if the commit is interrupted, the job continues with them.
        """
        sizes = {part.name: part.bytes for part in parts}
        joined, members = {name for part in parts for name in part.members}, self.staging / staging.MEMBERS
        if joined:
            members.mkdir(exist_ok=True)
        for path in list(fenced.iterdir()):
            if path.name in joined:
                os.rename(path, members / path.name)
            elif path.name not in sizes:
                atomic_io.remove([path])
        for name, size in sizes.items():
            if not (fenced / name).is_file() or (fenced / name).stat().st_size != size:
                raise StorageError(f"{fenced / name}: the part is missing or truncated; run the same command again.")


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
    spread: Spread = in_process,
    target_file_size: int | None = None,
) -> Iterator[WriteTransaction]:
    """Write the result of `plan` to the folder `output`; `fingerprint` is everything else that determines its bytes.

    If the output already has the result of this job, the transaction is `complete`; an interrupted write of the job is
    resumed; `allowed` lists what else may be replaced. `schema` is the output's, for a table without rows.
    `quarantined` files and the `environment` (library versions) are added to the record. `spread` reads the parts of an
    interrupted write, and writes files of about `target_file_size` bytes, if that is given, with the rows of several
    chunks.

    Raises before any work: FingerprintError (the output or the interrupted write belongs to another job, or the input
    changed), Locked (another writer is active), OutputError (not a torchlake output, or no space), UsageError (a URL).
    """
    job = JobSpec(plan, json.loads(json.dumps(dict(fingerprint))), environments=[dict(environment or {})])
    write = _begin(output_path(output), job, allowed, lease_s, spread)
    write.schema, write.quarantined = schema, quarantined
    write.spread, write.target_file_size = spread, target_file_size
    try:
        yield write
    finally:
        write.close()


def _begin(out: Path, job: JobSpec, allowed: AllowedChanges, lease_s: float, spread: Spread) -> WriteTransaction:
    """Check what is at `out`, and start or resume the write, unless the output is complete."""
    folder = staging.staging_of(out)
    # First without the lease: refusals cost no lock, and a complete output is returned even where the user may only
    # read. All of it is decided again in `_begin_leased`, because another writer may publish in between.
    try:
        staging.vacuum(folder)
        published = published_job(out)
        complete = is_complete(out, published, job, thorough=allowed.overwrite)
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be read: {error.strerror}: {error.filename}. Give an output in a folder that this "
            "user can read and write, or change the folder's permissions."
        ) from error
    if not complete:
        check_replaceable(out, published, job, allowed)
    elif not folder.exists():
        return _completed(out, job, published)  # a folder that a killed writer left is cleaned up below
    try:
        lease = acquire(folder, lease_s)
    except Locked:
        if complete:
            return _completed(out, job, published)  # the writer still removes the staging folder, or writes another job
        raise
    try:
        return _begin_leased(out, job, lease, allowed, spread)
    except BaseException as error:
        # A plan means that an interrupted write is stored here, of this job or of another one that was refused above:
        # its parts may have cost hours, so only the lease ends. Without a plan the folder is empty, and would stay
        # beside the output forever.
        if (folder / staging.PLAN).exists():
            lease.release()
        else:
            staging.remove_leased(folder, lease)
        if isinstance(error, OSError):
            kind = OutputError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
            raise kind(f"{out}: cannot be prepared: {error.strerror}: {error.filename}") from error
        raise


def _begin_leased(out: Path, job: JobSpec, lease: Lease, allowed: AllowedChanges, spread: Spread) -> WriteTransaction:
    """Repeat the checks of `_begin`, now that no other writer can interfere, and prepare the staging folder.

    This writer may be suspended anywhere, and wake beside its successor: each change is made with the lock held.
    """
    folder = lease.staging
    # Before anything is read at `out`: a crash between the two renames leaves no output there, and this job would then
    # be taken for the first one, and would not be compared with the old output.
    with lease.exclusive():
        staging.repair(folder, out)
    published = published_job(out)
    interrupted = interrupted_job(folder)
    # If the output is the result of the stored plan, its writer was killed between the rename and the removal of the
    # folder. To resume it would write the same output a second time.
    if interrupted is None or is_complete(out, published, interrupted, thorough=False):
        with lease.exclusive():
            staging.clear_job(folder)
        interrupted = None
    if is_complete(out, published, job, thorough=allowed.overwrite):
        if interrupted is None:
            staging.remove_leased(folder, lease)
        else:
            lease.release()  # another job's interrupted write stays
        return _completed(out, job, published)
    check_replaceable(out, published, job, allowed)
    # The interrupted write comes before the output: with --accept-new-input it was planned on top of the output and has
    # the output's chunks already, while the output lacks its new ones. Chunk numbers are part of a part's name, so
    # merging with the wrong plan would make finished parts unusable.
    with lease.exclusive():
        earlier = resumable_job(folder, interrupted, job, allowed) or published
    if earlier is not None and not differences(earlier, job):
        environments = [*earlier.environments, *(one for one in job.environments if one not in earlier.environments)]
        job = JobSpec(merge(earlier.plan, job.plan), job.fingerprint, environments=environments)
    # Before any part is written: a folder without a plan counts as empty, and the next run would clear its parts.
    content = plan_to_json(job.plan) | {"fingerprint": job.fingerprint, "environments": job.environments}
    with lease.exclusive():
        staging.reopen(folder)
        atomic_io.write_bytes(folder / staging.PLAN, json.dumps(content).encode(), site="plan")
    write = WriteTransaction(output=out, staging=folder, job=job, lease=lease)
    _keep_sound_parts(write, lease, published, spread, thorough=allowed.overwrite)
    _check_free_space(write)
    return write


def _completed(out: Path, job: JobSpec, published: JobSpec | None) -> WriteTransaction:
    assert published is not None, "only a published output is complete"
    return WriteTransaction(
        output=out, staging=staging.staging_of(out), job=job, complete=True, record=published.record
    )


def _keep_sound_parts(
    write: WriteTransaction, lease: Lease, published: JobSpec | None, spread: Spread, *, thorough: bool
) -> None:
    """Set `done` and `pending`: keep sound staged parts, link in published ones, delete orphan files.

    A published part is checked by its size, so that an increment does not read what it keeps; if `thorough`, by its
    sha256, and parts with failed rows are deleted.
    """
    table = write.staging / TABLE
    expected = {part_name(write.plan, chunk, write.job.fingerprint): chunk for chunk in write.plan.chunks}
    with lease.exclusive():
        for path in list(table.iterdir()):
            # A link could point to a file that somebody else changes after it was verified here.
            if path.name not in expected or path.is_symlink() or not path.is_file():
                atomic_io.remove([path])
                write.removed += 1
    sound = _link_published(write, published, expected, thorough=thorough)
    sizes = {name: size for name, size in file_sizes(table).items() if name not in sound}
    staged = [(table / name, expected[name].index, expected[name].rows) for name in sorted(sizes)]
    unsound = []
    for (path, _, _), part in zip(
        staged, spread(_read_staged, staged, size=sum(sizes.values()), name="check finished chunks"), strict=True
    ):
        if part is None or (thorough and part.failed):
            # With --overwrite the user wants failed rows to be tried again, so their chunk must become pending. The
            # file has to go, because the first part of a name wins in `PartFolder.store`.
            unsound.append(path)
        else:
            sound[part.name] = part
    if unsound:
        with lease.exclusive():
            atomic_io.remove(unsound)
        write.removed += len(unsound)
    write.done = list(sound.values())
    kept = {chunk for part in write.done for chunk in part.all_chunks}
    write.pending = tuple(chunk for chunk in write.plan.chunks if chunk.index not in kept)


def _read_staged(part: tuple[Path, int, int]) -> Part | None:
    path, chunk, rows = part
    return PartFolder(location=str(path.parent)).find(path.name, chunk, rows)


def _link_published(
    write: WriteTransaction, published: JobSpec | None, expected: Mapping[str, Chunk], *, thorough: bool
) -> dict[str, Part]:
    """Hard-link the published parts that belong to this job into the staging folder; return those linked, by name."""
    if published is None or published.record is None:
        return {}
    sizes, linked = file_sizes(write.output), {}
    for part in map(part_of_entry, published.record["parts"]):
        source, target = write.output / part.name, write.staging / TABLE / part.name
        if not expected.keys() >= {*(part.members or [part.name])} or sizes.get(part.name) != part.bytes:
            continue
        if thorough and (part.failed or atomic_io.sha256_file(source) != part.sha256):
            continue
        # Only a link to the published file is certain to have the recorded content. A file of that name that was
        # staged before, or copied where the file system has no hard links, is read and checked by the caller.
        if target.samefile(source) if target.exists() else _link(source, target):
            linked[part.name] = part
    return linked


def _link(source: Path, target: Path) -> bool:
    """Hard-link a file, or copy it where the file system has no hard links; return whether it was linked."""
    try:
        os.link(source, target)
        return True
    except OSError:
        atomic_io.write_bytes(target, source.read_bytes(), site="part")
        return False


def _check_free_space(write: WriteTransaction) -> None:
    """Raise OutputError if the job certainly does not fit: every output takes more than 8 bytes per row."""
    needed = 8 * sum(chunk.rows for chunk in write.pending)
    free = shutil.disk_usage(write.staging).free
    if free < needed:
        raise OutputError(f"{write.output}: needs at least {needed:,} bytes, but {free:,} are free. Make room first.")
