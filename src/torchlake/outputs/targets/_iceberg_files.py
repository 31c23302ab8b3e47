"""The entries of an Iceberg table's manifests: make them from parts without reading these, or list a snapshot's.

A part's statistics become an entry's counts and bounds, and its partition the entry's partition, so a commit's cost
does not depend on the storage of the parts. pyiceberg's `add_files` opens each file, and reads partitions from it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

from torchlake.errors import OutputError, TableError, Unavailable
from torchlake.outputs.grouping import partition_text
from torchlake.outputs.parts import Part
from torchlake.outputs.rewrite import LiveFile
from torchlake.outputs.target import Logged, files_of
from torchlake.storage.urls import filesystem_of, is_url
from torchlake.tables.formats.types import short
from torchlake.tables.sources import iceberg as source
from torchlake.tables.sources.files import local_path

_ENOUGH_DIGITS = Context(prec=76)


def data_file(table: Any, path: str, part: Part) -> Any:
    """Return the entry of a part at `path`, for a table with its columns."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

    schema, found = table.schema(), json.loads(part.statistics, parse_float=Decimal)
    ids = {one.name: one.field_id for one in schema.fields if one.name in found["nullCount"]}
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=_partition(table, dict(part.partition)),
        record_count=part.rows,
        file_size_in_bytes=part.bytes,
        value_counts=dict.fromkeys(ids.values(), found["numRecords"]),
        null_value_counts={ids[name]: found["nullCount"][name] for name in ids},
        lower_bounds=_bounds(schema, found.get("minValues", {})),
        upper_bounds=_bounds(schema, found.get("maxValues", {})),
        spec_id=table.metadata.default_spec_id,
    )


def _bounds(schema: Any, values: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the bounds of columns, by field id."""
    from pyiceberg.conversions import to_bytes

    known = [field for field in schema.fields if field.name in values]
    return {one.field_id: to_bytes(one.field_type, _parsed(one.field_type, values[one.name])) for one in known}


def _partition(table: Any, texts: Mapping[str, str | None]) -> Any:
    """Return the values of an entry's partition, as manifests have them."""
    from pyiceberg.partitioning import partition_record_value
    from pyiceberg.typedef import Record

    values, schema = [], table.schema()
    for field in table.spec().fields:
        column = schema.find_field(field.source_id)
        text = texts.get(column.name) if is_identity(field) else None
        values.append(None if text is None else partition_record_value(field, _parsed(column.field_type, text), schema))
    return Record(*values)


def _parsed(kind: Any, value: Any) -> Any:
    """Return a value of statistics, or of a partition's text, as a Python value."""
    from pyiceberg import types

    if isinstance(kind, types.DateType):
        return date.fromisoformat(value)
    if isinstance(kind, types.TimestampType | types.TimestamptzType):
        return datetime.fromisoformat(value)
    if isinstance(kind, types.DecimalType):
        return Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), context=_ENOUGH_DIGITS)
    if isinstance(kind, types.BooleanType):
        return value in (True, "true")
    if isinstance(kind, types.FloatType | types.DoubleType):
        return float(value)
    if isinstance(kind, types.IntegerType | types.LongType):
        return int(value)
    return value


def is_identity(field: Any) -> bool:
    """Return whether a partition field has the values of its column."""
    from pyiceberg.transforms import IdentityTransform

    return isinstance(field.transform, IdentityTransform)


def live_files(table: Any) -> Iterator[Any]:
    """Yield the data files of the current snapshot, as entries."""
    for manifest in _manifests(table, "DATA"):
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            yield entry.data_file


def has_rows(table: Any) -> bool:
    """Return whether the current snapshot has data files, without reading manifests."""
    return any(one.has_added_files() or one.has_existing_files() for one in _manifests(table, "DATA"))


def has_deletes(table: Any) -> bool:
    """Return whether the current snapshot has files that delete rows of data files."""
    return any(one.has_added_files() or one.has_existing_files() for one in _manifests(table, "DELETES"))


def deleted_rows(table: Any) -> dict[str, int]:
    """Return how many rows of a data file are deleted, by its path.

    Raises OutputError if equality deletes leave open which rows are.
    """
    if not has_deletes(table):
        return {}
    try:
        tasks = source.planned_files(table, table.current_snapshot().snapshot_id, str(table.name()))
    except Unavailable:
        raise
    except TableError as error:
        raise OutputError(
            f"{error} Until then it is not known which rows of earlier jobs the table still has."
        ) from error
    return {
        path: int.from_bytes(bits, "little").bit_count() for path, bits in source.deleted_rows(table, tasks).items()
    }


def _manifests(table: Any, content: str) -> Iterator[Any]:
    snapshot = table.current_snapshot()
    if snapshot is not None:
        for manifest in snapshot.manifests(table.io):
            if manifest.content.name == content:
                yield manifest


def was_rolled_back(table: Any, snapshots: list[Any]) -> bool:
    """Return whether it is certain that none of these snapshots is in the history of the current one."""
    from pyiceberg.table.snapshots import ancestors_of

    if not snapshots:
        return False
    mine, first = {one.snapshot_id for one in snapshots}, min(one.sequence_number or 0 for one in snapshots)
    for one in ancestors_of(table.current_snapshot(), table.metadata):
        source = (one.summary.additional_properties if one.summary else {}).get("source-snapshot-id", "")
        if one.snapshot_id in mine or source in {str(number) for number in mine}:
            return False
        if one.parent_snapshot_id is None or (one.sequence_number or 0) < first:
            return True
    return table.current_snapshot() is None


