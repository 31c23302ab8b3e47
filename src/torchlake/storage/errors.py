"""Turn errors of storages into errors that say what happened and what to do: the only place that knows their words.

The clients have no common error class. fsspec translates some errors to OSError and passes on those of boto, Google,
Azure and the Hub; obstore and delta-rs put the server's answer into their message. Both are searched here for what a
retry does not change: credentials, permission, a missing bucket, another region, a gated repository. The error for a
full disk is that of `atomic_io.storage_error`, as everywhere.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchlake import atomic_io
from torchlake.errors import AccessError, StorageError, TableError, TorchlakeError, Unavailable
from torchlake.redaction import USER, redacted
from torchlake.storage.urls import credentials_of, is_url, secret_repository

_MISSING = re.compile(r"NoSuchBucket|NO_SUCH_BUCKET|ContainerNotFound|The specified bucket does not exist")
_NO_CREDENTIALS = re.compile(
    r"Unauthenticated|[Cc]redential|[Aa]uthentication|Account must be specified|169\.254\.169\.254"
)
"The last one is the address where cloud machines get their role."
_DENIED = re.compile(
    r"ACCESS_DENIED|AccessDenied|Forbidden|Unauthorized|PermissionDenied|InvalidAccessKeyId|SignatureDoesNotMatch"
)
_REGION = re.compile(r"\b301 Moved|HTTP status 301|PermanentRedirect|incorrectly configured region")
_GATED = re.compile(r"GatedRepo|RepositoryNotFound")
_THROTTLED = re.compile(r"SlowDown|TooManyRequests|Too Many Requests|ServerBusy|RequestLimitExceeded|[Tt]hrottl")
_FULL = re.compile(r"No space left on device|os error 28\b|StorageFull")
NULL = "\0"
_COLORS, _CODE = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"<Code>(\w+)</Code>")


@contextmanager
def storage_errors(file: str) -> Iterator[None]:
    """Turn errors of reading a local file or a URL into Unavailable."""
    try:
        yield
    except TorchlakeError:
        raise
    except OSError as error:
        raise unavailable(file, error) from error
    except Exception as error:  # a library's own class; of Python, for a null byte in a path
        if not is_url(file) and NULL not in file:
            raise
        raise unavailable(file.replace(NULL, r"\0"), error) from error


@contextmanager
def library_errors(place: str, advice: str = "Restore it, or give another table.") -> Iterator[None]:
    """Turn whatever a table's library raises into an error that names the table, also a panic of code in Rust.

    Damaged logs and metadata raise exceptions of every kind.
    """
    try:
        yield
    except (TorchlakeError, MemoryError):
        raise
    except OSError as error:
        raise unavailable(place, error) from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = redacted(f"{type(error).__name__}: {first_line(error)}")
        raise TableError(f"{place}: the table cannot be read ({why}). {advice}") from error


def unavailable(file: str, error: Exception) -> Unavailable:
    """Return the error for a file that cannot be opened or read."""
    why = first_line(getattr(error, "strerror", None) or error)
    if not is_url(file):
        return Unavailable(f"{file}: {why}")
    advice = access_advice(file, error) or _throttled(error)
    return Unavailable(redacted(f"{file}: {why}. {advice}".rstrip()))


def storage_failure(place: str, why: Exception | str) -> StorageError:
    """Return the error for a folder or object that cannot be written to; `why` is the error of a library."""
    text = _COLORS.sub("", _without_secrets(place, why)).partition("Debug source:")[0] or type(why).__name__
    if not is_url(place) and _FULL.search(text):
        return atomic_io.storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Path(place))
    plain, _, answer = text.partition("<?xml")
    cause = ": ".join(line.strip(" \u21b3:.") for line in plain.splitlines() if line.strip(" \u21b3:."))
    code = _CODE.search(answer)
    shown = redacted(f"{place}: {cause}{f' {code[1]}' if code else ''}".rstrip(" .-"))
    if advice := access_advice(place, why):
        return AccessError(f"{shown}. {advice} Finished work is kept.")
    again = _throttled(why) or "Run the same command again once the store answers."
    return StorageError(f"{shown}. {again.rstrip('.')}: finished work is kept.")


def access_advice(place: str, error: Exception | str) -> str:
    """Return what to do about an error that a retry does not change; empty for others, and for local paths."""
    if not is_url(place):
        return ""
    text = _searched(error)
    for name in (place, place.partition("://")[2]):  # a file may be called credentials.csv
        text = text.replace(name, "")
    if _MISSING.search(text):
        return "There is no such bucket: create it, or correct the URL."
    if _GATED.search(text):
        return secret_repository(place)
    if isinstance(error, FileNotFoundError):
        return ""
    if _REGION.search(text) or getattr(error, "errno", None) == errno.EREMCHG:
        return "The bucket is in another region: set AWS_DEFAULT_REGION to its region."
    source = f"Credentials come from {credentials_of(place)}."
    if _NO_CREDENTIALS.search(text):
        return source
    if _DENIED.search(text) or isinstance(error, PermissionError):
        return f"The credentials that were found have no access. {source}"
    return ""


def first_line(error: object) -> str:
    """Return the message of an error in one line, without its period."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _throttled(error: Exception | str) -> str:
    """Return what to do about a store that limits the rate of requests; empty for other errors."""
    if not _THROTTLED.search(_searched(error)):
        return ""
    return "The store limits the rate of requests. Run the same command again later, or with fewer processes."


def _searched(error: Exception | str) -> str:
    """Return the text in which words are looked for: what an error says, and the names of its classes."""
    text = _COLORS.sub("", str(error)).partition("Debug source:")[0]
    return text if isinstance(error, str) else " ".join([text, *(kind.__name__ for kind in type(error).__mro__)])


def _without_secrets(place: str, why: Exception | str) -> str:
    """Return the text of an error without the user and password of the URL."""
    text = str(why)
    if user := USER.match(place):
        for secret in (user[2], user[2].partition(":")[2] or user[2]):
            text = text.replace(secret, "[redacted]")
    return text
