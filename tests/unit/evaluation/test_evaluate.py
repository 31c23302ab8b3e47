"""`evaluate`: metrics over the rows that have a label and a prediction; the others counted, never dropped silently."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import tiny
from torchlake.config.task_spec import Label
from torchlake.errors import DataError, TableError
from torchlake.evaluation.evaluate import evaluate
from torchlake.evaluation.result import Evaluation
from torchlake.metrics import evaluate_metrics
from torchlake.models import load
from torchlake.scoring.predict import predict


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "reviews"
    folder.mkdir()
    table = tiny.reviews(90)
    pq.write_table(table.slice(0, 50), folder / "a.parquet", row_group_size=20)
    pq.write_table(table.slice(50), folder / "b.parquet")
    return folder


def by_hand(model: Path, table: pa.Table) -> np.ndarray:
    """Class probabilities (N, C) from transformers alone."""
    loaded = load.load_model(model, auto_class="AutoModelForSequenceClassification")
    tokenizer = load.load_tokenizer(model)
    with torch.inference_mode():
        batch = tokenizer(table["text"].to_pylist(), padding=True, truncation=True, max_length=64, return_tensors="pt")
        logits = loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return np.asarray(torch.softmax(logits, dim=1).numpy())


@pytest.fixture(scope="module")
def evaluation(tiny_model: Path, reviews: Path) -> Evaluation:
    return evaluate(tiny_model, reviews, engine=tiny.Here())


def test_labels_of_a_frame_may_be_string_views(tiny_model: Path) -> None:
    table = tiny.reviews(8)
    views = table.set_column(2, "label", table["label"].cast(pa.string_view()))
    assert evaluate(tiny_model, views) == evaluate(tiny_model, table)


def test_classes_may_differ_in_case_or_blanks_only(tiny_bert: Path, tmp_path: Path) -> None:
    spec = replace(tiny.SPEC, labels=("Good", "good", "good_2", " good", "good "))
    model = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=spec)
    table = tiny.reviews(30).drop_columns("label").append_column("label", pa.array([*spec.labels] * 6))
    pq.write_table(table, tmp_path / "in.parquet")
    stored = evaluate(model, tmp_path / "in.parquet", engine=tiny.Here())
    assert stored == evaluate(model, table)
    assert sum(map(sum, stored.confusion or [])) == 30
    names = predict(model, table.select(["text"]), all_probabilities=True).column_names
    expected = ["prob_Good", "prob_good_2", "prob_good_2_2", "prob_ good_3", "prob_good _4"]
    assert [name for name in names if name.startswith("prob_")] == expected


def test_the_metrics_are_those_of_the_model(evaluation: Evaluation, tiny_model: Path, reviews: Path) -> None:
    table = pq.read_table(reviews)
    truth = np.array([tiny.SPEC.labels.index(label) for label in table["label"].to_pylist()])
    probabilities = by_hand(tiny_model, table)
    metrics, confusion = evaluate_metrics(probabilities, truth, "single_label", tiny.SPEC.labels, resamples=1)
    assert (evaluation.rows, evaluation.failed, evaluation.errors) == (90, 0, {})
    assert evaluation.labels == ("bad", "good")
    assert confusion is not None
    assert evaluation.confusion == confusion.tolist()
    for name, metric in metrics.items():
        assert evaluation.metrics[name].value == pytest.approx(metric.value, abs=1e-5)


def test_a_frame_and_a_csv_file_give_the_same(
    evaluation: Evaluation, tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    table = pq.read_table(reviews)
    renamed = table.rename_columns({"text": "review", "label": "sentiment"})
    framed = evaluate(tiny_model, renamed.to_pandas(), text="review", label="sentiment")
    pa.csv.write_csv(table, tmp_path / "reviews.csv")
    for other in (framed, evaluate(tiny_model, tmp_path / "reviews.csv", engine=tiny.Here())):
        assert (other.rows, other.failed, other.confusion) == (90, 0, evaluation.confusion)
        for name, metric in evaluation.metrics.items():
            # Other chunks make other batches: the last bit of a probability may differ.
            assert other.metrics[name].value == pytest.approx(metric.value, abs=1e-5)
            assert other.metrics[name].low == pytest.approx(metric.low, abs=0.02)


def test_failed_rows_are_counted_and_in_no_metric(
    evaluation: Evaluation, tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    good = pq.read_table(reviews)
    bad = pa.table(
        {"id": [-1, -2, -3], "text": ["a good film", None, "fine"], "label": [None, "good", None]}, schema=good.schema
    )
    pq.write_table(pa.concat_tables([good.slice(0, 7), bad, good.slice(7)]), tmp_path / "mixed.parquet")
    mixed = evaluate(tiny_model, tmp_path / "mixed.parquet", engine=tiny.Here())
    assert (mixed.rows, mixed.failed) == (93, 3)
    assert mixed.errors == {"null_label": 2, "null_input": 1}
    for name, metric in evaluation.metrics.items():
        assert mixed.metrics[name].value == pytest.approx(metric.value, abs=1e-6)


def test_json(evaluation: Evaluation) -> None:
    value = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert value["metrics"]["accuracy"]["low"] <= value["metrics"]["accuracy"]["value"]
    assert value["labels"] == ["bad", "good"]


def test_a_metric_that_does_not_exist_is_null(tiny_model: Path) -> None:
    table = pa.table({"text": ["a good film", "bad"], "label": ["good", "good"]})
    value = json.dumps(evaluate(tiny_model, table).to_json(), allow_nan=False)
    assert json.loads(value)["metrics"]["auc"]["value"] is None


def test_an_unknown_label_ends_the_job_before_it_is_scored(tiny_model: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "label": ["good", "ugly", "ugly"]})
    with pytest.raises(DataError, match=r"'ugly' \(2 rows\). Its classes: 'bad', 'good'"):
        evaluate(tiny_model, table)
    pq.write_table(table, tmp_path / "ugly.parquet")
    with pytest.raises(DataError, match=r"ugly\.parquet, rows 0 to 2: .*'ugly' \(2 rows\)"):
        evaluate(tiny_model, tmp_path / "ugly.parquet")


def test_nothing_to_measure(tiny_model: Path, tmp_path: Path) -> None:
    schema = pa.schema({"text": pa.string(), "label": pa.string()})
    with pytest.raises(DataError, match="null_label 2"):
        evaluate(tiny_model, pa.table({"text": ["a", "b"], "label": [None, None]}, schema=schema))
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty|no rows"):
        evaluate(tiny_model, tmp_path / "empty.parquet", engine=tiny.Here())
    with pytest.raises(TableError, match="'mood'"):
        evaluate(tiny_model, schema.empty_table(), label="mood")
    with pytest.raises(TableError, match="mood"):
        evaluate(tiny_model, tmp_path / "empty.parquet", label="mood")


@pytest.mark.parametrize(
    ("problem", "labels", "column", "metric"),
    [
        ("multi_label", ("x", "y"), pa.array([["x"], [], None, ["x", "y"]]), "micro_f1"),
        ("regression", (), pa.array([0.5, 1.0, None, -1.0]), "rmse"),
        ("single_label", (3, 4, 5), pa.array([3, 5, None, 3]), "macro_f1"),
    ],
)
def test_the_other_problems(
    tmp_path: Path, tiny_bert: Path, problem: str, labels: tuple[Label, ...], column: pa.Array, metric: str
) -> None:
    spec = tiny.spec_for(problem, labels)
    model = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=spec)
    table = pa.table({"text": ["a good film", "bad", "fine", "very very dull"], "label": column})
    pq.write_table(table, tmp_path / "table.parquet")
    stored, framed = evaluate(model, tmp_path / "table.parquet", engine=tiny.Here()), evaluate(model, table)
    assert (stored.rows, stored.failed, stored.errors) == (4, 1, {"null_label": 1})
    assert stored.metrics[metric].value == pytest.approx(framed.metrics[metric].value, abs=1e-6)
    assert (stored.confusion is None) == (problem != "single_label")
