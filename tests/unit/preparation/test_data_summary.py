"""What a run says of its data before it trains."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import training_runs as runs
from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.config.task_spec import TaskSpec
from torchlake.preparation.prepare import prepare
from torchlake.preparation.summary import summarize, summary_lines

WORDS = ("good", "bad", "film", "a", "the")


def summarized(
    folder: Path, encoder: Path, table: pa.Table, *, validation: Any = None, **data: Any
) -> tuple[TaskSpec, dict[str, Any]]:
    pq.write_table(table, folder / "in.parquet")
    task = plugins.load("tasks", "text_classification")
    found = task.find_labels(iter([table["label"]]), None)
    spec = TaskSpec(
        task="text_classification",
        problem=found.problem,
        labels=found.labels,
        text="text",
        label="label",
        max_length=16,
        mean=found.mean,
        deviation=found.deviation,
    )
    prepare(
        folder / "in.parquet",
        folder / "out",
        tokenizer=encoder,
        spec=spec,
        engine=runs.Inline(),
        bad_rows=data.get("bad_rows", "error"),
    )
    job = load_job(None, data={"train": "in.parquet", "validation": validation, **data}, model={"base": "base"})
    return spec, summarize(job, spec, [folder / "out"])


def test_classes_rows_and_lengths(tmp_path: Path, tiny_bert: Path) -> None:
    texts = [None, "good film", *[f"{one} {other} bad" for one in WORDS for other in WORDS][:18]]
    table = pa.table({"text": texts, "label": ["good"] * 4 + ["bad"] * 16})
    _, facts = summarized(tmp_path, tiny_bert, table, validation={"fraction": 0.25}, bad_rows="drop")
    assert facts["rows"] == {"training": 14, "validation": 5}
    assert facts["classes"] == {"bad": 12, "good": 2}
    assert facts["left_out"] == {"null_input": 1}
    assert (facts["tokens"]["median"], facts["tokens"]["longest"]) == (5, 5)
    lines = summary_lines(facts)
    assert lines[:3] == [
        "single_label, 2 classes: bad 12 (86%), good 2 (14%)",
        "14 rows to train on, 5 to validate on",
        "tokens per row: median 5, 95 % at most 5, longest 5",
    ]
    assert lines[-1] == "1 rows left out: null_input 1"


def test_many_classes_are_counted_and_ten_are_shown(tmp_path: Path, tiny_bert: Path) -> None:
    labels = [f"class {number:02}" for number in range(25) for _ in range(number + 1)]
    table = pa.table({"text": ["good film"] * len(labels), "label": labels})
    _, facts = summarized(tmp_path, tiny_bert, table)
    line = summary_lines(facts)[0]
    assert line.startswith("single_label, 25 classes: class 24 25 (8%), class 23 24 (7%), ")
    assert line.endswith("class 15 16 (5%) and 15 more, the smallest with 1 rows")
    assert sum(facts["classes"].values()) == len(labels)
    assert summary_lines(facts)[1] == "325 rows to train on, no validation"


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        ([["x"], [], ["x", "y"], ["y"]] * 5, "multi_label, 2 classes: x 10 (50%), y 10 (50%)"),
        ([0.25, 0.75] * 10, "regression: mean 0.5, standard deviation 0.25"),
        ([True, False] * 10, "single_label, 2 classes: false 10 (50%), true 10 (50%)"),
    ],
)
def test_the_kind_of_label(tmp_path: Path, tiny_bert: Path, labels: list[Any], line: str) -> None:
    table = pa.table({"text": tiny.reviews(20)["text"], "label": pa.array(labels)})
    assert summary_lines(summarized(tmp_path, tiny_bert, table)[1])[0] == line
