"""`compare`: paired differences, McNemar by hand, refusals, and the rates at which differences are found."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import bootstrap, norm
from sklearn.metrics import f1_score

import judged_rows as made
from html_page import Page
from torchlake.atomic_io import size_and_sha256
from torchlake.cli.main import main
from torchlake.errors import DataError, FingerprintError, UsageError
from torchlake.evaluation.compare import compare, holm, mcnemar
from torchlake.evaluation.report import ReportRequest, evaluating
from torchlake.evaluation.sections import sums
from torchlake.evaluation.sections.judged import read_judged
from torchlake.evaluation.sections.sums import drawn, groups_of
from torchlake.models.folders import model_hash
from torchlake.reporting.comparison import distinct_names, render_comparison

LABELS = ("ant", "bee", "cat")


def evaluation(folder: Path, truth: np.ndarray, chances: np.ndarray, **more: Any) -> Path:
    made.evaluated(folder, made.scored_classes(chances, truth, LABELS, **more), made.classes_spec(LABELS))
    return folder


@pytest.fixture
def truth() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 3, 500)


def test_differences_and_intervals_are_those_of_scipy(
    truth: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "RESAMPLES", 1000)
    chances = [made.chances_of(truth, 3, accuracy=share, seed=seed) for seed, share in ((1, 0.7), (2, 0.8))]
    found = compare(*(evaluation(tmp_path / f"{at}", truth, one) for at, one in enumerate(chances)))
    by_metric = {one.metric: one for one in found.differences}
    said = [one.argmax(axis=1) for one in chances]
    f1 = [f1_score(truth, one, average="macro") for one in said]
    assert by_metric["macro_f1"].difference == pytest.approx(f1[1] - f1[0])

    def difference(one: np.ndarray, other: np.ndarray, axis: int = -1) -> Any:
        return other.mean(axis=axis) - one.mean(axis=axis)

    right = [(one == truth).astype(float) for one in said]
    expected = bootstrap(right, difference, paired=True, method="percentile", n_resamples=2000, rng=0)
    accuracy = by_metric["accuracy"]
    assert (accuracy.low, accuracy.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.006)
    (pair,) = found.pairs
    won, lost = int(((1 - right[0]) * right[1]).sum()), int((right[0] * (1 - right[1])).sum())
    assert (pair["won"], pair["lost"]) == (won, lost)
    assert pair["agreement"] == pytest.approx((said[0] == said[1]).mean())
    assert pair["p"] == mcnemar(won, lost)


def test_mcnemar_and_holm_by_hand() -> None:
    # 2 * (C(10,0) + C(10,1) + C(10,2)) / 2^10, and one row of one.
    assert mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar(8, 2) == mcnemar(2, 8)
    assert mcnemar(0, 1) == 1.0
    assert mcnemar(0, 0) == 1.0
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_a_model_is_not_better_than_itself(truth: np.ndarray, tmp_path: Path) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    found = compare(*(evaluation(tmp_path / name, truth, chances) for name in "abc"))
    assert all((one.difference, one.low, one.high) == (0, 0, 0) for one in found.differences)
    assert [(pair["won"], pair["lost"], pair["p"], pair["p_holm"]) for pair in found.pairs] == [(0, 0, 1.0, 1.0)] * 2
    assert found.worse("accuracy") == []
    assert "<table>" in found._repr_html_()  # type: ignore[attr-defined]


def test_rows_are_matched_by_key(truth: np.ndarray, tmp_path: Path) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    one = evaluation(tmp_path / "one", truth, chances)
    scored = made.scored_classes(chances, truth, LABELS).take(pa.array(np.random.default_rng(0).permutation(500)))
    made.evaluated(tmp_path / "two", scored, made.classes_spec(LABELS))
    found = compare(one, tmp_path / "two")
    assert (found.rows, found.pairs[0]["won"], found.pairs[0]["agreement"]) == (500, 0, 1.0)


def test_rows_that_failed_in_one_model_are_left_out_and_listed(
    truth: np.ndarray, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    one = evaluation(tmp_path / "one", truth, chances)
    errors = pa.array(["null_input" if row % 50 == 7 else None for row in range(500)], pa.string())
    two = evaluation(tmp_path / "two", truth, chances, error=errors)
    for sides in ((one, two), (two, one)):
        found = compare(*sides, report=tmp_path / "compared")
        assert (found.rows, found.left_out, found.pairs[0]["agreement"]) == (490, 10, 1.0)
        (failed,) = found.failed
        assert (failed.model, failed.rows, failed.errors) == (str(two), 10, {"null_input": 10})
        assert [row["key"] for row in failed.first][:2] == ["7", "57"]
        assert "null_input 10" in Page((tmp_path / "compared" / "compare.html").read_text()).text
    assert main(["compare", str(one), str(two)]) == 0
    assert "10 rows left out (null_input 10)" in capfd.readouterr().out


def test_names_are_the_ends_by_which_paths_differ() -> None:
    assert distinct_names(["a/run", "b/run"]) == {"a/run": "a/run", "b/run": "b/run"}
    assert distinct_names(["x/y/one", "x/y/two", "x/y/one"]) == {"x/y/one": "one", "x/y/two": "two"}
    assert distinct_names(["one", "x/one"]) == {"one": "one", "x/one": "x/one"}


def test_different_rows_are_refused(truth: np.ndarray, tmp_path: Path) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    one = evaluation(tmp_path / "one", truth, chances)
    other = truth.copy()
    other[:12] = (other[:12] + 1) % 3
    with pytest.raises(DataError, match=r"500 and 490 rows, 490 in both; 12 labels differ"):
        compare(one, evaluation(tmp_path / "two", other[:490], chances[:490]))
    words = tmp_path / "words"
    made.evaluated(words, made.scored_classes(chances, truth, "012"), made.classes_spec("012"))
    numbers = made.scored_classes(chances, truth, [0, 1, 2])  # type: ignore[list-item]
    made.evaluated(tmp_path / "numbers", numbers, replace(made.classes_spec("012"), labels=(0, 1, 2)))
    with pytest.raises(DataError, match="different things: classes '0', '1', '2'; classes 0, 1, 2"):
        compare(words, tmp_path / "numbers")
    with pytest.raises(UsageError, match=r"two: has no eval\.json.*--report FOLDER"):
        compare(one, tmp_path / "absent" / "two")
    with pytest.raises(UsageError, match="two or more"):
        compare(one)
    with pytest.raises(UsageError, match="there is no metric 'bleu' here"):
        compare(one, one).worse("bleu")


@pytest.mark.parametrize("ids", [[7, 7], [None, 7]], ids=str)
def test_a_key_that_is_not_of_one_row_is_refused(ids: list[int | None], truth: np.ndarray, tmp_path: Path) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    one = evaluation(tmp_path / "one", truth, chances)
    two = evaluation(tmp_path / "two", truth, chances, id=pa.array([*ids, *range(100, 598)]))
    for sides in ((one, two), (two, one), (two, two)):
        with pytest.raises(DataError, match=rf"two: 500 rows have 499 different keys; {ids[0]} is not of one row"):
            compare(*sides)


def test_rows_that_all_failed_in_one_model_or_the_other_are_refused(truth: np.ndarray, tmp_path: Path) -> None:
    chances = made.chances_of(truth, 3, accuracy=0.7)
    sides = [
        evaluation(
            tmp_path / reason,
            truth,
            chances,
            error=pa.array([reason if row % 2 == odd else None for row in range(500)], pa.string()),
        )
        for odd, reason in enumerate(("null_input", "timeout"))
    ]
    with pytest.raises(DataError, match=r"no row that all .*: null_input 250; .*: timeout 250"):
        compare(*sides)


SPAN = {"start": 0, "end": 4, "label": "a"}
JUDGED: dict[str, tuple[Any, Any, Any]] = {
    "classes": ("a", "a", "b"),
    "labels": (["a"], ["a"], ["b"]),
    "number": (1.0, 1.0, 2.0),
    "spans": ([SPAN], [SPAN], [SPAN | {"end": 5}]),
    "answers": ("a", "a", "b"),
    "texts": ("a", "a", "b"),
    "vectors": (1.0, 1.0, 2.0),
    "ranks": (None, "a", "b"),
}
"""A label, what is right, and what is wrong."""


@pytest.mark.parametrize("kind", JUDGED)
def test_each_metric_of_each_task_says_which_model_is_worse(kind: str, tmp_path: Path) -> None:
    label, good, bad = JUDGED[kind]
    for name, wrong in (("good", 2), ("bad", 30)):
        right = [row >= wrong for row in range(40)]
        table = {"row_id": range(40), "label": [label] * 40, "prediction": [good if one else bad for one in right]}
        table |= {"score": [0.5] * 40, "loss": [1.0 if one else 20.0 for one in right], "error": pa.nulls(40)}
        table |= {"right": pa.nulls(40, pa.bool_()) if kind in ("number", "vectors") else right}
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(table), tmp_path / name / "rows.parquet")
        facts = {"format": 1, "kind": "vectors" if kind == "ranks" else kind, "labels": ["a", "b"], "rows": 40}
        stored = size_and_sha256(tmp_path / name / "rows.parquet")
        facts |= {"files": {"rows.parquet": stored}, "made": {"task": "a task"}}
        (tmp_path / name / "eval.json").write_text(json.dumps(facts))
    worse = compare(tmp_path / "good", tmp_path / "bad")
    better = compare(tmp_path / "bad", tmp_path / "good")
    for metric in {one.metric for one in worse.differences}:
        assert metric in sums.METRICS
        assert len(worse.worse(metric)) == 1
        assert better.worse(metric) == []
    if kind == "ranks":
        values = {one.metric: one.value for one in worse.differences}
        assert values == {"recall_at_1": 0.25, "recall_at_10": 0.25, "mrr_at_10": 0.25}, "a rank of 20 counts nothing"


def test_an_undefined_metric_does_not_pass_in_silence(truth: np.ndarray, tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", truth, made.chances_of(truth, 3, accuracy=0.7))
    found = compare(one, one)
    for name in ("first", "value", "high"):
        undefined = replace(found.differences[0], **{name: math.nan})
        with pytest.raises(DataError, match=r"accuracy is .* so it cannot be said whether it is worse"):
            replace(found, differences=(undefined, *found.differences[1:])).worse("accuracy")
    nothing = replace(undefined, low=math.nan)
    page = Page(render_comparison({**replace(found, differences=(nothing,)).to_json(), "written": "now"}, {}, []))
    assert "undefined" in page.text


def test_settings_are_shown_by_their_own_names(truth: np.ndarray, tmp_path: Path) -> None:
    """Not by those of the models above them, which may be runs/memory-0."""
    chances = made.chances_of(truth, 3, accuracy=0.7)
    found = compare(*(evaluation(tmp_path / f"memory-{at}", truth, chances) for at in range(2)))
    about = {"settings": {"train.epochs": [3, 4], "engine.ray.memory": [2**30, None]}}
    page = Page(render_comparison({**replace(found, about=about).to_json(), "written": "now"}, {}, []))
    assert "train.epochs34" in page.text.replace(" ", "").replace("\n", "")
    assert "engine.ray.memory1.0GiB-" in page.text.replace(" ", "").replace("\n", "")


def test_rows_whose_texts_were_replaced_are_not_compared(truth: np.ndarray, tmp_path: Path) -> None:
    """Their keys and labels are the same."""
    scored = made.scored_classes(made.chances_of(truth, 3, accuracy=0.7), truth, LABELS)
    texts = scored["text"].to_pylist()
    other = scored.set_column(scored.column_names.index("text"), "text", [[*texts[:-1], "another text"]])
    for name, rows in (("one", scored), ("two", other)):
        made.evaluated(tmp_path / name, rows, made.classes_spec(LABELS))
    with pytest.raises(DataError, match="one and .*two: their rows have other values of 'text' under the same keys"):
        compare(tmp_path / "one", tmp_path / "two")


def test_an_evaluation_that_is_not_whole_is_not_compared(truth: np.ndarray, tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", truth, made.chances_of(truth, 3, accuracy=0.7))
    two = evaluation(tmp_path / "two", truth, made.chances_of(truth, 3, accuracy=0.8))
    rows = (one / "rows.parquet").read_bytes()
    for content in ((two / "rows.parquet").read_bytes(), rows[:200], None):  # of another evaluation, cut, gone
        (one / "rows.parquet").unlink()
        if content is not None:
            (one / "rows.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"one/rows\.parquet: is missing, damaged or of another evaluation"):
            compare(two, one)
    for content in ("{}", "[]", '{"format": 2}'):
        (one / "eval.json").write_text(content)
        with pytest.raises(DataError, match=r"one/eval\.json: is not of an evaluation"):
            compare(two, one)


def test_a_run_whose_model_was_replaced_is_not_compared(truth: np.ndarray, tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", truth, made.chances_of(truth, 3, accuracy=0.7))
    run, model = tmp_path / "run", tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "bert"}')
    shutil.copytree(one, run / "eval")
    facts = json.loads((one / "eval.json").read_text()) | {"identity": {"model": model_hash(model)}}
    (run / "eval" / "eval.json").write_text(json.dumps(facts))
    assert compare(one, run).rows == 500
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DataError, match="model: the model was replaced after its evaluation"):
        compare(one, run)


def test_a_pipeline_fails_only_if_the_whole_interval_is_worse(
    truth: np.ndarray, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    better = str(evaluation(tmp_path / "a", truth, made.chances_of(truth, 3, accuracy=0.9)))
    worse = str(evaluation(tmp_path / "b", truth, made.chances_of(truth, 3, accuracy=0.6, seed=4)))
    arguments = ["compare", better, worse, "--fail-if-worse", "macro_f1", "--json"]
    assert main([*arguments, "--by", "0.05", "--report", str(tmp_path / "c")]) == 1
    values = json.loads(capfd.readouterr().out)
    assert values["worse"] == [worse]
    assert main([*arguments, "--by", "0.5"]) == 0
    assert main(["compare", worse, better, "--fail-if-worse", "log_loss"]) == 0
    page = (tmp_path / "c" / "compare.html").read_text()
    assert "worse" in page
    assert f"{values['pairs'][0]['lost']:,}" in page
    assert json.loads((tmp_path / "c" / "compare.json").read_text())["pairs"] == values["pairs"]


def test_a_metric_of_no_task_is_refused_before_models_are_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "--table", "t.csv", "--fail-if-worse", "acuracy"]) == 64
    assert "fail_if_worse: expected 'accuracy', " in (said := capfd.readouterr().err)
    assert "did you mean accuracy?" in said


def test_a_report_of_other_models_is_refused_without_an_option_of_evaluate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def evaluate(*args: Any, **options: Any) -> None:
        with evaluating(ReportRequest(folder=tmp_path), {"model": "another"}):
            pass

    (tmp_path / "eval.json").write_text(json.dumps({"identity": {"model": "this"}}))
    monkeypatch.setattr("torchlake.evaluation.compare.evaluate", evaluate)
    with pytest.raises(FingerprintError) as refused:
        compare("a", "b", table="t.csv", report=tmp_path / "c")
    assert str(refused.value).endswith("another model. Name another folder for the report (--report).")


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "lost", "won"), [(300, 0.06, 0.14), (1066, 0.04, 0.06)])
def test_intervals_cover_and_find_at_their_rate(
    rows: int, lost: float, won: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,000 pairs of samples, 93 to 97 % of the intervals have the true difference, and as many are above zero as
    the standard error of the difference says, within 4 points.
    """
    monkeypatch.setattr(sums, "RESAMPLES", 400)  # a minute for each case
    generator, samples = np.random.default_rng(3), 1000
    spec = made.classes_spec(LABELS[:2])
    template = made.scored_classes(np.full((rows, 2), 0.5), np.zeros(rows, dtype=int), LABELS[:2])
    made.evaluated(tmp_path, template, spec)
    judged = read_judged(tmp_path / "rows.parquet", "classes", spec.labels)
    place, limits = judged.table.schema.get_field_index("prediction"), []
    for _ in range(samples):
        kind = generator.choice(4, size=rows, p=[0.6, lost, won, 0.4 - lost - won])  # right: both, A, B, neither
        sides = []
        for right in (kind < 2, (kind == 0) | (kind == 2)):
            said = pa.array(LABELS[:2]).take(pa.array(np.where(right, 0, 1)))
            sides.append(replace(judged, table=judged.table.set_column(place, "prediction", said)))
        _, draws = drawn(next(iter(groups_of(sides))))["accuracy"]
        limits.append(np.quantile(draws[:, 1] - draws[:, 0], (0.025, 0.975)))
    low, high = np.array(limits).T
    true = won - lost
    assert 0.93 <= np.mean((low <= true) & (true <= high)) <= 0.97
    found = norm.cdf(true / np.sqrt((won + lost - true**2) / rows) - norm.ppf(0.975))
    assert np.mean(low > 0) == pytest.approx(found, abs=0.04)
