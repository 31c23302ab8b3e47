"""Outputs that cannot be written to: a clear error with its exit code, before any row is scored."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.utils.config import Config

import s3_server
import tiny
import torchlake as tl
from s3_server import BUCKET, S3Server
from sweeps import sweep
from torchlake.errors import AccessError, FingerprintError, MissingExtra, OutputError, TorchlakeError, UsageError
from torchlake.storage import objects
from torchlake.tables.sources import delta


class Untouched(tiny.Here):
    """An engine that nothing may be run on."""

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a chunk was run")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pq.write_table(tiny.reviews(6), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server.serving() as server:
        yield server


@pytest.fixture
def cloud(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's variables, and no others of this machine."""
    monkeypatch.setattr(objects, "RETRIES", 1)
    objects._opened.cache_clear()
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in {**s3.environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


def refused(
    model: Path, source: Any, output: str | Path, error: type[TorchlakeError], match: str, **options: Any
) -> None:
    with pytest.raises(error, match=match):
        tl.predict(model, source, output, key="id", engine=Untouched(), **options)


def make(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    deltalake.write_deltalake(path, pa.table(columns), **options)
    return path


ROW: dict[str, Any] = {
    "id": [1],
    "label": ["good"],
    "score": pa.array([0.5], pa.float32()),
    "error": pa.nulls(1, pa.string()),
}


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"id": [1]}, "do not fit the table: it has no column 'label'"),
        ({**ROW, "label": [1]}, "its column 'label' is int64, but the rows have string"),
    ],
)
def test_columns_that_do_not_fit(
    tmp_path: Path, source: Path, tiny_model: Path, columns: dict[str, Any], match: str
) -> None:
    refused(tiny_model, source, make(tmp_path / "t", columns), OutputError, match, mode="append")
    assert deltalake.DeltaTable(tmp_path / "t").version() == 0


def test_partitions_of_others_with_signs_of_a_url(tmp_path: Path) -> None:
    values = ["%2F", "a/b", "50%", "a#b", " ", None]
    table = make(tmp_path / "t", {"id": range(6), "p": values}, partition_by=["p"])
    assert sorted(map(str, tl.open(table).to_table()["p"].to_pylist())) == sorted(map(str, values))


def test_rows_of_others_are_not_replaced(tmp_path: Path, source: Path, tiny_model: Path) -> None:
    table = make(tmp_path / "t", ROW)
    refused(tiny_model, source, table, OutputError, "has rows that this job did not write.*mode append.*mode overwrite")


@pytest.mark.parametrize(
    ("configuration", "mode", "match"),
    [
        ({"delta.constraints.c": "id > 0"}, "append", "constraints"),
        ({"delta.appendOnly": "true"}, "overwrite", "append-only"),
    ],
)
def test_features_that_a_new_file_would_have_to_respect(
    tmp_path: Path, source: Path, tiny_model: Path, configuration: dict[str, str], mode: str, match: str
) -> None:
    table = make(tmp_path / "t", ROW)
    if "delta.appendOnly" in configuration:
        deltalake.DeltaTable(table).alter.set_table_properties(configuration)
    else:
        deltalake.DeltaTable(table).alter.add_constraint({"c": "id > 0"})
    refused(tiny_model, source, table, OutputError, match, mode=mode)


def test_a_version_of_a_table(tmp_path: Path, source: Path, tiny_model: Path) -> None:
    table = make(tmp_path / "t", ROW)
    refused(tiny_model, source, f"{table}@v0", UsageError, "a version of a table cannot be written to")
    named = make(tmp_path / "t@v1", ROW)
    refused(tiny_model, source, named, OutputError, "has rows that this job did not write")


@pytest.mark.parametrize("output", ["", "/", "file:///"])
def test_a_name_without_a_folder(source: Path, tiny_model: Path, output: str) -> None:
    for kind in ("parquet", "delta"):
        refused(tiny_model, source, output, UsageError, "cannot be an output", format=kind)  # type: ignore[arg-type]


