"""An output of each sink for the conformance suite: how it is named, and read and added to without torchlake.

A new file in `tables/sinks/` needs an entry here; the suite fails without one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import duckdb_extension_delta
import pyarrow as pa
import pyarrow.parquet as pq

from s3_server import BUCKET, S3Server

DELTA_OPTIONS = {"aws_conditional_put": "etag", "AWS_ALLOW_HTTP": "true"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a test's output is: a folder of this machine, and below a key of the server's bucket."""

    folder: Path
    server: S3Server
    variables: dict[str, str] = field(default_factory=dict)
    "Of the environment, with which a job finds the server."

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.key}"

    @property
    def key(self) -> str:
        return "/".join(self.folder.parts[-2:])

    def mirror(self) -> Path:
        """The objects below the place's URL as files, read by plain requests."""
        copy = self.folder / f"mirror-{len([*self.folder.glob('mirror-*')])}"
        copy.mkdir()
        for name in self.server.keys(self.key):
            path = copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.get(f"{self.key}/{name}"))
        return copy


@dataclass(frozen=True, kw_only=True)
class SinkKind:
    """Each function is given the place of the test, which has one output of this kind."""

    sink: str
    "The name of the plug-in."
    output: Callable[[Place], str]
    "What a user passes for it."
    read: Callable[[Place], pa.Table | None]
    "The committed rows as another library reads them, in any order; None if there is no table."
    options: dict[str, Any] = field(default_factory=dict)
    "Of the sink, such as the format."
    append: Callable[[Place, pa.Table], None] | None = None
    "Another writer adds rows; None if there is no other writer of such outputs."
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    "Variables with which any process finds the output, besides those of the S3 server."
    partitions: bool = False
    fenced: bool = False
    "A writer that is suspended in the middle of a commit holds a lock of this machine: others wait for it."
    refused: frozenset[str] = frozenset()
    "Types that it cannot hold."


def read_folder(place: Place) -> pa.Table | None:
    files = sorted((place.folder / "out").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files]) if files else None


def read_object_folder(place: Place) -> pa.Table | None:
    top = place.mirror()
    if not (top / "_torchlake" / "commit.json").exists():
        return None
    record = json.loads((top / "_torchlake" / "commit.json").read_text())
    parts = [pq.read_table(top / "_torchlake" / "parts" / part["name"], partitioning=None) for part in record["parts"]]
    return pa.concat_tables(parts) if parts else pa.table({})


def read_delta(top: Path) -> pa.Table | None:
    """The rows as DuckDB's delta extension, which is made from another library than delta-rs, reads them."""
    if not (top / "_delta_log").exists():
        return None
    (library,) = Path(duckdb_extension_delta.__file__).parent.rglob("delta.duckdb_extension")
    with duckdb.connect(config={"allow_unsigned_extensions": True}) as connection:
        connection.execute(f"LOAD '{library}'")
        return connection.sql(f"SELECT * FROM delta_scan('{top}')").to_arrow_table()


def append_delta(where: str, place: Place, rows: pa.Table) -> None:
    options = {**place.server.environment, **DELTA_OPTIONS} if "://" in where else None
    deltalake.write_deltalake(where, rows, mode="append", storage_options=options)


KINDS = {
    "folder": SinkKind(sink="folder", output=lambda place: f"{place.folder}/out", read=read_folder, fenced=True),
    "object_folder": SinkKind(sink="object_folder", output=lambda place: place.url, read=read_object_folder),
    "delta": SinkKind(
        sink="delta",
        output=lambda place: f"{place.folder}/table",
        read=lambda place: read_delta(place.folder / "table"),
        options={"format": "delta"},
        append=lambda place, rows: append_delta(f"{place.folder}/table", place, rows),
        partitions=True,
        fenced=True,
        refused=frozenset({"time64[us]", "duration[us]"}),
    ),
    "delta_on_s3": SinkKind(
        sink="delta",
        output=lambda place: place.url,
        read=lambda place: read_delta(place.mirror()),
        options={"format": "delta"},
        append=lambda place, rows: append_delta(place.url, place, rows),
        partitions=True,
        refused=frozenset({"time64[us]", "duration[us]"}),
    ),
}
