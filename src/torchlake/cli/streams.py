"""The standard streams of a command: closed by the shell, without a reader, or on a full disk; and that of the result.

Under --json, file descriptor 1 itself points to standard error, so that C libraries and child processes, which do not
use Python's `sys.stdout`, write there too.
"""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from typing import TextIO

from torchlake.errors import StorageError

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"The names and modes of the file descriptors 0, 1 and 2."
ERRORS = "backslashreplace"
"How letters that are not Unicode are written, as Python does on standard error."


def open_missing() -> None:
    """Open the null device for each standard stream that the shell has closed (`2>&-`).

    Otherwise the next file that is opened, such as a part of an output, would have its number, and what a C library
    prints would be written into it.
    """
    for number, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors=ERRORS, closefd=False))


@contextmanager
def result_stream(as_json: bool) -> Iterator[TextIO]:
    """Yield the stream for the result. Under --json all other output to descriptor 1 goes to standard error."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=ERRORS)  # names come from files and tables, workers' lines from users
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr), os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_result(text: str, out: TextIO) -> None:
    """Print the result of a command. Raises StorageError if the disk is full, BrokenPipeError without a reader."""
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence(out.fileno())
        message = f"standard output: {error.strerror}. The command has ended, but its result could not be written."
        raise StorageError(message) from None


def print_error(text: str) -> None:
    """Print to standard error. What a full disk does not take is dropped; raises BrokenPipeError without a reader."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def silence_closed() -> bool:
    """Return whether standard output or error is a pipe without a reader; what is written there is dropped then."""
    closed = [number for number in (1, 2) if _is_closed(number)]
    for number in closed:
        _silence(number)
    return bool(closed)


def silence_full() -> None:
    """Drop what a full disk does not take of standard output and error; Python would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            _silence(stream.fileno())


def _silence(number: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)


def _is_closed(number: int) -> bool:
    poll = select.poll()
    poll.register(number, 0)  # errors are always reported
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
