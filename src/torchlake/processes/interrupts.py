"""Answer Ctrl-C with an immediate message when the shutdown takes seconds."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def announce_interrupt(message: str) -> Iterator[None]:
    """Write `message` to standard error at the first Ctrl-C in the block; has no effect outside the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    shown = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal shown
        if not shown:
            shown = True
            os.write(2, f"\n{message}\n".encode())  # unbuffered, because the signal may interrupt a print
        before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:  # else a library has replaced it
            signal.signal(signal.SIGINT, before)
