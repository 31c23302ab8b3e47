"""An output of each sink for the conformance suite: how it is named, and read and added to without torchlake.

A new file in `outputs/targets/` needs an entry here; the suite fails without one. So does a file in `tests/sinks/`: a
sink that is written outside of torchlake.
"""

import atexit
import functools
import hashlib
import io
import json
import sqlite3
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog

import duck
import hub_repositories
from s3_server import BUCKET, S3Server
from torchlake.outputs import targets

targets.__path__.append(str(Path(__file__).parent / "sinks"))  # a file in the package's folders is a sink

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
    empty_is_null: bool = False
    "A partition of the empty text is read as null."
    fenced: bool = False
    "A writer that is suspended in the middle of a commit holds a lock of this machine: others wait for it."
    refused: frozenset[str] = frozenset()
    "Types that it cannot hold."


TYPES: dict[str, pa.Array] = {
    str(array.type): array
    for array in (
        pa.array([True, None, False]),
        *(pa.array([-(2 ** (bits - 1)), None, 2 ** (bits - 1) - 1], f"int{bits}") for bits in (8, 16, 32, 64)),
        *(pa.array([0, None, 2**bits - 1], f"uint{bits}") for bits in (8, 16, 32, 64)),
        pa.array([1.5, None, -65504.0], pa.float16()),
        pa.array([1.5, None, float("inf")], pa.float32()),
        pa.array([-0.0, None, 5e-324], pa.float64()),
        pa.array(["", None, "é\n\x00\U0010ffff"], pa.string()),
        pa.array(["", None, "x" * 100], pa.large_string()),
        pa.array([b"", None, b"\xff\x00"], pa.binary()),
        pa.array([b"ab", None, b"\xff\x00"], pa.binary(2)),
        pa.array([date(1, 1, 1), None, date(9999, 12, 31)]),
        pa.array([time(0), None, time(23, 59, 59, 999_999)], pa.time64("us")),
        pa.array([datetime(1, 1, 1), None, datetime(9999, 12, 31, 23, 59, 59, 999_999)], pa.timestamp("us")),
        pa.array([datetime(1900, 1, 1, tzinfo=UTC), None, datetime(2999, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        pa.array([0, None, 1_700_000_000], pa.timestamp("s")),
        pa.array([1000, None, -1000], pa.timestamp("ns")),
        pa.array([timedelta(0), None, timedelta(days=-1)], pa.duration("us")),
        pa.array([Decimal("-99999.99"), None, Decimal("0.01")], pa.decimal128(7, 2)),
        pa.array([Decimal(10) ** 37, None, Decimal(-1)], pa.decimal128(38, 0)),
        pa.array([[1, None], None, []], pa.list_(pa.int64())),
        pa.array([[0.5, 1.0], [5e-40, 2.0], [0.0, -1.0]], pa.list_(pa.float32(), 2)),
        pa.array([[{"a": [1]}], None, []], pa.list_(pa.struct({"a": pa.list_(pa.int32())}))),
        pa.array([{"a": 1, "b": None}, None, {"a": None, "b": "x"}], pa.struct({"a": pa.int64(), "b": pa.string()})),
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        pa.array(["a", None, "a"]).dictionary_encode(),
        pa.nulls(3),
    )
}
"A column of each type: the extreme values, and a null."


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
    return duck.shared("delta").sql(f"SELECT * FROM delta_scan('{top}')").to_arrow_table()


def append_delta(where: str, place: Place, rows: pa.Table) -> None:
    options = {**place.server.environment, **DELTA_OPTIONS} if "://" in where else None
    deltalake.write_deltalake(where, rows, mode="append", storage_options=options)


def lake(place: Place, *, on_s3: bool = False) -> Catalog:
    """A catalog in a SQLite file, with the namespace `db`."""
    catalog = load_catalog("lake", **{"type": "sql", **lake_properties(place, on_s3)})
    catalog.create_namespace_if_not_exists("db")
    return catalog


def lake_properties(place: Place, on_s3: bool) -> dict[str, str]:
    found = {"uri": f"sqlite:///{place.folder}/catalog.db", "warehouse": f"file://{place.folder}/warehouse"}
    if on_s3:
        variables = place.server.environment
        found |= {
            "warehouse": place.url,
            "s3.endpoint": variables["AWS_ENDPOINT_URL"],
            "s3.access-key-id": variables["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": variables["AWS_SECRET_ACCESS_KEY"],
            "s3.region": variables["AWS_DEFAULT_REGION"],
        }
    return found


def lake_environment(place: Place, *, on_s3: bool = False) -> dict[str, str]:
    """The variables of a catalog, which is made."""
    lake(place, on_s3=on_s3).close()
    properties = lake_properties(place, on_s3)
    variables = {f"PYICEBERG_CATALOG__LAKE__{name.upper()}": properties[name] for name in ("uri", "warehouse")}
    # Without it pyiceberg asks Amazon for the region of the bucket, and waits for an answer.
    return {**variables, "PYICEBERG_CATALOG__LAKE__S3__REGION": "us-east-1"}


def read_iceberg(place: Place, *, on_s3: bool = False) -> pa.Table | None:
    """The rows as DuckDB reads them, by the metadata file that the catalog's database names.

    pyiceberg 0.12 reads a null list of structs as an empty one.
    """
    with closing(sqlite3.connect(place.folder / "catalog.db")) as database:
        named = database.execute("SELECT metadata_location FROM iceberg_tables WHERE table_name = 't'").fetchone()
    if named is None:
        return None
    query = f"SELECT * FROM iceberg_scan('{named[0]}')"
    if not on_s3:
        return duck.shared("avro", "iceberg").sql(query).to_arrow_table()
    variables = place.server.environment
    with duck.connect("avro", "iceberg", "httpfs") as connection:
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{variables['AWS_ACCESS_KEY_ID']}', "
            f"SECRET '{variables['AWS_SECRET_ACCESS_KEY']}', REGION '{variables['AWS_DEFAULT_REGION']}', "
            f"ENDPOINT '{variables['AWS_ENDPOINT_URL'].removeprefix('http://')}', USE_SSL false, URL_STYLE 'path')"
        )
        return connection.sql(query).to_arrow_table()


def append_iceberg(place: Place, rows: pa.Table, *, on_s3: bool = False) -> None:
    catalog = lake(place, on_s3=on_s3)
    catalog.load_table("db.t").append(rows)
    catalog.close()


@functools.cache
def hub_address() -> str:
    """The address of a server for all tests of this process."""
    server = hub_repositories.serving()
    address = server.__enter__()
    atexit.register(server.__exit__, None, None, None)
    return address


def repository(place: Place) -> str:
    return f"me/{hashlib.sha256(str(place.folder).encode()).hexdigest()[:16]}"


def read_hub(place: Place) -> pa.Table | None:
    """The rows by plain requests."""

    def get(path: str) -> bytes:
        return bytes(urllib.request.urlopen(f"{hub_address()}/{path}", timeout=30).read())

    repo = repository(place)
    listed = json.loads(get(f"api/datasets/{repo}/tree/main?recursive=true"))
    names = [one["path"] for one in listed if one["path"].endswith(".parquet")]
    parts = [pq.read_table(io.BytesIO(get(f"datasets/{repo}/resolve/main/{name}"))) for name in names]
    return pa.concat_tables(parts) if parts else None


def read_sqlite(place: Place) -> pa.Table | None:
    if not (place.folder / "out.db").exists():
        return None
    with closing(sqlite3.connect(place.folder / "out.db")) as database:
        contents = database.execute("SELECT content FROM parts ORDER BY name").fetchall()
    return pa.concat_tables([pq.read_table(io.BytesIO(one)) for (one,) in contents]) if contents else None


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
        empty_is_null=True,
        fenced=True,
        refused=frozenset({"time64[us]", "duration[us]", "null"}),
    ),
    "delta_on_s3": SinkKind(
        sink="delta",
        output=lambda place: place.url,
        read=lambda place: read_delta(place.mirror()),
        options={"format": "delta"},
        append=lambda place, rows: append_delta(place.url, place, rows),
        partitions=True,
        empty_is_null=True,
        refused=frozenset({"time64[us]", "duration[us]", "null"}),
    ),
    "iceberg": SinkKind(
        sink="iceberg",
        output=lambda place: "iceberg:lake.db.t",
        read=read_iceberg,
        append=append_iceberg,
        environment=lake_environment,
        partitions=True,
        fenced=True,
        refused=frozenset({"duration[us]", "null"}),
    ),
    "iceberg_on_s3": SinkKind(
        sink="iceberg",
        output=lambda place: "iceberg:lake.db.t",
        read=partial(read_iceberg, on_s3=True),
        append=partial(append_iceberg, on_s3=True),
        environment=partial(lake_environment, on_s3=True),
        partitions=True,
        refused=frozenset({"duration[us]", "null"}),
    ),
    "hub": SinkKind(
        sink="hub",
        output=lambda place: f"hf://datasets/{repository(place)}",
        read=read_hub,
        environment=lambda place: {
            "HF_ENDPOINT": hub_address(),
            "HF_HOME": f"{place.folder}/home",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        },
        fenced=True,
    ),
    "sqlite": SinkKind(
        sink="sqlite", output=lambda place: f"sqlite://{place.folder}/out.db", read=read_sqlite, fenced=True
    ),
}
