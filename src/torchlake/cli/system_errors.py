"""Turn errors of the operating system that nothing else caught into messages with a remedy.

Missing permissions, a full disk or a link to itself can occur wherever a path is opened. A missing or existing file is
the user's error only if the user named its path; otherwise it is a fault in torchlake.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.redaction import redacted
from torchlake.config.yaml import read_text, read_yaml
from torchlake.errors import DataError, OutputError, TorchlakeError

STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
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
SHOWN = 300
"Characters of a path that a message shows."


def explain_os_error(error: OSError, words: Sequence[str]) -> TorchlakeError | None:
    """Return the error to report instead; None for a fault in torchlake.

    words: the command line. The paths in it, and in the job files that it names, are those that the user named.
    """
    number, path = error.errno, "" if error.filename is None else os.fsdecode(error.filename)
    if number in STORAGE_ERRORS and path:
        return atomic_io.storage_error(error, Path(path))
    reason = error.strerror or str(error)
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
