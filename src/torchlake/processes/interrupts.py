"""Answer Ctrl-C with an immediate message when the shutdown takes seconds, and say at the end what is kept."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "Stopping; press Ctrl-C again to abort."


@contextmanager
def announce_interrupt(kept: str) -> Iterator[None]:
    """Write `STOPPING` to standard error at the first Ctrl-C in the block; has no effect outside the main thread.

    `kept` says what is kept of the work in the block. A KeyboardInterrupt that leaves the block has it as a note.
    """
    try:
        with _answered():
            yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept)
        raise


@contextmanager
def _answered() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    shown = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal shown
        if not shown:
            shown = True
            os.write(2, f"\n{STOPPING}\n".encode())  # unbuffered, because the signal may interrupt a print
        before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:  # else a library has replaced it
            signal.signal(signal.SIGINT, before)


@contextmanager
def restored_interrupt() -> Iterator[None]:
    """Handle Ctrl-C after the block as before it, though a library replaces the handler in it; no effect outside the
    main thread.
    """
    before, able = signal.getsignal(signal.SIGINT), threading.current_thread() is threading.main_thread()
    try:
        yield
    finally:
        if able and before is not None:  # None: not set by Python
            signal.signal(signal.SIGINT, before)


@contextmanager
def noted_signals(*signals: int) -> Iterator[list[int]]:
    """Yield a list that gets the signals in the block, instead of what they did; no effect outside the main thread."""
    noted: list[int] = []
    able = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, lambda number, frame: noted.append(number)) for each in signals if able}
    try:
        yield noted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
