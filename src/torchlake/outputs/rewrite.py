"""Replace rows of a table by key: each file that has some of them is written again without them. Find repeated keys.

One commit adds the new files and the replacing rows, and removes the old files. Cost: the key column of every file
whose bounds may have one of the keys, one read and write of the files that have replaced rows, memory for the keys.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.atomic_io import digest
from torchlake.errors import OutputError
from torchlake.outputs.parts import Part, PartFolder, parquet_bytes
from torchlake.storage.spread import Spread
from torchlake.tables.formats.columnar import open_parquet
from torchlake.tables.formats.types import common_type, short, without_size


@dataclass(frozen=True)
class LiveFile:
    """A file of a table."""

    path: str
    "The name that the table uses."
    file: str
    "Its path or URL."
    bytes: int
    partition: tuple[tuple[str, str | None], ...] = ()
    lowest: Mapping[str, Any] = field(default_factory=dict)
    highest: Mapping[str, Any] = field(default_factory=dict)


def keys_in(folder: PartFolder, parts: Iterable[Part], key: str, kind: pa.DataType) -> pa.Array:
    """Return the keys of the rows of parts, in this type; if the key is a partition column, one for each part."""
    found = []
    for part in parts:
        partition = dict(part.partition)
        if key in partition:
            found.append(pa.array([partition[key]], pa.string()).cast(kind))
            continue
        with open_parquet(f"{folder.location}/{part.name}") as parquet:
            found += [one.cast(kind) for one in parquet.read(columns=[key])[key].chunks]
    return pa.chunked_array(found, kind).combine_chunks()


def without_keys(
    files: Sequence[LiveFile], key: str, values: pa.Array, folder: PartFolder, spread: Spread
) -> tuple[list[str], list[Part]]:
    """Return the paths of the files that have rows with one of the values, and new files with the other rows."""
    work = partial(_rewritten, key, values, folder)
    removed, kept = [], []
    files = _near(files, key, values)
    results = spread(work, files, size=sum(one.bytes for one in files), name="replace rows")
    for one, (has, part) in zip(files, results, strict=True):
        removed += [one.path] if has else []
        kept += [part] if part is not None else []
    return removed, kept


def repeated_key(files: Sequence[LiveFile], key: str, values: pa.Array, spread: Spread) -> str | None:
    """Return one of the values that a file has already, as text; None if none has."""
    partitions = [dict(one.partition) for one in files]
    if partitions and key in partitions[0]:
        return _common(pa.chunked_array([[one[key] for one in partitions]], pa.string()).cast(values.type), values)
    files = _near(files, key, values)
    found = spread(partial(_present, key, values), files, size=sum(one.bytes for one in files), name="compare the keys")
    return next((one for one in [*found] if one is not None), None)


def _near(files: Sequence[LiveFile], key: str, values: pa.Array) -> Sequence[LiveFile]:
    """Return the files whose bounds allow one of the values: integers or texts, which compare as in Python."""
    if not len(values):
        return ()
    if not (pa.types.is_integer(values.type) or without_size(values.type) == pa.string()) or not values.drop_null():
        return files
    lowest, highest = pc.min_max(values).as_py().values()
    bounds = ((one, one.lowest.get(key), one.highest.get(key)) for one in files)
    return [one for one, low, high in bounds if low is None or high is None or (low <= highest and lowest <= high)]


def _present(key: str, values: pa.Array, one: LiveFile) -> str | None:
    with open_parquet(one.file) as parquet:
        if key not in parquet.schema_arrow.names:
            return None
        return _common(parquet.read(columns=[key])[key], values)


def _common(column: pa.ChunkedArray, values: pa.Array) -> str | None:
    """Return one of the values that the column has, too."""
    column, wanted = _alike(column, values.drop_null())
    found = column.filter(pc.is_in(column, value_set=wanted))
    return str(found[0]) if len(found) else None


def _alike(column: pa.ChunkedArray, values: pa.Array) -> tuple[pa.ChunkedArray, pa.Array]:
    """Return keys of a file and other keys in one type: the file may be older than a wider type of the column."""
    own = without_size(column.type)
    kind = common_type(own, values.type) or own
    return column.cast(kind), values.cast(kind)


def _rewritten(key: str, values: pa.Array, folder: PartFolder, one: LiveFile) -> tuple[bool, Part | None]:
    """Return whether a file has such rows, and a file with its other rows if it has any."""
    with open_parquet(one.file) as parquet:
        if key not in parquet.schema_arrow.names:
            raise OutputError(f"{one.file}: has no column {key!r}, the key of the rows to replace. Give another key.")
        column, wanted = _alike(parquet.read(columns=[key])[key], values)
        found = pc.is_in(column, value_set=wanted)
        if not pc.any(found).as_py():
            return False, None
        rows = parquet.read()
    # Files that delta-rs rewrote have string views, which Arrow cannot filter.
    schema = pa.schema([short(one) for one in rows.schema], rows.schema.metadata)
    rows = rows.cast(schema).filter(pc.invert(found))
    if not rows.num_rows:
        return True, None
    content = parquet_bytes(rows)
    name = f"kept-{digest([one.path, hashlib.sha256(content).hexdigest()])[:16]}.parquet"
    folder.store(name, content, rows.num_rows, site="kept")  # the name is a hash of the content
    return True, replace(folder.part(name, -1, rows, content), partition=one.partition)
