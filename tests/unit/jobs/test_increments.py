"""An increment leaves the output as one full run over the source would, or it is refused in words.

Hypothesis draws what happens to a source and to the options between calls, for each kind of source and target. The
function of the job is quick, and runs in this process: what is tested is which rows are read, and what becomes of them.
"""

import datetime as dt
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.schema import PrimitiveType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.types import LongType, StringType
from pyiceberg.utils.config import Config

import s3_server
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import FingerprintError, OutputError, TorchlakeError
from torchlake.outputs.find import output_of
from torchlake.outputs.records import commits_of
from torchlake.outputs.target import TargetOptions

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
FEED = {"delta.enableChangeDataFeed": "true"}
DAY = dt.date(2024, 1, 1)
NEVER = dt.datetime(2100, 1, 1)
STAMP = dt.datetime(2024, 1, 1, 2, tzinfo=dt.UTC)
PARTITIONS = {
    "": None,
    "text": pa.field("lang", pa.string()),
    "date": pa.field("day", pa.date32()),
    "timestamp": pa.field("at", pa.timestamp("us", "UTC")),
    "decimal": pa.field("price", pa.decimal128(8, 3)),
}


def rows(first: int, stop: int, word: str = "film", other: bool = False) -> pa.Table:
    """`stop - first` rows with the columns that a table may be partitioned by."""
    ids = range(first, stop)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "text": [f"{word} {number}" for number in ids],
        "lang": ["en" if number % 3 else "a=b/c d%20ü" for number in ids],
        "day": pa.array([DAY + dt.timedelta(number % 2) for number in ids], pa.date32()),
        "at": pa.array([STAMP + dt.timedelta(hours=number % 2) for number in ids], pa.timestamp("us", "UTC")),
        "price": pa.array([f"{number % 2}.500" for number in ids]).cast(pa.decimal128(8, 3)),
        "votes": pa.array(ids, pa.int32()),
    }
    return pa.table(columns | ({"extra": [f"x{number}" for number in ids]} if other else {}))


def numbers(batch: pa.Table) -> pa.Array:
    """A number that depends on all columns that the job reads."""
    return pc.add(pc.cast(pc.utf8_length(batch["text"]), pa.int64()), pc.cast(batch["votes"], pa.int64()))


def read_lengths() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"length": numbers(batch)})


def read_doubled() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"length": pc.multiply(numbers(batch), 2)})


def read_by_other_names() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"length": pc.cast(pc.utf8_length(batch["votes"]), pa.int64())})


FUNCTIONS = {"lengths": read_lengths, "doubled": read_doubled, "by_other_names": read_by_other_names}


