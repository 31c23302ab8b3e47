"""The plan covers every row once, in chunks that depend on the table alone."""

import hashlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake import atomic_io
from torchlake.errors import DataError, TableError
from torchlake.storage import versions
from torchlake.storage.versions import Version
from torchlake.tables import chunks as planning
from torchlake.tables.chunks import MAX_BYTES, Split, plan_chunks, split_row_groups, split_text
from torchlake.tables.formats.layout import SplitCandidates
from torchlake.tables.formats.lines import Segment
from torchlake.tables.plan import Chunk, ChunkPlan, InputFile, plan_from_json, plan_to_json
from torchlake.tables.table import open_table

SEGMENTS = st.lists(
    st.builds(Segment, st.integers(1, 5000), st.integers(0, 40 << 20)) | st.just(Segment(0, 0)), max_size=40
)


def covers(cuts: list[Split], rows: int) -> None:
    at = 0
    for first_row, taken, *_ in cuts:
        assert first_row == at
        assert taken > 0
        at += taken
    assert at == rows


@given(groups=SEGMENTS, size=st.integers(1, 3000))
def test_row_groups_are_covered_once(groups: list[Segment], size: int) -> None:
    cuts = list(split_row_groups(groups, size))
    covers(cuts, sum(group.rows for group in groups))
    starts = [sum(group.rows for group in groups[:place]) for place in range(len(groups) + 1)]
    for first_row, taken, (first, count), groups_row, *_ in cuts:
        assert taken <= size
        assert groups_row == starts[first] <= first_row
        assert first_row + taken <= starts[first + count]
        if count > 1:
            assert first_row == starts[first]
            assert sum(group.bytes for group in groups[first : first + count]) <= MAX_BYTES


@given(
    segments=st.lists(st.builds(Segment, st.integers(1, 256), st.integers(1, 3 << 20)), max_size=60),
    size=st.integers(1, 3000),
    start=st.integers(0, 9),
)
def test_text_segments_are_covered_once(segments: list[Segment], size: int, start: int) -> None:
    cuts = list(split_text(SplitCandidates(segments, start, None), size))
    covers(cuts, sum(segment.rows for segment in segments))
    at = start
    for _, taken, groups, _, offset, length, _ in cuts:
        assert groups == (0, 0)
        assert offset == at
        assert taken <= max(size, 256)
        assert length <= MAX_BYTES
        at += length
    assert at == start + sum(segment.bytes for segment in segments)


def test_a_big_group_is_cut_evenly() -> None:
    cuts = [cut[1] for cut in split_row_groups([Segment(10_001, 0)], 1024)]
    assert len(cuts) == 10
    assert max(cuts) - min(cuts) <= 1


@pytest.mark.parametrize(("rows", "size"), [(10, 1024), (64 * 2000, 2000), (64 * 40_000, 32768)])
def test_the_chunk_size_comes_from_the_table(tmp_path: Path, rows: int, size: int) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": pa.nulls(rows, pa.int8())}), path, row_group_size=rows)
    plan = plan_chunks(open_table(path), columns=["n"])
    assert plan.rows == rows
    assert max(chunk.rows for chunk in plan.chunks) <= size
    assert len(plan.chunks) == -(-rows // size)


def test_an_explicit_size_is_met_exactly(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n" + "x\n" * 10)
    assert [c.rows for c in plan_chunks(open_table(tmp_path), columns=["a"], chunk_rows=4).chunks] == [4, 4, 2]


def test_the_plan_is_the_same_after_a_move(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.csv").write_text("a\n1\n")
    (tmp_path / "one" / "b.csv").write_text("a\n2\n")
    before = plan_chunks(open_table(tmp_path / "one"), columns=["a"])
    shutil.move(tmp_path / "one", tmp_path / "two")
    after = plan_chunks(open_table(tmp_path / "two"), columns=["a"])
    assert after.id == before.id
    (tmp_path / "two" / "b.csv").write_text("a\n3\n")
    assert plan_chunks(open_table(tmp_path / "two"), columns=["a"]).id != before.id


def test_known_files_are_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    plan = plan_chunks(open_table(path), columns=["a"])
    hashed: list[str] = []
    monkeypatch.setattr(versions, "block_id", lambda block: hashed.append(block[0]) or "0" * 64)
    assert plan_chunks(open_table(path), columns=["a"], cached=plan.inputs).id == plan.id
    assert hashed == []
    path.write_text("a\n12\n")
    plan_chunks(open_table(path), columns=["a"], cached=plan.inputs)
    assert hashed == [str(path)]


@pytest.mark.parametrize(("module", "step"), [(planning, "scan_range"), (versions, "block_id")])
def test_rows_appended_while_planning_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    table, real = open_table(path), getattr(module, step)

    def appended_after(*arguments: Any) -> Any:
        result = real(*arguments)
        with path.open("a") as stream:
            stream.write("2\n")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, step, appended_after)
        with pytest.raises(TableError, match=r"a\.csv: changed while it was being planned. Run the same command again"):
            plan_chunks(table, columns=["a"])
    assert plan_chunks(table, columns=["a"]).rows == 2


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\nx,1\n")
    with pytest.raises(TableError, match=r"no column 'txt'. Did you mean 'text'\? It has: text, label"):
        plan_chunks(open_table(tmp_path / "t.csv"), columns=["txt"])


@pytest.mark.slow
def test_a_plan_of_100_000_chunks_goes_through_json_quickly() -> None:
    schema = pa.schema([pa.field("text", pa.string())])
    serialized = schema.serialize().to_pybytes()
    one = InputFile(path="/f", name="f", version=Version(1), sha256="0", rows=100_000, checksums=True)
    chunk = Chunk(
        index=0,
        file="/f",
        name="f",
        version=Version(1),
        sha256="0",
        format="parquet",
        row_groups=(0, 1),
        first_row=0,
        rows=1,
        schema=serialized,
    )
    chunks = tuple(replace(chunk, index=place, first_row=place) for place in range(100_000))
    plan = ChunkPlan(inputs=(one,), chunks=chunks, serialized=serialized, rows=100_000)
    began = time.process_time()
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    seconds = time.process_time() - began
    assert again == plan
    assert again.id == plan.id
    assert seconds < 5


@pytest.mark.parametrize("value", [{}, [], None, {"format": 2}, {"format": 1, "inputs": {}}])
def test_what_is_no_plan_is_refused(value: object) -> None:
    with pytest.raises(DataError):
        plan_from_json(value)


def test_the_plan_survives_a_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": [["x"], None]}), tmp_path / "t.parquet")
    plan = plan_chunks(open_table(tmp_path), columns=["b", "a"])
    atomic_io.write_json(tmp_path / "plan.json", plan_to_json(plan), site="test")
    assert plan_from_json(atomic_io.read_json(tmp_path / "plan.json")) == plan


def test_a_large_file_is_hashed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes hash it, and every block counts, also the last one, which is shorter."""
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "1234567\n" * 5)
    whole = versions.content_id(str(path))
    assert whole == hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(versions, "HASHED_BYTES", 16)
    blocks = [path.read_bytes()[start : start + 16] for start in range(0, 42, 16)]
    expected = hashlib.sha256("".join(hashlib.sha256(block).hexdigest() for block in blocks).encode()).hexdigest()
    assert plan_chunks(open_table(path), columns=["a"]).inputs[0].sha256 == versions.content_id(str(path)) == expected
