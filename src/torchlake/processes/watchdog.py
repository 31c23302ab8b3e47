"""A small process that kills what its parent leaves behind.

Standard input holds one line per event, "+PID" for a process group begun and "-PID" for one that ended. When the
parent ends, however it ends, the kernel closes the pipe, and every group still listed is killed: stopped processes,
ranks blocked in a collective and their own children too, which a signal to the rank alone would orphan. The argument
is a number of seconds: the groups' first processes get SIGTERM and that long before the groups are killed.
Runs as a bare file (`python -I -S`), so it starts in about 10 ms and imports nothing of the package.
"""

import os
import signal
import sys
import time
from contextlib import suppress


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    grace_s = float(sys.argv[1])
    if grace_s:
        _ask_to_end(groups, grace_s)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _ask_to_end(groups: set[int], grace_s: float) -> None:
    """Send SIGTERM, and wait until all have ended or the time is over."""
    running, deadline = set(groups), time.monotonic() + grace_s
    for number in (signal.SIGTERM, 0):
        while running and time.monotonic() < deadline:
            for process in list(running):
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    running.discard(process)
            if number:
                break
            time.sleep(0.05)


if __name__ == "__main__":
    main()
