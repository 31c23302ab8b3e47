"""Zero-shot classification: the scores of transformers' pipeline, and what is refused."""

from pathlib import Path

import pyarrow as pa
import pytest
import transformers

import task_cases
import tiny
import torchlake as tl
from torchlake.errors import DataError, UsageError

LABELS = ["good", "bad", "a film about nothing"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_cases.build_entailment(tmp_path_factory.mktemp("zero") / "model")


@pytest.mark.parametrize("several", [False, True])
def test_scores_are_those_of_the_pipeline(model: Path, several: bool) -> None:
    table = tiny.reviews(8, seed=8).drop_columns("label")
    options = {"candidate_labels": LABELS, "hypothesis_template": "It is {}.", "multi_label": several}
    ours = tl.predict(model, table, task="zero_shot_classification", task_options=options, all_probabilities=True)
    pipeline = transformers.pipeline("zero-shot-classification", model=str(model), tokenizer=str(model))
    theirs = pipeline(table["text"].to_pylist(), LABELS, hypothesis_template="It is {}.", multi_label=several)
    for mine, its in zip(ours.to_pylist(), theirs, strict=True):
        found = {label: mine[f"prob_{label}"] for label in LABELS}
        assert found == pytest.approx(dict(zip(its["labels"], its["scores"], strict=True)), abs=1e-5)
        if several:
            assert set(mine["label"]) == {label for label, score in found.items() if score >= 0.5}
        else:
            assert (mine["label"], mine["score"]) == (its["labels"][0], pytest.approx(its["scores"][0], abs=1e-5))


def test_only_texts_are_cut_as_in_the_pipeline(model: Path) -> None:
    """The class is the end of its hypothesis: one that was cut had the probability of every other."""
    text, labels, length = "the film was good " * 20, ["good", "bad"], 16
    options = {"candidate_labels": labels}
    ours = tl.predict(
        model,
        pa.table({"text": [text]}),
        task="zero_shot_classification",
        task_options=options,
        all_probabilities=True,
        max_length=length,
    ).to_pylist()[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, model_max_length=length)
    theirs = transformers.pipeline("zero-shot-classification", model=str(model), tokenizer=tokenizer)(text, labels)
    assert ours["truncated"]
    found = {label: ours[f"prob_{label}"] for label in labels}
    assert found == pytest.approx(dict(zip(theirs["labels"], theirs["scores"], strict=True)), abs=1e-5)
    options["candidate_labels"] = ["good", "bad " * 20]
    with pytest.raises(
        UsageError, match="a hypothesis of candidate_labels takes .* tokens, and the longest input has 16"
    ):
        tl.predict(
            model,
            pa.table({"text": [text]}),
            task="zero_shot_classification",
            task_options=options,
            max_length=length,
        )


def test_a_loaded_model_has_its_options(model: Path) -> None:
    with tl.load(model, task="zero_shot_classification", task_options={"candidate_labels": LABELS}) as classify:
        assert classify("a good film")["label"] in LABELS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "candidate_labels must be the names"),
        ({"candidate_labels": ["one"]}, "at least two"),
        ({"candidate_labels": ["one", "one"]}, "two different classes"),
        ({"candidate_labels": [True, False]}, r"is \[True, False\], but a list of strings is expected \(in YAML, yes"),
        ({"candidate_labels": LABELS, "hypothesis_template": "about it"}, "must contain {} once"),
    ],
)
def test_options_that_cannot_be_are_refused(model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tl.predict(model, pa.table({"text": ["x"]}), task="zero_shot_classification", task_options=options)


def test_a_classifier_without_entailment_is_refused(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="no class is named entailment"):
        tl.predict(
            tiny_model,
            pa.table({"text": ["x"]}),
            task="zero_shot_classification",
            task_options={"candidate_labels": LABELS},
        )