@dataclass
class Case:
    """A source and an output, and the options of the next call."""

    folder: Path
    lake: Any
    bucket: Any
    kind: str
    sink: str
    partition: str
    next_id: int = 100
    read: dict[str, Any] = field(default_factory=dict)
    function: str = "lengths"
    done: list[str] = field(default_factory=list)
    copy: str = ""

    @property
    def source(self) -> str:
        places = {"iceberg": "iceberg:lake.films.source", "bucket": f"s3://{s3_server.BUCKET}/source"}
        return places.get(self.kind, str(self.folder / "source"))

    def output(self, name: str) -> str:
        return f"iceberg:lake.films.{name}" if self.sink == "iceberg" else str(self.folder / name)

    def map(self, name: str, **options: Any) -> tl.Mapped:
        return tl.map(
            FUNCTIONS[self.function],
            self.source,
            self.output(name),
            schema={"length": pa.int64()},
            columns=["text", "votes"],
            key="id",
            version=self.function,
            engine=tiny.Here(),
            **({} if self.sink == "iceberg" else {"format": "delta"}),
            **self.read,
            **options,
        )

    def rows(self, name: str) -> list[tuple[int, int]]:
        table = tl.open(self.output(name)).to_table()
        return sorted(zip(table["id"].to_pylist(), table["length"].to_pylist(), strict=True))

    def happen(self, event: str) -> None:
        """Let something happen, unless the source's own library cannot do it now."""
        try:
            getattr(self, event)()
        except DeltaError as error:
            event = f"{event}: {error}"
        self.done.append(event)

    # What happens to the source.
    def make(self) -> None:
        first = rows(0, 6)
        if self.kind in ("files", "bucket"):
            self.put("0.parquet", first)
        elif self.kind == "iceberg":
            self.lake.create_table("films.source", first.schema).append(first)
        else:
            by = PARTITIONS[self.partition]
            write_deltalake(
                self.source,
                first,
                partition_by=[by.name] if by is not None else None,
                configuration=FEED if self.kind == "delta with a feed" else {},
            )
        self.back_up()

    def back_up(self) -> None:
        """Keep a copy of the source as it is."""
        if self.kind == "iceberg":
            self.copy = self.lake.load_table("films.source").metadata_location
        elif self.kind.startswith("delta"):
            shutil.rmtree(self.folder / "copy", ignore_errors=True)
            shutil.copytree(self.source, self.folder / "copy")

    def put_back(self) -> None:
        """Put the copy in place of the source; it has new versions soon."""
        if self.kind == "iceberg":
            self.lake.drop_table("films.source")
            self.lake.register_table("films.source", self.copy)
        elif self.kind.startswith("delta"):
            shutil.rmtree(self.source)
            shutil.copytree(self.folder / "copy", self.source)
        self.add()

    def add(self) -> None:
        self.next_id += 3
        self._add(rows(self.next_id - 3, self.next_id))

    def put(self, name: str, table: pa.Table) -> None:
        content = pa.BufferOutputStream()
        pq.write_table(table, content)
        if self.kind == "bucket":
            self.bucket.put(f"source/{name}", content.getvalue().to_pybytes())
        else:
            Path(self.source).mkdir(exist_ok=True)
            (Path(self.source) / name).write_bytes(content.getvalue())

    def has_first(self) -> bool:
        return "0.parquet" in (
            self.bucket.keys("source") if self.kind == "bucket" else [one.name for one in Path(self.source).iterdir()]
        )

    def _add(self, table: pa.Table) -> None:
        if self.kind in ("files", "bucket"):
            self.put(f"{self.next_id}.parquet", table)
        elif self.kind == "iceberg":
            self.lake.load_table("films.source").append(table)
        else:
            write_deltalake(self.source, table, mode="append", schema_mode="merge")

    def add_column(self) -> None:
        self.next_id += 2
        if self.kind == "iceberg":
            table = self.lake.load_table("films.source")
            if "extra" not in table.schema().column_names:
                with table.update_schema() as update:
                    update.add_column("extra", StringType())
        elif self.kind.startswith("delta") and "extra" not in [
            one.name for one in DeltaTable(self.source).schema().fields
        ]:
            DeltaTable(self.source).alter.add_columns(Field("extra", PrimitiveType("string")))
        self._add(rows(self.next_id - 2, self.next_id, other=self.kind not in ("files", "bucket")))

    def widen(self) -> None:
        """Add rows whose votes need a wider type, where the source's library can widen a column."""
        self.next_id += 2
        added = rows(self.next_id - 2, self.next_id)
        if self.kind == "iceberg":
            with self.lake.load_table("films.source").update_schema() as update:
                update.update_column("votes", LongType())
        if not self.kind.startswith("delta"):
            votes = pa.array([2**40, None], pa.int64())
            added = added.set_column(added.column_names.index("votes"), "votes", votes)
        self._add(added)

    def delete(self) -> None:
        if self.kind == "files":
            self.add()
            (Path(self.source) / "0.parquet").unlink(missing_ok=True)
        elif self.kind == "bucket":
            self.add()
            self.bucket.delete("source/0.parquet")
        elif self.kind == "iceberg":
            self.lake.load_table("films.source").delete("id < 2")
        else:
            DeltaTable(self.source).delete("id < 2")

    def update(self) -> None:
        if self.kind in ("files", "bucket"):
            if self.has_first():
                self.put("0.parquet", rows(0, 6, "another"))
        elif self.kind == "iceberg":
            self.lake.load_table("films.source").overwrite(rows(3, 4, "another"), overwrite_filter="id = 3")
        else:
            DeltaTable(self.source).update(predicate="id = 3", updates={"text": "'another film'"})

    def change_key(self) -> None:
        if self.kind.startswith("delta"):
            DeltaTable(self.source).update(predicate="id = 4", updates={"id": str(self.next_id)})
            self.next_id += 1

    def repeat_key(self) -> None:
        """Give a row the key of another one that does not change, or add one with such a key."""
        if self.kind.startswith("delta"):
            DeltaTable(self.source).update(predicate="id = 5", updates={"id": "4"})
        else:
            self.add_repeated_key()

    def change_hidden_row(self) -> None:
        """Change a row that is not English, and has the key of an English one."""
        if self.kind.startswith("delta"):
            table = DeltaTable(self.source)
            table.update(predicate="id = 3", updates={"id": "4"})
            table.update(predicate="id = 4 and lang <> 'en'", updates={"text": "'hidden'"})

    def add_repeated_key(self) -> None:
        self.next_id += 1
        self._add(rows(4, 5, "repeated"))

    def remove_repeated_key(self) -> None:
        if self.kind.startswith("delta"):
            DeltaTable(self.source).delete("id = 4 and text <> 'film 4'")

    def leave_condition(self) -> None:
        if self.kind.startswith("delta") and self.partition != "text":
            DeltaTable(self.source).update(predicate="id = 5", updates={"lang": "'nowhere'"})

    def compact(self) -> None:
        if self.kind.startswith("delta"):
            DeltaTable(self.source).optimize.compact()

    def forget(self) -> None:
        """Remove what only earlier versions of the source have."""
        if self.kind == "iceberg":
            self.lake.load_table("films.source").maintenance.expire_snapshots().older_than(NEVER).commit()
        elif self.kind.startswith("delta"):
            DeltaTable(self.source).vacuum(0, dry_run=False, enforce_retention_duration=False)

    def overwrite(self) -> None:
        if self.kind == "iceberg":
            self.lake.load_table("films.source").overwrite(rows(50, 53))
        elif self.kind.startswith("delta"):
            write_deltalake(self.source, rows(50, 53), mode="overwrite")

    def restore(self) -> None:
        if self.kind == "iceberg":
            table = self.lake.load_table("films.source")
            first = table.history()[0].snapshot_id
            with table.manage_snapshots() as manage:
                manage.set_current_snapshot(first)
        elif self.kind.startswith("delta") and DeltaTable(self.source).version():
            DeltaTable(self.source).restore(0)

    def recreate(self) -> None:
        if self.kind == "iceberg":
            self.lake.drop_table("films.source")
            self.lake.create_table("films.source", rows(0, 1).schema).append(rows(20, 22))
        elif self.kind.startswith("delta"):
            shutil.rmtree(self.source)
            self.make()
            write_deltalake(self.source, rows(20, 22), mode="append", schema_mode="merge")

    # What happens to the output and to the options.
    def restore_output(self) -> None:
        if self.sink == "delta" and DeltaTable.is_deltatable(self.output("out")):
            table = DeltaTable(self.output("out"))
            if table.version():
                table.restore(table.version() - 1)

    def compact_output(self) -> None:
        if self.sink == "delta" and DeltaTable.is_deltatable(self.output("out")):
            DeltaTable(self.output("out")).optimize.compact()

    def forget_output(self) -> None:
        if self.sink == "delta" and DeltaTable.is_deltatable(self.output("out")):
            DeltaTable(self.output("out")).vacuum(0, dry_run=False, enforce_retention_duration=False)
        elif self.sink == "iceberg" and self.lake.table_exists("films.out"):
            self.lake.load_table("films.out").maintenance.expire_snapshots().older_than(NEVER).commit()

    def select_english(self) -> None:
        self.read = {"where": "lang = 'en'"}

    def select_some(self) -> None:
        self.read = {"sample": 0.5}

    def select_few(self) -> None:
        self.read = {"limit": 2}

    def select_all(self) -> None:
        self.read = {}

    def another_function(self) -> None:
        self.function = "doubled"


