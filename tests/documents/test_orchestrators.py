"""The examples for Airflow and Dagster run, in the environments that `make orchestrators` makes."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
from code_blocks import ROOT, read_blocks

PAGE = ROOT / "docs" / "how-to" / "orchestrators.md"
ENVIRONMENTS = ROOT / ".bench"
DAY = "2026-01-02"
COMMANDS = {
    "airflow": ["airflow", "dags", "test", "reviews", DAY],
    "dagster": ["dagster", "asset", "materialize", "-f", "assets.py", "--select", "scored_reviews", "--partition", DAY],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("library", sorted(COMMANDS))
def test_the_example_scores_a_day(library: str, tmp_path: Path, tiny_model: Path) -> None:
    binaries = ENVIRONMENTS / library / "bin"
    if not (binaries / library).exists():
        pytest.skip(f"{library} is not in {binaries}: make orchestrators")
    lake = tmp_path / "lake"
    (lake / "new").mkdir(parents=True)
    (lake / "model").symlink_to(tiny_model)
    pq.write_table(tiny.reviews(30), lake / "new" / f"{DAY}.parquet")
    write_examples(tmp_path, lake)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "DAGSTER_HOME": str(tmp_path),
    }
    prepare = [["airflow", "db", "migrate"]] if library == "airflow" else []
    for program, *words in [*prepare, COMMANDS[library]]:
        subprocess.run([binaries / program, *words], cwd=tmp_path, env=environment, check=True)
    assert pq.read_table(lake / "scored" / DAY)["error"].null_count == 30


def write_examples(folder: Path, lake: Path) -> None:
    """The files of the page, with a program and a folder of this machine."""
    program = folder / "torchlake"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} -m torchlake "$@"\n')
    program.chmod(0o755)
    for block in read_blocks(PAGE):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(exist_ok=True)
            text = block.text.replace("/opt/torchlake/bin/torchlake", str(program)).replace("/lake/reviews", str(lake))
            path.write_text(text, encoding="utf-8")
