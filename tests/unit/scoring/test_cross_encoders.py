"""Cross-encoders that were trained elsewhere: the scores of sentence-transformers' CrossEncoder, or a refusal."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tiny
import torchlake as tl
from torchlake.config.task_spec import ACTIVATIONS
from torchlake.errors import DataError, UsageError
from torchlake.labels.predictions import FUNCTIONS

LONG = " ".join(tiny.GOOD * 30)
PAIRS = pd.DataFrame(
    {
        "q": ["good film", "good film", "the plot", "a bore", LONG],
        "p": ["great", "dull and that", "film", LONG, LONG],
        "truth": [0.1, 0.9, 0.5, 0.2, 0.4],
    }
)
SAVED = {"model_type": "CrossEncoder", "prompts": {"ask": "find: "}, "default_prompt_name": None}
MODULES = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
TRANSFORMER = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
NN = "torch.nn.modules"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives a classifier as transformers saves it, which scores pairs."""
    parent = tmp_path_factory.mktemp("hub")

    @cache
    def build(kind: Any = "bert", outputs: int = 1) -> Path:
        folder = parent / f"{kind}-{outputs}"
        tiny.build_pair_encoder(folder, kind=kind)
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=outputs)
        for parameter in model.classifier.parameters():
            parameter.data.normal_(0, 0.3)
        model.save_pretrained(folder)
        return folder

    return build


def edited(source: Path, target: Path, files: dict[str, Any]) -> Path:
    """A copy of a folder with other values in its JSON files."""
    shutil.copytree(source, target)
    for name, values in files.items():
        file = target / name
        kept = json.loads(file.read_text()) if file.exists() and isinstance(values, dict) else {}
        file.write_text(json.dumps({**kept, **values} if isinstance(values, dict) else values))
    return target


