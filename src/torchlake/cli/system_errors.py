"""Errors of the operating system in words for people: which of them are not torchlake's, and what they end with.

A folder without permission, a full disk or a link that leads to itself can be met wherever a path is opened. What is
expected is caught there, with better words; this is for the rest. A file that is missing, or there already, is the
user's error only where the user named its path: anywhere else it is a fault in torchlake.
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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
REMEDIES = {
    errno.EACCES: "Change its permissions or those of the folders above it, or name another path.",
    errno.EPERM: "Change its permissions or those of the folders above it, or name another path.",
    errno.EROFS: "Name a path that can be written.",
    errno.ELOOP: "The symbolic links in this path lead to themselves: name the file or folder itself.",
    errno.ENAMETOOLONG: "Name a shorter path.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the limit of open files (ulimit -n).",
}
"What no program can prevent, by the number of the error."
AT_NAMED_PATHS = {
    errno.ENOENT: "Look for a typing error, or for what removed it.",
    errno.ENOTDIR: "A part of this path is a file, not a folder.",
    errno.EISDIR: "A file is expected there: name another path.",
    errno.EEXIST: "A folder is expected there: name another path.",
    errno.ENXIO: "Name a file or folder.",
    errno.ENODEV: "Name a file or folder.",
    errno.EINVAL: "Name a file or folder.",
}
SHOWN = 300
"Characters of a path that a message shows."


def in_words(error: OSError, words: Sequence[str]) -> TorchlakeError | None:
    """The error to end with, in one sentence; None where it is a fault in torchlake.

    `words` is the command line, job files among them: the paths that the user named.
    """
    number, path = error.errno, "" if error.filename is None else os.fsdecode(error.filename)
    if number in FULL and path:
        return atomic_io.storage_error(error, Path(path))
    said = error.strerror or str(error)
    if number in REMEDIES and (path or said != os.strerror(number)):  # pyarrow puts the path into the words
        remedy = REMEDIES[number]
    elif number in AT_NAMED_PATHS and path and any(_concerns(path, one, number) for one in named_paths(words)):
        remedy = AT_NAMED_PATHS[number]
    else:
        return None
    shown = f"{path[:SHOWN]}{'...' * (len(path) > SHOWN)}: " if path else ""
    to_be_made = number in (errno.EACCES, errno.EPERM) and path and _was_to_be_made(path)
    kind = OutputError if number == errno.EROFS or to_be_made else DataError
    return kind(redacted(f"{shown}{said}. {remedy}"))


def named_paths(words: Sequence[str]) -> Iterator[str]:
    """What may be a path among the words of a command line, and in the job files that they name."""
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
    """Whether an error at `path` is one of the path that was named: that path itself, one above it, or one below it."""
    if not named or "\0" in named:
        return False
    path, named = os.path.abspath(path), os.path.abspath(os.path.expanduser(named))
    above, below = f"{named}/".startswith(f"{path}/"), f"{path}/".startswith(f"{named}/")
    return above or (below and (number != errno.ENOENT or not os.path.exists(named)))


def _was_to_be_made(path: str) -> bool:
    """Whether there is no such file or folder where one can look."""
    parent = os.path.dirname(os.path.abspath(path))
    return os.access(parent, os.X_OK) and not os.path.lexists(path)
