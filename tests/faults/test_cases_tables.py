"""Scoring tables that are not what they should be: cases 6, 10, 13, 18 to 20 and 22 to 27, through `predict` whole.

What is refused before any work goes through the command line, for its exit code; the rest runs without worker
processes, because these faults need none.
"""

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import misbehaving
import tiny
import torchlake as tl
from torchlake.cli.main import main
from torchlake.errors import StorageError, TableError, TorchlakeError
from torchlake.models import load
from torchlake.outputs.staging import folders as staging
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

TEXTS = [f"{word} good film" for word in tiny.OTHER]


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return path


def bad_strings(values: list[bytes]) -> pa.Array:
    """A string array that holds `values` unchecked."""
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), binary.buffers()[1], binary.buffers()[2])


def predict(model: Path, table: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of the output, in order; `verify` has nothing against it."""
    scored = tl.predict(model, table, output, engine=tiny.Here(), **options)
    assert scored.rows_in == scored.rows_out
    assert tl.verify(output).problems == []
    return pq.read_table(output, partitioning=None).to_pylist()


def refused(capfd: pytest.CaptureFixture[str], model: Path, table: Path, output: Path, *more: str) -> str:
    """What the command line says when it refuses a table with exit code 65, before it makes anything."""
    beside = sorted(output.parent.iterdir())
    assert main(["predict", str(model), str(table), str(output), *more]) == 65
    assert sorted(output.parent.iterdir()) == beside, "nothing was begun"
    return capfd.readouterr().err


def test_planted_files_are_not_read_and_the_next_run_removes_them(tiny_model: Path, tmp_path: Path) -> None:
    """Case 6, and 54d for an output: leftovers, torn parts and links in the staging folder."""
    source = write(tmp_path / "in" / "t.parquet", text=TEXTS)
    out = tmp_path / "out"
    expected = predict(tiny_model, source, tmp_path / "whole", chunk_rows=8)
    predict(tiny_model, source, out, chunk_rows=8)
    table = staging.staging_of(out) / "table"
    table.parent.mkdir()
    shutil.move(out, table)  # as if killed before the rename that publishes
    plan = table / "_torchlake" / "plan.json"
    plan.rename(table.parent / "plan.json")
    precious = write(tmp_path / "precious" / "x.parquet", text=["other rows"])
    parts = sorted(table.glob("part-*.parquet"))
    parts[0].unlink()
    parts[0].symlink_to(precious)
    parts[1].write_bytes(parts[1].read_bytes()[:-9])
    (table / ".part-00000.parquet.77.tmp").write_bytes(b"torn")
    shutil.copy(precious, table / "part-00009-0123456789abcdef.parquet")
    assert predict(tiny_model, source, out, chunk_rows=8) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "precious", "whole"]
    assert pq.read_table(precious)["text"].to_pylist() == ["other rows"]
    assert not [path for path in out.rglob("*") if path.is_symlink() or path.name.endswith(".tmp")]


def test_another_model_or_config_is_refused_with_what_differs(
    tiny_model: Path, tiny_bert: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 10."""
    source = write(tmp_path / "t.parquet", text=TEXTS)
    predict(tiny_model, source, tmp_path / "out")
    other = tiny.build_model(tmp_path / "other", encoder=tiny_bert, seed=1)
    assert "model: '" in refused(capfd, other, source, tmp_path / "out")
    assert "null: 'error' -> 'score'" in refused(capfd, tiny_model, source, tmp_path / "out", "--null", "score")


def lose_the_staging_folder(folder: Path, spec: load.TaskSpec, *, device: str):
    """Scores like any other, and takes the staging folder beside the model's away once, while a chunk is scored."""
    inner = misbehaving.misbehave(folder, spec, device=device)
    (lost,) = folder.parent.glob(".*.staging")

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        if not (folder.parent / "done").exists():
            (folder.parent / "done").touch()
            lost.rename(folder.parent / "removed")  # at once: a thread may write into it
        return inner(input_ids, attention_mask)

    return forward


def test_an_output_removed_while_it_is_written(tiny_model: Path, tmp_path: Path) -> None:
    """Case 13: the next write fails in words, exit code 74; the same call again completes."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    source = write(tmp_path / "t.parquet", text=TEXTS)
    with pytest.raises(StorageError, match="No such file or directory.*run the same command again") as error:
        predict(model, source, tmp_path / "out", runtime=lose_the_staging_folder, chunk_rows=8)
    assert error.value.exit_code == 74
    assert not (tmp_path / "out").exists()
    assert len(predict(model, source, tmp_path / "out", runtime=lose_the_staging_folder, chunk_rows=8)) == len(TEXTS)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "output",
    ["/proc/torchlake/out", "{file}/out"],
)
def test_an_output_that_cannot_be_created(
    tiny_model: Path, tmp_path: Path, output: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 13: exit code 73 before any row is scored."""
    source = write(tmp_path / "t.parquet", text=TEXTS)
    assert main(["predict", str(tiny_model), str(source), output.replace("{file}", str(source))]) == 73
    assert "cannot be created" in capfd.readouterr().err


def test_odd_texts_keep_their_place(tiny_model: Path, tmp_path: Path) -> None:
    """Cases 18, 19 and 20: no text, 2 MB of it, emoji, NUL, right to left, bytes that are not UTF-8."""
    odd = [
        b"good " * 400_000,
        "emoji 🙂".encode(),
        b"nul \0 nul",
        "\u202ertl עברית".encode(),
        b"caf\xe9",
        b"",
        b" \t\n",
    ]
    texts = [text for one in odd for text in (b"good film", one)]
    source = write(tmp_path / "t.parquet", id=list(range(len(texts))), text=bad_strings(texts))
    rows = predict(tiny_model, source, tmp_path / "out", key="id")
    assert [row["id"] for row in rows] == list(range(len(texts)))
    errors = {texts[row["id"]]: row["error"] for row in rows if row["error"] is not None}
    assert errors == {b"caf\xe9": "bad_utf8", b"": "null_input", b" \t\n": "null_input"}
    assert [row["id"] for row in rows if row["truncated"]] == [1]
    plain = [row for row in rows if row["id"] % 2 == 0]
    assert {row["label"] for row in plain} == {plain[0]["label"]} != {None}
    assert [row["score"] for row in plain] == pytest.approx([plain[0]["score"]] * len(odd), abs=1e-6)


def test_the_batch_size_that_memory_allows_is_logged(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 22; that no answer changes is in test_scoring_faults."""
    source = write(tmp_path / "t.parquet", text=TEXTS)
    with caplog.at_level(logging.WARNING, logger="torchlake"):
        rows = predict(tiny_model, source, tmp_path / "out", runtime=misbehaving.small_memory)
    assert [row["error"] for row in rows] == [None] * len(TEXTS)
    assert "out of memory: batches now hold at most" in caplog.text


def test_drift_is_refused_before_scoring(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Case 23: a column missing, and of another type, in the third file."""
    for number in range(2):
        write(tmp_path / "in" / f"{number}.parquet", text=TEXTS)
    out = tmp_path / "out"
    third = write(tmp_path / "in" / "2.parquet", txt=TEXTS)
    assert f"{third}: there is no column 'text'. Did you mean 'txt'?" in refused(capfd, tiny_model, third.parent, out)
    write(third, text=[1, 2])
    said = refused(capfd, tiny_model, third.parent, out)
    assert f"{third}: the column 'text' is int64, but string in {tmp_path / 'in' / '0.parquet'}" in said


def test_extra_and_null_columns_change_no_schema(tiny_model: Path, tmp_path: Path) -> None:
    """Case 24: a column of nulls in the first file, one more column in the second; each part has one schema."""
    write(tmp_path / "in" / "0.parquet", text=pa.nulls(3), note=pa.nulls(3))
    write(tmp_path / "in" / "1.parquet", text=TEXTS, note=["n"] * len(TEXTS), extra=list(range(len(TEXTS))))
    rows = predict(tiny_model, tmp_path / "in", tmp_path / "out", columns=["note"])
    assert [row["error"] for row in rows[:4]] == ["null_input"] * 3 + [None]
    assert list(rows[0]) == ["row_id", "note", "label", "score", "truncated", "error"]
    first, *others = [pq.read_schema(path) for path in sorted((tmp_path / "out").glob("part-*"))]
    assert others
    assert all(other.equals(first) for other in others)
    assert first.field("note").type == first.field("error").type == pa.string()


@pytest.mark.parametrize("damage", ["truncated", "footer", "empty", "no parquet"])
def test_a_damaged_file_is_refused_or_listed(
    tiny_model: Path, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 25."""
    write(tmp_path / "in" / "good.parquet", text=TEXTS)
    bad = write(tmp_path / "in" / "bad.parquet", text=TEXTS)
    content = bad.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2],
        "footer": content[:-60] + b"\xff" * 52 + content[-8:],
        "empty": b"",
        "no parquet": b"text\ngood film\n" * 9,
    }
    bad.write_bytes(damaged[damage])
    assert str(bad) in refused(capfd, tiny_model, bad.parent, tmp_path / "out")
    scored = tl.predict(tiny_model, bad.parent, tmp_path / "out", engine=tiny.Here(), on_bad_file="quarantine")
    assert scored.rows_out == len(TEXTS)
    ((file, reason),) = scored.record["quarantined"]
    assert file == str(bad)
    assert str(bad) in reason


def test_a_flipped_bit_in_a_page_is_found_before_it_is_used(tiny_model: Path, tmp_path: Path) -> None:
    """Case 26: an error that names the file, and nothing published."""
    source = tmp_path / "t.parquet"
    table = pa.table({"text": [f"number {n} good" for n in range(3000)]})
    pq.write_table(table, source, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(source.read_bytes())
    content[content.index(b"number 2000")] ^= 1
    source.write_bytes(content)
    with pytest.raises(TableError, match=r"t.parquet: rows .*The file is damaged") as error:
        predict(tiny_model, source, tmp_path / "out", runtime=misbehaving.misbehave)
    assert error.value.exit_code == 65
    assert not (tmp_path / "out").exists()


def test_no_flipped_bit_of_the_data_changes_a_row_unseen(tmp_path: Path) -> None:
    """Case 26: 150 seeded flips among the pages; each is an error that names the file, or changes nothing."""
    source = tmp_path / "t.parquet"
    texts = [f"{n} {TEXTS[n % len(TEXTS)]}" for n in range(2000)]
    pq.write_table(pa.table({"text": texts}), source, compression="zstd", write_page_checksum=True, data_page_size=4096)
    content = source.read_bytes()
    column = pq.read_metadata(source).row_group(0).column(0)
    first = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
    chance, words = random.Random(11), []
    for _ in range(150):
        damaged = bytearray(content)
        damaged[chance.randrange(first, first + column.total_compressed_size)] ^= 1 << chance.randrange(8)
        source.write_bytes(damaged)
        try:
            rows = read_all(source)
        except TorchlakeError as error:
            words.append(str(error))
        else:
            assert rows == texts
    assert len(words) > 140
    assert all(str(source) in said for said in words)


def read_all(source: Path) -> list[str]:
    """Every text of a one-column table, planned and read anew."""
    reader, rows = ChunkReader(["text"]), []
    try:
        for chunk in plan_chunks(open_table(source, columns=["text"]), columns=["text"]).chunks:
            table, errors = reader.read(chunk)
            assert errors == {}
            rows += table["text"].to_pylist()
    finally:
        reader.close()
    return rows


def test_a_key_that_is_none_is_refused_with_examples(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 27; without a key the rows get ids of their own."""
    source = write(tmp_path / "t.parquet", twice=[n // 2 for n in range(20)], gaps=[None] * 20, text=TEXTS[:20])
    said = refused(capfd, tiny_model, source, tmp_path / "out", "--key", "twice")
    assert "not unique" in said
    assert said.count(f"{source} row ") >= 3
    said = refused(capfd, tiny_model, source, tmp_path / "out", "--key", "gaps")
    assert "null" in said
    assert said.count("row ") >= 3
    ids = [row["row_id"] for row in predict(tiny_model, source, tmp_path / "out")]
    assert ids == [f"t.parquet:{n}" for n in range(20)]
