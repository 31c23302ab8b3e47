"""End the process when a step takes too long, even if it hangs inside a kernel.

The watchdog of faulthandler is a C thread that needs no interpreter lock. There is one per process, so it is set to the
first deadline of the steps that run.
"""

import faulthandler
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_watching = threading.Lock()
_deadlines: dict[int, float] = {}
"Deadlines of the running steps, by the file descriptor for the stack."


@contextmanager
def watched(trace: int, limit_s: float) -> Iterator[None]:
    """Write the stack to the file descriptor and exit, if the block takes longer than `limit_s` seconds.

    Two threads may be inside at the same time.
    """
    with _watching:
        _deadlines[trace] = time.monotonic() + limit_s
        _watch_first()
    try:
        yield
    finally:
        with _watching:
            del _deadlines[trace]
            _watch_first()


def extend(trace: int, deadline: float) -> None:
    """Set another deadline for a step that is still running."""
    with _watching:
        if trace in _deadlines:
            _deadlines[trace] = deadline
            _watch_first()


def _watch_first() -> None:
    if _deadlines:
        trace, deadline = min(_deadlines.items(), key=lambda item: item[1])
        faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.001), exit=True, file=trace)
    else:
        faulthandler.cancel_dump_traceback_later()
