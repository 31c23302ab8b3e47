"""The page of a run's validation rows for tasks whose best model is measured after the training."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import task_cases
import tiny
import training_runs as runs
from sweeps import sweep
from torchlake.evaluation.compare import compare
from torchlake.evaluation.held_out import PAGE
from torchlake.reporting.sent import Evaluated
from torchlake.training.train import train

FAST: dict[str, Any] = {"max_steps": 2, "batch_size": 16}
KINDS = {
    "token_classification": ("spans", "f1", "Per entity type"),
    "question_answering": ("answers", "exact_match", "Questions with and without an answer"),
    "embeddings_of_pairs": ("vectors", "mrr_at_10", "Retrieval by rank"),
    "embeddings_of_similar_pairs": ("vectors", "spearman", "Cosines of pairs"),
    "text_generation": ("language", "perplexity", "Loss by position in the text"),
}


def sections_of(name: str, folder: Path, **train: Any) -> dict[str, Any]:
    case = task_cases.CASES[name]
    return case.sections(folder / "in", case.build(folder / "base"), **{**FAST, **train})


def page_of(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    facts = json.loads((run / PAGE / "eval.json").read_text())
    return facts, pq.read_table(run / PAGE / "rows.parquet").to_pylist()


@pytest.mark.parametrize("name", sweep(KINDS, quick={"question_answering", "text_generation"}))
def test_the_best_model_is_measured_on_the_validation_rows(tmp_path: Path, name: str) -> None:
    kind, metric, title = KINDS[name]
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections_of(name, tmp_path))
    facts, rows = page_of(run.path)
    assert facts["kind"] == kind
    assert facts["metrics"][metric]["value"] == pytest.approx(run.metrics[metric], rel=1e-3)
    assert (facts["made"]["rows"], facts["made"]["table"]) == (
        "the validation rows",
        str(tmp_path / "in/reviews.parquet"),
    )
    table = pq.read_table(tmp_path / "in/reviews.parquet").to_pylist()
    shown = [column for column in facts["made"]["columns"] if column in rows[0]]
    assert len(rows) == 24
    for row in rows:
        place = int(row["row_id"].rpartition(":")[2])
        assert [row[column] for column in shown] == [table[place][column] for column in shown]
    assert "trained" not in facts["sections"]  # the training table has these rows, but the model did not see them
    assert title in (run.path / PAGE / "eval.html").read_text()
    assert 'href="eval/eval.html"' in (run.path / "report.html").read_text()
    assert sorted(path.name for path in (run.path / PAGE).iterdir()) == ["eval.html", "eval.json", "rows.parquet"]
    if kind != "language":  # which has no labels
        assert {one.difference for one in compare(run.path, run.path).differences} == {0}
    sent = Evaluated.of(run.path).tables
    assert sent.keys() == ({"per_class", "worst_rows"} if kind == "spans" else {"worst_rows"})


def test_a_validation_table_and_its_key_name_the_rows(tmp_path: Path) -> None:
    sections = sections_of("token_classification", tmp_path)
    rows = pq.read_table(tmp_path / "in/reviews.parquet").slice(10, 20)
    pq.write_table(rows, tmp_path / "others.parquet")
    sections["data"] |= {"validation": str(tmp_path / "others.parquet"), "key": "id"}
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    facts, found = page_of(run.path)
    assert [row["id"] for row in found] == list(range(10, 30))
    assert facts["made"]["table"] == str(tmp_path / "others.parquet")
    sections["train"]["max_steps"] = 3
    more = train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert page_of(run.path)[0]["metrics"]["f1"]["value"] == pytest.approx(more.metrics["f1"])


def test_written_texts_are_those_of_the_rows_that_validations_write(tmp_path: Path) -> None:
    sections = sections_of("text2text_generation", tmp_path)
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert not (run.path / PAGE).exists()
    assert "set train.validate_writing" in (run.path / "report.html").read_text()
    sections["train"]["validate_writing"] = {"rows": 5, "max_new_tokens": 3}
    run = train(run=tmp_path / "writes", engine=runs.Inline(), **sections)
    facts, rows = page_of(run.path)
    assert (facts["kind"], len(rows)) == ("texts", 5)
    assert facts["metrics"]["exact_match"]["value"] == pytest.approx(run.metrics["exact_match"])


def test_a_metric_that_is_undefined_leaves_out_no_page(tmp_path: Path) -> None:
    """One row of numbers has no correlation."""
    sections = runs.job(tmp_path, tiny.build_encoder(tmp_path / "base"), max_steps=2)
    table = pq.read_table(tmp_path / "reviews.parquet").slice(0, 20)
    numbers = pa.array([row + 0.5 for row in range(20)])
    pq.write_table(table.set_column(2, "label", numbers), tmp_path / "reviews.parquet")
    sections["data"]["validation"] = {"fraction": 0.05}
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert math.isnan(run.metrics["r2"])
    facts, rows = page_of(run.path)
    assert (len(rows), facts["metrics"]["rmse"]["value"]) == (1, pytest.approx(run.metrics["rmse"]))
    assert "r2" in (run.path / PAGE / "eval.html").read_text()


def test_the_report_says_why_pairs_of_answers_have_no_page(tmp_path: Path) -> None:
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections_of("preference", tmp_path))
    assert not (run.path / PAGE).exists()
    assert "There is no page: the metrics of the validation are all" in (run.path / "report.html").read_text()


def test_a_page_that_cannot_be_written_leaves_the_run_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "evaluation.facts.write:1:enospc")
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections_of("token_classification", tmp_path))
    assert "page of the validation rows was not written: StorageError" in caplog.text
    assert "The page was not written: StorageError" in (run.path / "report.html").read_text()
    assert json.loads((run.path / "result.json").read_text())["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("site", ["evaluation.rows.rename", "evaluation.facts.rename"])
def test_a_run_that_is_killed_at_its_page_writes_the_same(tmp_path: Path, site: str) -> None:
    sections = sections_of("token_classification", tmp_path)
    runs.succeed(tmp_path / "whole", sections, page=True)
    killed = runs.attempt(tmp_path / "run", sections, failpoint=f"{site}:1:kill9", page=True)
    assert killed.exit_code
    assert not (tmp_path / "run/result.json").exists()
    runs.succeed(tmp_path / "run", sections, page=True)
    (one, first), (other, second) = page_of(tmp_path / "whole"), page_of(tmp_path / "run")
    assert (first, one["metrics"], one["sections"]) == (second, other["metrics"], other["sections"])
    assert sorted(path.name for path in (tmp_path / "run/eval").iterdir()) == ["eval.html", "eval.json", "rows.parquet"]
