"""Objects written with conditions: created only if missing, or replaced only if unchanged; obstore does the requests.

Two answers of a store are ambiguous. If the answer to a successful request was lost, the client repeats the request and
gets "exists already"; and a conflict (409) may mean that nothing was written. So after a refusal the object is read,
and its content decides. Contents that must differ between writers contain a random token.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torchlake.errors import MissingExtra, StorageError, pip_install
from torchlake.failpoints import failpoint
from torchlake.storage.errors import storage_failure
from torchlake.storage.spread import REQUESTS
from torchlake.storage.urls import EXTRAS, check_url, object_store_options

RETRIES, RETRY_S = 6, 60.0
"Retries of a request that got no answer or an error of the store itself; then the job fails."
PART, MOST_PARTS = 16 << 20, 9_000
"Bytes of an object that are sent or read by one request, and a number of requests that all stores accept."
ATTEMPTS = 5
"Attempts at a conditional write that was refused although the object did not change."


_CONFLICT = re.compile(r"status code: 409\b")
"The number alone may be part of a name, a port or a duration."


class Found(NamedTuple):
    """An object's content, and its version for `replace`."""

    content: bytes
    version: Mapping[str, str]
    modified: datetime
    "Modification time by the store's clock."


def version_of(found: Found | None) -> Mapping[str, str] | None:
    """Return the version of an object, None if there is none."""
    return None if found is None else found.version


def is_marker(name: str, size: int | None) -> bool:
    """Return whether an object only stands for a folder, or for a finished job.

    Consoles and Hadoop write such objects of zero bytes: `sub/`, `sub_$folder$`, `_SUCCESS`.
    """
    return size == 0 and (name.endswith(("/", "_$folder$")) or "." not in name.rpartition("/")[2])