EVENTS = (
    "add", "add", "add_column", "widen", "delete", "update", "change_key", "repeat_key", "add_repeated_key",
    "remove_repeated_key", "change_hidden_row", "leave_condition", "compact", "forget", "overwrite", "restore",
    "recreate", "back_up", "put_back", "put_back", "restore_output", "compact_output", "forget_output",
    "select_english", "select_english", "select_some", "select_few", "select_all", "another_function",
)  # fmt: skip


def call(case: Case) -> None:
    """Make one incremental call, and compare its output with a full run, unless it is refused."""
    before = case.rows("out")
    refused = None
    try:
        case.map("out", incremental=True)
    except TorchlakeError as error:
        refused = error
    case.done.append("added" if refused is None else f"refused: {type(refused).__name__}: {refused}")
    if refused is not None:
        assert case.rows("out") == before, f"a refused call changed the output: {case.done}"
        case.read = {key: value for key, value in case.read.items() if key == "where"}  # no increment follows a sample
    try:
        case.map("full", mode="overwrite")
    except TorchlakeError:  # the source has a repeated key
        if refused is None:
            raise
        return
    if refused is not None:
        # It can go on: a full run replaces the output, and increments follow it.
        case.map("out", mode="overwrite")
        assert case.map("out", incremental=True).rows_in == 0, case.done
    assert case.rows("out") == case.rows("full"), case.done
    assert tl.verify(case.output("out")).problems == []


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
    found = pyiceberg.catalog.load_catalog("lake")
    found.create_namespace("films")
    yield found
    found.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.S3Server]:
    with s3_server.serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # clients of another test's server
        yield server
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.filterwarnings("ignore:Delete operation did not match any records")  # of a source, by pyiceberg
@pytest.mark.parametrize("examples", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_an_increment_is_a_full_run_or_refused(
    examples: int, tmp_path: Path, lake: Any, bucket: s3_server.S3Server
) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=CHECKS, print_blob=False)
    @given(
        kind=st.sampled_from(["delta with a feed", "delta", "files", "bucket", "iceberg"]),
        sink=st.sampled_from(["delta", "iceberg"]),
        partition=st.sampled_from(list(PARTITIONS)),
        first=st.sampled_from(["incremental", "whole"]),
        calls=st.lists(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=2), min_size=1, max_size=3),
    )
    def check(kind: str, sink: str, partition: str, first: str, calls: list[list[str]]) -> None:
        folder = tmp_path / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in ("source", "out", "full"):
            if lake.table_exists(f"films.{name}"):
                lake.purge_table(f"films.{name}")
        for name in bucket.keys("source"):
            bucket.delete(f"source/{name}")
        case = Case(folder, lake, bucket, kind, sink, partition)
        case.make()
        case.map("out", **({"incremental": True} if first == "incremental" else {}))
        case.done.append(first)
        for events in calls:
            for event in events:
                case.happen(event)
            call(case)

    check()


