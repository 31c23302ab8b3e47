"""The columns of an Iceberg table in its Parquet files, by field id, or by name in files without ids.

Files that another program wrote and `add_files` added have no ids; the table's name mapping then assigns the file's
columns. A column that a file lacks has the value that the file is partitioned by, else the column's default for older
rows, else it is null.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.formats.types import children, rebuilt, without_size
from torchlake.tables.sources._interface import SourceFile, View
from torchlake.tables.sources._lakehouse import constant_text

FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table at one snapshot."""

    table: str
    arrow: pa.Schema
    "Each field with its id, including those inside nested columns."
    defaults: Mapping[str, str | None]
    "The value of a column in files that were written before it was added; columns that are not listed are null there."
    mapping: Mapping[str, int]
    "The id of each column in files without ids, by name."

    @classmethod
    def of(cls, table: str, schema: Any, mapping: Any) -> "Columns":
        """Return the columns of a pyiceberg schema. Raises TableError for types that Arrow does not have."""
        try:
            arrow = schema.as_arrow()
        except (NotImplementedError, ValueError, TypeError) as error:
            raise TableError(f"{table}: its columns cannot be read: {error}") from error
        defaults = {
            one.name: constant_text(table, one.name, pa.scalar(one.initial_default, arrow.field(one.name).type))
            for one in schema.fields
            if one.initial_default is not None
        }
        ids = {} if mapping is None else {name: one.field_id for one in mapping.root for name in one.names}
        return cls(table=table, arrow=arrow, defaults=defaults, mapping={k: v for k, v in ids.items() if v is not None})

    @property
    def schema(self) -> pa.Schema:
        """The columns in the types that they are read as."""
        return pa.schema([pa.field(one.name, _without_ids(one.type)) for one in self.arrow])

    def partition_values(self, file: Any, spec: Any) -> dict[str, str | None]:
        """Return the columns by whose own values a file is partitioned; the file may lack them."""
        names = {_id(one): one.name for one in self.arrow}
        values = {}
        for place, field in enumerate(spec.fields):
            name = names.get(field.source_id)
            if name is None or str(field.transform) != "identity":
                continue
            kind, value = self.arrow.field(name).type, file.partition[place]
            if pa.types.is_temporal(kind):
                scalar = pa.scalar(value, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
            else:
                scalar = pa.scalar(value, kind)
            values[name] = constant_text(self.table, name, scalar)
        return values

    def view(self, file: SourceFile, stored: pa.Schema, columns: Sequence[str]) -> View:
        """Return how `columns` (all, if empty) are read from a file; `stored` is its schema, with the ids.

        Raises TableError for a file without ids in a table without a name mapping, and for nested columns whose fields
        have changed since the file was written.
        """
        ids = {_id(one): one for one in stored}
        has_ids = set(ids) != {None}
        if not has_ids:
            if not self.mapping:
                raise TableError(
                    f"{file.file}: has no field ids, and {self.table} has no name mapping "
                    "(schema.name-mapping.default); rewrite the file."
                )
            ids = {self.mapping[one.name]: one for one in stored if one.name in self.mapping}
        constants, names = {}, {}
        for column in self.arrow:
            own = ids.get(_id(column))
            if own is None:
                constants[column.name] = file.view.constants.get(column.name, self.defaults.get(column.name))
                continue
            if own.name != column.name:
                names[column.name] = own.name
            if (not columns or column.name in columns) and _fields(own.type, ids=has_ids) != _fields(
                column.type, ids=has_ids
            ):
                raise TableError(
                    f"{file.file}: the fields of the nested column {column.name!r} have changed since the file was "
                    "written, which is not supported. Rewrite the file, for example by Spark's rewrite_data_files."
                )
        return View(constants=constants, names=names)


def _id(field: pa.Field) -> int | None:
    found = (field.metadata or {}).get(FIELD_ID)
    return None if found is None else int(found)


def _fields(kind: pa.DataType, *, ids: bool) -> list[Any]:
    """Return the ids and names of the fields inside a type, at every depth; only structs have names."""
    names = pa.types.is_struct(kind)
    return [
        (_id(one) if ids else None, one.name if names else "", _fields(one.type, ids=ids)) for one in children(kind)
    ]


def _without_ids(kind: pa.DataType) -> pa.DataType:
    """Return the type with 32-bit offsets, as in Parquet files, and without field ids."""
    if not pa.types.is_fixed_size_binary(kind):
        kind = without_size(kind)
    return rebuilt(kind, lambda one: one.with_type(_without_ids(one.type)).remove_metadata())
