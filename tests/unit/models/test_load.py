"""Model folders: what is written can be read, by transformers too, and what is wrong is said."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

import families
import tiny
from sweeps import examples
from torchlake.atomic_io import digest
from torchlake.config.task_spec import Label, label_name, spec_from_json, spec_to_json
from torchlake.errors import DataError, StorageError, UsageError
from torchlake.models import folders, load, tokenizer, tokenizer_file
from torchlake.models.load import TaskSpec
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet
from torchlake.tasks._pretrained import base_model

AUTO = "AutoModelForSequenceClassification"


def test_transformers_loads_a_model_folder(tiny_model: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(tiny_model)
    ours = load.load_model(tiny_model, load_spec(tiny_model), auto_class=AUTO)
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    assert theirs.config.problem_type == "single_label_classification"
    assert not ours.training
    assert ours.dtype == torch.float32
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer("a good film")["input_ids"] == load.load_tokenizer(tiny_model)("a good film")["input_ids"]


NAMES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(["x"])


@given(id2label=st.dictionaries(st.integers(0, 3).map(str) | st.just("x"), NAMES, min_size=2, max_size=4))
@example(id2label={"0": False, "1": 2, "2": 1.5, "3": "x"})
@example(id2label={"0": "a", "2": "b"})
@example(id2label={"0": "1", "1": 1})
@settings(max_examples=examples(50, quick=12))
def test_names_of_classes_are_strings_or_refused_in_words(id2label: dict[str, Any], tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("task.json", "manifest.json"))
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "id2label": id2label}))
        try:
            labels = load_spec(folder).labels
        except DataError as error:
            assert "id2label" in str(error) or "x" in id2label  # noqa: PT017
            return
    assert len(set(labels)) == len(id2label)
    assert labels == tuple(label_name(id2label[str(index)]) for index in range(len(labels)))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, tiny_bert: Path, tiny_model: Path) -> None:
    again = tiny.build_model(tmp_path / "again", encoder=tiny.build_encoder(tmp_path / "encoder"))
    assert folders.model_hash(again) == folders.model_hash(tiny_model)
    assert folders.tokenizer_hash(again) == folders.tokenizer_hash(tiny_model)
    other = tiny.build_model(tmp_path / "other", encoder=tiny_bert, seed=1)
    assert folders.model_hash(other) != folders.model_hash(tiny_model)
    assert folders.tokenizer_hash(other) == folders.tokenizer_hash(tiny_model)


def test_the_hash_needs_no_manifest(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    (tmp_path / "model" / "README.md").write_text("another card")
    assert folders.model_hash(tmp_path / "model") == folders.model_hash(tiny_model)


@pytest.mark.parametrize(
    "name", ["a.model", "source.spm", "target_vocab.json", "o200k.tiktoken", "bpe.codes", "dict.txt"]
)
def test_an_edited_vocabulary_is_another_tokenizer(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Of the same size and time; exports copy it, and it is downloaded with a model of the Hub."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / name).write_text("{}" if name.endswith("json") else "ab")
    before, time = (folders.model_hash(model), folders.tokenizer_hash(model)), (model / name).stat().st_mtime_ns
    (model / name).write_text("[]" if name.endswith("json") else "ba")
    os.utime(model / name, ns=(time, time))
    after = (folders.model_hash(model), folders.tokenizer_hash(model))
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert any(fnmatch(name, pattern) for pattern in folders.HUB_FILES)


def test_further_chat_templates_are_part_of_the_hash(tmp_path: Path, tiny_model: Path) -> None:
    """transformers saves named ones beside the default one, and renders conversations with tools by `tool_use`."""
    shutil.copytree(tiny_model, tmp_path / "model")
    model, hashes = tmp_path / "model", []
    for content in (None, "a", "b"):
        if content is not None:
            (model / "additional_chat_templates").mkdir(exist_ok=True)
            (model / "additional_chat_templates" / "tool_use.jinja").write_text(content)
        hashes.append((folders.tokenizer_hash(model), folders.model_hash(model)))
    assert hashes[0] == (folders.tokenizer_hash(tiny_model), folders.model_hash(tiny_model))
    assert all(len(set(each)) == 3 for each in zip(*hashes, strict=True))


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label", ("no", "yes", 'ünïcode " label')),
        ("single_label", (-1, 0, 7)),
        ("single_label", (False, True)),
        ("multi_label", ("a", "b")),
        ("regression", ()),
    ],
)
def test_a_spec_comes_back(tmp_path: Path, tiny_bert: Path, problem: str, labels: tuple[Label, ...]) -> None:
    spec = tiny.spec_for(problem, labels)
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=spec)
    loaded = load_spec(folder)
    assert loaded == spec
    assert [type(label) for label in loaded.labels] == [type(label) for label in labels]
    model = load.load_model(folder, loaded, auto_class=AUTO)
    assert model.config.num_labels == max(1, len(labels))


def test_a_task_without_labels_comes_back(tmp_path: Path) -> None:
    spec = TaskSpec(task="text_generation", problem="next_token", labels=(), text="text", label=None, max_length=64)
    assert spec_from_json(tmp_path / "task.json", json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_tasks_fingerprint_is_that_of_earlier_versions() -> None:
    """Else every prepared table would have to be prepared again."""
    assert digest(spec_to_json(tiny.SPEC)) == "3e2dd7d4256d4b7cc4738b6a1f6b0040016990e34b19794bcaec4587e1fd1a1d"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ["a", 1]}, "all strings"),
        ({"labels": ["a", "a"]}, "distinct"),
        ({"labels": []}, "empty only for regression, next_token, next_answer_token"),
        ({"label": None}, "label: expected str, got None"),
        (
            {"problem": "next_token", "labels": []},
            "label must be null for next_token, next_answer_token, preference, and only",
        ),
        ({"problem": "riddle"}, "riddle"),
        ({"max_length": "long"}, "max_length"),
        ({"surprise": 1}, "must have the keys"),
    ],
)
def test_a_task_that_was_edited_wrongly(
    tmp_path: Path, tiny_model: Path, change: dict[str, object], message: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "task.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        load_spec(tmp_path / "model")


def test_a_folder_without_a_task_is_read_from_its_config(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("task.json", "manifest.json"):
        (tmp_path / "model" / name).unlink()
    assert load_spec(tmp_path / "model") == replace(tiny.SPEC, max_length=128)


def test_an_encoder_without_a_head_has_no_task(tiny_bert: Path) -> None:
    with pytest.raises(DataError, match="BertModel"):
        load_spec(tiny_bert)
    with pytest.raises(DataError, match=r"classifier\.bias.*predictions would be random"):
        load.load_model(tiny_bert, auto_class=AUTO)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, tiny_model: Path, damage: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-20] ^= 1
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(bytes(content) if damage == "flip" else bytes(content[:-4]))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        load.load_model(tmp_path / "model", auto_class=AUTO)


def test_a_model_is_replaced_whole_or_not_at_all(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    before = folders.model_hash(folder)
    for site in ("model.write", "model.task.write", "model.card.rename", "model.manifest.write", "model.rename"):
        monkeypatch.setenv("TORCHLAKE_FAILPOINT", f"{site}:1:enospc")
        monkeypatch.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(StorageError, match="free there"):
            tiny.build_model(folder, encoder=tiny_bert, seed=1)
        assert folders.model_hash(folder) == before
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.delenv("TORCHLAKE_FAILPOINT")
    tiny.build_model(folder, encoder=tiny_bert, seed=1)
    assert folders.model_hash(folder) != before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_state_dict_is_saved_like_its_model(tmp_path: Path, tiny_bert: Path) -> None:
    torch.manual_seed(0)
    model = base_model(tiny_bert, tiny.SPEC, AUTO)
    tokenizer = load.load_tokenizer(tiny_bert)
    card = {"base": "tiny", "metrics": {"accuracy": 0.5, "auc": {"value": 0.7, "low": 0.6, "high": 0.8}}}
    load.save_model_folder(tmp_path / "model", model, model.config, tokenizer, tiny.SPEC, card=card)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load.save_model_folder(tmp_path / "state", state, model.config, tokenizer, tiny.SPEC, card=card)
    assert folders.model_hash(tmp_path / "model") == folders.model_hash(tmp_path / "state")
    text = (tmp_path / "model" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "| auc | 0.7000 | 0.6000 to 0.8000 |" in text


def test_the_head_is_fresh_and_the_encoder_is_not(tiny_model: Path, tiny_bert: Path) -> None:
    weight, bias, inside = "classifier.weight", "classifier.bias", "bert.pooler.dense.weight"
    tuned = load.load_model(tiny_model, auto_class=AUTO).state_dict()
    other = tiny.spec_for("single_label", ("no", "yes"))
    torch.manual_seed(3)
    first = base_model(tiny_model, other, AUTO).state_dict()
    torch.manual_seed(3)
    second = base_model(tiny_bert, other, AUTO).state_dict()
    third = base_model(tiny_bert, other, AUTO).state_dict()
    assert not torch.equal(first[weight], tuned[weight])
    assert torch.equal(first[inside], second[inside])
    assert not torch.equal(second[weight], third[weight])
    assert torch.equal(second[bias], torch.zeros(2))
    five = base_model(tiny_model, tiny.spec_for("single_label", ("a", "b", "c", "d", "e")), AUTO)
    assert five.state_dict()[weight].shape == (5, 32)


def test_tied_weights_are_saved_once_and_load(tmp_path: Path, tiny_bert: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_bert)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertForMaskedLM(config)
    load.save_model_folder(tmp_path / "model", model, config, tokenizer, tiny.SPEC, card={})
    # A pretrained language model is a base: its prediction head is left behind, its missing pooler is drawn.
    assert base_model(tmp_path / "model", tiny.SPEC, AUTO).config.num_labels == 2


@pytest.mark.parametrize(
    ("own", "of_config", "expected"),
    [
        ("[PAD]", None, "[PAD]"),
        ("[PAD]", "[SEP]", "[SEP]"),  # by which a decoder finds a row's last token
        (None, None, "[SEP]"),  # what ends a text
        ("<beyond the embeddings>", None, "[SEP]"),
        (None, "good", "[SEP]"),  # an ordinary word would become special when the tokenizer is saved
    ],
)
def test_a_tokenizer_pads_with_a_token_that_the_model_has(
    tmp_path: Path, own: str | None, of_config: str | None, expected: str
) -> None:
    folder = families.build(tmp_path / "llama", "llama", kind="classifier")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.pad_token = "[SEP]", own
    if own not in (None, "[PAD]"):
        tokenizer.add_special_tokens({"pad_token": own})
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    named = None if of_config is None else tokenizer.convert_tokens_to_ids(of_config)
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": named}))
    assert load.load_tokenizer(folder).pad_token == expected


def test_lengths(tiny_bert: Path, tiny_roberta: Path) -> None:
    assert load.max_length(tiny_bert) == 128
    assert load.max_length(tiny_roberta) == 128  # 130 positions, the first two unused
    assert load.max_length(tiny_bert, 16) == 16
    with pytest.raises(DataError, match="128 tokens only"):
        load.max_length(tiny_roberta, 129)


def test_roberta_takes_its_longest_row(tiny_roberta: Path) -> None:
    model = base_model(tiny_roberta, tiny.SPEC, AUTO).eval()
    with torch.inference_mode():
        assert model(torch.full((1, load.max_length(tiny_roberta)), 7)).logits.isfinite().all()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """What is looked for on the hub, by name and revision, from `tmp_path`; it has none of it."""
    calls: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None = None, **options: object) -> str:
        calls.append((name, revision))
        raise OSError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize("name", ["models/minilm", "./models/minilm", "models/minilm/", "~/models/minilm"])
def test_a_mistyped_path_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, str | None]], name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "mini-lm").mkdir(parents=True)
    with pytest.raises(DataError, match=r"there is no such model folder.* Did you mean '.*models/mini-lm'\?"):
        load.model_folder(name)
    assert asked == []


@pytest.mark.parametrize("name", ["./minilm", "../minilm", "/no/such/minilm", "~/minilm", "a/b/c", "model/x/"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(asked: list[tuple[str, str | None]], name: str) -> None:
    Path("model").mkdir()
    with pytest.raises(DataError, match="there is no such model folder"):
        load.model_folder(name)
    assert asked == []


def test_the_first_folder_that_is_mistyped_is_named(asked: list[tuple[str, str | None]]) -> None:
    Path("models/minilm").mkdir(parents=True)
    with pytest.raises(DataError, match=r"Could not download it .* Did you mean 'models'\?"):
        load.model_folder("modles/minilm")


@pytest.mark.parametrize(
    ("model", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("gpt2", "gpt2", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
        ("gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e", "gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    ],
)
def test_a_revision_of_the_hub_is_named_after_the_model(
    asked: list[tuple[str, str | None]], model: str, name: str, revision: str | None
) -> None:
    with pytest.raises(DataError, match="Could not download it"):
        load.model_folder(model)
    assert asked == [(name, revision)]
    Path(model).mkdir(parents=True)
    assert load.model_folder(model) == Path(model)


def test_what_is_no_base_model_is_named(tmp_path: Path, tiny_bert: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match="no such model folder"):
        base_model(missing, tiny.SPEC, AUTO)
    with pytest.raises(
        DataError,
        match=r"no such folder here .*nobody/nothing.*Could not download it from the .* Hub \(HF_HUB_OFFLINE is set\)",
    ):
        load.load_tokenizer("nobody/nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        load_spec(tmp_path / "file")
    with pytest.raises(DataError, match=r"no weights|not a model folder"):
        load_spec(tmp_path)
    shutil.copytree(tiny_bert, tmp_path / "wordless")
    (tmp_path / "wordless" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="no tokenizer"):
        load.load_tokenizer(tmp_path / "wordless")
    vision = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with quiet():
        ViTModel(vision).save_pretrained(tmp_path / "vit")
    with pytest.raises(DataError, match="'vit' has no head for text_classification"):
        base_model(tmp_path / "vit", tiny.SPEC, AUTO)


def test_a_tokenizer_without_padding(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(tokenizer_models.BPE())).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no padding token"):
        load.load_tokenizer(tmp_path)


def test_a_tokenizer_in_python(tmp_path: Path, tiny_bert: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "slow")
    (tmp_path / "slow" / "tokenizer.json").unlink()
    (tmp_path / "slow" / "vocab.txt").write_text("[UNK]")
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}))
    with pytest.raises(DataError, match="CanineTokenizer is a slow tokenizer in Python"):
        load.load_tokenizer(tmp_path / "slow")


def test_an_encoder_with_missing_layers(tmp_path: Path, tiny_bert: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "torn")
    file = tmp_path / "torn" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"lack bert\.encoder\.layer\.2"):
        base_model(tmp_path / "torn", tiny.SPEC, AUTO)


def test_the_head_must_fit_the_task(tiny_model: Path) -> None:
    spec: TaskSpec = tiny.spec_for("single_label", ("a", "b", "c"))
    with pytest.raises(DataError, match=r"2 outputs, but task\.json asks for 3$"):
        load.load_model(tiny_model, spec, auto_class=AUTO)


READ_AND_TOUCH = """
import re, sys
from pathlib import Path
from torchlake.models.load import load_model

