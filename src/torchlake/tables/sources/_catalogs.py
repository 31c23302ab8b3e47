"""Tables of an Iceberg catalog, by name: `iceberg:catalog.namespace.table`, or the path of a metadata file.

Catalogs are configured as for pyiceberg: in `.pyiceberg.yaml`, or by `PYICEBERG_CATALOG__<NAME>__URI` and the other
variables in its documentation. torchlake reads no credentials itself.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchlake.errors import MissingExtra, TableError, TorchlakeError, need_library
from torchlake.redaction import redacted
from torchlake.storage.errors import first_line, library_errors
from torchlake.storage.urls import is_url, s3_address

_NAME = re.compile(r"iceberg:(?P<catalog>[^@./]+)\.(?P<table>[^@]+)(?:@(?P<ref>.+))?")
_METADATA = re.compile(r"(?P<table>.+\.metadata\.json)(?:@(?P<ref>.+))?", re.DOTALL)


_CODE = "py-io-impl"
"The property in which pyiceberg looks for the import path of a class."


class TableName(NamedTuple):
    """A table of `catalog`, or, if that is empty, the path or URL of a metadata file."""

    catalog: str
    table: str
    ref: str | None
    "A snapshot id, tag or branch."

    @property
    def shown(self) -> str:
        """The name without the reference, for messages and records."""
        return f"{self.catalog}.{self.table}" if self.catalog else self.table

    @property
    def name(self) -> str:
        """The name without the reference, as it is given to torchlake."""
        return f"iceberg:{self.catalog}.{self.table}" if self.catalog else self.table


def parse_name(source: str) -> TableName | None:
    """Return the Iceberg table that a string names, or None. Raises TableError for an incomplete name."""
    match = _NAME.fullmatch(source)
    if match is not None:
        return TableName(match["catalog"], match["table"], match["ref"])
    if source.startswith("iceberg:"):
        raise TableError(
            f"{source}: write a table as iceberg:catalog.namespace.table or iceberg:catalog.namespace.table@snapshot."
        )
    match = _METADATA.fullmatch(source)
    if match is None:
        return None
    path = match["table"]
    return TableName("", path if is_url(path) else os.path.abspath(os.path.expanduser(path)), match["ref"])


def load_table(name: TableName) -> Any:
    """Return the pyiceberg table. Raises TableError when it cannot be read, MissingExtra when a library is missing."""
    if not name.catalog:
        _check_installed(name)
        with library_errors(name.shown):
            try:
                return _read_metadata(name.table)
            except (OSError, ValueError) as error:
                raise TableError(f"{name.shown}: the metadata file cannot be read: {first_line(error)}.") from error
    with catalog_errors(name), opened_catalog(name) as catalog:
        return catalog.load_table(name.table)


@contextmanager
def opened_catalog(name: TableName) -> Iterator[Any]:
    """Open the pyiceberg catalog of a table until the end of the block. Raises TableError and MissingExtra."""
    _check_installed(name)
    from pyiceberg.catalog import load_catalog

    with catalog_errors(name):
        catalog = load_catalog(name.catalog)
        _ignore_named_code(catalog)
        for property, value in _s3_properties().items():
            catalog.properties.setdefault(property, value)
    try:
        yield catalog
    finally:
        catalog.close()


@contextmanager
def catalog_errors(name: TableName) -> Iterator[None]:
    """Turn errors that occur while a catalog is read into TableError and MissingExtra."""
    _check_installed(name)
    from pyiceberg import exceptions

    try:
        yield
    except TorchlakeError:
        raise
    except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError, exceptions.NoSuchIcebergTableError) as error:
        raise TableError(f"{name.shown}: the catalog {name.catalog!r} has no such table.") from error
    except exceptions.NotInstalledError as error:
        raise MissingExtra(f"{name.shown}: {first_line(error)}.") from error
    except Exception as error:  # a catalog's database, server and configuration raise exceptions of many libraries
        variable, why = f"PYICEBERG_CATALOG__{name.catalog.upper()}__URI", redacted(first_line(error))
        raise TableError(
            f"{name.shown}: the catalog {name.catalog!r} cannot be read: {why}. Configure it in "
            f".pyiceberg.yaml, or by {variable} and its other variables."
        ) from error


def _check_installed(name: TableName) -> None:
    need_library("pyiceberg", "iceberg", f"{name.shown}: an Iceberg table")


def _ignore_named_code(catalog: Any) -> None:
    """Keep pyiceberg from importing and running a storage class that a table's own properties name."""
    load_file_io: Callable[..., Any] = catalog._load_file_io

    def load(properties: Mapping[str, str] | None = None, location: str | None = None) -> Any:
        safe = {name: value for name, value in (properties or {}).items() if name != _CODE}
        return load_file_io(safe, location)

    catalog._load_file_io = load


def _s3_properties() -> dict[str, str]:
    """Return the address of the S3 storage: pyiceberg does not read the variable that all other clients read."""
    address = s3_address()
    return {"s3.endpoint": address} if address else {}


def _read_metadata(location: str) -> Any:
    """Return the table of a metadata file; unlike `StaticTable.from_metadata`, do not run a class that it names."""
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io import load_file_io
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    io = load_file_io(_s3_properties(), location)
    return StaticTable(
        identifier=("static-table", location),
        metadata=FromInputFile.table_metadata(io.new_input(location)),
        metadata_location=location,
        io=io,
        catalog=NoopCatalog("static-table"),
    )
