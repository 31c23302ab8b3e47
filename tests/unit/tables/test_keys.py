"""A key is unique and not null, and what says so is exact."""

import itertools
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.errors import TableError
from torchlake.tables import hashes, keys
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import Keys, bundled, check_key, key_problem
from torchlake.tables.table import open_table


def check(path: Path, key: str, chunk_rows: int = 10) -> None:
    table = open_table(path, columns=[key])
    check_key(table, plan_chunks(table, columns=[key], chunk_rows=chunk_rows), key)


def test_a_sound_key_passes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [f"key {n}" for n in range(1000)], "n": range(1000)}), tmp_path / "t.parquet")
    check(tmp_path, "k")
    check(tmp_path, "n")


def test_duplicates_come_with_examples_over_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": range(100)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": range(95, 200)}), tmp_path / "b.parquet")
    with pytest.raises(TableError) as caught:
        check(tmp_path, "k")
    assert str(caught.value).count(" in ") == 3
    assert f"95 in {tmp_path}/a.parquet row 95 and {tmp_path}/b.parquet row 0" in str(caught.value)


def test_nulls_come_with_examples(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1, None, 3, None, None, None]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"is null, for example in .* row 1; .* row 3; .* row 4\."):
        check(tmp_path, "k")


def test_an_unreadable_row_is_not_the_keys_fault(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("k,t\n1,a\nbroken\n3,c\nbroken\n")
    check(tmp_path, "k")


def test_lists_cannot_be_keys(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [[1], [2]]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match="cannot be keys"):
        check(tmp_path, "k")


@pytest.mark.parametrize("values", [pa.array([float("nan"), 1.0, 2.0]), pa.array([float("nan")] * 5, pa.float16())])
def test_nan_is_no_key(values: pa.Array) -> None:
    problem = key_problem(lambda item: [Keys("f", 7, item)], [pa.chunked_array([values])], rows=len(values))
    assert problem is not None
    assert problem.startswith("is NaN, for example in f row 7")


def test_nan_comes_with_file_and_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1.0, 2.0, float("nan"), 4.0]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"is NaN, for example in .*t\.parquet row 2\."):
        check(tmp_path, "k")


