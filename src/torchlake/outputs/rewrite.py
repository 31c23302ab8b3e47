"""Replace rows of a table by key: each file that has some of them is written again without them.

One commit adds the new files and the replacing rows, and removes the old files. Cost: the key column of every file, and
one read and write of the files that have replaced rows; memory for the replaced keys.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.atomic_io import digest
from torchlake.errors import OutputError
from torchlake.outputs.parts import Part, PartFolder, parquet_bytes
from torchlake.storage.spread import Spread
from torchlake.tables.formats.columnar import open_parquet


@dataclass(frozen=True, kw_only=True)
class LiveFile:
    """A file of a table."""

    path: str
    "The name that the table uses."
    file: str
    "Its path or URL."
    bytes: int
    partition: tuple[tuple[str, str | None], ...] = ()


def keys_in(folder: PartFolder, parts: Iterable[Part], key: str) -> Iterator[pa.Array]:
    """Yield the values of the key column of parts."""
    for part in parts:
        with open_parquet(f"{folder.location}/{part.name}") as parquet:
            yield from parquet.read(columns=[key])[key].chunks


def without_keys(
    files: Sequence[LiveFile], key: str, values: pa.Array, folder: PartFolder, spread: Spread
) -> tuple[list[str], list[Part]]:
    """Return the paths of the files that have rows with one of the values, and new files with the other rows."""
    work = partial(_rewritten, key, values, folder)
    removed, kept = [], []
    results = spread(work, files, size=sum(one.bytes for one in files), name="replace rows")
    for one, (has, part) in zip(files, results, strict=True):
        removed += [one.path] if has else []
        kept += [part] if part is not None else []
    return removed, kept


def _rewritten(key: str, values: pa.Array, folder: PartFolder, one: LiveFile) -> tuple[bool, Part | None]:
    """Return whether a file has such rows, and a file with its other rows if it has any."""
    with open_parquet(one.file) as parquet:
        if key not in parquet.schema_arrow.names:
            raise OutputError(f"{one.file}: has no column {key!r}, the key of the rows to replace. Give another key.")
        column = parquet.read(columns=[key])[key]
        found = pc.is_in(column, value_set=values.cast(column.type))
        if not pc.any(found).as_py():
            return False, None
        rows = parquet.read().filter(pc.invert(found))
    if not rows.num_rows:
        return True, None
    content = parquet_bytes(rows)
    name = f"kept-{digest([one.path, hashlib.sha256(content).hexdigest()])[:16]}.parquet"
    folder.store(name, content, rows.num_rows, site="kept")  # the name is a hash of the content
    return True, replace(folder.part(name, -1, rows, content), partition=one.partition)
