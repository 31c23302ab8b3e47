"""What ranks print on other machines: whole lines, whatever bytes they are, brought to the driver's own streams."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LAST_WORDS_S = 2.0  # for the last words of processes that have ended

Send = Callable[[int, bytes], None]
"""Takes a stream (1: stdout, 2: stderr) and whole lines."""


@contextmanager
def captured(send: Send) -> Iterator[tuple[int, int]]:
    """Two open files for children to print to, as their stdout and stderr."""
    pipes = [os.pipe() for _ in (1, 2)]
    threads = [
        threading.Thread(target=_pass_on, args=(read, stream, send), daemon=True)
        for stream, (read, _) in enumerate(pipes, start=1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield pipes[0][1], pipes[1][1]
    finally:
        for _, write in pipes:
            os.close(write)
        for thread in threads:
            thread.join(LAST_WORDS_S)


def show(stream: int, lines: bytes, *, stdout_to_stderr: bool = False) -> None:
    """Print lines on this process's own stream; in a notebook that is no file but takes text. A stream that is closed,
    or a pipe that its reader has left (`| head`), takes no more and stops nothing."""
    file = sys.stderr if stdout_to_stderr or stream == 2 else sys.stdout
    if file is not None:
        with suppress(ValueError, OSError):
            file.write(lines.decode(errors="replace"))
            file.flush()


def _pass_on(descriptor: int, stream: int, send: Send) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        rest = b""
        while data := pipe.read(1 << 16):
            lines, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                send(stream, lines + newline)
        if rest:
            send(stream, rest + b"\n")
