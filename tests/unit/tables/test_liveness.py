"""Whether a process still runs has one answer, for leases and for logs of attempts, of this version and the last."""

import json
import os
import platform
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from torchlake.errors import Locked
from torchlake.jobs.worker import poison_rows
from torchlake.storage import lease, liveness


@pytest.mark.parametrize(("off", "running"), [(0.0, True), (0.5, True), (2.0, False)])
def test_lease_and_log_agree_on_a_start_time_that_was_rounded(tmp_path: Path, off: float, running: bool) -> None:
    me = liveness.this_process()
    state = {"machine": me.machine, "pid": me.pid}
    log = tmp_path / "0-a.json"
    log.write_text(json.dumps({**state, "started": me.created + off}) + "\n")
    assert poison_rows._is_running(log) is running
    lease.acquire(tmp_path, 60.0, name="out").stop()
    stored = json.loads((tmp_path / lease.NAME).read_text())
    (tmp_path / lease.NAME).write_text(json.dumps({**stored, "created": me.created + off}))
    with pytest.raises(Locked) if running else nullcontext():
        lease.acquire(tmp_path, 60.0, name="out").release()


def test_a_zombie_has_ended() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        pass
    created = psutil.Process(child).create_time()
    assert liveness.is_running(liveness.this_process()._replace(pid=child, created=created)) is False
    os.waitpid(child, 0)
    assert liveness.is_running(liveness.this_process()._replace(pid=child, created=created)) is False


def test_of_a_process_of_another_machine_or_boot_nothing_is_said(tmp_path: Path) -> None:
    """Logs of the version before name the host instead of the boot: their heartbeat decides."""
    before = f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    assert liveness.is_running(liveness.this_process()._replace(machine=before)) is None
    log = tmp_path / "0-a.json"
    log.write_text(json.dumps({"machine": before, "pid": os.getpid(), "started": 0.0}) + "\n")
    assert poison_rows._is_running(log) is None
    log.write_text('{"machine": ')
    assert poison_rows._is_running(log) is None