@pytest.mark.parametrize("partition_by", [[], ["id"]])
@pytest.mark.parametrize("sink", sweep(["delta", "iceberg"], quick={"delta"}))
def test_a_key_that_the_output_has_is_not_added_again(
    sink: str, partition_by: list[str], tmp_path: Path, lake: Any
) -> None:
    """A full run over the source is refused for its key; of two sources, neither takes the other's rows for its own."""
    case = Case(tmp_path, lake, None, "delta", sink, "")
    case.make()
    case.map("out", incremental=True, partition_by=partition_by)
    case.add()
    call(case)
    before = case.rows("out")
    case._add(rows(5, 7, "twice"))
    for _ in range(2):
        with pytest.raises(OutputError, match=r"has a row whose key 'id' is 5, .* not unique"):
            case.map("out", incremental=True)
    assert case.rows("out") == before
    DeltaTable(case.source).delete("text = 'film 5'")
    case.map("out", mode="overwrite")
    case.add()
    call(case)


@pytest.mark.parametrize("sink", sweep(["delta", "iceberg"], quick={"delta"}))
@pytest.mark.parametrize("change", ["a row gets another's key", "added beside a deletion", "two in one version"])
def test_a_key_that_a_feed_repeats_is_refused(change: str, sink: str, tmp_path: Path, lake: Any) -> None:
    case = Case(tmp_path, lake, None, "delta with a feed", sink, "")
    case.make()
    case.map("out", incremental=True)
    before = case.rows("out")
    if change == "a row gets another's key":
        case.repeat_key()
    else:
        case.delete()
        case._add(rows(4, 5, "repeated") if "beside" in change else pa.concat_tables([rows(9, 10), rows(9, 10)]))
    for _ in range(2):
        with pytest.raises(TorchlakeError, match=r"key 'id' .*is not unique|so the key is not unique"):
            case.map("out", incremental=True)
    assert case.rows("out") == before
    call(case)