def were_deleted(table: Any, made: set[int], replaced_all: Callable[[Any], bool]) -> bool:
    """Return whether the rows of files that the table no longer lists went with them.

    `made` are the snapshots that added the files. An overwrite or a compaction after them may have written the rows
    again, unless it left no row at all or `replaced_all` says so.
    """
    from pyiceberg.table.snapshots import ancestors_of

    for one in ancestors_of(table.current_snapshot(), table.metadata):
        if one.snapshot_id in made:
            return True
        summary = one.summary
        if summary is None:
            return False
        if summary.additional_properties.get("total-records") == "0" or replaced_all(one):
            return True
        if summary.operation.value not in ("append", "delete"):
            return False
    return False


def replaceable_files(table: Any, shown: str) -> list[LiveFile]:
    """Return the files of the current snapshot. Raises OutputError if rows cannot be replaced in them."""
    others = {one.spec_id for one in live_files(table)} - {table.metadata.default_spec_id}
    problem = "files of earlier partitions" if others else _unlike_its_files(table)
    if problem:
        raise OutputError(
            f"{shown}: the table has {problem}, so rows cannot be replaced in it. Compact it first "
            "(rewrite_data_files)."
        )
    return files_of(logged(table), local_path)


def dataset(table: Any, shown: str) -> Any:
    """Return the current snapshot's rows as a pyarrow dataset. Raises OutputError if only Iceberg can find them."""
    import pyarrow.dataset as ds
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    problem = _unlike_its_files(table)
    if problem:
        raise OutputError(
            f"{shown}: the table has {problem}, which a pyarrow dataset does not show. Read it with pyiceberg, DuckDB "
            "(iceberg_scan) or Spark, or score it by its name."
        )
    schema, kind, fragments = schema_to_arrow(table), ds.ParquetFileFormat(), []
    filesystem: Any = LocalFileSystem()
    for file in live_files(table):
        path, known = local_path(file.file_path), ds.scalar(True)
        if is_url(path):
            opened, path = filesystem_of(path)
            filesystem = PyFileSystem(FSSpecHandler(opened))
        for name, value in _partition_values(table, file, schema):
            column = ds.field(name)
            known &= column.is_null() if value is None else column == pa.scalar(value, schema.field(name).type)
        fragments.append(kind.make_fragment(path, filesystem, known))
    return ds.FileSystemDataset(fragments, schema, kind, filesystem)


def logged(table: Any) -> dict[str, Logged]:
    """Return what the current snapshot's entries say about each data file, by its path."""
    from pyiceberg.conversions import from_bytes

    columns, kinds = {one.field_id: one for one in table.schema().fields}, schema_to_arrow(table)
    deleted = deleted_rows(table)

    def values(bounds: Mapping[int, bytes] | None) -> dict[str, Any]:
        known = [(columns[number], value) for number, value in (bounds or {}).items() if number in columns]
        return {
            one.name: _python(kinds.field(one.name).type, from_bytes(one.field_type, value)) for one, value in known
        }

    return {
        file.file_path: Logged(
            file.file_size_in_bytes,
            file.record_count,
            {name: partition_text(value) for name, value in _partition_values(table, file, kinds)},
            {columns[one].name: count for one, count in (file.null_value_counts or {}).items() if one in columns},
            values(file.lower_bounds),
            values(file.upper_bounds),
            deleted.get(file.file_path, 0),
        )
        for file in live_files(table)
    }


def schema_to_arrow(table: Any, *, ids: bool = False) -> pa.Schema:
    """Return the table's columns with strings and lists as parts have them and, if `ids`, with their field ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return pa.schema([short(one) for one in schema_to_pyarrow(table.schema(), include_field_ids=ids)])


def _partition_values(table: Any, file: Any, schema: pa.Schema) -> Iterator[tuple[str, Any]]:
    """Yield the columns that have one value in all rows of a file, with that value."""
    for place, field in enumerate(table.specs()[file.spec_id].fields):
        if is_identity(field):
            name, value = table.schema().find_column_name(field.source_id), file.partition[place]
            yield name, _python(schema.field(name).type, value)


def _python(kind: pa.DataType, value: Any) -> Any:
    """Return a value of a manifest, which has dates and times as numbers."""
    if value is not None and (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return pa.scalar(value, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind).as_py()
    return value


def _unlike_its_files(table: Any) -> str:
    """Return what a reader of the files alone would miss; empty if nothing."""
    if has_deletes(table):
        return "deleted rows"
    now = {field.name: field for field in table.schema().fields}
    for schema in table.schemas().values():
        for field in schema.fields:
            same = now.get(field.name)
            if same is not None and (same.field_id != field.field_id or same.field_type != field.field_type):
                return f"an earlier column {field.name!r} of another type"
            if same is None and any(field.field_id == one.field_id for one in now.values()):
                return f"a column that was named {field.name!r}"
    return ""
