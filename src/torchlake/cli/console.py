"""Errors, SIGTERM and readers that are gone while a command runs.

Python drops an exception that is raised in a finalizer or a callback of a weak reference: then the signal comes again.

A job whose standard error is a pipe stops when the pipe's reader is gone, as at SIGTERM: child processes write there,
too, and save their work when this process tells them to stop.

Errors of the operating system that nothing else caught become messages with a remedy. Missing permissions, a full disk
or a link to itself can occur wherever a path is opened. A missing or existing file is the user's error only if the user
named its path; otherwise it is a fault in torchlake.
"""

import errno
import os
import select
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from torchlake import atomic_io
from torchlake.cli.display import Outcome
from torchlake.cli.streams import print_error, silence_closed
from torchlake.config.yaml import read_text, read_yaml
from torchlake.errors import (
    DataError,
    Interrupted,
    OutputError,
    RankFailed,
    StorageError,
    Terminated,
    TorchlakeError,
    stopped_by,
)
from torchlake.redaction import redacted

PIPE_CLOSED = 128 + signal.SIGPIPE
"The exit status of other tools whose output is not read to its end."
KEEPING = ("train", "tune", "predict", "rank", "demo")
"Commands that keep what was finished when they are stopped."
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STORAGE_ERRORS = (*FULL, errno.EIO, errno.ESTALE)
REMEDIES = {
    errno.EACCES: "Change its permissions or those of the folders above it, or name another path.",
    errno.EPERM: "Change its permissions or those of the folders above it, or name another path.",
    errno.EROFS: "Name a path that can be written.",
    errno.ELOOP: "The symbolic links in this path lead to themselves: name the file or folder itself.",
    errno.ENAMETOOLONG: "Name a shorter path.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the limit of open files (ulimit -n).",
}
"Remedies by error number; never a fault in torchlake."
NAMED_PATH_REMEDIES = {
    errno.ENOENT: "Check the spelling, or whether the file was removed.",
    errno.ENOTDIR: "A part of this path is a file, not a folder.",
    errno.EISDIR: "A file is expected there: name another path.",
    errno.EEXIST: "A folder is expected there: name another path.",
    errno.ENXIO: "Name a file or folder.",
    errno.ENODEV: "Name a file or folder.",
    errno.EINVAL: "Name a file or folder.",
}
"Remedies by error number; the user's error only at a path that the user named."
AGAIN_S = 0.05
"After how long a signal comes again that could not stop the command."
LOCKING = ("_get_module_lock", "_get_module_lock.<locals>.cb")
"Functions of importlib that would keep the lock of all imports if they were interrupted."
SHOWN = 300
"Characters of a path that a message shows."
_closed = False


def error_outcome(error: BaseException, message: str, exit_code: int, *, shown: str = "") -> Outcome:
    """Print `shown` to standard error and return the error for --json. Secrets are removed from both."""
    if shown:
        print_error(redacted(shown))
    described: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": exit_code}
    if isinstance(error, RankFailed):
        described |= {"rank": error.rank, "signal": error.signal, "traceback": error.traceback}
    return Outcome(values={"error": redacted(described)}, lines=(), exit_code=exit_code)


def stop_outcome(stop: KeyboardInterrupt | Interrupted, words: Sequence[str]) -> Outcome:
    """Say in one sentence by what `torchlake WORDS` was stopped and what is kept, and in another how to continue."""
    if isinstance(stop, KeyboardInterrupt):
        text = stopped_by(stop.signum if isinstance(stop, Terminated) else signal.SIGINT)
        if words[:1] and words[0] in KEEPING:
            text += f"; {next(iter(getattr(stop, '__notes__', [])), 'nothing new was saved')}"
        stop = Interrupted(text, signum=stop.signum if isinstance(stop, Terminated) else signal.SIGINT)
    text = str(stop)
    shown = f"{text[:1].upper()}{text[1:].rstrip('.')}. To continue, run it again: {shlex.join(['torchlake', *words])}"
    return error_outcome(stop, text, stop.exit_code, shown="" if stop.exit_code == PIPE_CLOSED else shown)


