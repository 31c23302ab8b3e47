"""A model's task is that of its class in transformers, and a classifier of texts reads a row by places, not by ids."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import families
import tiny
from torchlake import plugins
from torchlake.errors import DataError
from torchlake.models import load
from torchlake.models.config import ENCODERS, HEADS, IMAGE_MODELS, Head, architectures_of, tasks_of
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet
from torchlake.runtimes import varlen
from torchlake.tasks._pretrained import base_model, load_encoder

AUTO = "AutoModelForSequenceClassification"
END = 2
"The end token of the models below."


@pytest.mark.parametrize(
    ("model_type", "architecture", "task"),
    [
        ("marian", "MarianMTModel", "text2text_generation"),
        ("encoder-decoder", "EncoderDecoderModel", "text2text_generation"),
        ("deit", "DeiTForImageClassificationWithTeacher", "image_classification"),
        ("perceiver", "PerceiverForImageClassificationFourier", "image_classification"),
        ("xlnet", "XLNetLMHeadModel", "text_generation"),
        ("flaubert", "FlaubertForQuestionAnsweringSimple", "question_answering"),
        ("bert", "BertForNextSentencePrediction", None),
        ("vit", "ViTForMaskedImageModeling", None),
        ("bert", "", None),
    ],
)
def test_the_task_of_a_class(model_type: str, architecture: str, task: str | None) -> None:
    assert tasks_of(Head(model_type, architecture, None, {})) == ([] if task is None else [task])


def test_common_types_have_the_tasks_that_transformers_says() -> None:
    for task in HEADS:
        for model_type, classes in architectures_of(task).items():
            if model_type in ENCODERS or model_type in IMAGE_MODELS:
                for architecture in classes:
                    assert tasks_of(Head(model_type, architecture, None, {})) == [task]


def test_the_task_of_a_common_type_is_found_without_transformers(tmp_path: Path) -> None:
    """Its import is slow, and the driver and each worker look for the task."""
    folder = tiny.build_encoder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    (folder / "config.json").write_text(json.dumps(config))
    code = "import sys; from torchlake.models.spec import load_spec; print(load_spec(sys.argv[1]).task, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("text_classification ")
    assert not {"torch", "transformers"} & {*done.stdout.split()}


@pytest.mark.parametrize(
    ("change", "task", "message"),
    [
        ({"architectures": None}, None, r"no architectures.*Give the task of the model: text_classification, token_c"),
        ({"architectures": None}, "image_classification", "no model of the type 'bert' for image_classification"),
        ({}, "token_classification", "BertForSequenceClassification is for text_classification, not for token_class"),
        (
            {"problem_type": "single_label_classification", "id2label": {"0": "good"}, "label2id": {"good": 0}},
            None,
            "the head has one output, so its class would always have the probability 1",
        ),
        ({"problem_type": "regression"}, None, "regression, and the head has 2 outputs.*one number a row"),
        ({"model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"]}, None, "reads sounds"),
    ],
)
def test_a_head_without_a_task_is_refused_by_the_reason(
    tmp_path: Path, tiny_model: Path, change: dict[str, Any], task: str | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_spec(changed(tmp_path / "model", tiny_model, **change), task)


def test_a_task_is_given_where_config_json_names_no_class(tmp_path: Path, tiny_model: Path) -> None:
    folder = changed(tmp_path / "model", tiny_model, architectures=None)
    assert load_spec(folder, "text_classification").labels == tiny.SPEC.labels
    assert load_spec(folder, "token_classification").problem == "spans"


def changed(folder: Path, model: Path, **change: Any) -> Path:
    """A copy of a model as the hub has them, with changes of config.json."""
    shutil.copytree(model, folder)
    for name in ("task.json", "manifest.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return folder


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_a_head_of_another_size_than_config_json_says_is_named(
    tmp_path: Path, tiny_model: Path, names: list[str]
) -> None:
    change = {"id2label": dict(enumerate(names)), "problem_type": "regression" if len(names) == 1 else None}
    folder = changed(tmp_path / "model", tiny_model, **change)
    spec, number = load_spec(folder), len(names)
    with pytest.raises(DataError, match=rf"lack classifier\.bias of the size {number}, .* theirs is 2\."):
        load.load_model(folder, spec, auto_class=AUTO)
    with pytest.raises(DataError, match=rf"the head has 2 outputs, but config\.json asks for {number}$"):
        varlen.load(folder, spec, device="cpu")


def test_a_body_of_another_size_than_config_json_says_is_named(tmp_path: Path, tiny_model: Path) -> None:
    folder = changed(tmp_path / "model", tiny_model, intermediate_size=7)
    with pytest.raises(DataError, match=r"lack \S*intermediate\.dense\.bias of the size 7, .* theirs is \d+\."):
        base_model(folder, tiny.SPEC, AUTO)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_outputs_have_names_whatever_config_json_says(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    folder = changed(tmp_path / "model", tiny_model, return_dict=False)
    if kind == "image":
        parts = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.SiglipConfig(
            vision_config={**parts, "image_size": 16, "patch_size": 8}, text_config=parts
        )
        values = {**config.to_dict(), "return_dict": False}
        values["vision_config"]["return_dict"] = False
        transformers.SiglipForImageClassification(config).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(values))
    task = f"{kind}_classification"
    model = load.load_model(folder, auto_class=plugins.load("tasks", task).auto_class)
    inputs = {"input_ids": torch.tensor([[2, 7, 3]])} if kind == "text" else {"pixel_values": torch.ones(1, 3, 16, 16)}
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, model(**inputs, return_dict=True).logits)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Classifiers in torchlake and in transformers: without a padding token, with one, and with one that ends rows."""
    found = {}
    for name, family, pad in (("none", "llama", None), ("end", "gpt2", END), ("word", "llama", 9), ("bart", "bart", 1)):
        folder = tmp_path_factory.mktemp("heads") / name
        ids = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": END, "pad_token_id": pad}
        config = families.config_of(family, **ids, num_labels=3)
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(0)
            model = transformers.AutoModelForSequenceClassification.from_config(config)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0.0, 0.3)
            model.save_pretrained(folder)
        theirs: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        found[name] = load.load_model(folder, auto_class=AUTO), theirs.eval()
    return found


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(2, 11), min_size=1, max_size=6), min_size=2, max_size=4),
    padding=st.integers(0, 19),
)
@pytest.mark.parametrize("name", ["none", "end", "word", "bart"])
def test_a_row_has_the_logits_of_transformers_whatever_it_ends_in(
    classifiers: dict[str, tuple[Any, Any]], name: str, rows: list[list[int]], padding: int
) -> None:
    ours, theirs = classifiers[name]
    if name == "bart":  # it reads the last end token
        rows = [[*row, END] for row in rows]
    ids = torch.full((len(rows), max(map(len, rows))), padding)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
    with torch.inference_mode():
        together = ours(input_ids=ids, attention_mask=mask).logits
        alone = torch.cat([theirs(input_ids=torch.tensor([row])).logits for row in rows])
    np.testing.assert_allclose(together.numpy(), alone.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("special", "ends", "of_config", "expected"),
    [
        ({"pad_token": "<pad>"}, True, None, "<pad>"),
        ({"pad_token": "</s>"}, True, None, None),  # every row ends in the only one
        ({}, False, None, "</s>"),  # GPT-2: a text may have it, but the tokenizer does not add it
        ({"additional_special_tokens": ["<s>", "<|reserved_1|>"]}, False, None, "<|reserved_1|>"),
        ({"bos_token": "<s>"}, False, None, "<s>"),
        ({"pad_token": "<pad>"}, False, "</s>", "</s>"),  # the head reads by it already
        ({"bos_token": "<s>"}, False, "one", "<s>"),  # an ordinary word would become special in the saved tokenizer
    ],
)
def test_a_trained_head_pads_with_a_token_that_rows_do_not_end_in(
    tmp_path: Path, special: dict[str, Any], ends: bool, of_config: str | None, expected: str | None
) -> None:
    words = ["one", "two", "</s>", "three", "four", "<pad>", "<s>", "<|reserved_1|>"]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "four"))
    backend.pre_tokenizer = WhitespaceSplit()
    if ends:
        backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **special)
    pad = None if of_config is None else words.index(of_config)
    ids = {"vocab_size": len(words), "bos_token_id": None, "eos_token_id": END, "pad_token_id": pad}
    with quiet(), torch.random.fork_rng():
        base = transformers.AutoModelForCausalLM.from_config(families.config_of("llama", **ids))
        base.save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        model = base_model(tmp_path / "base", tiny.SPEC, AUTO).eval()
    made = load.load_tokenizer(tmp_path / "base")
    load.save_model_folder(tmp_path / "saved", model, model.config, made, tiny.SPEC, card={})
    found = json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"]
    assert (None if found is None else words[found]) == expected
    # transformers reads the folder as the model that was trained reads it, rows in a batch included.
    theirs: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert expected is None or tokens.pad_token == expected
    rows = ["one </s>", "two", "three one two"]
    batch = tokens(rows, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        ours = model(**batch).logits
        alone = [theirs(**tokens(row, return_tensors="pt", return_token_type_ids=False)).logits for row in rows]
        np.testing.assert_allclose(ours.numpy(), torch.cat(alone).numpy(), atol=1e-5)
        if expected is not None:
            np.testing.assert_allclose(theirs(**batch).logits.numpy(), ours.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["marian", "pegasus"])
@pytest.mark.parametrize("whole", [False, True])
def test_an_encoder_is_read_without_its_decoder(tmp_path: Path, name: str, whole: bool) -> None:
    config = families.config_of(name, vocab_size=20, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    with quiet(), torch.random.fork_rng():
        model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        (model if whole else model.get_encoder()).save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, weights=True).eval()
    assert type(load_encoder(tmp_path, weights=False)) is type(encoder)
    ids = torch.tensor([[5, 6, 7, 1]])
    with torch.inference_mode():
        states, expected = (each(input_ids=ids).last_hidden_state for each in (encoder, model.get_encoder()))
    np.testing.assert_allclose(states.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "change", [{"size": {"height": 24, "width": 24}}, {"do_resize": False, "size": {"height": 8, "width": 8}}]
)
def test_a_model_that_cannot_compute_its_processors_images_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tiny.build_vision(tmp_path)
    with quiet():
        config = transformers.AutoConfig.from_pretrained(folder, num_labels=2)
        transformers.AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    task, spec = plugins.load("tasks", "image_classification"), load_spec(folder)
    pixels = f"{change['size']['height']} x {change['size']['width']}"
    with pytest.raises(DataError, match=rf"cannot compute images of {pixels} pixels.*image_size is 16"):
        task.load_model(folder, spec)
