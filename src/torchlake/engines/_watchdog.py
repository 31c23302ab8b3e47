"""The launcher's last will: a small process that outlives it and kills what it leaves behind.

Standard input holds one line per event, "+PID" for a process group begun and "-PID" for one that ended. When the
launcher ends, however it ends, the kernel closes the pipe, and every group still listed is killed: stopped processes,
ranks blocked in a collective and their own children too, which a signal to the rank alone would orphan.
Runs as a bare file (`python -I -S`), so it starts in about 10 ms and imports nothing of the package.
"""

import os
import signal
import sys
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
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
