"""`init` guesses pairs of texts by the names of their columns only, and says so in the job file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import task_cases
from torchlake.config.job import load_job
from torchlake.errors import UsageError
from torchlake.preparation.first_job import write_first_job


def written(folder: Path, table: pa.Table, **options: str) -> tuple[Path, str, str | None]:
    pq.write_table(table, folder / "in.parquet")
    done = write_first_job(str(folder / "in.parquet"), output=folder / "job.yaml", force=True, **options)
    return done.path, done.text, done.text_pair


@pytest.mark.parametrize("names", [("question", "answer"), ("Premise", "Hypothesis"), ("sentence1", "sentence2")])
def test_usual_names_are_a_pair(names: tuple[str, str], tmp_path: Path) -> None:
    table = task_cases.pairs(40).rename_columns({"question": names[0], "answer": names[1]})
    path, *found = written(tmp_path, table)
    assert found == list(names)
    job = load_job(path)
    assert (job.data.text, job.data.text_pair, job.data.label) == (*names, "label")
    assert "# The second text of each pair. Delete this line if the rows are not pairs." in path.read_text()


def test_other_columns_are_no_pair(tmp_path: Path) -> None:
    table = task_cases.pairs(40)
    with pytest.raises(UsageError, match="several columns hold texts"):
        written(tmp_path, table.rename_columns({"answer": "remark"}))
    assert written(tmp_path, table.rename_columns({"question": "text"}))[1:] == ("text", None)


def test_given_columns_are_a_pair(tmp_path: Path) -> None:
    table = task_cases.pairs(40).rename_columns({"question": "left", "answer": "right"})
    assert written(tmp_path, table, text="left", text_pair="right")[1:] == ("left", "right")
    assert written(tmp_path, table, text_pair="left")[1:] == ("right", "left")
    with pytest.raises(UsageError, match="--text-pair id: the column holds int64, not text"):
        written(tmp_path, table, text="left", text_pair="id")
    with pytest.raises(UsageError, match="cannot be both"):
        written(tmp_path, table, text="left", text_pair="left")