def test_two_zeros_are_one_key(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [0.0, 1.0, -0.0]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match="is not unique"):
        check(tmp_path, "k")


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("ms"), pa.timestamp("us", tz="UTC"), pa.duration("s")])
def test_a_date_that_python_does_not_know_is_a_key(tmp_path: Path, kind: pa.DataType) -> None:
    numbers = (
        pa.array([2**31 - 1, 7, 2**31 - 2], pa.int32()) if kind == pa.date32() else pa.array([2**60, 7, 2**60 - 1])
    )
    pq.write_table(pa.table({"k": numbers.view(kind)}), tmp_path / "t.parquet")
    check(tmp_path, "k")
    pq.write_table(pa.table({"k": pa.concat_arrays([numbers, numbers]).view(kind)}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=f"is not unique, for example {numbers[0]} in .* row 0 and .* row 3"):
        check(tmp_path, "k")


def test_the_same_text_in_two_encodings_is_one_key() -> None:
    texts = ["a", "b" * 300, "c"]
    stored = [
        pa.array(texts),
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.array(["x", *texts]).slice(1),
    ]
    for one, other in itertools.combinations(stored, 2):
        parts = [Keys(name, 0, pa.chunked_array([values])) for name, values in (("one", one), ("other", other))]
        problem = key_problem(lambda item: [item], parts, rows=6)
        assert problem is not None
        assert [f"in one row {row} and other row {row}" in problem for row in range(3)] == [True] * 3


def test_hashes_of_many_different_texts_differ() -> None:
    texts = [f"{'-' * (number % 17)}{number:07d}{'-' * (number % 5)}" for number in range(100_000)]
    assert len(np.unique(hashes.hashes(pa.array(texts)))) == len(texts)


def integers(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.integers(low, high) | st.integers(0, 3)


def as_type(kind: pa.DataType, bits: int) -> Callable[[list[int | None]], pa.Array]:
    return lambda values: pa.array(values, pa.int32() if bits == 32 else pa.int64()).view(kind)


def decimals(kind: pa.DataType) -> Callable[[list[int | None]], pa.Array]:
    return lambda values: pa.array([None if value is None else Decimal(value).scaleb(-2) for value in values], kind)


# Values as Python compares them, and how they are stored.
TYPES: dict[str, tuple[st.SearchStrategy[Any], Callable[[list[Any]], pa.Array]]] = {
    **{
        str(kind): (integers(kind.bit_width, signed=str(kind)[0] == "i"), partial(pa.array, type=kind))
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    },
    **{
        str(kind): (st.floats(width=width) | st.sampled_from([0.0, -0.0, 1.5]), partial(pa.array, type=kind))
        for kind, width in ((pa.float16(), 16), (pa.float32(), 32), (pa.float64(), 64))
    },
    **{str(kind): (integers(32), as_type(kind, 32)) for kind in (pa.date32(), pa.time32("s"), pa.time32("ms"))},
    **{
        str(kind): (integers(64), as_type(kind, 64))
        for kind in (
            *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
            *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
            pa.timestamp("us", tz="Europe/Berlin"),
            pa.time64("us"),
            pa.time64("ns"),
        )
    },
    "date64": (
        integers(30),
        lambda days: as_type(pa.date64(), 64)([None if d is None else d * 86_400_000 for d in days]),
    ),
    "bool": (st.booleans(), partial(pa.array, type=pa.bool_())),
    "decimal128": (st.integers(-(10**30), 10**30), decimals(pa.decimal128(38, 2))),
    "decimal256": (st.integers(-(10**60), 10**60), decimals(pa.decimal256(76, 2))),
    **{
        str(kind): (st.text() | st.text("ab\0", max_size=9), partial(pa.array, type=kind))
        for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()))
    },
    **{
        str(kind): (st.binary() | st.binary(min_size=250, max_size=260), partial(pa.array, type=kind))
        for kind in (pa.binary(), pa.large_binary())
    },
    **{
        f"fixed_size_binary {size}": (st.binary(min_size=size, max_size=size), partial(pa.array, type=pa.binary(size)))
        for size in (0, 1, 3, 8, 17)
    },
}


@given(st.data(), st.sampled_from(sorted(TYPES)), st.booleans(), st.integers(1, 3), st.integers(1, 40))
def test_the_answer_is_exact(data: st.DataObject, name: str, weak: bool, candidates: int, range_rows: int) -> None:
    strategy, stored = TYPES[name]
    pool = data.draw(st.lists(strategy, min_size=1, max_size=12))
    unique = data.draw(st.booleans())
    values = pool if unique else data.draw(st.lists(st.sampled_from(pool), max_size=30))
    if data.draw(st.integers(0, 4)) == 0:
        values = [None, *values]
    cut = data.draw(st.integers(1, 7))
    array = stored(values)

    def read(firsts: list[int]) -> Iterator[Keys]:
        for first in firsts:
            rows = array.slice(first, cut)
            half = len(rows) // 2
            yield Keys("f", first, pa.chunked_array([rows.slice(0, half), rows.slice(half)]))

    firsts = list(range(0, len(values), cut))
    items = bundled(firsts, [1] * len(firsts), data.draw(st.integers(1, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "CANDIDATES", candidates)
        patch.setattr(keys, "RANGE_ROWS", range_rows)
        patch.setattr(keys, "SAMPLE", data.draw(st.integers(1, 5)))
        if weak:
            patch.setattr(keys, "hashes", lambda values: hashes.hashes(values) % np.uint64(3))
        problem = key_problem(read, items, rows=len(values))
    if None in values:
        assert problem == "is null, for example in f row 0" or "is NaN" in str(problem)
    elif any(value != value for value in values):
        assert "is NaN, for example in f row " in str(problem)
    elif len(set(values)) == len(values):
        assert problem is None
    else:
        places = re.findall(r" in f row (\d+) and f row (\d+)", str(problem))
        assert 1 <= len(places) <= 3
        assert all(values[int(one)] == values[int(other)] and one != other for one, other in places)