def test_a_key_that_was_repeated_for_a_while(tmp_path: Path, lake: Any) -> None:
    """The last change of the key is the removal of the older row, whose key the newer one has."""
    case = Case(tmp_path, lake, None, "delta with a feed", "delta", "")
    case.make()
    case.map("out", incremental=True)
    case.repeat_key()
    DeltaTable(case.source).delete("text = 'film 4'")
    case._add(rows(9, 10))
    DeltaTable(case.source).delete("id = 9")
    assert case.map("out", incremental=True).rows_in == 1
    case.map("full", mode="overwrite")
    assert case.rows("out") == case.rows("full")


@pytest.mark.parametrize("by", [None, "kind", "at", "price"])
def test_a_change_of_a_row_that_was_not_selected_removes_none(by: str | None, tmp_path: Path, lake: Any) -> None:
    """The keys of the other rows are those of selected ones; conditions see the values of the table."""
    case = Case(tmp_path, lake, None, "delta with a feed", "delta", "")
    table = rows(0, 6).append_column("kind", pa.array([None, "b", "a", None, "b", "a"]))
    table = pa.concat_tables([table, table.set_column(0, "id", pa.array([1, 2, 3, 4, 5, 6]))])
    if by == "at":  # delta-rs cannot find the folders of times that are escaped
        table = table.drop_columns("at").append_column("at", table["at"].cast(pa.date32()))
    write_deltalake(case.source, table, configuration=FEED, partition_by=None if by is None else [by])
    case.read = {"where": f"kind is null and votes < 4 and at < '2024-02-01' and price <= {STAMP.year}"}
    case.map("out", incremental=True)
    before = case.rows("out")
    changed = DeltaTable(case.source)
    changed.update(predicate="kind = 'b' or votes >= 4", updates={"text": "'hidden'"})
    changed.delete("kind = 'a'")
    assert case.map("out", incremental=True).rows_in == 0
    assert case.rows("out") == before
    changed.update(predicate="id = 1 and kind is null", updates={"kind": "'b'"})
    changed.update(predicate="id = 1 and votes = 1 and kind = 'b'", updates={"kind": "null"})
    case.map("out", incremental=True)
    case.map("full", mode="overwrite")
    assert case.rows("out") == case.rows("full") != before


def test_rows_of_a_sample_are_not_added_to(tmp_path: Path, lake: Any) -> None:
    case = Case(tmp_path, lake, None, "files", "delta", "")
    case.make()
    case.map("out", limit=2)
    case.add()
    with pytest.raises(FingerprintError, match=r"0\.parquet: other rows of it were added .*limit: 2 -> None"):
        case.map("out", incremental=True)


def test_files_of_the_output_that_another_library_rewrote(tmp_path: Path, lake: Any) -> None:
    """They have string views, and may be older than a wider type of the key."""
    case = Case(tmp_path, lake, None, "delta with a feed", "delta", "")
    case.make()
    case.map("out", incremental=True)
    DeltaTable(case.output("out")).update(predicate="id = 2", updates={"error": "'seen'"})
    DeltaTable(case.output("out")).update(predicate="id = 2", updates={"error": "null"})
    case.update()
    call(case)


