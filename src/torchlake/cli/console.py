"""The process around a command: where its result and its errors are written, and what SIGTERM does to it.

Under --json, descriptor 1 itself points to standard error while a command runs, so that C libraries and child
processes, which know nothing of Python's `sys.stdout`, write there too. Price: two system calls.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any, TextIO

from torchlake.cli.commands import Outcome
from torchlake.config.redaction import redacted
from torchlake.errors import Interrupted, RankFailed


def error_outcome(error: BaseException, message: str, exit_code: int, *, shown: str = "") -> Outcome:
    """The error on standard error, for people; and in `values`, for --json. Secrets are taken out of both."""
    if shown:
        print(redacted(shown), file=sys.stderr, flush=True)
    described: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": exit_code}
    if isinstance(error, RankFailed):
        described |= {"rank": error.rank, "signal": error.signal, "traceback": error.traceback}
    return Outcome(values={"error": redacted(described)}, lines=(), exit_code=exit_code)


def resume_line(words: Sequence[str]) -> str:
    """What to type to continue where `torchlake WORDS` was stopped."""
    return f"To continue, run it again: {shlex.join(['torchlake', *words])}"


@contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGTERM in the block raises Interrupted in it; further ones do nothing."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def apart(as_json: bool) -> Iterator[TextIO]:
    """Yield where the result goes; under --json all other writers of descriptor 1 write to standard error meanwhile."""
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


def _terminated(signum: int, frame: FrameType | None) -> None:
    # Once: a second SIGTERM must not break the saving that the first one started.
    signal.signal(signal.SIGTERM, _already_stopping)
    raise Interrupted("Stopped by SIGTERM.", signum=signum)


def _already_stopping(signum: int, frame: FrameType | None) -> None:
    """Keep saving. (SIG_IGN would be inherited by child processes; this is not.)"""