def version_6(**saved: Any) -> dict[str, Any]:
    files = {"modules.json": MODULES, "sentence_bert_config.json": TRANSFORMER}
    return {**files, "config_sentence_transformers.json": {**SAVED, **saved}}


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "version 6": ("bert", 1, version_6(activation_fn=f"{NN}.linear.Identity")),
    "version 6, its default": ("roberta", 1, version_6(activation_fn=None)),
    "version 6, prompt": ("bert", 1, version_6(activation_fn=f"{NN}.activation.Tanh", default_prompt_name="ask")),
    "version 6, short": ("bert", 1, {**version_6(), "tokenizer_config.json": {"model_max_length": 12}}),
    "version 4": ("bert", 1, {"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}}),
    "version 4, its default": ("bert", 1, {"config.json": {"sentence_transformers": {"version": "4.1.0"}}}),
    "one output, several labels": (
        *("bert", 1),
        {"config.json": {"sentence_transformers": {"version": "4.1.0"}, "problem_type": "multi_label_classification"}},
    ),
    "version 2": ("bert", 1, {"config.json": {"sbert_ce_default_activation_function": f"{NN}.linear.Identity"}}),
    "several outputs": ("bert", 3, version_6(activation_fn=f"{NN}.linear.Identity")),
    "several sigmoids": ("bert", 2, version_6(activation_fn=f"{NN}.activation.Sigmoid")),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_and_ranks_are_those_of_sentence_transformers(
    name: str, hub: Callable[..., Path], tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    kind, outputs, files = CASES[name]
    folder = edited(hub(kind, outputs), tmp_path / "model", files)
    pairs = PAIRS[["q", "p"]].to_numpy().tolist()
    theirs = CrossEncoder(str(folder), device="cpu")
    softmax = outputs > 1 and theirs.activation_fn.__class__.__name__ == "Identity"
    expected = theirs.predict(pairs, apply_softmax=softmax)
    scored = tl.predict(folder, PAIRS, text="q", text_pair="p", all_probabilities=True)
    found = scored[[column for column in scored if column == "prediction" or column.startswith("prob_")]]
    np.testing.assert_allclose(found.to_numpy().squeeze(), expected, atol=2e-5)
    if outputs > 1:
        assert scored["label"].tolist() == [f"LABEL_{row.argmax()}" for row in expected]
        return
    documents = ["film", "great", "a bore", "dull and that", "the plot of a film"]
    right = theirs.rank("good film", documents)
    ranked = tl.rank(folder, pd.DataFrame({"q": "good film", "d": documents}), query="q", document="d")
    assert ranked.sort_values("rank").index.tolist() == [one["corpus_id"] for one in right]
    assert sorted(ranked["score"], reverse=True) == pytest.approx([one["score"] for one in right], abs=2e-5)


def test_a_folder_of_the_hub_scores_pairs_on_other_runtimes_and_in_this_process(
    hub: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edited(hub("bert", 1), tmp_path / "model", {})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    rows = tokenizer(PAIRS["q"].tolist(), PAIRS["p"].tolist(), truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        right = model(**rows).logits[:, 0].numpy()
    given: dict[str, Any] = {"text": "q", "text_pair": "p"}
    for runtime in ("eager", "varlen"):
        found = tl.predict(folder, PAIRS, runtime=runtime, **given)["prediction"]
        np.testing.assert_allclose(found, right, atol=2e-5)
    with tl.load(folder, text_pair="p") as score:
        found = [row["prediction"] for row in score([{"text": q, "p": p} for q, p in PAIRS[["q", "p"]].to_numpy()])]
    np.testing.assert_allclose(found, right, atol=2e-5)
    measured = tl.evaluate(folder, PAIRS, label="truth", **given)
    assert measured.metrics["rmse"].value == pytest.approx(np.sqrt(np.mean((right - PAIRS["truth"]) ** 2)), abs=1e-5)
    with pytest.raises(UsageError, match="has no input for token types"):
        tl.predict(folder, PAIRS, runtime="onnx", **given)
    chosen = tl.optimize(folder, PAIRS, runtimes=["onnx"], rows=5, engine=tiny.Here(), **given)
    assert [one.verdict[:7] for one in chosen.candidates] == ["chosen", "refused"]
    with pytest.raises(UsageError, match=r"name the column of documents \(document=\)"):
        tl.rank(folder, PAIRS, query="q")


def test_two_outputs_rank_by_the_second_class_unless_it_has_a_name(hub: Callable[..., Path], tmp_path: Path) -> None:
    folder, given = hub("roberta", 2), {"query": "q", "document": "p"}
    scored = tl.predict(folder, PAIRS, text="q", text_pair="p", all_probabilities=True)
    assert tl.rank(folder, PAIRS, **given)["score"].tolist() == scored["prob_LABEL_1"].tolist()
    named = edited(folder, tmp_path / "model", {"config.json": {"id2label": {"0": "relevant", "1": "other"}}})
    assert tl.rank(named, PAIRS, relevant="relevant", **given)["score"].tolist() == scored["prob_LABEL_0"].tolist()
    with pytest.raises(UsageError, match="has the classes relevant, other. Name the one of relevant documents"):
        tl.rank(named, PAIRS, **given)


@pytest.mark.parametrize(
    ("outputs", "files", "message"),
    [
        (1, version_6(activation_fn="my.Activation"), "has the activation function 'my.Activation'; .* supports Id"),
        (1, version_6(activation_fn=f"{NN}.activation.Threshold"), "'torch.nn.modules.activation.Threshold'"),
        (3, version_6(activation_fn=f"{NN}.activation.Tanh"), "for several outputs torchlake supports Identity, Soft"),
        (1, version_6(default_prompt_name="none"), "prompts has no prompt of that name"),
        (1, {**version_6(), "modules.json": [*MODULES, {"type": "sentence_transformers.x.LogitScore"}]}, "LogitScore"),
        (1, {**version_6(), "sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case is True; .* F"),
        (1, {**version_6(), "sentence_bert_config.json": {"processing_kwargs": {"text": 1}}}, "processing_kwargs is"),
        (
            1,
            {**version_6(), "sentence_bert_config.json": {"modality_config": {"text": "x"}}},
            "modality_config is {'text': 'x'}",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(
    outputs: int, files: dict[str, Any], message: str, hub: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edited(hub("bert", outputs), tmp_path / "model", files)
    with pytest.raises(DataError, match=message):
        tl.rank(folder, PAIRS, query="q", document="p")


def test_activations_are_those_of_torch() -> None:
    x = np.linspace(-30, 30, 101, dtype=np.float32)
    assert tuple(FUNCTIONS) == ACTIVATIONS
    for name, function in FUNCTIONS.items():
        np.testing.assert_allclose(function(x), getattr(torch.nn, name)()(torch.from_numpy(x)), rtol=1e-5, atol=1e-6)
