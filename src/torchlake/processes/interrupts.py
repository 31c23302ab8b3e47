"""What Ctrl-C says at once, while what it set off takes seconds. Price: a signal handler, in the main thread only."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def announced(message: str) -> Iterator[None]:
    """In the block, the first Ctrl-C writes `message` to standard error; what Ctrl-C does stays as it is."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    said = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal said
        if not said:
            said = True
            os.write(2, f"\n{message}\n".encode())  # a signal may come in the middle of a print: no buffer here
        before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:  # a library may have set its own meanwhile
            signal.signal(signal.SIGINT, before)