def test_the_input_itself_and_a_folder_around_it(tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(6)
    table = make(tmp_path / "t", {name: rows[name] for name in rows.column_names})
    refused(tiny_model, table, table, UsageError, "contains the input file", mode="append")
    (tmp_path / "lake").mkdir()
    pq.write_table(rows, tmp_path / "lake" / "in.parquet")
    lake = tmp_path / "lake"
    refused(tiny_model, lake / "in.parquet", lake, (UsageError, OutputError), "in.parquet", format="delta")  # type: ignore[arg-type]


def test_a_folder_with_other_files(tmp_path: Path, source: Path, tiny_model: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    refused(
        tiny_model, source, tmp_path / "other", OutputError, "is not a Delta table, and holds other", format="delta"
    )
    (tmp_path / "file").write_text("")
    refused(tiny_model, source, tmp_path / "file", OutputError, "is a file; an output is a folder", format="delta")


def test_partitions_of_a_column_that_is_not_there(tmp_path: Path, source: Path, tiny_model: Path) -> None:
    out = tmp_path / "t"
    refused(
        tiny_model, source, out, UsageError, "'day', which the output does not have", format="delta", partition_by="day"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("library", "format", "extra"), [("deltalake", "delta", "delta"), ("obstore", "parquet", "s3")]
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, source: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, cloud: None,
    library: str, format: str, extra: str,
) -> None:  # fmt: skip
    for name in [library, *(one for one in sys.modules if one.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    objects._opened.cache_clear()
    output = tmp_path / "t" if format == "delta" else f"s3://{BUCKET}/{tmp_path.name}"
    match = rf"'{library}', which is not installed: .*pip install 'torchlake\[{extra}\]'"
    refused(tiny_model, source, output, MissingExtra, match, format=format)
    assert MissingExtra.exit_code == 64


@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("missing", sweep(["bucket", "credentials", "region"], quick={"bucket"}))
def test_a_store_that_refuses_access(
    source: Path, tiny_model: Path, cloud: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    format: str, missing: str,
) -> None:  # fmt: skip
    if (format, missing) == ("iceberg", "credentials"):
        pytest.skip("without credentials pyarrow writes as anyone, which this server allows")
    bucket = f"s3://{'no-such-bucket' if missing == 'bucket' else BUCKET}"
    match = "There is no such bucket" if missing == "bucket" else "Credentials come from AWS_ACCESS_KEY_ID"
    with ExitStack() as stack:
        if missing == "credentials":
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name)
        elif missing == "region":
            monkeypatch.setenv("AWS_ENDPOINT_URL", stack.enter_context(s3_server.of_another_region()))
            match = "The bucket is in another region: set AWS_DEFAULT_REGION"
        output = f"{bucket}/{tmp_path.name}"
        if format == "iceberg":
            output = "iceberg:lake.db.t"
            for name, value in {"URI": f"sqlite:///{tmp_path}/catalog.db", "WAREHOUSE": f"{bucket}/lake"}.items():
                monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name}", value)
            # It is read once, when pyiceberg is imported.
            monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
            with pyiceberg.catalog.load_catalog("lake") as catalog:
                catalog.create_namespace("db")
        refused(tiny_model, source, output, OutputError if format == "iceberg" else AccessError, match, format=format)
    assert AccessError.exit_code == OutputError.exit_code == 73


def test_signs_of_a_url_in_the_name_of_a_table(source: Path, tiny_model: Path, cloud: None, s3: S3Server) -> None:
    url = f"s3://{BUCKET}/signs/a#b?*.v2"
    scored = tl.predict(tiny_model, source, url, key="id", format="delta", engine=tiny.Here())
    assert tl.open(url).count_rows() == scored.rows_out > 0
    assert {name.partition("/")[0] for name in s3.keys("signs")} == {"a#b?*.v2"}
    assert delta.recognizes(url)
    for root in (f"s3://{BUCKET}/signs/a%20b", f"{source.parent}/a%20b", f"{source.parent}/a\\b"):
        refused(tiny_model, source, root, UsageError, "cannot have % or a backslash in its path", format="delta")


def test_other_objects_at_the_url(source: Path, tiny_model: Path, cloud: None, s3: S3Server, tmp_path: Path) -> None:
    s3.put(f"{tmp_path.name}/notes.txt", b"mine")
    refused(
        tiny_model, source, f"s3://{BUCKET}/{tmp_path.name}", OutputError,
        "holds objects that torchlake did not write, such as notes.txt",
    )  # fmt: skip
    for kind in ("parquet", "delta"):
        url = f"s3://{BUCKET}/{tmp_path.name}/notes.txt"
        refused(tiny_model, source, url, OutputError, "is an object; an output is a folder", format=kind)
    assert s3.keys(tmp_path.name) == ["notes.txt"]


@pytest.mark.slow
def test_another_job_at_the_url(source: Path, tiny_model: Path, cloud: None, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    tl.predict(tiny_model, source, url, key="id", engine=tiny.Here())
    with pytest.raises(FingerprintError, match=r"labels|columns|settings|differ"):
        tl.predict(tiny_model, source, url, key="id", columns=["label"], prefix="p_", engine=Untouched())
