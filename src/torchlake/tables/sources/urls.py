"""URLs of storages: which may be opened, and the fsspec file system behind one.

fsspec opens an URL only after `check_url`: it knows protocols that unpack archives, read through other URLs, render
templates with the environment in them, run a shell elsewhere or send what they read in the clear, and it chains them.
"""

from typing import Any

from torchlake.config.redaction import redacted
from torchlake.errors import MissingExtra, TableError

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hdfs", "memory")
"""Protocols of storages that hold files, and know who may read them. Not among them: plain http and what is made of it
(webhdfs), what needs a password in the URL (ftp, smb), and ssh, which runs programs."""
READ_ONLY = ("https", "hf")
"Protocols of public files: nothing is written there."

_S3, _GCS, _AZURE = ("s3fs", "s3"), ("gcsfs", "gcs"), ("adlfs", "azure")
EXTRAS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS} | dict.fromkeys(("abfs", "abfss", "az"), _AZURE)
"By protocol, the library that opens it and the extra of torchlake that installs it."


def is_url(path: str) -> bool:
    """Whether `path` is an fsspec URL (`file://` URLs are local paths and never get this far)."""
    return "://" in path


def check_url(url: str, *, to_write: bool = False) -> str:
    """The protocol of an URL that may be opened. Raises TableError saying which may be, for all others."""
    protocol = url.partition("://")[0]
    shown, allowed = redacted(url), STORES if to_write else STORES + READ_ONLY
    if "::" in url:
        raise TableError(
            f"{shown}: an URL in another one ('::') is refused: it would be unpacked, copied or led elsewhere. "
            "Name the files themselves; unpack an archive first."
        )
    if protocol not in allowed:
        hint = " Use https." if protocol == "http" and not to_write else ""
        raise TableError(
            f"{shown}: the protocol {protocol[:40]!r} is refused.{hint} Allowed are local paths, file and "
            f"{', '.join(allowed)}."
        )
    return protocol


def missing_library(url: str, error: ImportError) -> str:
    """What to install for the storage of an URL whose library is not there; `error` is fsspec's."""
    protocol = url.partition("://")[0]
    if protocol not in EXTRAS:
        return str(error)
    library, extra = EXTRAS[protocol]
    return f"{protocol}:// needs the library {library!r}, which is not installed: pip install 'torchlake[{extra}]'"


def filesystem_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of an URL and the path in it.

    Raises TableError as `check_url` does, MissingExtra when the protocol's library is not installed.
    """
    from fsspec.core import url_to_fs

    check_url(url)
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"{redacted(url)}: {missing_library(url, error)}") from error
    except ValueError as error:
        raise TableError(f"{redacted(url)}: {error}") from error
    return filesystem, path
