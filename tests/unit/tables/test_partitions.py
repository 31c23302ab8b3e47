"""Columns in the names of folders: types and values are those of pyarrow, and no other folder is opened."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import ChunkPlan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table


def rows_of(source: Any, columns: tuple[str, ...], **options: Any) -> tuple[pa.Table, ChunkPlan]:
    table = open_table(source, columns=columns, options=ReadOptions(selection=Selection(**options)))
    plan = plan_chunks(table, columns=columns)
    reader = ChunkReader(columns)
    rows = [reader.read(chunk)[0] for chunk in plan.chunks]
    reader.close()
    return pa.concat_tables(rows) if rows else plan.schema.empty_table(), plan


def write(folder: Path, values: dict[str, Any], number: int) -> Path:
    inner = folder.joinpath(*(f"{name}={value}" for name, value in values.items()))
    inner.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [number * 2, number * 2 + 1]}), inner / "part-0.parquet")
    return inner / "part-0.parquet"


@pytest.mark.parametrize(
    "texts",
    [
        ["1", "02", "-3"],
        ["1", "x"],
        ["a%20b", "c%3Dd"],
        ["1", "__HIVE_DEFAULT_PARTITION__"],
        ["2147483648", "1"],
        ["é"],
    ],
)
def test_types_and_values_are_those_of_pyarrow(tmp_path: Path, texts: list[str]) -> None:
    for number, text in enumerate(texts):
        write(tmp_path, {"key": text, "other": number}, number)
    found, _ = rows_of(tmp_path, ("id", "key", "other"))
    expected = ds.dataset(tmp_path, partitioning="hive").to_table(columns=["id", "key", "other"])
    assert found.sort_by("id").equals(expected.sort_by("id"))


def test_a_table_partitioned_by_spark_is_read_with_its_columns(tmp_path: Path) -> None:
    table = pa.table({"id": range(6), "lang": ["en", "de", None, "a/b", "en", "c=d"], "year": [1, 1, 2, 2, 3, 3]})
    ds.write_dataset(table, tmp_path, format="parquet", partitioning=ds.partitioning(
        pa.schema([("lang", pa.string()), ("year", pa.int64())]), flavor="hive"))  # fmt: skip
    found, _ = rows_of(tmp_path, ("id", "lang", "year"))
    assert found.sort_by("id").to_pydict() == table.to_pydict()


def test_other_folders_are_not_opened(tmp_path: Path) -> None:
    for number in range(4):
        file = write(tmp_path, {"year": 2020 + number, "lang": "en" if number % 2 else "de"}, number)
        if number != 3:
            file.write_bytes(b"not a Parquet file")
    found, plan = rows_of(tmp_path, ("id", "year"), where="year >= 2022 and lang = 'en'")
    assert found.to_pydict() == {"id": [6, 7], "year": [2023, 2023]}
    assert plan.selection["unread_files"] == 3
    found, plan = rows_of(tmp_path / "year=2023", ("id",), where="lang = 'en'")
    assert found.to_pydict() == {"id": [6, 7]}


def test_text_files_have_them_too(tmp_path: Path) -> None:
    for lang in ("de", "en"):
        (tmp_path / f"lang={lang}").mkdir()
        (tmp_path / f"lang={lang}" / "t.csv").write_text("id\n1\n2\n")
        (tmp_path / f"lang={lang}" / "t.jsonl").write_text(json.dumps({"id": "1"}) + "\n")
    for pattern, rows in (("*.csv", 4), ("*.jsonl", 2)):
        found, _ = rows_of(str(tmp_path / "*" / pattern), ("id", "lang"))
        assert found["lang"].to_pylist() == ["de"] * (rows // 2) + ["en"] * (rows // 2)
        assert len(rows_of(str(tmp_path / "*" / pattern), ("id", "lang"), where="lang = 'en'")[0]) == rows // 2


def test_a_folder_that_has_an_equals_sign_is_only_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"run": "a"}, 0)
    pq.write_table(pa.table({"id": [8]}), tmp_path / "first.parquet")
    pq.write_table(pa.table({"id": [9]}), tmp_path / "x=y.parquet")
    with caplog.at_level(logging.WARNING):
        table = open_table(tmp_path)
    assert table.schema.names == ["id"]
    assert "folders such as 'run=a' are not read as columns: not all files have the same ones" in caplog.text
    assert open_table(tmp_path / "x=y.parquet").schema.names == ["id"]
    assert open_table([tmp_path / "x=y.parquet", tmp_path / "run=a"]).schema.names == ["id"]


@pytest.mark.slow
def test_predict_copies_a_column_of_folders(tmp_path: Path, tiny_model: Path) -> None:
    for lang in ("de", "en"):
        (tmp_path / "t" / f"lang={lang}").mkdir(parents=True)
        pq.write_table(tiny.reviews(5), tmp_path / "t" / f"lang={lang}" / "a.parquet")
    scored = tl.predict(tiny_model, tmp_path / "t", tmp_path / "out", columns=["lang"], where="lang = 'en'")
    assert pq.read_table(scored.path)["lang"].to_pylist() == ["en"] * 5
    assert tl.verify(scored.path).problems == []
