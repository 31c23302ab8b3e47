"""The folders of a write in progress, and the one rename that publishes it.

    <parent>/.<name>.staging/          beside the output, so that a rename is atomic
        lock, lease.json               the writer (lease.py)
        plan.json                      plan and fingerprint
        journal/                       the workers' attempt logs, removed before publishing
        rows/                          finished rows of unfinished chunks (jobs/worker/journal.py)
        table/part-*.parquet           becomes the output
        sealed/                        `table`, renamed before publishing so that late workers cannot write to it
        members/                       parts whose rows are in larger files of `sealed`, kept until it is published
        old/                           the output being replaced, where two folders cannot be exchanged
    <parent>/<name>/part-*.parquet, _torchlake/{commit,plan}.json

A new output appears by one rename(2). An existing one is exchanged with the new one in one step where the kernel and
the file system can (renameat2 with RENAME_EXCHANGE); elsewhere there is no output between two renames, and `repair`
undoes the first if the second never happened.
"""

import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path

from torchlake import atomic_io
from torchlake.errors import LeaseLost
from torchlake.failpoints import failpoint
from torchlake.outputs.parts import TABLE
from torchlake.storage.lease import Lease

FENCED, MEMBERS, OLD, ATTEMPT_LOG, ROWS, PLAN = "sealed", "members", "old", "journal", "rows", "plan.json"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def staging_of(out: Path) -> Path:
    """Return the staging folder of an output."""
    return out.with_name(f".{out.name}.staging")


def fence(staging: Path) -> Path:
    """Rename the table so that late workers cannot write to it; return the new path."""
    fenced = staging / FENCED
    os.rename(staging / TABLE, fenced)
    failpoint("commit.fence")
    return fenced


def publish(staging: Path, out: Path) -> None:
    """Replace `out` with the fenced table, durably; the old output goes into the staging folder."""
    fenced, old = staging / FENCED, staging / OLD
    # The names inside must reach the disk before the name of the folder: after a power failure the output could
    # otherwise exist without some of its parts.
    atomic_io.sync_folder(fenced)
    failpoint("commit.before_publish")
    if not out.exists() or not any(out.iterdir()):
        os.rename(fenced, out)  # rename(2) also replaces an empty folder, which the user may have created
    elif not exchange(fenced, out):
        # A crash here leaves no output; `repair` moves the old one back when the next run begins. Readers in between
        # find nothing, which is why the exchange is tried first.
        os.rename(out, old)
        failpoint("commit.swap")
        os.rename(fenced, out)
    failpoint("commit.publish")
    # The rename changes two folders, and is durable only when both are synced.
    atomic_io.sync_folder(out.parent)
    atomic_io.sync_folder(staging)
    failpoint("commit.after_publish")


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False where that is not supported."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))


def repair(staging: Path, out: Path) -> None:
    """Restore the old output if a replacement was interrupted between its two renames."""
    old = staging / OLD
    # With an output in place the second rename happened, and `old` is only what it replaced.
    if old.exists() and not out.exists():
        os.rename(old, out)
        atomic_io.sync_folder(out.parent)


def reopen(staging: Path) -> None:
    """Undo `fence` after an interrupted commit, and empty the attempt log."""
    table, fenced, members = staging / TABLE, staging / FENCED, staging / MEMBERS
    # The fenced folder of an interrupted commit has all finished parts, except those that were joined to larger files.
    if fenced.exists() and not table.exists():
        os.rename(fenced, table)
    table.mkdir(exist_ok=True)
    for path in list(members.iterdir()) if members.exists() else []:
        os.rename(path, table / path.name)
    atomic_io.remove([fenced, members, staging / OLD, staging / ATTEMPT_LOG])
    (staging / ATTEMPT_LOG).mkdir()


def clear_job(staging: Path) -> None:
    """Remove the job, but not lock and lease. The plan goes first, because without it the rest counts as orphaned."""
    atomic_io.remove([staging / name for name in (PLAN, TABLE, FENCED, MEMBERS, OLD, ATTEMPT_LOG, ROWS)])


def remove_staging(staging: Path) -> None:
    """Remove the staging folder; it is renamed first, so that the next writer can create its own."""
    failpoint("commit.cleanup")
    trash = staging.with_name(f"{staging.name}.{secrets.token_hex(4)}.old")
    os.rename(staging, trash)
    failpoint("commit.trash")
    shutil.rmtree(trash, ignore_errors=True)


def remove_leased(folder: Path, lease: Lease) -> None:
    """Remove a folder with a lease and end the lease, unless another writer has taken it over."""
    try:
        with lease.exclusive():
            remove_staging(folder)
    except (LeaseLost, OSError):
        pass  # taken over, or not removable
    lease.stop()


def vacuum(folder: Path) -> None:
    """Remove folders that an interrupted `remove_staging` renamed but did not remove."""
    prefix = f"{folder.name}."
    if folder.parent.is_dir():
        atomic_io.remove(
            path for path in folder.parent.iterdir() if path.name.startswith(prefix) and path.suffix == ".old"
        )
