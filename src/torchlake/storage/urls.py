"""URLs: which protocols are allowed, and the fsspec file system of a URL.

fsspec opens a URL only after `check_url`, because it has protocols that unpack archives, read through other URLs,
render templates with environment variables, run a remote shell or send data unencrypted, and it can chain them.
"""

import os
from typing import Any

from torchlake.errors import MissingExtra, TableError, pip_install
from torchlake.redaction import redacted

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hdfs", "memory")
"""Protocols of storages with files and access control. Excluded: plain http, also as webhdfs, protocols with a password
in the URL (ftp, smb), and ssh, which runs programs."""
READ_ONLY = ("https", "hf")
"Protocols of public files, which are only read."

_S3, _GCS, _AZURE = ("s3fs", "s3"), ("gcsfs", "gcs"), ("adlfs", "azure")
EXTRAS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS} | dict.fromkeys(("abfs", "abfss", "az"), _AZURE)
"The library that opens each protocol, and torchlake's extra that installs it."
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the role of the machine",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "HF_TOKEN, or `hf auth login`",
}


def is_url(path: str) -> bool:
    """Return whether `path` is an fsspec URL (`file://` URLs are converted to local paths before)."""
    return "://" in path


def check_url(url: str, *, to_write: bool = False) -> str:
    """Return the protocol of a URL. Raises TableError listing the allowed protocols for others."""
    protocol, _, place = url.partition("://")
    shown, allowed = redacted(url), STORES if to_write else STORES + READ_ONLY
    if protocol in EXTRAS and not place.strip("/"):
        raise TableError(f"{shown}: names no bucket or container. Write {protocol}://BUCKET/PATH.")
    if "::" in url:
        raise TableError(
            f"{shown}: a URL inside another one ('::') is refused, because it would be unpacked, copied or redirected. "
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
    """Return a message that names the missing library of a URL's protocol; `error` is fsspec's."""
    protocol = url.partition("://")[0]
    if protocol not in EXTRAS:
        return str(error)
    library, extra = EXTRAS[protocol]
    return f"{protocol}:// needs the library {library!r}, which is not installed: {pip_install(f'torchlake[{extra}]')}"


def credentials_of(url: str) -> str:
    """Return where the library of a URL's protocol looks for credentials, for messages."""
    protocol = url.partition("://")[0]
    extra = EXTRAS[protocol][1] if protocol in EXTRAS else protocol
    return _CREDENTIALS.get(extra, f"fsspec's settings for {protocol}://")


def secret_repository(url: str) -> str:
    """Return advice about a repository to which the server refuses access, for messages."""
    return f"A private or gated repository needs credentials, which come from {credentials_of(url)}."


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Raises TableError as `check_url` does, MissingExtra when the protocol's library is not installed.
    """
    from fsspec.core import url_to_fs

    check_url(url)
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"{redacted(url)}: {missing_library(url, error)}") from error
    except ValueError as error:
        unknown = "Protocol not known" in str(error) and check_url(url) in EXTRAS  # fsspec has no entry for it
        if unknown:
            raise MissingExtra(f"{redacted(url)}: {missing_library(url, ImportError())}") from error
        advice = f". Credentials come from {credentials_of(url)}." if check_url(url) in EXTRAS else ""
        raise TableError(f"{redacted(url)}: {error}{advice}") from error
    return filesystem, path


def object_store_options(url: str) -> dict[str, str] | None:
    """Return the options with which object_store, the Rust library in delta-rs, finds the storage that fsspec finds.

    None for local paths, and for storages that both find by the same variables. For S3, fsspec has its own settings;
    object_store reads fewer variables, and refuses an address without TLS from a variable.
    """
    if not is_url(url) or EXTRAS.get(check_url(url)) != _S3:
        return None
    filesystem, _ = filesystem_of(url)
    address = s3_address()
    found = {
        "aws_access_key_id": filesystem.key,
        "aws_secret_access_key": filesystem.secret,
        "aws_session_token": filesystem.token,
        "aws_endpoint_url": address,
        "aws_skip_signature": "true" if filesystem.anon else "",
        "aws_allow_http": "true" if address.startswith("http://") else "",
    }
    return {name: value for name, value in found.items() if value}


def quoted(url: str) -> str:
    """Return a URL for delta-rs, which takes % # ? for signs of a URL, not for parts of a name; a path as it is."""
    return url.replace("%", "%25").replace("#", "%23").replace("?", "%3F") if is_url(url) else url


def s3_address() -> str:
    """Return the address of the S3 storage that fsspec finds, by its settings or the variables; empty for AWS."""
    from fsspec.config import conf

    own = conf.get("s3", {})
    return str(
        own.get("endpoint_url")
        or own.get("client_kwargs", {}).get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or ""
    )
