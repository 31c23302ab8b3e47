"""A table of each source for the conformance suite: how it is written, given to torchlake, and read without it.

A new file in `tables/sources/` needs an entry here; the suite fails without one.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

from torchlake.tables.sources import streams


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """Each function is given the folder of the test, in which the table has a place of its own."""

    source: str
    "The name of the plug-in."
    write: Callable[[Path, pa.Table], None]
    "Makes the table, or adds the rows to it as another commit or file."
    give: Callable[[Path], Any]
    "What a user passes for it."
    read: Callable[[Path], pa.Table]
    "All rows as another library reads them."
    versioned: bool = False
    stored_first: bool = False
    "Rows come from memory: other rows make another file, and none can go missing."


def add_file(folder: Path, rows: pa.Table) -> None:
    place = folder / "files"
    place.mkdir(exist_ok=True)
    pq.write_table(rows, place / f"{len(list(place.iterdir())):03}.parquet", row_group_size=5)


def read_files(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted((folder / "files").iterdir())])


def add_delta(folder: Path, rows: pa.Table) -> None:
    deltalake.write_deltalake(folder / "delta", rows, mode="append")


def read_delta(folder: Path) -> pa.Table:
    return pa.table(deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder / "delta")).execute(
        "select * from t").read_all())  # fmt: skip


def catalog(folder: Path) -> SqlCatalog:
    return SqlCatalog("conformance", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")


def environment(folder: Path) -> dict[str, str]:
    """The variables with which any process finds the Iceberg catalog."""
    return {
        "PYICEBERG_CATALOG__CONFORMANCE__URI": f"sqlite:///{folder}/catalog.db",
        "PYICEBERG_CATALOG__CONFORMANCE__WAREHOUSE": f"file://{folder}/warehouse",
    }


def add_iceberg(folder: Path, rows: pa.Table) -> None:
    lake = catalog(folder)
    try:
        lake.create_namespace_if_not_exists("db")
        lake.create_table_if_not_exists("db.t", rows.schema).append(rows)
    finally:
        lake.close()


def read_iceberg(folder: Path) -> pa.Table:
    lake = catalog(folder)
    try:
        return lake.load_table("db.t").scan().to_arrow()
    finally:
        lake.close()


KINDS = {
    "files": SourceKind(
        source="files", write=add_file, give=lambda folder: os.path.join(folder, "files"), read=read_files
    ),
    "delta": SourceKind(
        source="delta", write=add_delta, give=lambda folder: os.path.join(folder, "delta"), read=read_delta,
        versioned=True,
    ),
    "iceberg": SourceKind(
        source="iceberg", write=add_iceberg, give=lambda folder: "iceberg:conformance.db.t", read=read_iceberg,
        versioned=True,
    ),
    "pyarrow": SourceKind(source="frames", write=add_file, give=read_files, read=read_files, stored_first=True),
    "polars": SourceKind(
        source="frames", write=add_file, give=lambda folder: pl.from_arrow(read_files(folder)), stored_first=True,
        read=lambda folder: pl.from_arrow(read_files(folder)).to_arrow(),
    ),
    "reader": SourceKind(
        source="streams", write=add_file, give=lambda folder: read_files(folder).to_reader(max_chunksize=3),
        read=read_files, stored_first=True,
    ),
    "duckdb": SourceKind(
        source="streams", write=add_file, give=lambda folder: duckdb.connect().from_arrow(read_files(folder)),
        read=lambda folder: duckdb.connect().from_arrow(read_files(folder)).to_arrow_table(), stored_first=True,
    ),
}  # fmt: skip


def stored(kind: SourceKind, folder: Path) -> Any:
    """What `predict` opens: the source itself, or the file that its rows are stored in."""
    given = kind.give(folder)
    if not kind.stored_first:
        return given
    streams.store(given, folder / "input.parquet")
    return streams.Stored(folder / "input.parquet", type(given).__name__)


if __name__ == "__main__":
    import json
    import sys

    import tiny
    import torchlake as tl

    name, place, model, output, options = sys.argv[1:]
    given = KINDS[name].give(Path(place))
    done = tl.predict(model, given, output, key="id", chunk_rows=7, engine=tiny.Here(), **json.loads(options))
    print(done.record["provenance"]["rows_scored"])
