"""The folders of a write in progress, and the one rename that shows it.

    <parent>/.<name>.staging/          beside the output, so that a rename is atomic
        lock, lease.json               who writes (lease.py)
        plan.json                      what is written: plan and fingerprint
        journal/                       the workers' notes, removed before publishing
        table/part-*.parquet           becomes the output
        sealed/                        `table` under the name that no late worker knows, while it is being published
        old/                           the output that is being replaced, where two folders cannot be exchanged
    <parent>/<name>/part-*.parquet, _torchlake/{commit,plan}.json

A new output appears by one rename(2). An existing one is exchanged with the new in one step where the kernel and the
file system can (renameat2 with RENAME_EXCHANGE); elsewhere two renames leave a moment without an output, and `repair`
undoes the first one when the second never came.
"""

import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path

from torchlake import atomic_io
from torchlake.failpoints import failpoint
from torchlake.tables.output.parts import TABLE

FENCED, OLD, ATTEMPT_LOG, PLAN = "sealed", "old", "journal", "plan.json"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def staging_of(out: Path) -> Path:
    """The staging folder of an output."""
    return out.with_name(f".{out.name}.staging")


def fence(staging: Path) -> Path:
    """Rename the table away from every worker that still knows its path; returns the new place."""
    fenced = staging / FENCED
    os.rename(staging / TABLE, fenced)
    failpoint("commit.fence")
    return fenced


def publish(staging: Path, out: Path) -> None:
    """Put `fenced` in the place of `out`, durably; what was there goes into the staging folder."""
    fenced, old = staging / FENCED, staging / OLD
    atomic_io.sync_folder(fenced)
    failpoint("commit.before_publish")
    if not out.exists() or not any(out.iterdir()):
        os.rename(fenced, out)
    elif not exchange(fenced, out):
        os.rename(out, old)
        failpoint("commit.swap")
        os.rename(fenced, out)
    failpoint("commit.publish")
    atomic_io.sync_folder(out.parent)
    atomic_io.sync_folder(staging)
    failpoint("commit.after_publish")


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where that is not possible."""
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
    """Bring back the old output when a replacement was cut short between its two renames."""
    old = staging / OLD
    if old.exists() and not out.exists():
        os.rename(old, out)
        atomic_io.sync_folder(out.parent)


def reopen(staging: Path) -> None:
    """Make the table writable again after a commit that was cut short, and drop what workers left behind."""
    table, fenced = staging / TABLE, staging / FENCED
    if fenced.exists() and not table.exists():
        os.rename(fenced, table)
    atomic_io.remove([fenced, staging / OLD, staging / ATTEMPT_LOG])
    table.mkdir(exist_ok=True)
    (staging / ATTEMPT_LOG).mkdir()


def clear_job(staging: Path) -> None:
    """Forget the job in the staging folder; lock and lease stay. The plan goes first: without it there is no job."""
    atomic_io.remove([staging / name for name in (PLAN, TABLE, FENCED, OLD, ATTEMPT_LOG)])


def remove_staging(staging: Path) -> None:
    """Remove the staging folder: out of the way by one rename first, so that the next writer may make its own."""
    failpoint("commit.cleanup")
    trash = staging.with_name(f"{staging.name}.{secrets.token_hex(4)}.old")
    os.rename(staging, trash)
    failpoint("commit.trash")
    shutil.rmtree(trash, ignore_errors=True)


def vacuum(out: Path) -> None:
    """Remove what `remove_staging` had no time to."""
    prefix = staging_of(out).name + "."
    if out.parent.is_dir():
        atomic_io.remove(
            path for path in out.parent.iterdir() if path.name.startswith(prefix) and path.suffix == ".old"
        )
