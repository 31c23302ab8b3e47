"""The columns of a file as its table has them: renamed, with constants, and null where the file lacks one."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.formats.types import fits, without_size
from torchlake.tables.sources._interface import SourceFile, SourceTable, View


def as_in_table(path: SourceFile, stored: pa.Schema, source: SourceTable) -> tuple[SourceFile, pa.Schema]:
    """Return the file and its columns as in the table: renamed, with constants, and null where a column is missing."""
    if source.schema is None and not path.view.constants:
        return path, stored
    names = {name: logical for logical, name in path.view.names.items()}
    fields = [
        field.with_name(names.get(field.name, field.name))
        for field in stored
        if field.name in names or field.name not in path.view.names
    ]
    fields = [field for field in fields if field.name not in path.view.constants]
    if source.schema is None:
        return path, pa.schema([*fields, *(source.partitions.field(name) for name in path.view.constants)])
    own = {field.name: field.type for field in fields}
    lacking = {name: None for name in source.schema.names if name not in own and name not in path.view.constants}
    view = View(
        constants={**path.view.constants, **lacking},
        names={one: name for one, name in path.view.names.items() if one not in lacking},
    )
    typed = []
    for column in source.schema:
        kind, stored_as = storage_type(column.type), own.get(column.name, column.type)
        # If a file cannot be read as the table's type, it keeps its own; `check_widened` refuses needed columns.
        typed.append(pa.field(column.name, kind if fits(stored_as, kind) else stored_as))
    return replace(path, view=view), pa.schema(typed)


def check_widened(file: str, columns: Sequence[pa.Field], table: pa.Schema) -> None:
    """Raise TableError for a column that does not have the table's type, nor one that its type was changed from."""
    for one in columns:
        kind = storage_type(table.field(one.name).type)
        if one.type != kind and without_size(one.type) != kind:
            raise TableError(
                f"{file}: the column {one.name!r} is {one.type}, but {kind} in the table. Rewrite the file, or leave "
                "the column out."
            )