def own() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous:\\s+(\\d+)", rollup)[1]) << 10

import torch, transformers.models.bert.modeling_bert
before = own()
model = load_model(sys.argv[1], auto_class="AutoModelForSequenceClassification")
assert sum(parameter.sum().item() for parameter in model.parameters()) != 0
print(own() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells shared pages from own ones")
def test_processes_share_the_weights(tmp_path: Path) -> None:
    """A process that has loaded a model and read every weight owns hardly any page of them: they are the file's."""
    config = BertConfig(hidden_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=50_000)
    with quiet():
        BertForSequenceClassification(config).save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", READ_AND_TOUCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert weights > 100 << 20
    assert int(done.stdout) < weights / 4


LABELS = ("a", "b", "c")


def output_layer(folder: Path, spec: TaskSpec) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    model: Any = base_model(folder, spec, AUTO)
    return model.classifier.weight.detach().clone(), model.classifier.bias.detach().clone()


def test_the_same_classes_keep_their_rows_of_the_head(tmp_path: Path, tiny_bert: Path) -> None:
    spec = tiny.spec_for("single_label", LABELS)
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=spec)
    trained: Any = load.load_model(folder, spec, auto_class=AUTO)
    weight, bias = output_layer(folder, spec)
    assert torch.equal(weight, trained.classifier.weight)
    assert torch.equal(bias, trained.classifier.bias)
    other = tiny.spec_for("single_label", ("c", "a", "b"))
    weight, bias = output_layer(folder, other)
    assert torch.equal(weight, trained.classifier.weight[[2, 0, 1]])
    assert base_model(folder, other, AUTO).config.id2label == {0: "c", 1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("problem", "labels"),
    [("single_label", ("a", "b", "d")), ("single_label", ("a", "b")), ("multi_label", LABELS), ("regression", ())],
)
def test_other_classes_get_a_head_of_their_own(
    tmp_path: Path, tiny_bert: Path, problem: str, labels: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """As wide or not: it is the head that the bare encoder would get."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=tiny.spec_for("single_label", LABELS))
    spec = tiny.spec_for(problem, labels)
    with caplog.at_level("INFO", logger="torchlake"):
        weight, _ = output_layer(folder, spec)
    trained: Any = load.load_model(folder, auto_class=AUTO)
    assert weight.shape[0] == max(1, len(labels))
    assert not any(torch.equal(row, before) for row in weight for before in trained.classifier.weight)
    assert "the head is initialized at random" in caplog.text


def test_a_classifier_of_transformers_keeps_its_head_by_the_names_of_its_classes(
    tmp_path: Path, tiny_bert: Path
) -> None:
    """It has no task.json; config.json names the classes."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=tiny.spec_for("single_label", (1, 2)))
    (folder / "task.json").unlink()
    (folder / "manifest.json").unlink()
    trained: Any = load.load_model(folder, auto_class=AUTO)
    assert torch.equal(output_layer(folder, tiny.spec_for("single_label", (1, 2)))[0], trained.classifier.weight)
    assert not torch.equal(output_layer(folder, tiny.spec_for("single_label", (1, 3)))[0], trained.classifier.weight)


def test_a_regression_keeps_its_head_in_the_same_units(tmp_path: Path, tiny_bert: Path) -> None:
    spec = replace(tiny.spec_for("regression", ()), mean=1000.0, deviation=50.0)
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert, spec=spec)
    trained: Any = load.load_model(folder, auto_class=AUTO)
    assert torch.equal(output_layer(folder, spec)[0], trained.classifier.weight)
    assert not torch.equal(output_layer(folder, replace(spec, mean=0.0))[0], trained.classifier.weight)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": 1.0},
        {"mean": 1.0, "deviation": 0.0},
        {"mean": float("nan"), "deviation": 1.0},
        {"mean": True, "deviation": 1.0},
        {"mean": "1", "deviation": 1.0},
        {"problem": "single_label", "labels": ["a", "b"], "mean": 1.0, "deviation": 1.0},
        {"median": 1.0},
    ],
)
def test_a_scale_that_no_regression_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    value = {**spec_to_json(tiny.spec_for("regression", ())), **change}
    with pytest.raises(DataError, match="task.json: "):
        spec_from_json(tmp_path / "task.json", value)


def test_a_scale_comes_back_and_may_be_absent(tmp_path: Path) -> None:
    plain = tiny.spec_for("regression", ())
    assert spec_to_json(plain).keys() == {"task", "problem", "labels", "text", "label", "max_length"}
    for spec in (plain, replace(plain, mean=-2.5, deviation=1e-3)):
        assert spec_from_json(tmp_path / "task.json", json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_library_that_loses_tokens_is_refused(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokenizers 0.23.1 does: what is cut from a text is gone."""

    class Forgetful:
        def __init__(self, model: Any) -> None:
            self.made, self.most = Tokenizer(model), 0

        def enable_truncation(self, most: int) -> None:
            self.most = most

        def encode(self, text: str) -> Any:
            return self.made.encode(" ".join(text.split()[: self.most]))

    tokenizer_file.check_library.cache_clear()
    monkeypatch.setattr("tokenizers.Tokenizer", Forgetful)
    with pytest.raises(UsageError, match=r"loses the tokens of rows beyond the maximum length.*tokenizers>=0\.23\.3"):
        tokenizer.load_text_tokenizer(tiny_bert)
    with pytest.raises(UsageError, match="loses the tokens"):
        tokenizer.load_tokenizer(tiny_bert)