@pytest.mark.parametrize("first", ["incremental", "whole", "changed"])
@pytest.mark.parametrize("kind", ["delta with a feed", "iceberg"])
def test_an_older_copy_that_grew_is_refused(kind: str, first: str, tmp_path: Path, lake: Any) -> None:
    """Its version has the number of the one that was read, or a higher one."""
    case = Case(tmp_path, lake, None, kind, "delta", "")
    case.make()
    case.add()
    if first == "changed" and kind != "iceberg":
        case.map("out", incremental=True)
        case.update()
    case.map("out", incremental=first != "whole")
    before = case.rows("out")
    case.put_back()
    case.update()
    for _ in range(2):
        with pytest.raises(TorchlakeError, match=r"version \d is another one now: an older copy was put in its place"):
            case.map("out", incremental=True)
        case.add()
    assert case.rows("out") == before
    case.back_up()
    call(case)
    case.add()
    call(case)
    case.put_back()
    case.add()
    call(case)


@pytest.mark.parametrize("what", ["record", "log"])
def test_a_version_that_cannot_be_compared_is_taken_for_the_one_that_was_read(
    what: str, tmp_path: Path, lake: Any
) -> None:
    """Records of the version before do not say which commit it was; a log is cleaned up."""
    case = Case(tmp_path, lake, None, "delta", "delta", "")
    case.make()
    case.add()
    case.map("out", incremental=True)
    if what == "record":
        (path,) = (path for path in (tmp_path / "out/_torchlake/commits").iterdir() if ".plan." not in path.name)
        record = json.loads(path.read_text())
        del record["sources"][0]["commit"]
        path.write_text(json.dumps(record))
    else:
        DeltaTable(case.source).create_checkpoint()
    case.add()
    if what == "log":
        for version in (0, 1):
            (tmp_path / f"source/_delta_log/{version:020d}.json").unlink()
    assert case.map("out", incremental=True).rows_in == 3


def test_columns_of_an_iceberg_table_that_changed_without_a_snapshot(tmp_path: Path, lake: Any) -> None:
    case = Case(tmp_path, lake, None, "iceberg", "delta", "")
    case.make()
    table = lake.load_table("films.source")
    for old, new in (("text", "words"), ("votes", "text"), ("words", "votes")):
        with table.update_schema() as update:
            update.rename_column(old, new)
    case.function = "by_other_names"
    case.map("out", incremental=True)
    case.map("full", mode="overwrite")
    assert case.rows("out") == case.rows("full")


def test_files_of_the_output_that_are_gone_are_written_again(tmp_path: Path, lake: Any) -> None:
    case = Case(tmp_path, lake, None, "delta", "delta", "")
    case.make()
    case.map("out")
    for file in Path(case.output("out")).glob("torchlake-*/*.parquet"):
        file.unlink()
    assert tl.verify(case.output("out")).problems
    with pytest.raises(OutputError, match=r"is damaged: .* is missing .*mode overwrite"):
        case.map("out")
    case.map("out", mode="overwrite")
    assert len(case.rows("out")) == 6


@pytest.mark.parametrize("sink", sweep(["delta", "iceberg"], quick={"delta"}))
def test_replaced_rows_stay_gone_without_the_history(
    sink: str, tmp_path: Path, lake: Any, bucket: s3_server.S3Server
) -> None:
    """The rows that replaced them have the same keys."""
    case = Case(tmp_path, lake, bucket, "files", sink, "")
    for word in ("film", "movie", "picture"):
        case.put("0.parquet", rows(0, 6, word))
        case.map("out", mode="overwrite")
    case.put("1.parquet", rows(6, 8))
    assert case.map("out", incremental=True).rows_in == 2
    if sink == "delta":
        table = DeltaTable(case.output("out"))
        table.create_checkpoint()
        for file in (tmp_path / "out" / "_delta_log").glob("*.json"):
            if int(file.stem) < table.version():
                file.unlink()
    else:
        case.forget_output()
    target = output_of(case.output("out"), TargetOptions()).target
    assert len(commits_of(target, target.snapshot())) == 2, "the third replacement and the increment"
    assert case.map("out", incremental=True).rows_in == 0
    case.put("2.parquet", rows(8, 9))
    assert case.map("out", incremental=True).rows_in == 1
    assert [number for number, _ in case.rows("out")] == list(range(9))
