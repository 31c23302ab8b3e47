"""Failed rows are counted by reason, with an example, by predict as by evaluate."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.cli.main import main
from torchlake.tables.failures import count_reasons, format_reasons


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: 4 rows of 9 have no text, one is no UTF-8 and two are no rows."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_bytes(b"id,text\n0,good film\n1,bad film\n2,good \xff film\n")
    (folder / "b.csv").write_bytes(b"id,text\n3,\n4,\n5,good\n6,\n7,\nbroken\nbroken,a,b\n")
    return folder


def test_reasons_and_an_example(model: Path, folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_error_rate": 1.0, "chunk_rows": 4, "engine": tiny.Here()}
    scored = tl.predict(model, folder, tmp_path / "out", **options)
    assert next(iter(scored.errors.items())) == ("null_input", 4)
    assert scored.errors == {"null_input": 4, "bad_csv": 2, "bad_utf8": 1}
    assert sum(scored.errors.values()) == scored.rows_failed
    assert scored.example == f"{folder}/a.csv row 2: bad_utf8"
    again = tl.predict(model, folder, tmp_path / "out", **options)
    assert again.record["provenance"] == scored.record["provenance"], "nothing was scored again"
    assert (again.errors, again.example) == (scored.errors, scored.example)


def test_a_sound_table_has_none(model: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(3), tmp_path / "t.parquet")
    scored = tl.predict(model, tmp_path / "t.parquet", tmp_path / "out", engine=tiny.Here())
    assert (scored.errors, scored.example) == ({}, None)


def test_the_command_says_them(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchlake.cli.options.make_engine", lambda *_, **__: tiny.Here())
    words = ["predict", str(model), str(folder), str(tmp_path / "out"), "--max-error-rate", "1"]
    assert main(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[lines.index("rows with an error, by reason") :] == [
        "rows with an error, by reason",
        "  null_input 4",
        "  bad_csv 2",
        "  bad_utf8 1",
        f"for example {folder}/a.csv row 2: bad_utf8",
        "bad_utf8: if a CSV file has an encoding other than UTF-8, give --csv encoding=latin-1 or its name.",
    ]
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["errors"] == {"null_input": 4, "bad_csv": 2, "bad_utf8": 1}
    assert told["example"] == f"{folder}/a.csv row 2: bad_utf8"


def test_what_follows_a_colon_is_no_reason() -> None:
    errors = pa.array(["bad_csv: 2 fields, 3 expected", "error: ValueError: x", "bad_csv: quote", "null_input"])
    assert count_reasons(errors) == {"bad_csv": 2, "error": 1, "null_input": 1}
    assert count_reasons(pa.chunked_array([errors, errors]))["bad_csv"] == 4
    assert count_reasons(pa.array([], pa.string())) == {}


def test_many_reasons_take_five_lines() -> None:
    assert format_reasons({f"r{number}": 10 - number for number in range(5)}) == [
        "r0 10",
        "r1 9",
        "r2 8",
        "r3 7",
        "r4 6",
    ]
    many = {f"r{number}": 2000 - number for number in range(7)}
    assert format_reasons(many) == ["r0 2,000", "r1 1,999", "r2 1,998", "r3 1,997", "3 other reasons 5,985"]
    assert format_reasons({}) == []
