"""For tests about processes: pid files that the processes write themselves, and polling with a deadline."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def note(folder: Path, name: str) -> None:
    """In the process: leave its pid in `folder`, whole or not at all."""
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(folder / f"{name}.pid")


def wait_for(condition: Callable[[], object], *, seconds: float = 120.0) -> None:
    """Poll until `condition()` holds; fails after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not true within {seconds} s"
        time.sleep(0.01)


def pid(folder: Path, name: str, *, seconds: float = 120.0) -> int:
    """The pid that `name` left in `folder`, waiting for it."""
    path = folder / f"{name}.pid"
    wait_for(path.exists, seconds=seconds)
    return int(path.read_text())


def gone(number: int) -> bool:
    """Whether no process has this pid, a zombie that waits for its parent not counted."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
