"""One writer at a time: a live lease locks, a dead or expired one is taken over, and its holder notices."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchlake.errors import LeaseLost, Locked, OutputError
from torchlake.storage.lease import acquire, locked


def edit(staging: Path, **fields: Any) -> None:
    path = staging / "lease.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def age(staging: Path, seconds: float) -> None:
    """Let the lease have been written so long ago, by the clock of its storage."""
    path = staging / "lease.json"
    written = path.stat().st_mtime - seconds
    os.utime(path, (written, written))


def read(staging: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((staging / "lease.json").read_text())
    return value


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / ".scored.staging"


def test_a_live_lease_locks_and_a_released_one_does_not(staging: Path) -> None:
    lease = acquire(staging, 60, name="scored")
    with pytest.raises(Locked, match=rf"scored: being written by pid {os.getpid()} on \S+ since 20\d\d-"):
        acquire(staging, 60, name="scored")
    lease.release()
    again = acquire(staging, 60, name="scored")
    assert read(staging)["epoch"] == 2
    again.release()


def test_a_lock_names_what_is_held(staging: Path) -> None:
    lease = acquire(staging, 60, name="runs/reviews")
    with pytest.raises(Locked, match=r"^runs/reviews: being written by pid"):
        acquire(staging, 60, name="runs/reviews")
    lease.release()


def test_an_expired_lease_is_taken_over_and_its_holder_is_refused(staging: Path) -> None:
    zombie = acquire(staging, 60, name="scored")
    age(staging, 61)
    lease = acquire(staging, 60, name="scored")
    with locked(staging), pytest.raises(LeaseLost, match="taken over by pid"):
        zombie.check()
    with locked(staging):
        lease.check()
    before = read(staging)
    zombie.release()
    assert read(staging) == before, "a lease that is no longer ours is left alone"
    lease.release()


def test_a_dead_process_on_this_machine_holds_nothing(staging: Path) -> None:
    script = (
        "import os; from pathlib import Path; from torchlake.storage.lease import acquire; "
        f"acquire(Path({str(staging)!r}), 600, name='scored'); os._exit(0)"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert read(staging)["epoch"] == 1
    acquire(staging, 60, name="scored").release()
    assert read(staging)["epoch"] == 2


def test_a_process_id_that_was_given_to_another_process_holds_nothing(staging: Path) -> None:
    lease = acquire(staging, 60, name="scored")
    edit(staging, created=1.0)
    lease.stop()
    acquire(staging, 60, name="scored").release()


def test_a_lease_of_another_machine_holds_until_it_expires(staging: Path) -> None:
    acquire(staging, 60, name="scored").stop()
    edit(staging, machine="elsewhere", host="elsewhere", pid=2**22 + 1)
    with pytest.raises(Locked, match="on elsewhere"):
        acquire(staging, 60, name="scored")
    age(staging, 61)
    acquire(staging, 60, name="scored").release()


@pytest.mark.parametrize("ahead_s", [86_400, 61, -61, -86_400])
def test_the_clock_of_another_machine_does_not_matter(staging: Path, ahead_s: float) -> None:
    acquire(staging, 60, name="scored").stop()
    now = time.time() + ahead_s
    edit(staging, machine="elsewhere", host="elsewhere", pid=2**22 + 1, started=now, renewed=now)
    with pytest.raises(Locked, match="on elsewhere"):
        acquire(staging, 60, name="scored")
    age(staging, 61)
    acquire(staging, 60, name="scored").release()


def test_a_lease_from_the_future_of_its_storage_is_no_older_than_now(staging: Path) -> None:
    acquire(staging, 60, name="scored").stop()
    age(staging, -3600)
    with pytest.raises(Locked):
        acquire(staging, 60, name="scored")


def test_a_lease_is_renewed_until_it_is_lost(staging: Path) -> None:
    lease = acquire(staging, 0.04, name="scored")
    first = read(staging)["renewed"]
    deadline = time.monotonic() + 20
    while read(staging)["renewed"] == first:
        assert time.monotonic() < deadline
    with locked(staging):
        edit(staging, token="another's")
    lease._thread.join(20)
    assert not lease._thread.is_alive(), "the thread of a lost lease ends"
    assert read(staging)["token"] == "another's"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"epoch": 3}'])
def test_a_damaged_lease_is_nobodys(staging: Path, content: str) -> None:
    staging.mkdir()
    (staging / "lease.json").write_text(content)
    acquire(staging, 60, name="scored").release()


def test_a_folder_that_is_gone_is_lost_and_one_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(LeaseLost, match="gone"), locked(tmp_path / "none"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be created"):
        acquire(tmp_path / "file" / ".x.staging", 60, name="scored")
    with pytest.raises(OutputError, match="cannot be created"):
        acquire(Path("/proc/none/.x.staging"), 60, name="scored")


def test_a_lock_that_is_never_given_back_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: its holder was stopped in the middle of publishing; the newcomer says so instead of waiting for ever."""
    monkeypatch.setattr("torchlake.storage.lease.LOCK_WAIT_S", 0.2)
    staging = tmp_path / ".out.staging"
    first = acquire(staging, 60.0, name="scored")
    with locked(staging), pytest.raises(Locked, match=r"locked for 0 s by pid \d+.*kill -CONT"):
        acquire(staging, 60.0, name="scored")
    first.release()


def test_a_process_that_may_not_be_looked_at_is_alive(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(staging, 60, name="scored")

    def hidden(pid: int) -> psutil.Process:
        raise psutil.AccessDenied(pid)

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", hidden)
        with pytest.raises(Locked):
            acquire(staging, 60, name="scored")
    lease.release()


def test_a_lock_says_who_holds_it_and_since_when(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(staging, 60, name="scored")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    edit(staging, pid=4711, host="node-7", machine="elsewhere", started=1_700_000_000.0)
    with pytest.raises(
        Locked, match=r"being written by pid 4711 on node-7 since 2023-11-14 22:13:20 UTC\. Wait for it"
    ):
        acquire(staging, 60, name="scored")
    lease.stop()
    monkeypatch.undo()
    time.tzset()


def test_a_lease_that_is_damaged_is_lost(staging: Path) -> None:
    lease = acquire(staging, 60, name="scored")
    (staging / "lease.json").write_text("")
    with pytest.raises(LeaseLost, match="taken over by another process"):
        lease.check()
    lease.stop()
