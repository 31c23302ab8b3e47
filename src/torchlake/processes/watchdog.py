"""A small process that kills the process groups of a parent that has exited.

Standard input has one line per event: "+PID" for a new process group, "-PID" for one that has ended. When the parent
exits for any reason, the kernel closes the pipe, and every group still listed is killed, including stopped processes,
ranks blocked in a collective, and their descendants. The argument is a grace period in seconds: the groups' leaders get
SIGTERM that long before the groups are killed. Runs as a bare file (`python -I -S`) without the package, so it starts
in about 10 ms.
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
    """Send SIGTERM, and wait until all processes have exited or the grace period is over."""
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