@contextmanager
def interruptible(*, watched: bool) -> Iterator[None]:
    """Raise Terminated on the first SIGTERM in the block, or if `watched` when the reader of standard error is gone."""
    global _closed
    _closed = False
    before, alarm = signal.signal(signal.SIGTERM, _terminated), signal.getsignal(signal.SIGALRM)
    dropped = sys.unraisablehook

    def hook(found: "sys.UnraisableHookArgs") -> None:
        if isinstance(found.exc_value, KeyboardInterrupt) and current_thread() is main_thread():
            _later(partial(_raise, found.exc_value))
        else:
            dropped(found)

    sys.unraisablehook = hook
    try:
        with _reader_watched() if watched and _is_pipe(2) else nullcontext():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = dropped
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _reader_watched() -> Iterator[None]:
    ours, theirs = os.pipe()
    watching = Thread(target=_watch_reader, args=(ours,), name="reader", daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(theirs)
        watching.join()
        os.close(ours)


def lost_reader() -> bool:
    """Return whether the last block of `interruptible` was stopped because the reader of standard error was gone."""
    if _closed:
        silence_closed()
    return _closed


def _is_pipe(number: int) -> bool:
    return stat.S_ISFIFO(os.fstat(number).st_mode)


def _watch_reader(until: int) -> None:
    """Send SIGTERM to this process when the reader of standard error is gone, unless `until` is closed before."""
    global _closed
    poll = select.poll()
    poll.register(2, 0)
    poll.register(until, select.POLLIN)
    if 2 in dict(poll.poll()):
        _closed = True
        os.kill(os.getpid(), signal.SIGTERM)


def stop_in_parsing() -> KeyboardInterrupt:
    """Return the signal that typer made an exit status of, because it came while the command line was parsed."""
    is_terminated = signal.getsignal(signal.SIGTERM) is _already_stopping
    return Terminated(signum=signal.SIGPIPE if _closed else signal.SIGTERM) if is_terminated else KeyboardInterrupt()


def _terminated(signum: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code.co_qualname in LOCKING:
        _later(_terminated)
        return
    # A second SIGTERM must not interrupt the saving that the first one started.
    signal.signal(signal.SIGTERM, _already_stopping)
    raise Terminated(signum=signal.SIGPIPE if _closed else signal.SIGTERM)


def _raise(stop: BaseException, signum: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code.co_qualname in LOCKING:
        _later(partial(_raise, stop))
        return
    raise stop


def _later(handle: Callable[[int, FrameType | None], None]) -> None:
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _already_stopping(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited by child processes."""


def explain_os_error(error: OSError, words: Sequence[str]) -> TorchlakeError | None:
    """Return the error to report instead; None for a fault in torchlake.

    words: the command line. The paths in it, and in the job files that it names, are those that the user named.
    """
    number, path = error.errno, "" if error.filename is None else os.fsdecode(error.filename)
    reason = error.strerror or str(error)
    if number in STORAGE_ERRORS and path:
        return atomic_io.storage_error(error, Path(path))
    if number in FULL:
        return StorageError(f"{reason}. Make room, and run it again.")
    if number in REMEDIES and (path or reason != os.strerror(number)):  # pyarrow puts the path into the message
        remedy = REMEDIES[number]
    elif number in NAMED_PATH_REMEDIES and path and any(_concerns(path, one, number) for one in named_paths(words)):
        remedy = NAMED_PATH_REMEDIES[number]
    else:
        return None
    shown = f"{path[:SHOWN]}{'...' * (len(path) > SHOWN)}: " if path else ""
    is_output = number in (errno.EACCES, errno.EPERM) and path and _is_missing(path)
    kind = OutputError if number == errno.EROFS or is_output else DataError
    return kind(redacted(f"{shown}{reason}. {remedy}"))


def named_paths(words: Sequence[str]) -> Iterator[str]:
    """Yield every word of a command line, and every string of the job files in it: what may be a path."""
    for word in words:
        for text in (word, word.partition("=")[2]):
            yield text
            if text.endswith((".yaml", ".yml")):
                try:
                    yield from _strings(read_yaml(read_text(Path(text)), text)[0])
                except TorchlakeError:
                    continue


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _concerns(path: str, named: str, number: int) -> bool:
    """Return whether `path` is the named path, a folder above it, or (if that explains the error) below it."""
    if not named or "\0" in named:
        return False
    path, named = os.path.abspath(path), os.path.abspath(os.path.expanduser(named))
    above, below = f"{named}/".startswith(f"{path}/"), f"{path}/".startswith(f"{named}/")
    return above or (below and (number != errno.ENOENT or not os.path.exists(named)))


def _is_missing(path: str) -> bool:
    """Return whether `path` does not exist, in a folder that can be searched."""
    parent = os.path.dirname(os.path.abspath(path))
    return os.access(parent, os.X_OK) and not os.path.lexists(path)
