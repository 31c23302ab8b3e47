"""A real terminal for tests: a pseudo-terminal of a given width that a process has as its controlling one."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

CTRL_C = b"\x03"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    words: Sequence[str],
    *,
    columns: int,
    keys: Sequence[tuple[str, bytes]] = (),
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 120.0,
) -> tuple[int, str]:
    """Run a command on a terminal; its exit status and all that it wrote there.

    `keys` are typed one after the other, each as soon as its text has appeared after what was typed before.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("TORCHLAKE_PROGRESS", "COLUMNS")}
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**variables, "TERM": "xterm", **(environment or {})},
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    shown, todo, looked = b"", list(keys), 0
    deadline = time.monotonic() + deadline_s
    try:
        while True:
            assert time.monotonic() < deadline, f"still running: {shown.decode(errors='replace')[-2000:]}"
            if not select.select([ours], [], [], 0.1)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                added = os.read(ours, 1 << 16)
            except OSError:  # Linux: the last process with the terminal has closed it
                break
            if not added:
                break
            shown += added
            while todo and (at := shown.find(todo[0][0].encode(), looked)) >= 0:
                looked = at + len(todo[0][0])
                os.write(ours, todo.pop(0)[1])
        return process.wait(timeout=30), shown.decode(errors="replace")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def frames(shown: str) -> list[str]:
    """What stood on a line at any time: every line, and every redrawing of one, without control sequences."""
    return [CONTROL.sub("", frame).rstrip() for line in shown.split("\n") for frame in re.split(r"\r|\x1b\[2K", line)]


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
