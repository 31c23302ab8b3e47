"""Standard output, errors and SIGTERM while a command runs.

Under --json, file descriptor 1 itself points to standard error, so that C libraries and child processes, which do not
use Python's `sys.stdout`, write there too.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any, TextIO

from torchlake.cli.display import Outcome
from torchlake.config.redaction import redacted
from torchlake.errors import RankFailed, Terminated


def error_outcome(error: BaseException, message: str, exit_code: int, *, shown: str = "") -> Outcome:
    """Print `shown` to standard error and return the error for --json. Secrets are removed from both."""
    if shown:
        print(redacted(shown), file=sys.stderr, flush=True)
    described: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": exit_code}
    if isinstance(error, RankFailed):
        described |= {"rank": error.rank, "signal": error.signal, "traceback": error.traceback}
    return Outcome(values={"error": redacted(described)}, lines=(), exit_code=exit_code)


def resume_hint(words: Sequence[str]) -> str:
    """Return the command that continues `torchlake WORDS` after it was stopped."""
    return f"To continue, run it again: {shlex.join(['torchlake', *words])}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Terminated on the first SIGTERM in the block; ignore further ones."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def result_stream(as_json: bool) -> Iterator[TextIO]:
    """Yield the stream for the result. Under --json all other output to descriptor 1 goes to standard error."""
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
    # A second SIGTERM must not interrupt the saving that the first one started.
    signal.signal(signal.SIGTERM, _already_stopping)
    raise Terminated("Stopped by SIGTERM.")


def _already_stopping(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited by child processes."""
