"""Models of transformers over concatenated rows: outputs of every family and task equal `eager`'s."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import families
import tiny
from sweeps import sweep
from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet
from torchlake.runtimes import _disentangled, _packed, eager, varlen

HEADS = {
    "text_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "feature_extraction": "AutoModel",
}
SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
CASES = [
    (kind, task)
    for kind in _packed.MODEL_TYPES
    for task, head in HEADS.items()
    if transformers.CONFIG_MAPPING[kind] in getattr(transformers, head)._model_mapping
]
QUICK = {
    ("modernbert", "text_classification"),
    ("modernbert", "token_classification"),
    ("deberta-v2", "text_classification"),
    ("deberta", "token_classification"),
    ("bert", "question_answering"),
    ("xlm-roberta", "token_classification"),
    ("qwen3", "feature_extraction"),
    ("gemma3_text", "text_classification"),
}


def build(folder: Path, kind: str, task: str, **others: Any) -> Path:
    """A model of the family with a head for the task, with random weights that are large enough to be seen."""
    tokenizer = tiny.wordpiece_tokenizer()
    known = transformers.CONFIG_MAPPING[kind]().to_dict()
    special = {name: tokenizer.sep_token_id for name in SPECIAL if name in known}
    special["num_labels"] = {"question_answering": 2}.get(task, 3)
    special["pad_token_id"] = tokenizer.pad_token_id
    special = {name: value for name, value in special.items() if name not in families.OWN.get(kind, {})}
    config = families.config_of(kind, vocab_size=len(tokenizer), **special, **others)
    if "sliding_window" in known:
        config.sliding_window = 16
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = getattr(transformers, HEADS[task]).from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.15)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batch_of(lengths: list[int]) -> dict[str, np.ndarray]:
    tokenizer = tiny.wordpiece_tokenizer()
    ids = np.full((len(lengths), max(lengths)), tokenizer.pad_token_id)
    for row, length in enumerate(lengths):
        ids[row, :length] = np.random.default_rng(row).integers(10, len(tokenizer), length)
    return {"input_ids": ids, "attention_mask": (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)}


def check(folder: Path, task: str) -> None:
    spec = load_spec(folder, "feature_extraction" if task == "feature_extraction" else None)
    assert spec.task == task
    spec = replace(spec, options=plugins.load("tasks", task).checked_options(dict(spec.options), UsageError))
    expected, found = (each.load(folder, spec, device="cpu") for each in (eager, varlen))
    batch = batch_of([1, 4, 9, 9, 9, 30, 77, 100])  # longer than the windows of a layer
    wanted = expected(**batch)
    assert np.abs(wanted).max() > 0.01
    real = slice(None) if wanted.ndim == 2 else batch["attention_mask"] != 0
    ours = found(**batch)
    assert ours.shape == wanted.shape
    scale = np.abs(wanted[real]).max()
    np.testing.assert_allclose(ours[real], wanted[real], atol=2e-5 * max(1.0, scale))
    order = np.random.default_rng(0).permutation(len(ours))
    mixed = found(**{name: array[order] for name, array in batch.items()})
    np.testing.assert_allclose(mixed[np.argsort(order)][real], ours[real], atol=1e-5 * max(1.0, scale))


@pytest.mark.parametrize(("kind", "task"), sweep(CASES, quick=QUICK))
def test_concatenated_rows_have_the_outputs_of_each_row(kind: str, task: str, tmp_path: Path) -> None:
    folder = build(tmp_path, kind, task)
    assert varlen.refusal(folder) is None
    check(folder, task)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"position_buckets": 8, "max_relative_positions": 24, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
            marks=pytest.mark.slow,
        ),
        {"position_buckets": -1, "max_relative_positions": 20},
        {"relative_attention": False, "position_biased_input": True},
    ],
    ids=["as DeBERTa-v3", "distances beyond the table", "without distances"],
)
def test_every_form_of_disentangled_attention(options: dict[str, Any], tmp_path: Path) -> None:
    """`deberta` has no buckets and no shared projections; it ignores these options."""
    for kind in _disentangled.MODEL_TYPES:
        for parts in ([], ["c2p"], ["p2c", "c2p"]) if options.get("relative_attention", True) else ([],):
            about = {"relative_attention": True, "position_biased_input": False, "pos_att_type": parts} | options
            folder = build(tmp_path / f"{kind}_{len(parts)}", kind, "text_classification", **about)
            check(folder, "text_classification")


def test_a_model_whose_rows_affect_one_another_is_refused_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5's distances are between all tokens of a batch."""
    folder = build(tmp_path, "megatron-bert", "text_classification")
    assert "megatron-bert" in str(varlen.refusal(folder))
    monkeypatch.setattr(_packed, "MODEL_TYPES", ("megatron-bert",))
    with pytest.raises(UsageError, match="affect one another: their states differ by .*Use the runtime 'eager'"):
        varlen.load(folder, load_spec(folder), device="cpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "deberta-v2", "conv_kernel_size": 3}, "conv_kernel_size"),
        ({"kind": "deberta", "talking_head": True}, "talking_head"),
        ({"kind": "bert", "is_decoder": True}, "absolute positions"),
        ({"kind": "gemma2"}, "limits the scores"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    kind = options.pop("kind")
    folder = build(tmp_path, kind, "text_classification", **options)
    assert reason in str(varlen.refusal(folder))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_decoders_head_reads_the_last_token_of_a_row_whatever_it_is(kind: str, tmp_path: Path) -> None:
    """Rows that end in the end token, which pads in many folders, or in the padding token."""
    folder = build(tmp_path, kind, "text_classification")
    spec, tokenizer = load_spec(folder), tiny.wordpiece_tokenizer()
    batch = batch_of([3, 5, 9, 9])
    for row, length, token in ((0, 3, tokenizer.sep_token_id), (1, 5, tokenizer.pad_token_id)):
        batch["input_ids"][row, length - 1] = token
    ours = varlen.load(folder, spec, device="cpu")(**batch)
    alone = eager.load(folder, spec, device="cpu")
    for row, length in enumerate([3, 5, 9, 9]):
        one = {name: array[row : row + 1, :length] for name, array in batch.items()}
        np.testing.assert_allclose(ours[row : row + 1], alone(**one), atol=1e-5)
