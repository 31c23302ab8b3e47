"""predict over stored tables, with real worker processes: every format, keys, resuming, verification."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import misbehaving
import tiny
import torchlake as tl
from torchlake.errors import FingerprintError, TableError, TooManyErrors, UsageError

ROWS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


def test_the_process_that_starts_a_job_loads_no_torch(model: Path, tmp_path: Path) -> None:
    """Its import takes longer than scoring a small table."""
    pq.write_table(tiny.reviews(20), tmp_path / "in.parquet")
    code = (
        "import sys, torchlake as tl\nscored = tl.predict(*sys.argv[1:], engine=tl.Local(processes=1))\n"
        "print(scored.rows_out, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    given = [str(model), str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    assert done.stdout == "20 []\n"


def test_every_format_gives_the_same_answers(model: Path, tmp_path: Path) -> None:
    """One job over a table in four formats, two files of each: same rows, same labels, same order."""
    table = tiny.reviews(ROWS).select(["id", "text"])
    halves = [table.slice(0, ROWS // 2), table.slice(ROWS // 2)]
    answers = {}
    for name in ("parquet", "csv", "jsonl", "arrow"):
        folder = tmp_path / name
        folder.mkdir()
        for number, half in enumerate(halves):
            write(half, folder / f"{number}.{name}")
        scored = tl.predict(model, folder, tmp_path / f"{name}-out", columns=["id"], engine=tl.Local(processes=1))
        assert (scored.rows_in, scored.rows_out, scored.rows_failed) == (ROWS, ROWS, 0)
        rows = pq.read_table(tmp_path / f"{name}-out").to_pylist()
        assert rows[-1]["row_id"] == f"1.{name}:{ROWS // 2 - 1}"
        answers[name] = [(int(row["id"]), row["label"], row["score"]) for row in rows]
        assert tl.verify(tmp_path / f"{name}-out").problems == []
    assert answers["csv"] == answers["jsonl"] == answers["arrow"] == answers["parquet"]
    assert [row[0] for row in answers["csv"]] == list(range(ROWS))


def write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def test_a_changed_job_is_refused_and_a_changed_input_can_be_accepted(model: Path, tmp_path: Path) -> None:
    """Cases 9 and 10."""
    source = tmp_path / "in"
    source.mkdir()
    table = tiny.reviews(ROWS)
    pq.write_table(table.slice(0, 20), source / "0.parquet")
    one = tl.Local(processes=1)
    tl.predict(model, source, tmp_path / "out", key="id", engine=one)
    with pytest.raises(FingerprintError, match="all_probabilities"):
        tl.predict(model, source, tmp_path / "out", key="id", all_probabilities=True, engine=one)
    pq.write_table(table.slice(20), source / "1.parquet")
    with pytest.raises(FingerprintError, match="accept-new-input"):
        tl.predict(model, source, tmp_path / "out", key="id", engine=one)
    scored = tl.predict(model, source, tmp_path / "out", key="id", accept_new_input=True, engine=one)
    assert (scored.rows_out, scored.record["provenance"]["rows_scored"]) == (ROWS, 20)
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == list(range(ROWS))


def test_overwrite_tries_the_rows_again_that_failed_in_an_unfinished_write(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished chunks are kept, failed rows and all; who mended the cause may ask for those chunks again."""
    source, out = tmp_path / "in.parquet", tmp_path / "out"
    texts = ["good film"] * 4 + [misbehaving.RAISER] * 4
    pq.write_table(pa.table({"text": texts}), source)

    def again(**options: Any) -> Any:
        return tl.predict(
            model, source, out, runtime=misbehaving.broken_for_now, chunk_rows=4, engine=tiny.Here(), **options
        )

    monkeypatch.setenv("BROKEN", "yes")
    with pytest.raises(TooManyErrors, match="4 of 8 rows failed"):
        again(max_error_rate=0.1)
    monkeypatch.delenv("BROKEN")
    with pytest.raises(TooManyErrors, match="4 of 8 rows failed"):
        again(max_error_rate=0.1)
    scored = again(max_error_rate=0.1, overwrite=True)
    assert (scored.rows_out, scored.rows_failed, scored.record["provenance"]["rows_scored"]) == (8, 0, 4)


def test_a_bad_file_may_be_left_out_and_is_named(model: Path, tmp_path: Path) -> None:
    """Case 25."""
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(tiny.reviews(3), source / "0.parquet")
    (source / "1.parquet").write_bytes(b"PAR1 and nothing else")
    scored = tl.predict(model, source, tmp_path / "out", on_bad_file="quarantine", engine=tiny.Here())
    assert scored.rows_out == 3
    assert [Path(file).name for file, _ in scored.quarantined] == ["1.parquet"]


def test_a_key_must_be_one(model: Path, tmp_path: Path) -> None:
    """Case 27."""
    pq.write_table(pa.table({"id": [1, 2, 2], "text": ["a", "b", "c"]}), tmp_path / "in.parquet")
    with pytest.raises(TableError, match="not unique"):
        tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", key="id")
    assert not (tmp_path / "out").exists()


def test_the_record_says_how_many_rows_are_distinct(model: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["good film"] * 6 + ["bad film"] * 3 + ["a film", None]})
    pq.write_table(table, tmp_path / "in.parquet")
    made = tl.predict(model, tmp_path / "in.parquet", tmp_path / "out")
    assert made.record["provenance"]["distinct"] == 0.3
    assert made.record["provenance"]["padding"] >= 0
    scored = pq.read_table(made.path)
    assert len(set(zip(scored["label"].to_pylist(), scored["score"].to_pylist(), strict=True))) == 4


def test_provenance_names_what_decided_the_answers(model: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(5).select(["text"]), tmp_path / "in.parquet")
    record = tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", engine=tl.Local(processes=1)).record
    assert record["fingerprint"]["runtime"] == "varlen"
    assert len(record["fingerprint"]["model"]) == 64
    assert record["provenance"]["engine"] == "local"
    assert record["provenance"].keys() >= {
        "torch",
        "transformers",
        "torchlake",
        "python",
        "tokens",
        "padding",
        "distinct",
    }


@pytest.mark.parametrize("name", ["label", "Label", "LABEL"])
def test_a_carried_column_may_not_have_the_name_of_a_prediction(model: Path, tmp_path: Path, name: str) -> None:
    """Spark and Hive read `Label` as `label`."""
    pq.write_table(pa.table({"text": ["good"], name: ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=rf"'(label|{name})' is both in the input and predicted.*--prefix predicted_"):
        tl.predict(model, tmp_path / "t.parquet", tmp_path / "out", columns=[name])
    with pytest.raises(UsageError, match="is both in the input and predicted"):
        tl.predict(model, pa.table({"text": ["good"], name: ["x"]}))


def test_an_unknown_option_is_a_type_error_with_the_nearest_name(model: Path) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'chunk_row'\. Did you mean 'chunk_rows'\?"):
        tl.predict(model, "reviews.parquet", "scored", chunk_row=10)  # type: ignore[call-arg]
