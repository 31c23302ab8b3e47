"""`verify` finds what is wrong with an output, and says nothing against a sound one."""

import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from folder_writes import write_transaction
from torchlake import atomic_io
from torchlake.errors import TableError
from torchlake.outputs.parts import part_name
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import COMMIT, PLAN
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify


def make(tmp_path: Path, key: str | None = None) -> Path:
    out, source = tmp_path / "out", tmp_path / "in.parquet"
    numbers = list(range(12))
    pq.write_table(pa.table({"id": numbers, "t": [f"t{n}" for n in numbers]}), source, write_page_checksum=key is None)
    plan = plan_chunks(open_table(source), columns=["id"], chunk_rows=4)
    fingerprint: dict[str, Any] = {"key": key}
    with write_transaction(out, plan=plan, fingerprint=fingerprint) as write:
        parts, reader = [], ChunkReader(["id"])
        for chunk in write.pending:
            rows, _ = reader.read(chunk)
            ids = {"id": rows["id"]} if key else {"row_id": row_ids(chunk)}
            errors = pa.array(["bad" if n == 5 else None for n in rows["id"].to_pylist()], pa.string())
            table = pa.table({**ids, "label": ["x"] * chunk.rows, "error": errors})
            parts.append(write.parts.write(part_name(plan, chunk, fingerprint), table, chunk=chunk.index))
        write.commit(parts, {})
    return out


@pytest.mark.parametrize("key", [None, "id"])
def test_a_sound_output_has_no_problems(tmp_path: Path, key: str | None) -> None:
    found = verify(make(tmp_path, key))
    assert (found.rows_in, found.rows_out, found.rows_failed, found.parts) == (12, 12, 1, 3)
    assert found.problems == []
    assert found.notes == ([] if key is None else ["1 of 1 input files have no checksums in their pages."])


