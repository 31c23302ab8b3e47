"""tokenizer.json read alone gives the ids that transformers gives, for every kind of tokenizer, or is not used.

So does config.json of the encoders that are read without transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    BertTokenizer,
    CamembertTokenizer,
    DistilBertTokenizer,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

import families
import tiny
from torchlake.models import config as model_config
from torchlake.models.load import load_text_tokenizer, load_tokenizer
from torchlake.models.tokenizer_file import MODEL_TYPES, TextTokenizer
from torchlake.tasks._tokens import tokenize

TEXTS = [
    "a lovely film , warm and very funny",
    "The PLOT is Dull!!  two  spaces\tand\nlines",
    "café naïve Ünïcode ﬁ ½ ™",
    "漢字 and かな mixed 한국어",
    "emoji 🙂 and \u202e rtl \u200b zero width \x00 nul",
    "[MASK] in [CLS] the <mask> text <s> </s> [SEP]",
    " leading and trailing ",
    "good " * 300,
    "x" * 200,
    ".",
    "<new> token",
]
WORDS = [*tiny.SPECIAL, *tiny.GOOD, *tiny.BAD, *tiny.OTHER, *"abcdefghijklmnopqrstuvwxyzABCDEFG.,!?éü漢"]
VOCABULARY = {
    word: index for index, word in enumerate(dict.fromkeys([*WORDS, *(f"##{letter}" for letter in "abcdeorst")]))
}
PIECES = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")] + [(f"▁{word}", -2.0) for word in tiny.OTHER]
PIECES += [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"] + [("<mask>", 0.0)]


def roberta(**options: Any) -> RobertaTokenizer:
    made = json.loads(tiny.bpe_tokenizer().backend_tokenizer.to_str())["model"]
    return RobertaTokenizer(vocab=made["vocab"], merges=[tuple(merge) for merge in made["merges"]], **options)


def with_new_token(tokenizer: Any) -> Any:
    tokenizer.add_tokens([AddedToken("<new>", lstrip=True)])
    return tokenizer


def with_limits(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.enable_truncation(16, direction="left")
    tokenizer.backend_tokenizer.enable_padding(length=16, pad_id=0, pad_token="[PAD]")
    return tokenizer


Make = Callable[[], Any]
READ: dict[str, tuple[str, Make]] = {
    "backend": ("bert", tiny.wordpiece_tokenizer),
    "backend, of roberta": ("roberta", tiny.bpe_tokenizer),
    "backend, added token": ("bert", lambda: with_new_token(tiny.wordpiece_tokenizer())),
    "backend, limits": ("bert", lambda: with_limits(tiny.wordpiece_tokenizer())),
    "bert": ("bert", lambda: BertTokenizer(vocab=VOCABULARY)),
    "bert, cased": ("bert", lambda: BertTokenizer(vocab=VOCABULARY, do_lower_case=False, strip_accents=False)),
    "bert, accents": (
        "bert",
        lambda: BertTokenizer(vocab=VOCABULARY, strip_accents=False, tokenize_chinese_chars=False),
    ),
    "bert, limits": ("bert", lambda: with_limits(BertTokenizer(vocab=VOCABULARY, model_max_length=64))),
    "bert, left": ("bert", lambda: BertTokenizer(vocab=VOCABULARY, truncation_side="left")),
    "bert, added token": ("bert", lambda: with_new_token(BertTokenizer(vocab=VOCABULARY))),
    "distilbert": ("distilbert", lambda: DistilBertTokenizer(vocab=VOCABULARY)),
    "roberta": ("roberta", roberta),
    "roberta, space": ("roberta", lambda: roberta(add_prefix_space=True)),
}
OTHERS: dict[str, tuple[str, Make]] = {
    "camembert": ("camembert", lambda: CamembertTokenizer(vocab=PIECES)),
    "xlm-roberta": ("xlm-roberta", lambda: XLMRobertaTokenizer(vocab=PIECES)),
    "gpt": ("gpt2", tiny.language_tokenizer),
}


def saved(folder: Path, kind: str, tokenizer: Any) -> Path:
    families.config_of(kind, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")


def agrees(folder: Path) -> bool:
    """Whether tokenizer.json was read alone; either way everything that scoring uses is as in transformers."""
    read, expected = load_text_tokenizer(folder), load_tokenizer(folder)
    length = tiny.SPEC.max_length
    for found, wanted in zip(tokenize(read, TEXTS, length), tokenize(expected, TEXTS, length), strict=True):
        assert found.tolist() == wanted.tolist()
    for name in ("pad_token_id", "eos_token_id", "truncation_side", "model_max_length"):
        assert getattr(read, name) == getattr(expected, name), name
    assert read.convert_ids_to_tokens(7) == expected.convert_ids_to_tokens(7)
    return isinstance(read, TextTokenizer)


@pytest.mark.parametrize("name", READ)
def test_the_file_alone_gives_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    kind, make = READ[name]
    assert agrees(saved(tmp_path, kind, make()))


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    kind, make = OTHERS[name]
    assert not agrees(saved(tmp_path, kind, make()))


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "lower case": ("tokenizer_config.json", lambda value: value.update(do_lower_case=False)),
    "accents": ("tokenizer_config.json", lambda value: value.update(strip_accents=True)),
    "another mask": ("tokenizer_config.json", lambda value: value.update(mask_token="<new>")),
    "another unknown": ("tokenizer_config.json", lambda value: value.update(unk_token="good")),
    "extra tokens": ("tokenizer_config.json", lambda value: value.update(extra_special_tokens=["<new>"])),
    "end token": ("tokenizer_config.json", lambda value: value.update(add_eos_token=True, eos_token="[SEP]")),
    "normalizer": ("tokenizer.json", lambda value: value["normalizer"].update(clean_text=False)),
    "prefix": ("tokenizer.json", lambda value: value["model"].update(continuing_subword_prefix="@@")),
    "word length": ("tokenizer.json", lambda value: value["model"].update(max_input_chars_per_word=50)),
    "processor": ("tokenizer.json", lambda value: value.update(post_processor=None)),
    "splitting": ("tokenizer.json", lambda value: value.update(pre_tokenizer={"type": "Whitespace"})),
    "mask strips": ("tokenizer.json", lambda value: value["added_tokens"][-1].update(lstrip=True)),
}


@pytest.mark.parametrize("kind", ["backend", "bert"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_edited_folder_gives_the_ids_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """What transformers makes of contradicting files is its own affair: such files are not read alone, or agree."""
    file, change = CHANGES[name]
    folder = saved(tmp_path, READ[kind][0], READ[kind][1]())
    edit(folder / file, change)
    agrees(folder)


@pytest.mark.parametrize(
    "content", [{"mask_token": "<new>"}, {"mask_token": "[MASK]"}, {"additional_special_tokens": ["<new>"]}]
)
def test_the_special_tokens_of_older_folders_count(content: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", BertTokenizer(vocab=VOCABULARY))
    (folder / "special_tokens_map.json").write_text(json.dumps(content))
    agrees(folder)


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
@pytest.mark.parametrize(
    "given", [{}, {"num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 5, "vocab_size": 99}]
)
def test_the_configuration_is_that_of_transformers(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **given}))
    (tmp_path / "tokenizer.json").write_text("{}")
    read, expected = model_config.encoder_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert read is not None
    for name, value in read.items():
        if not (kind == "distilbert" and name in ("layer_norm_eps", "is_decoder", "hidden_act")):
            assert value == getattr(expected, name), name
    assert model_config.embeddings(tmp_path) == expected.vocab_size
    assert model_config.padding_id(tmp_path) == expected.pad_token_id


def test_the_fields_have_the_names_that_distilbert_gives_them(tmp_path: Path) -> None:
    AutoConfig.for_model("distilbert", n_layers=2, n_heads=4, dim=32, activation="relu").save_pretrained(tmp_path)
    read = model_config.encoder_config(tmp_path)
    assert read is not None
    assert [read[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "hidden_act")] == [
        2,
        4,
        32,
        "relu",
    ]


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES | model_config.IMAGE_MODELS))
@pytest.mark.parametrize("names", [["bad", "good"], ["a", "b", "c"], ["value"], None], ids=str)
def test_the_head_is_that_of_transformers(kind: str, names: list[str] | None, tmp_path: Path) -> None:
    given: dict[str, Any] = {"architectures": ["XForSequenceClassification"], "problem_type": "regression"}
    labels = {} if names is None else {"id2label": dict(enumerate(names))}
    AutoConfig.for_model(kind, **given, **labels).save_pretrained(tmp_path)
    read, expected = model_config.read_head(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert read == (kind, expected.architectures[0], expected.problem_type, expected.id2label)
