"""A key is unique and not null, and what says so is exact."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlake.errors import TableError
from torchlake.tables import keys
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import Keys, check_key, key_problem
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


class Clashing(str):
    """A key whose hash says next to nothing."""

    def __hash__(self) -> int:
        return len(self) % 3

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=6) | st.integers(0, 50), max_size=40), st.booleans(), st.integers(1, 3))
def test_the_answer_is_exact_whatever_the_hashes(values: list[Any], clashing: bool, candidates: int) -> None:
    if clashing:
        values = [Clashing(value) for value in values]

    def read() -> Iterator[Keys]:
        for first in range(0, len(values), 7):
            yield Keys("f", first, values[first : first + 7], frozenset())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "CANDIDATES", candidates)
        problem = key_problem(read, len(values))
    plain = [str(value) if isinstance(value, str) else value for value in values]
    assert (problem is None) == (len(set(plain)) == len(plain))
