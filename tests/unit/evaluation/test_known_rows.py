"""What a page holds against a model: rows that it was trained on, words in common, random pairs, far residuals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

import judged_rows as made
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from torchlake.evaluation.evaluate import evaluate
from torchlake.evaluation.sections.classes import FAR, outliers
from torchlake.evaluation.sections.judged import read_judged
from torchlake.evaluation.sections.label_hints import label_hints
from torchlake.models.spec import load_spec
from torchlake.training.train import train


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    return found


def test_rows_of_the_training_table_are_found(tmp_path: Path, tiny_bert: Path) -> None:
    """Also without the texts in the report; a text that differs in a letter is another one."""
    job = runs.job(tmp_path, tiny_bert)
    run = train(run=tmp_path / "run", engine=runs.Inline(), **job)
    known = pq.read_table(job["data"]["train"])["text"].to_pylist()[:5]
    texts = [*known, *(f"{text}!" for text in known), "a new one", None]
    labels = pq.read_table(job["data"]["train"])["label"].to_pylist()[:1] * len(texts)
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "test.parquet")
    for no_texts in (False, True):
        folder = tmp_path / f"eval-{no_texts}"
        evaluate(run.path / "model", tmp_path / "test.parquet", report=folder, no_texts=no_texts, engine=tiny.Here())
        rows = pq.read_table(folder / "rows.parquet")
        assert rows["trained_on"].to_pylist() == [*[True] * 5, *[False] * 7]
        sections = facts_of(folder)["sections"]
        assert sections["trained"] == {"rows": 5, "of": 11, "list": [0, 1, 2, 3, 4]}
        named = [one["value"] for one in sections["slices"]["slices"] if one["slice"] == "in the training table"]
        assert sorted(named) == ["no", "yes"]
        assert "5 of 11 rows have the inputs of a row of the training table" in (folder / "eval.html").read_text()
    alone = shutil.copytree(run.path / "model", tmp_path / "alone" / "model")
    evaluate(alone, tmp_path / "test.parquet", report=tmp_path / "elsewhere", engine=tiny.Here())
    assert "trained" not in facts_of(tmp_path / "elsewhere")["sections"]


def test_a_language_model_knows_its_training_texts(tmp_path: Path, tiny_gpt2: Path) -> None:
    texts = [f"a film about {row}" for row in range(40)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "train.parquet")
    data = {"train": str(tmp_path / "train.parquet"), "text": "text"}
    steps = {"train": {"max_steps": 1, "batch_size": 2}}
    job: Any = {"data": data, "model": {"base": str(tiny_gpt2), "max_length": 16, "task": "text_generation"}, **steps}
    run = train(run=tmp_path / "run", engine=runs.Inline(), **job)
    evaluate(
        run.path / "model", pa.table({"text": [texts[3], None, "new"]}), report=tmp_path / "eval", engine=tiny.Here()
    )
    assert pq.read_table(tmp_path / "eval" / "rows.parquet")["trained_on"].to_pylist() == [True, False, False]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_embedder(tmp_path_factory.mktemp("embedder") / "model")


PAIRS = {"text": "a", "text_pair": "b", "engine": tiny.Here()}


def pairs(rows: int) -> tuple[list[str], list[str]]:
    first = [f"good film number{row} was number{row % 7}" for row in range(rows)]
    return first, [f"the number{row} film is number{(row + 3) % 5}" for row in range(rows)]


@pytest.mark.usefixtures("page_libraries")
@pytest.mark.parametrize("labeled", [False, True])
def test_vectors_are_compared_with_words_in_common(embedder: Path, tmp_path: Path, labeled: bool) -> None:
    first, second = pairs(40)
    wanted = np.linspace(0, 1, 40)
    more = {"label": "near"} if labeled else {}
    evaluate(embedder, pa.table({"a": first, "b": second, "near": wanted}), report=tmp_path / "eval", **PAIRS, **more)
    base = facts_of(tmp_path / "eval")["sections"]["baseline"]
    by_hand = TfidfVectorizer().fit([*first, *second])
    similar = (by_hand.transform(first) @ by_hand.transform(second).T).toarray()
    if labeled:
        assert base["metrics"]["pearson"] == pytest.approx(np.corrcoef(np.diag(similar), wanted)[0, 1], abs=1e-5)
    else:
        best = np.isclose(similar, similar.max(axis=1, keepdims=True), atol=1e-6)
        share = (np.diag(best) / best.sum(axis=1)).mean()  # equally near texts have a random order
        assert base["metrics"]["recall_at_1"] == pytest.approx(share, abs=1e-6)
    page = (tmp_path / "eval" / "eval.html").read_text()
    assert "Without a model: the words in common (cosine of TF-IDF)." in page
    assert "Cosines of equal and of random pairs" in page


def test_random_pairs_are_of_other_rows(embedder: Path, tmp_path: Path) -> None:
    first, _ = pairs(40)
    evaluate(embedder, pa.table({"a": first, "b": first}), report=tmp_path / "eval", **PAIRS)
    rows = pq.read_table(tmp_path / "eval" / "rows.parquet")
    assert rows["score"].to_numpy() == pytest.approx(1, abs=1e-5)
    assert max(rows["random"].to_pylist()) < 1 - 1e-6
    found = facts_of(tmp_path / "eval")["sections"]["cosines"]
    assert {name: sum(counts) for name, counts in found["counts"].items()} == {
        "of the pairs": 40,
        "of random pairs": 40,
    }
    evaluate(embedder, pa.table({"a": first[:1], "b": first[:1]}), report=tmp_path / "one", **PAIRS)
    assert [*facts_of(tmp_path / "one")["sections"]["cosines"]["counts"]] == ["of the pairs"]
    evaluate(embedder, pa.table({"a": first, "b": first}), report=tmp_path / "plain", no_texts=True, **PAIRS)
    assert "baseline" not in facts_of(tmp_path / "plain")["sections"]


@pytest.mark.slow
def test_vectors_are_compared_with_the_base_of_their_run(embedder: Path, tmp_path: Path) -> None:
    """Without that base, or without a run, the page has no such numbers, and with a run it says why."""
    first, second = pairs(40)
    table = pa.table({"a": first, "b": second, "near": np.linspace(0, 1, 40)})
    pq.write_table(table, tmp_path / "t.parquet")
    base = shutil.copytree(embedder, tmp_path / "base")
    job: Any = {"data": {"train": str(tmp_path / "t.parquet"), "text": "a", "text_pair": "b"}}
    job |= {"model": {"task": "feature_extraction", "base": str(base)}, "train": {"max_steps": 2, "batch_size": 8}}
    model = train(run=tmp_path / "run", engine=runs.Inline(), **job).path / "model"

    def untrained(name: str, **options: Any) -> Any:
        evaluate(model, tmp_path / "t.parquet", report=tmp_path / name, **PAIRS, **options)
        return facts_of(tmp_path / name)["sections"].get("untrained")

    for name, options in (("found", {}), ("near", {"label": "near"})):
        by_hand = evaluate(base, table, **PAIRS, **options)
        expected = {metric: one.value for metric, one in by_hand.metrics.items()}
        assert untrained(name, **options) == {"base": str(base), "metrics": pytest.approx(expected, abs=1e-6)}
        page = (tmp_path / name / "eval.html").read_text()
        assert f"Before training: the base model, {base}." in page
        assert "before training</th>" in page
    assert "which the report has to keep" in untrained("plain", no_texts=True)["left_out"]
    (base / "README.md").write_text("not a part of the model")
    assert untrained("same")["metrics"]
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "hidden_dropout_prob": 0.3}))
    assert untrained("replaced") == {"left_out": "it has changed since the run began"}
    assert "The base model is not measured: it has changed" in (tmp_path / "replaced" / "eval.html").read_text()
    shutil.rmtree(base)
    assert "no such" in untrained("gone")["left_out"]
    model = shutil.copytree(model, tmp_path / "alone" / "model")
    assert untrained("elsewhere") is None


def numbers(folder: Path, residuals: np.ndarray) -> dict[str, Any]:
    truth = np.random.default_rng(0).normal(10, 3, len(residuals))
    scored = made.scored_numbers(truth, truth + residuals)
    made.evaluated(folder, scored, made.NUMBERS)
    return outliers(read_judged(folder / "rows.parquet", "number", ()))


def test_far_residuals_are_labels_to_look_at(tmp_path: Path) -> None:
    residuals = np.random.default_rng(1).normal(2, 1, 20_000)
    quiet = numbers(tmp_path / "quiet", residuals)
    assert 0 < quiet["rows"] < 20_000 / 1000  # as the page says, 1 in 2,000
    residuals[[7, 99, 1234]] = (-30, 40, 50)
    found = numbers(tmp_path / "planted", residuals)
    assert found["list"][:3] == [1234, 99, 7]
    assert found["rows"] - quiet["rows"] in (2, 3)
    page = (tmp_path / "planted" / "eval.html").read_text()
    assert f"labels to look at, by residuals more than {FAR} standard deviations" in page
    assert "confident learning" not in page
    assert numbers(tmp_path / "exact", np.zeros(50)) == {}


@pytest.mark.usefixtures("hint_library")
def test_hints_of_several_labels_and_of_rare_ones_are_those_of_cleanlab(tmp_path: Path) -> None:
    from cleanlab.multilabel_classification.filter import find_label_issues

    names, drawn = ("ant", "bee", "cat"), np.random.default_rng(4)
    truth = drawn.random((200, 3)) < (0.5, 0.3, 0.005)
    chances = np.clip(np.where(truth, 0.8, 0.2) + drawn.normal(0, 0.3, truth.shape), 0.01, 0.99).astype(np.float32)
    lists = [np.flatnonzero(row).tolist() for row in truth]
    labels = pa.array([[names[at] for at in row] for row in lists])
    predicted = pa.table({**{f"prob_{name}": chances[:, at] for at, name in enumerate(names)}, "label": labels})
    spec = replace(made.classes_spec(names), problem="multi_label")
    by, found = label_hints(predicted, labels, spec, "labels")
    assert by.startswith("confident learning (cleanlab")
    assert found["label_issue"].any()
    assert found["label_issue"].tolist() == find_label_issues(lists, chances.astype(np.float64), n_jobs=1).tolist()
    everywhere = pa.array([sorted({"ant", *row}) for row in labels.to_pylist()])
    by, found = label_hints(predicted, everywhere, spec, "labels")
    assert by == "the probability of the label (one label is in every row)"
    assert found["label_issue"].any()
    once = np.array([0] * 60 + [1] * 39 + [2])
    scored = made.scored_classes(made.chances_of(once, 3, accuracy=0.8), once, names)
    assert made.evaluated(tmp_path, scored, made.classes_spec(names), hints=True)["sections"]["hints"]["rows"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:May not flag all label issues")
@pytest.mark.usefixtures("page_libraries")
def test_words_to_look_at_are_those_of_cleanlabs_token_form(tmp_path: Path) -> None:
    from cleanlab.token_classification.filter import find_label_issues
    from cleanlab.token_classification.rank import get_label_quality_scores

    case = task_cases.CASES["token_classification"]
    sections = case.sections(tmp_path / "in", case.build(tmp_path / "base"), max_steps=2, batch_size=16)
    run = train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    model, table = run.path / "model", case.table(60).slice(10)
    pq.write_table(table, tmp_path / "t.parquet")
    folder = tmp_path / "eval"
    given: dict[str, Any] = {"key": "id", "engine": tiny.Here()}
    evaluate(model, tmp_path / "t.parquet", report=folder, label_hints=True, **given)
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    scored = tl.predict(model, table.select(["text"]), all_probabilities=True, engine=tiny.Here()).to_pylist()
    number = {tag: place for place, tag in enumerate(load_spec(model).labels)}
    tags, chances = [], []
    for row, one in zip(table.to_pylist(), scored, strict=True):
        begins = {span["start"]: number[f"B-{span['label']}"] for span in row["label"]}
        tags.append([begins.get(word["start"], 0) for word in one["words"]])
        chances.append(np.array([word["probabilities"] for word in one["words"]], dtype=np.float64))
        assert [row["text"][word["start"] : word["end"]] for word in one["words"]] == row["text"].split()
    issues = find_label_issues(tags, chances, n_jobs=1)
    assert issues
    expected = {(place, scored[place]["words"][word]["start"]) for place, word in issues}
    found = {(place, word["start"]) for place, row in enumerate(rows) for word in row["suggested"] or []}
    assert found == expected
    assert [row["label_quality"] for row in rows] == pytest.approx(get_label_quality_scores(tags, chances)[0])
    assert [row["label_issue"] for row in rows] == [place in {one for one, _ in issues} for place in range(50)]
    facts = json.loads((folder / "eval.json").read_text())
    assert facts["sections"]["hints"]["rows"] == len({place for place, _ in issues})
    page = (folder / "eval.html").read_text()
    assert "texts with words to look at, by confident learning over words (cleanlab" in page
    assert "words" not in pq.read_schema(folder / "rows.parquet").names
    assert {"label_quality", "suggested"} <= {*pq.read_schema(run.path / "eval" / "rows.parquet").names}
