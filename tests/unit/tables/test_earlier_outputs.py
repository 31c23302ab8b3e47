"""Writes that an earlier version of torchlake began and never ended: they go on, and nothing is computed twice.

tests/fixtures/interrupted has one for each place where a writer was killed; each has its input beside it.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.parquet as pq
import pytest

from sink_jobs import job
from torchlake.tables.verification.verify import verify

INTERRUPTED = Path(__file__).parents[2] / "fixtures" / "interrupted"
GROUPED = {"target_file_size": 3500}
DELTA = {"format": "delta"}


def ids(output: Path) -> list[int]:
    if (output / "_delta_log").exists():
        return sorted(deltalake.DeltaTable(output).to_pyarrow_table()["id"].to_pylist())
    return sorted(one for path in output.glob("*.parquet") for one in pq.read_table(path)["id"].to_pylist())


@pytest.mark.parametrize(
    ("killed", "output", "options", "left"),
    [
        pytest.param("folder", "out", {}, 2, id="two of four parts of a folder were written"),
        pytest.param("sealed", "out", GROUPED, 0, id="the folder was fenced, its files had several parts"),
        pytest.param("delta", "table", DELTA, 2, id="two of four parts of a Delta table were written"),
        pytest.param("made", "table", DELTA, 0, id="the commit to a Delta table was made, and nothing removed"),
    ],
)
def test_a_write_of_the_version_before_goes_on(
    killed: str, output: str, options: dict[str, Any], left: int, tmp_path: Path
) -> None:
    place = tmp_path / killed
    shutil.copytree(INTERRUPTED / killed, place)
    os.utime(next(place.glob(".*.staging")) / "lease.json", (0, 0))
    assert job(place / "in.parquet", str(place / output), **options) == left
    assert ids(place / output) == list(range(7))
    assert verify(place / output).problems == []
    assert job(place / "in.parquet", str(place / output), **options) == 0
    assert sorted(os.listdir(place)) == ["in.parquet", output]