class ObjectFolder:
    """A folder in an object store, by URL. Methods take names relative to it, and raise StorageError."""

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")

    def __reduce__(self) -> tuple[type["ObjectFolder"], tuple[str]]:
        return ObjectFolder, (self.location,)

    def write_new(self, name: str, content: bytes, *, site: str) -> bool:
        """Create an object; return False if it exists with other content."""
        return self.replace(name, content, None, site=site)

    def replace(self, name: str, content: bytes, before: Found | None, *, site: str) -> bool:
        """Replace the object `before`, or create it (None); return False if it now has another version, or was removed.

        Equal content counts as written.
        """
        failpoint(f"{site}.write")
        for _ in range(ATTEMPTS):
            try:
                self._call("put", name, content, mode="create" if before is None else dict(before.version))
                break
            except _Refused:
                found = self.read(name)
            # Equal content is this writer's: the first request succeeded, and the refusal answered its repetition. An
            # unchanged object after a refusal is a 409, of a put that was in flight at the same moment: try again.
            if found is not None and found.content == content:
                break
            if version_of(found) != version_of(before):
                return False
        else:
            unchanged = "create it, but it does not exist" if before is None else "replace it, but it did not change"
            raise self._failure(name, f"its store refused to {unchanged}")
        failpoint(f"{site}.done")
        return True

    def check(self) -> None:
        """Raise TableError or MissingExtra for a storage that cannot be opened, without connecting to it."""
        _store(self.location)

    def put_file(self, name: str, path: Path) -> None:
        """Upload a file, in parts if it is large."""
        part = max(PART, path.stat().st_size // MOST_PARTS + 1)
        self._call("put", name, path, chunk_size=part)

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file, in parts that are read at the same time.

        Raises FileNotFoundError when there is no such object, OSError for the file.
        """
        size = int(self._call("head", name)["size"])

        def copy(first: int) -> None:
            content = self._call("get_range", name, start=first, end=min(first + PART, size))
            with open(path, "r+b") as file:
                file.seek(first)
                file.write(content)

        path.write_bytes(b"")
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(copy, range(0, size, PART)))

    def write(self, name: str, content: bytes, *, site: str) -> None:
        """Create or replace an object."""
        failpoint(f"{site}.write")
        self._call("put", name, content)
        failpoint(f"{site}.done")

    def replace_damaged(self, name: str, damaged: bytes, content: bytes, *, site: str) -> None:
        """Replace an object's damaged content, but keep what another writer has written since then."""
        found = self.read(name)
        if found is not None and found.content == damaged:
            self.replace(name, content, found, site=site)

    def read(self, name: str) -> Found | None:
        """Return an object, or None if there is none."""
        try:
            got = self._call("get", name)
            content = bytes(got.bytes())
        except FileNotFoundError:
            return None
        return Found(content, _version(got.meta), got.meta["last_modified"])

    def is_object(self) -> bool:
        """Return whether the store has an object of the folder's own name, other than an empty marker."""
        path = _path(self.location)
        try:
            return bool(path) and not is_marker(path, int(self._call("head", "")["size"]))
        except FileNotFoundError:
            return False

    def content(self, name: str) -> bytes | None:
        """Return an object's bytes, or None if there is none."""
        found = self.read(name)
        return None if found is None else found.content

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the size in bytes of every object below a folder, by its name relative to this folder.

        Without markers of folders. obstore removes the slash at the end of their names.
        """
        prefix = "/".join(part for part in (_path(self.location), below.strip("/")) if part)
        store = _store(self.location)
        try:
            listed = [one for batch in store.list(prefix or None) for one in batch]
        except Exception as error:
            raise self._failure(below, error) from error
        top = f"{_path(self.location)}/".lstrip("/")
        found = {one["path"].removeprefix(top): int(one["size"]) for one in listed if one["path"] != top.rstrip("/")}
        return {name: size for name, size in found.items() if not is_marker(name, size)}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""
        wanted = [f"{_path(self.location)}/{name}".lstrip("/") for name in names]
        for first in range(0, len(wanted), 1000):
            self._delete(wanted[first : first + 1000])

    def _delete(self, paths: list[str]) -> None:
        store = _store(self.location)
        try:
            store.delete(paths)
        except FileNotFoundError:  # some stores stop a request for several objects at one that is missing
            if len(paths) > 1:
                for path in paths:
                    self._delete([path])
        except Exception as error:
            raise self._failure("", error) from error

    def _call(self, method: str, name: str, *arguments: Any, **options: Any) -> Any:
        """Make a request for one object. Raises FileNotFoundError, _Refused (failed condition) or StorageError."""
        store = _store(self.location)  # before obstore is imported, because this names the missing extra
        from obstore import exceptions

        path = f"{_path(self.location)}/{name}".strip("/")
        try:
            return getattr(store, method)(path, *arguments, **options)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise _Refused from error
        except FileNotFoundError as error:
            if method in ("get", "head", "get_range"):
                raise
            raise self._failure(name, error) from error
        except Exception as error:
            if options.get("mode") and _CONFLICT.search(str(error)):
                raise _Refused from error
            raise self._failure(name, error) from error

    def _failure(self, name: str, why: Exception | str) -> StorageError:
        return storage_failure(f"{self.location}/{name}".rstrip("/"), why)


class _Refused(Exception):
    """The store answered that the object exists, or has another version."""


def _version(meta: Mapping[str, Any]) -> dict[str, str]:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _path(url: str) -> str:
    """Return the part of a URL after its bucket."""
    return url.partition("://")[2].partition("/")[2].strip("/")


def _store(url: str) -> Any:
    protocol, _, rest = url.partition("://")
    options: Sequence[tuple[str, str]] = sorted((object_store_options(url) or {}).items())
    return _opened(protocol, rest.partition("/")[0], tuple(options))


@lru_cache(maxsize=16)
def _opened(protocol: str, bucket: str, options: tuple[tuple[str, str], ...]) -> Any:
    """Return the obstore store of a bucket. Raises MissingExtra when obstore is not installed."""
    url = f"{protocol}://{bucket}"
    check_url(url, to_write=True)
    try:
        from obstore.store import AzureStore, from_url
    except ImportError as error:
        extra = EXTRAS.get(protocol, ("", "s3"))[1]
        raise MissingExtra(
            f"{protocol}:// needs the library 'obstore', which is not installed: {pip_install(f'torchlake[{extra}]')}"
        ) from error
    config: Any = dict(options)
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    client: Any = {"allow_http": True} if config.pop("aws_allow_http", "") else None
    try:
        if protocol in ("az", "abfs", "abfss") and "@" not in bucket:
            # In fsspec's URLs the container comes first, and the environment has the account; from_url expects the
            # account.
            return AzureStore(bucket, retry_config=retry)
        known = {"gcs": "gs", "s3a": "s3"}.get(protocol, protocol)
        return from_url(f"{known}://{bucket}", config=config or None, client_options=client, retry_config=retry)
    except Exception as error:  # settings that are missing or contradict one another
        raise storage_failure(url, error) from error
