"""The sections of an evaluation: scikit-learn's, scipy's and cleanlab's numbers, and planted errors on top of their
lists."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import binomtest
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    precision_recall_curve,
    precision_recall_fscore_support,
    recall_score,
)

import judged_rows as made
from torchlake.errors import UsageError
from torchlake.evaluation.labeled import measured
from torchlake.evaluation.sections.classes import confusion, per_class
from torchlake.evaluation.sections.judged import JudgedRows
from torchlake.evaluation.sections.label_hints import refuse_trained
from torchlake.evaluation.sections.rows import BATCH_BYTES, scored_parts, write_rows
from torchlake.evaluation.sections.slices import refuse_slices
from torchlake.evaluation.sections.sums import drawn, groups_of
from torchlake.metrics import evaluate_metrics

LABELS = ("ant", "bee", "cat")


def data(rows: int = 400, *, accuracy: float = 0.8, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    truth = np.random.default_rng(1).integers(0, classes, rows)
    return made.chances_of(truth, classes, accuracy=accuracy), truth


def test_classes_have_the_numbers_of_scikit_learn(tmp_path: Path) -> None:
    chances, truth = data()
    facts = made.evaluated(tmp_path, made.scored_classes(chances, truth, LABELS), made.classes_spec(LABELS))
    found, said = facts["sections"], chances.argmax(axis=1)
    expected = precision_recall_fscore_support(truth, said)
    by_label = {one["label"]: one for one in found["classes"]}
    for at, label in enumerate(LABELS):
        one = by_label[label]
        assert one["rows"] == expected[3][at]
        for name, values in zip(("precision", "recall", "f1"), expected, strict=False):
            value, low, high = one[name]
            assert value == pytest.approx(values[at])
            assert low < value < high
        # A bootstrap of a share is close to Wilson's interval.
        low, high = binomtest(int(one["recall"][0] * one["rows"] + 0.5), one["rows"]).proportion_ci(method="wilson")
        assert one["recall"][1:] == pytest.approx([low, high], abs=0.02)
    metrics, matrix = evaluate_metrics(chances.astype(np.float32), truth, "single_label", LABELS, resamples=1)
    assert matrix is not None
    assert found["confusion"]["counts"] == matrix.tolist()
    assert found["calibration"]["ece"] == pytest.approx(metrics["ece"].value)
    assert sum(one["rows"] for one in found["calibration"]["bins"]) == len(truth)
    constant = np.full(len(truth), np.bincount(truth).argmax())
    base = found["baseline"]["metrics"]
    assert base["macro_f1"] == pytest.approx(f1_score(truth, constant, average="macro", zero_division=0))
    assert base["accuracy"] == pytest.approx((truth == constant).mean())
    order = np.argsort(-chances.max(axis=1).astype(np.float32), kind="stable")
    half = next(one for one in found["coverage"] if one["answered"] == 0.5)
    assert half["right"] == pytest.approx((said == truth)[order][: len(truth) // 2].mean())


def test_two_classes_have_a_threshold_for_a_wanted_precision(tmp_path: Path) -> None:
    chances, truth = data(classes=2, accuracy=0.7)
    facts = made.evaluated(tmp_path, made.scored_classes(chances, truth, LABELS[:2]), made.classes_spec(LABELS[:2]))
    (curve,) = facts["sections"]["threshold"]
    precision, recall, thresholds = precision_recall_curve(truth == 1, chances[:, 1])
    for least, at, reached, kept in curve["wanted"]:
        enough = precision[:-1] >= least
        assert kept == pytest.approx(recall[:-1][enough].max(), abs=1e-6)
        assert reached >= least
        said = chances[:, 1] >= at - 1e-6
        assert (truth[said] == 1).mean() == pytest.approx(reached, abs=0.02)
    assert curve["wanted"]
    assert len(thresholds) > 2


def test_planted_errors_are_on_top_of_their_lists(tmp_path: Path) -> None:
    rows = 600
    truth = np.random.default_rng(2).integers(0, 3, rows)
    chances = made.chances_of(truth, 3, accuracy=0.97, seed=3)
    lang = np.array(["en", "de", "fr"])[np.arange(rows) % 3]
    wrong = (lang == "fr") & (truth == 2)  # in French, cats are taken for bees
    chances[wrong] = [0.05, 0.9, 0.05]
    flipped = np.arange(0, rows, 20)[:20]
    flipped = flipped[~wrong[flipped]]
    chances[flipped] = np.eye(3)[(truth[flipped] + 1) % 3] * 0.985 + 0.005
    scored = made.scored_classes(chances, truth, LABELS, lang=pa.array(lang))
    facts = made.evaluated(tmp_path, scored, made.classes_spec(LABELS), slices=["lang"], hints=True)
    found = facts["sections"]
    assert (found["slices"]["slices"][0]["slice"], found["slices"]["slices"][0]["value"]) == ("lang", "fr")
    pair = found["confusion"]["pairs"][0]
    assert (pair["label"], pair["predicted"]) == ("cat", "bee")
    assert pair["rows"] >= wrong.sum()
    assert set(flipped.tolist()) <= set(found["worst"][: len(flipped) + 3])
    assert found["surest_wrong"][0] in set(flipped.tolist())
    assert set(flipped.tolist()) <= set(found["hints"]["list"])
    assert found["hints"]["by"] == "the probability of the label"
    assert found["classes"][0]["label"] in ("bee", "cat")


@pytest.mark.usefixtures("hint_library")
def test_label_hints_are_those_of_cleanlab(tmp_path: Path) -> None:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    chances, truth = data(accuracy=0.9)
    scored = made.scored_classes(chances, truth, LABELS)
    facts = made.evaluated(tmp_path, scored, made.classes_spec(LABELS), hints=True)
    assert "cleanlab 2.9" in facts["sections"]["hints"]["by"]
    stored = pq.read_table(tmp_path / "rows.parquet")
    given = np.stack([scored[f"p_prob_{label}"].to_numpy() for label in LABELS], axis=1).astype(np.float64)
    assert stored["label_issue"].to_pylist() == find_label_issues(truth, given, n_jobs=1).tolist()
    assert stored["label_quality"].to_numpy() == pytest.approx(get_label_quality_scores(truth, given))


def test_hints_on_rows_that_were_trained_on_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "t.parquet").touch()
    (tmp_path / "run" / "job.yaml").write_text(f"data: {{train: {tmp_path}/t.parquet}}\nmodel: {{base: encoder}}\n")
    with pytest.raises(UsageError, match=r"hints on rows that were trained on are worthless.*--folds 5"):
        refuse_trained(tmp_path / "run" / "model", tmp_path / "x" / ".." / "t.parquet")
    refuse_trained(tmp_path / "run" / "model", tmp_path / "other.parquet")


def test_several_labels(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    truth = generator.random((300, 3)) < 0.4
    chances = np.clip(np.where(truth, 0.75, 0.25) + generator.normal(0, 0.25, truth.shape), 0.01, 0.99)
    chances[:60, 2], chances[:60, 0], truth[:60, 2], truth[:60, 0] = 0.1, 0.9, True, False  # cat, said to be ant
    found = made.evaluated(tmp_path, *made.scored_lists(chances, truth, LABELS), hints=True)["sections"]
    expected = precision_recall_fscore_support(truth, chances >= 0.5, zero_division=0)
    for one in found["labels"]:
        at = LABELS.index(one["label"])
        assert [one[name][0] for name in ("precision", "recall", "f1")] == pytest.approx([x[at] for x in expected[:3]])
    pair = found["confused"]["pairs"][0]
    assert (pair["label"], pair["predicted"]) == ("cat", "ant")
    assert [curve["label"] for curve in found["threshold"]] == list(LABELS)
    assert found["hints"]["rows"] > 0


def test_a_row_without_labels_leaves_the_page_of_several_labels_whole(tmp_path: Path) -> None:
    chances, truth = data(60)
    scored = made.scored_classes(chances, truth, LABELS).drop_columns(["label", "p_label"])
    lists = [None if row == 2 else [LABELS[at]] for row, at in enumerate(truth)]
    said = [[LABELS[at] for at in np.flatnonzero(row >= 0.5)] for row in chances]
    scored = scored.append_column("label", pa.array(lists)).append_column("p_label", pa.array(said))
    spec = replace(made.classes_spec(LABELS), problem="multi_label")
    found = made.evaluated(tmp_path, scored, spec)["sections"]
    assert sum(one["rows"] for one in found["calibration"]["bins"]) == 59 * len(LABELS)


@pytest.mark.parametrize("label", ["ant", ["ant"], []], ids=str)
def test_labels_are_judged_where_one_alone_occurs(label: str | list[str], tmp_path: Path) -> None:
    chances, truth = data(20)
    scored = made.scored_classes(chances, truth, LABELS).drop_columns("label")
    several = isinstance(label, list)
    spec = replace(made.classes_spec(LABELS), problem="multi_label" if several else "single_label")
    kind = pa.list_(pa.string()) if several else pa.string()
    if several:
        said = pa.array([[word] for word in scored["p_label"].to_pylist()])
        scored = scored.drop_columns("p_label").append_column("p_label", said)
    scored = scored.append_column("label", pa.array([label] * 20, kind))
    found = made.evaluated(tmp_path, scored, spec, hints=True)["sections"]
    assert found["hints"]["by"] == "the probability of the label (fewer than two labels occur)"


def test_numbers(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    truth = generator.normal(10, 3, 200)
    said = truth + generator.normal(0, 1, 200)
    said[17] += 40
    kind = np.where(np.arange(200) % 4 == 0, "steel", "wood")
    said[kind == "steel"] += 5
    scored = made.scored_numbers(truth, said, kind=kind)
    found = made.evaluated(tmp_path, scored, made.NUMBERS, slices=["kind"])["sections"]
    assert found["worst"][0] == found["hints"]["list"][0] == 17
    assert found["slices"]["slices"][0]["value"] == "steel"
    away = np.abs(said.astype(np.float32).astype(float) - truth.astype(np.float32).astype(float))
    assert dict(map(tuple, found["residuals"]["widths"]))[0.9] == pytest.approx(np.quantile(away, 0.9))
    assert found["baseline"]["metrics"]["rmse"] == pytest.approx(truth.std(), rel=1e-6)
    assert "calibration" not in found


def test_a_row_is_in_the_slice_of_each_item_of_a_list(tmp_path: Path) -> None:
    chances, truth = data(200, accuracy=1.0)
    wrong = np.arange(200) % 10 == 0
    chances[wrong] = np.roll(chances[wrong], 1, axis=1)
    tags = [["old", "red"] if bad else ["red"] if row % 3 else None for row, bad in enumerate(wrong)]
    scored = made.scored_classes(chances, truth, LABELS, tags=pa.array(tags))
    found = made.evaluated(tmp_path, scored, made.classes_spec(LABELS), slices=["tags"])["sections"]["slices"]
    by_value = {one["value"]: one for one in found["slices"] if one["slice"] == "tags"}
    assert {name: one["rows"] for name, one in by_value.items()} == {
        "old": 20,
        "red": sum("red" in (some or []) for some in tags),
        "null": tags.count(None),
    }
    assert (found["slices"][0]["value"], by_value["old"]["mean"]) == ("old", 0)


def test_columns_that_name_no_slices_are_refused() -> None:
    kinds = {"a": pa.list_(pa.string()), "b": pa.dictionary(pa.int32(), pa.string()), "c": pa.date32()}
    refuse_slices(pa.schema(kinds), list(kinds))
    for kind in (pa.struct({"x": pa.int32()}), pa.list_(pa.struct({"x": pa.int32()})), pa.binary()):
        with pytest.raises(UsageError, match=r"slices: the column 'a' holds .*each item of a list"):
            refuse_slices(pa.schema({"a": kind}), ["a"])


def test_many_classes_have_the_numbers_of_scikit_learn_and_no_matrix(tmp_path: Path) -> None:
    classes, rows = 1200, 2000
    labels = tuple(f"c{at}" for at in range(classes))
    truth = np.random.default_rng(1).integers(0, classes, rows)
    chances = made.chances_of(truth, classes, accuracy=0.6).astype(np.float32)
    said, names = chances.argmax(axis=1), pa.array(labels)
    scored = made.scored_classes(chances, truth, labels).rename_columns(
        {"p_label": "predicted_label"}
        | {"p_score": "predicted_score"}
        | {f"p_prob_{one}": f"predicted_prob_{one}" for one in labels}
    )
    known = pa.table({"label": scored["label"], "unreadable": pa.nulls(rows, pa.string())})
    spec = made.classes_spec(labels)
    found = measured([scored.slice(0, 700), scored.slice(700)], known, spec)
    assert found.confusion is None
    expected = {
        "accuracy": accuracy_score(truth, said),
        "balanced_accuracy": recall_score(truth, said, labels=np.unique(truth), average="macro"),
        "macro_f1": f1_score(truth, said, average="macro", zero_division=0),
        "log_loss": log_loss(truth, chances.astype(np.float64), labels=range(classes)),
    }
    assert {name: found.metrics[name].value for name in expected} == pytest.approx(expected)
    table = pa.table({"label": names.take(pa.array(truth)), "prediction": names.take(pa.array(said))})
    judged = JudgedRows(tmp_path, "classes", labels, table.append_column("loss", pa.array(np.zeros(rows))), truth)
    tracemalloc.start()
    scores, pairs, (values, _) = per_class(judged), confusion(judged), drawn(next(groups_of([judged])))["macro_f1"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60e6  # a matrix of numbers by row and class has 19 MB, one of 1,000 resamples 10 MB
    assert values[0] == pytest.approx(expected["macro_f1"])
    wanted = precision_recall_fscore_support(truth, said, labels=range(classes), zero_division=0)
    assert {one["label"]: one["f1"][0] for one in scores} == pytest.approx(dict(zip(labels, wanted[2], strict=True)))
    assert len(pairs["pairs"]) == 20
    assert pairs["counts"] is None


def test_nothing_planted_is_no_alarm_at_the_rate_of_the_intervals(tmp_path: Path) -> None:
    """Slices that do not matter: the 95 % interval of their share misses the average in about 5 % of them."""
    chances, truth = data(4000, accuracy=0.8)
    columns = {f"s{at}": pa.array(np.random.default_rng(at).integers(0, 10, 4000)) for at in range(10)}
    scored = made.scored_classes(chances, truth, LABELS, **columns)
    facts = made.evaluated(tmp_path, scored, made.classes_spec(LABELS), slices=list(columns))
    found, right = facts["sections"]["slices"], (chances.argmax(axis=1) == truth).mean()
    assert found["looked_at"] == 104
    missed = sum(not one["low"] <= right <= one["high"] for one in found["slices"])
    assert missed <= 8  # of the 30 worst of 104


def test_names_of_classes_that_look_like_secrets_are_shown(tmp_path: Path) -> None:
    labels = ("password: forgotten", "token: lost", "Bearer of bad news")
    chances, truth = data()
    facts = made.evaluated(tmp_path, made.scored_classes(chances, truth, labels), made.classes_spec(labels))
    assert facts["labels"] == list(labels)
    assert {one["label"] for one in facts["sections"]["classes"]} == set(labels)
    assert "[redacted]" not in (tmp_path / "eval.html").read_text() + (tmp_path / "eval.json").read_text()


def test_rows_hold_all_that_the_page_shows_and_texts_can_be_left_out(tmp_path: Path) -> None:
    chances, truth = data(30)
    scored = made.scored_classes(chances, truth, LABELS)
    bad = pa.array([None if row else "null_input" for row in range(30)], pa.string())
    scored = scored.set_column(scored.schema.get_field_index("error"), "error", bad)
    facts = made.evaluated(tmp_path, scored, made.classes_spec(LABELS), texts=())
    rows = pq.read_table(tmp_path / "rows.parquet")
    fixed = ["label", "prediction", "score", "probability", "loss", "right", "tokens", "truncated", "error"]
    assert rows.column_names == ["id", *fixed]
    assert rows["loss"].null_count == 1
    given = chances.astype(np.float32).astype(float)[np.arange(30), truth]
    assert rows["loss"].to_numpy()[1:] == pytest.approx(-np.log(given[1:]))
    assert "row 3" not in (tmp_path / "eval.html").read_text()
    assert json.loads((tmp_path / "eval.json").read_text()) == facts


def test_long_texts_are_held_some_at_a_time(tmp_path: Path) -> None:
    """Also equal ones, which a file holds once: 2,000 texts of 100 kB are 200 MB."""
    table = pa.table({"id": range(2000), "text": pa.array(["x" * 100_000]).take(pa.array([0] * 2000))})
    pq.write_table(table, tmp_path / "scored.parquet")
    assert (tmp_path / "scored.parquet").stat().st_size < 2**21
    parts = [*scored_parts([tmp_path / "scored.parquet"])]
    assert pa.concat_tables(parts).equals(table)
    assert max(part.nbytes for part in parts) < 2 * BATCH_BYTES
    write_rows(tmp_path / "rows.parquet", [table])
    about = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert max(about.row_group(at).num_rows for at in range(about.num_row_groups)) * 100_000 <= BATCH_BYTES
    pq.write_table(pa.table({"id": range(40_000)}), tmp_path / "short.parquet")
    assert [len(part) for part in scored_parts([tmp_path / "short.parquet"])] == [16_384, 16_384, 7_232]