SOUND: dict[str, pa.Array] = {
    "timestamp[s]": pa.array([5, 6, 7], pa.timestamp("s")),
    "timestamp[s] with a zone": pa.array([5, 6, 7], pa.timestamp("s", tz="UTC")),
    "time32[s]": pa.array([5, 6, 7], pa.time32("s")),
    "date64": pa.array([0, 86_400_000, -86_400_000], pa.date64()),
    "large_string": pa.array(["a", "b", "c"], pa.large_string()),
    "decimal": pa.array([Decimal("1.50"), Decimal("1.51"), Decimal("0.00")], pa.decimal128(20, 2)),
    "list": pa.array([["x"], [], None]),
    "map": pa.array([[("x", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array(["a", "b", "c"]).dictionary_encode(),
}


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize("name", SOUND)
def test_columns_of_every_type_verify(tmp_path: Path, name: str, suffix: str) -> None:
    """Parquet gives some types back as others, and lists with another name for their elements."""
    column, source = SOUND[name], tmp_path / f"in.{suffix}"
    table = pa.table({"k": column})
    if suffix == "parquet":
        pq.write_table(table, source)
    else:
        with pa.ipc.new_file(source, table.schema) as file:
            file.write_table(table)
    found = verify(copied(source, tmp_path / "out", key="k"))
    if name in ("list", "map"):
        assert found.problems == ["The key 'k' holds lists or structs, which cannot be keys."]
        found = verify(copied(source, tmp_path / "carried", key=None))
    assert found.problems == []
    assert found.rows_out == 3


def test_lists_from_json_lines_verify(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"k": ["x"]}\n{"k": []}\n')
    assert verify(copied(tmp_path / "in.jsonl", tmp_path / "out", key=None)).problems == []


def test_the_output_of_a_multi_label_model_verifies(tmp_path: Path) -> None:
    spec = tiny.spec_for("multi_label", ("a", "b", "c"))
    model = tiny.build_model(tmp_path / "model", encoder=tiny.build_encoder(tmp_path / "encoder"), spec=spec)
    pq.write_table(tiny.reviews(4).select(["id", "text"]), tmp_path / "in.parquet")
    tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", key="id", engine=tiny.Here())
    assert verify(tmp_path / "out").problems == []


def copied(source: Path, out: Path, *, key: str | None) -> Path:
    """An output that carries the column `k` of the source."""
    plan = plan_chunks(open_table(source), columns=["k"])
    fingerprint: dict[str, Any] = {"key": key}
    with write_transaction(out, plan=plan, fingerprint=fingerprint) as write:
        parts, reader = [], ChunkReader(["k"])
        for chunk in write.pending:
            rows, _ = reader.read(chunk)
            ids = {} if key else {"row_id": row_ids(chunk)}
            table = pa.table({**ids, "k": rows["k"], "error": pa.nulls(chunk.rows, pa.string())})
            parts.append(write.parts.write(part_name(plan, chunk, fingerprint), table, chunk=chunk.index))
        write.commit(parts, {})
    return out


def test_what_is_no_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="not a finished torchlake output"):
        verify(tmp_path)


def part(out: Path, place: int = 1) -> Path:
    return sorted(out.glob("part-*.parquet"))[place]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def rewrite(out: Path, change: Callable[[pa.Table], pa.Table], *, place: int = 1) -> None:
    """Change a part's rows and make the record agree, as a program with a bug would have written it."""
    path = part(out, place)
    pq.write_table(change(pq.ParquetFile(path).read()), path, write_page_checksum=True)
    record = atomic_io.read_json(out / COMMIT)
    for one in record["parts"]:
        if one["name"] == path.name:
            one["sha256"], one["bytes"] = atomic_io.sha256_file(path), path.stat().st_size
    (out / COMMIT).write_text(json.dumps(record))


def set_column(name: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.column_names.index(name)
        return table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = atomic_io.read_json(path)
    change(value)
    path.write_text(json.dumps(value))


CASES: dict[str, tuple[str | None, Callable[[Path], object], str]] = {
    "flipped bit": (None, lambda out: flip(part(out)), "sha256 differs from the committed one"),
    "missing": (None, lambda out: part(out).unlink(), "part-00001-.*: missing"),
    "truncated": (None, lambda out: part(out).write_bytes(part(out).read_bytes()[:-20]), "cannot be read: .*truncated"),
    "alien": (None, lambda out: (out / "x.parquet").write_bytes(b""), "x.parquet: a Parquet file that the record"),
    "alien below": (
        None,
        lambda out: [(out / "sub").mkdir(), (out / "sub" / "x.parquet").write_bytes(b"")],
        "sub/x.parquet: a Parquet file that the record",
    ),
    "symlink": (
        None,
        lambda out: os.replace(_linked(out), part(out)),
        "a symbolic link|leads out of the output",
    ),
    "name leading out": (
        None,
        lambda out: edit(out / COMMIT, lambda record: record["parts"][0].update(name="../in.parquet")),
        r"'../in.parquet' leads out of the output",
    ),
    "rows lost": (None, lambda out: rewrite(out, lambda table: table.slice(1)), "has 3 rows, but 4 in the plan"),
    "row ids": (
        None,
        lambda out: rewrite(
            out, set_column("row_id", ["in.parquet:4", "in.parquet:4", "in.parquet:6", "in.parquet:7"])
        ),
        "row ids are not those of in.parquet from row 4",
    ),
    "double key": (
        "id",
        lambda out: rewrite(out, set_column("id", [3, 5, 6, 7])),
        "key 'id' is not unique, for example 3",
    ),
    "null key": ("id", lambda out: rewrite(out, set_column("id", [None, 5, 6, 7])), "key 'id' is null"),
    "other keys": (
        "id",
        lambda out: rewrite(out, set_column("id", [40, 5, 6, 7])),
        "keys are not those of in.parquet from row 4",
    ),
    "part listed twice": (
        None,
        lambda out: edit(out / COMMIT, lambda record: record["parts"].append(record["parts"][0])),
        r"duplicate: \[0\]",
    ),
    "part not listed": (
        None,
        lambda out: edit(out / COMMIT, lambda record: record["parts"].pop()),
        r"do not match one to one \(missing: \[2\]",
    ),
    "failed": (
        None,
        lambda out: edit(out / COMMIT, lambda record: record.update(failed=0)),
        "12 rows, 0 of them failed",
    ),
    "plan edited": (
        None,
        lambda out: edit(out / PLAN, lambda plan: plan["inputs"].update(sha256=["0" * 64])),
        "is not the plan that was committed",
    ),
    "other columns": (
        None,
        lambda out: rewrite(out, lambda table: table.drop_columns(["label"])),
        "its columns are .*, but .* in the record",
    ),
}


def _linked(out: Path) -> Path:
    link = out.parent / "link"
    link.symlink_to(out.parent / "in.parquet")
    return link


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_found(tmp_path: Path, case: str) -> None:
    key, damage, words = CASES[case]
    out = make(tmp_path, key)
    damage(out)
    problems = verify(out).problems
    assert any(re.search(words, problem) for problem in problems), problems


def test_a_changed_or_missing_input_is_a_note(tmp_path: Path) -> None:
    out = make(tmp_path)
    os.utime(tmp_path / "in.parquet")
    assert verify(out).notes == [], "the same bytes at another time are the same input"
    pq.write_table(pa.table({"id": [1]}), tmp_path / "in.parquet")
    found = verify(out)
    assert found.problems == []
    assert "input has changed" in found.notes[0]
    (tmp_path / "in.parquet").unlink()
    found = verify(out)
    assert found.problems == []
    assert "input was removed" in found.notes[0]
