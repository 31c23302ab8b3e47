"""Answer whether a process still runs: leases and logs of attempts name their process this way.

A process id means something only on one boot of one kernel and in one process namespace, and there it is reused. So a
record has three fields: machine, process id, start time. Of a process on another machine nothing can be said here; its
heartbeat decides.
"""

import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

ROUNDING_S = 1.0
"Two readings of one start time differ by the kernel's clock ticks, or by a step of the clock."


class ProcessIdentity(NamedTuple):
    """What a record says about the process that wrote it."""

    machine: str
    pid: int
    created: float
    "Its start time, in seconds since 1970."


def this_process() -> ProcessIdentity:
    """Return the identity of the process that calls."""
    return ProcessIdentity(machine_id(), os.getpid(), psutil.Process().create_time())


def is_running(identity: ProcessIdentity) -> bool | None:
    """Return whether a process still runs; None for one on another machine."""
    if identity.machine != machine_id():
        return None
    try:
        process = psutil.Process(identity.pid)
        # A zombie has ended; its id stays until its parent reaps it, which in a container may never happen.
        same = abs(process.create_time() - identity.created) < ROUNDING_S
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # another user's process: it exists, and waiting is safer than two writers


def machine_id() -> str:
    """Return the scope in which a process id is unique: this boot of this kernel, this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
