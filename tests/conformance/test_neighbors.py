"""A row's result never depends on the rows beside it, whatever task reads whichever encoder of transformers.

Many architectures are changed by padding despite the mask: FNet mixes all positions, Nystromformer averages segments,
XLNet and Funnel read the last position.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

import families
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.models.write import quiet

ROUNDING = 1e-4
TEXTS = ("good", "a film that we like", "it was boring and we did not like all of it , but the acting is great fun")
LONG = "we like the acting . " * 40
"Of several windows."
WRITERS = (
    *("bart", "bigbird_pegasus", "blenderbot", "fsmt", "led", "longt5", "m2m_100", "mbart", "mt5", "mvp", "nllb-moe"),
    *("pegasus", "pegasus_x", "plbart", "switch_transformers", "t5", "umt5"),
)
"Encoder-decoders that write texts."
MODELS = {
    "feature_extraction": ("AutoModel", auto.MODEL_MAPPING_NAMES),
    "token_classification": (
        "AutoModelForTokenClassification",
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    "question_answering": ("AutoModelForQuestionAnswering", auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    "zero_shot_classification": (
        "AutoModelForSequenceClassification",
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "text2text_generation": ("AutoModelForSeq2SeqLM", WRITERS),
}
LABELS = {
    "token_classification": {0: "O", 1: "B-PER", 2: "I-PER"},
    "zero_shot_classification": {0: "contradiction", 1: "neutral", 2: "entailment"},
}
CLASSES = ["fun", "a long and boring film"]
OPTIONS: dict[str, dict[str, Any]] = {
    "zero_shot_classification": {"task_options": {"candidate_labels": CLASSES}, "all_probabilities": True},
    "text2text_generation": {"max_new_tokens": 8},
}
"Of `predict`."
EXCLUDED = {
    ("feature_extraction", "t5gemma"): "torchlake refuses it: its configuration does not say how wide its states are",
    ("question_answering", "longformer"): "it asks for the three separators of its own tokenizer",
}
CASES = [
    (task, name)
    for task, (_, known) in MODELS.items()
    for name in (WRITERS if known is WRITERS else families.classifiers())
    if name in known and (task, name) not in EXCLUDED
]
CASES += [("feature_extraction", name) for name in ("longt5", "switch_transformers")]
QUICK = {("token_classification", "xlnet"), ("feature_extraction", "fnet")}


def build(folder: Path, task: str, name: str) -> Path:
    """A model of the family with the head of the task, and random weights."""
    tokenizer = tiny.bpe_tokenizer() if name in WRITERS else tiny.wordpiece_tokenizer()
    special: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.sep_token_id}
    special |= {"pad_token_id": tokenizer.pad_token_id, "architectures": []}
    if "bos_token_id" not in families.OWN.get(name, {}):
        special["bos_token_id"] = tokenizer.bos_token_id
    if transformers.CONFIG_MAPPING[name]().is_encoder_decoder:
        special["decoder_start_token_id"] = tokenizer.pad_token_id
    if task in LABELS:
        special["id2label"] = LABELS[task]
    config = families.config_of(name, **special)
    model_class: Any = getattr(transformers, MODELS[task][0])
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = model_class.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.3 if name in WRITERS else 0.1)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored(model: Path, task: str, texts: list[str]) -> list[dict[str, Any]]:
    """The predictions for the texts, in one table."""
    name = "context" if task == "question_answering" else "text"
    table = pa.table({name: texts, "question": ["what is it ?"] * len(texts)})
    settings = {"task": task, "engine": tiny.Here(), **OPTIONS.get(task, {})}
    rows: list[dict[str, Any]] = tl.predict(model, table, **settings).to_pylist()
    assert [row["error"] for row in rows] == [None] * len(texts)
    return rows


def differ(one: Any, other: Any) -> bool:
    """Whether two predictions differ by more than rounding."""
    if isinstance(one, float):
        return not abs(one - other) <= ROUNDING
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(differ(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) != len(other) or any(map(differ, one, other))
    return bool(one != other)


@pytest.mark.filterwarnings("default")  # transformers' own, of families that it is about to rename or to replace
@pytest.mark.parametrize(("task", "name"), sweep(CASES, quick=QUICK))
def test_a_row_has_the_same_result_alone_and_beside_others(task: str, name: str, tmp_path: Path) -> None:
    model = build(tmp_path / "model", task, name)
    texts = [*TEXTS, LONG]
    together = scored(model, task, texts)
    for row, text in zip(together, texts, strict=True):
        [alone] = scored(model, task, [text])
        if task == "zero_shot_classification":  # classes with equal probabilities change places
            row["label"] = alone["label"] = None
        assert not differ(row, alone), (row, alone)
