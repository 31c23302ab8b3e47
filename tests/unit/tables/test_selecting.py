"""Samples and limits do not depend on chunks; what statistics rule out is not opened; rows are counted and verified."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folder_writes import write_transaction
from sweeps import examples
from torchlake.errors import FingerprintError
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.parts import part_name
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import ChunkPlan, plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify


def planned(
    source: Any, *, chunk_rows: int | None = None, columns: tuple[str, ...] = ("id",), **options: Any
) -> ChunkPlan:
    table = open_table(source, columns=columns, options=ReadOptions(selection=Selection(**options)))
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows)
    return plan_from_json(json.loads(json.dumps(plan_to_json(plan))))


def rows_of(plan: ChunkPlan) -> list[dict[str, Any]]:
    reader = ChunkReader(plan.schema.names)
    rows = [row for chunk in plan.chunks for row in reader.read(chunk)[0].to_pylist()]
    reader.close()
    assert plan.rows == len(rows)
    return rows


def ids(plan: ChunkPlan) -> list[int]:
    return [int(row["id"]) for row in rows_of(plan)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """500 rows in three files of Parquet, JSON lines and CSV."""
    made = {}
    for kind in ("parquet", "jsonl", "csv"):
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        for number, numbers in enumerate((range(200), range(200, 201), range(201, 500))):
            path = folder / f"{number}.{kind}"
            if kind == "parquet":
                pq.write_table(pa.table({"id": numbers, "even": [n % 2 for n in numbers]}), path, row_group_size=70)
            elif kind == "jsonl":
                path.write_text("".join(json.dumps({"id": n, "even": n % 2}) + "\n" for n in numbers))
            else:
                path.write_text("id,even\n" + "".join(f"{n},{n % 2}\n" for n in numbers))
    return made


@settings(max_examples=examples(60, quick=15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["parquet", "jsonl", "csv"]),
    chunk_rows=st.integers(1, 300),
    sample=st.none() | st.floats(0.001, 1),
    limit=st.none() | st.integers(1, 600),
    where=st.sampled_from([None, "even = 1", "id >= 150 and id < 260", "even = 7"]),
)
def test_a_selection_does_not_depend_on_chunks(
    files: dict[str, Path], kind: str, chunk_rows: int, sample: float | None, limit: int | None, where: str | None
) -> None:
    options = {"where": where, "sample": sample, "limit": limit}
    plan = planned(files[kind], chunk_rows=chunk_rows, **options)
    assert ids(plan) == ids(planned(files[kind], **options))
    possible = {None: range(500), "even = 1": range(1, 500, 2), "even = 7": range(0)}.get(where, range(150, 260))
    sampled = ids(planned(files[kind], sample=sample)) if sample is not None else range(500)
    assert ids(plan) == [one for one in sampled if one in {*possible}][: limit or 500]
    counted = plan.rows + sum(plan.selection.get("left_out", {}).values())
    assert counted == 500 or (counted < 500 and limit is not None and plan.selection["unread_files"])


def test_a_sample_has_its_share_of_rows_grows_with_it_and_depends_on_the_seed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(100_000)}), tmp_path / "t.parquet")
    tenth, third = (ids(planned(tmp_path, sample=share)) for share in (0.1, 0.3))
    assert 9_700 < len(tenth) < 10_300
    assert 29_500 < len(third) < 30_500
    assert {*tenth} < {*third}
    other = ids(planned(tmp_path, sample=0.1, seed=1))
    assert 800 < len({*tenth} & {*other}) < 1_200


def test_a_row_group_that_cannot_match_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": range(3_000), "n": range(3_000)}), path, row_group_size=1_000, use_dictionary=False)
    column = pq.read_metadata(path).row_group(0).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset :][:1] = b"\xff"
    content[column.data_page_offset : column.data_page_offset + 30] = b"\xff" * 30  # the condition's column
    path.write_bytes(content)
    assert ids(planned(path, where="n >= 2500")) == [*range(2_500, 3_000)]
    # Nor one of which every row matches.
    assert ids(planned(path, where="n < 1000")) == [*range(1_000)]


def test_a_file_that_cannot_match_is_not_opened(tmp_path: Path) -> None:
    for day in range(3):
        rows = pa.table({"id": range(day * 10, day * 10 + 10), "day": [f"d{day}"] * 10, "n": [day] * 10})
        write_deltalake(tmp_path / "t", rows, partition_by=["day"], mode="append")
    for file in (tmp_path / "t").rglob("*.parquet"):
        if "day=d1" not in str(file):
            file.write_bytes(b"x" * file.stat().st_size)
    for where in ("day = 'd1'", "n = 1", "not (n < 1 or day >= 'd2')"):
        plan = planned(tmp_path / "t", where=where)
        assert ids(plan) == [*range(10, 20)]
        assert plan.selection["left_out"] == {"where": 20}
        assert len(plan.inputs) == 1


def test_a_delta_table_of_which_no_file_matches_has_no_rows(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": range(5), "day": ["a"] * 5}), partition_by=["day"])
    plan = planned(tmp_path / "t", where="day = 'b'")
    assert (plan.rows, plan.inputs, plan.chunks) == (0, (), ())
    assert plan.selection == {"where": "day = 'b'", "left_out": {"where": 5}}


def test_rows_that_cannot_be_read_are_selected(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": 1, "n": 1}\nbroken\n{"id": 3, "n": 3}\n')
    plan = planned(tmp_path, where="n = 3")
    assert [(row["id"], error) for row, error in zip(rows_of(plan), (True, False), strict=True)] == [
        (None, True),
        (3, False),
    ]
    (chunk,) = plan.chunks
    assert list(ChunkReader(("id",)).read(chunk)[1]) == [0]


def test_an_output_is_of_one_selection(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(50), "n": range(50)}), tmp_path / "t.parquet")
    schema = pa.schema([pa.field("row_id", pa.string()), pa.field("id", pa.int64()), pa.field("error", pa.string())])

    def write(**options: Any) -> dict[str, Any]:
        plan = planned(tmp_path / "t.parquet", chunk_rows=10, **options)
        with write_transaction(
            tmp_path / "out", plan=plan, fingerprint={}, schema=schema, allowed=AllowedChanges()
        ) as out:
            reader, parts = ChunkReader(("id",)), []
            for chunk in out.pending:
                rows = reader.read(chunk)[0]["id"]
                table = pa.table([row_ids(chunk), rows, pa.nulls(len(rows), pa.string())], schema=schema)
                parts.append(out.parts.write(part_name(plan, chunk, {}), table, chunk=chunk.index))
            record: dict[str, Any] = out.commit([*out.done, *parts], {}) if not out.complete else out.record
        return record

    record = write(where="n >= 10", limit=25)
    assert record["rows"] == 25
    assert record["selection"] == {"where": "n >= 10", "limit": 25, "left_out": {"where": 10, "limit": 15}}
    checked = verify(tmp_path / "out")
    assert (checked.problems, checked.rows_in) == ([], 25)
    note = "only selected rows were read (where n >= 10, limit 25); left out: 10 by where, 15 by limit."
    assert note in checked.notes
    with pytest.raises(FingerprintError, match=r"where: 'n >= 10' -> 'n >= 11'"):
        write(where="n >= 11", limit=25)
    with pytest.raises(FingerprintError, match=r"limit: 25 -> None"):
        write(where="n >= 10")
    assert write(where="n >= 10", limit=25) == record
