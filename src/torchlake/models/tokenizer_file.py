"""tokenizer.json as transformers loads it, read by the library `tokenizers` alone.

transformers does not simply read that file. For the class `BertTokenizer` it takes the vocabulary and builds the rest
from tokenizer_config.json; for `TokenizersBackend` it reads the file and adds missing special tokens. A file is used
here only if the result is certain to be the same; otherwise the caller must use transformers.
`tests/conformance/test_tokenizers.py` compares both for every kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.errors import UsageError, pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE, CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
MODEL_TYPES = frozenset({"bert", "distilbert", "roberta", "camembert", "xlm-roberta"})
NO_LIMIT = int(1e30)
"The `model_max_length` that transformers sets for a tokenizer without one."
MAX_VOCABULARY = 100_000
"transformers patches the tokenizers of some larger vocabularies."
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CHANGES_TEXT = ("max_len", "add_bos_token", "add_eos_token", "split_special_tokens", "fix_mistral_regex", "gguf_file")
"Options of tokenizer_config.json that change the tokens of the file."
BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


@cache
def check_library() -> None:
    """Raise UsageError if `tokenizers` loses what is cut from texts: 0.23.1 and 0.23.2 do (tokenizers#2091).

    Windows of long texts would lack tokens, and rows would not be counted as truncated.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    found = made.encode("a a a a a a")
    if sum(len(piece.ids) for piece in (found, *found.overflowing)) != 6:
        raise UsageError(
            f"tokenizers {version('tokenizers')} loses the tokens of rows beyond the maximum length. Install another "
            f"release: {pip_install('tokenizers>=0.23.3')}"
        )


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """The part of a transformers tokenizer that tasks with labels use, under the same names."""

    backend_tokenizer: "Tokenizer"
    truncation_side: str
    model_max_length: int
    pad_token_id: int | None
    eos_token_id: int | None
    added_tokens: frozenset[int]

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return the token of an id."""
        found: str | None = self.backend_tokenizer.id_to_token(token)
        return found


def read_tokenizer_file(folder: Path) -> TextTokenizer | None:
    """Read tokenizer.json; None if transformers might build another tokenizer from the folder."""
    paths = [folder / name for name in (FILE, CONFIG, "config.json")]
    if not all(path.is_file() for path in paths):
        return None
    file, config, model = (atomic_io.read_json(path) for path in paths)
    if model.get("model_type") not in MODEL_TYPES or any(config.get(name) for name in CHANGES_TEXT):
        return None
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    checks = {"BertTokenizer": _is_bert, "DistilBertTokenizer": _is_bert, "RobertaTokenizer": _is_roberta}
    defaults = {"BertTokenizer": BERT_TOKENS, "DistilBertTokenizer": BERT_TOKENS, "RobertaTokenizer": ROBERTA_TOKENS}
    if kind not in (*checks, "TokenizersBackend", "PreTrainedTokenizer"):
        return None
    tokens = {**defaults.get(kind, {}), **{name: _content(config[name]) for name in NAMED if name in config}}
    if not _adds_nothing(folder, file, config, tokens) or (kind in checks and not checks[kind](file, config, tokens)):
        return None
    return _text_tokenizer(paths[0], file, config, tokens)


def _text_tokenizer(
    path: Path, file: Mapping[str, Any], config: Mapping[str, Any], tokens: Mapping[str, str | None]
) -> TextTokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    ids = {name: None if token is None else backend.token_to_id(token) for name, token in tokens.items()}
    padding, truncation = file.get("padding") or {}, file.get("truncation") or {}
    pad = ids["pad_token"] if "pad_token" in tokens else padding.get("pad_id")
    limit = config.get("model_max_length")
    return TextTokenizer(
        backend_tokenizer=backend,
        truncation_side=config.get("truncation_side") or str(truncation.get("direction", "right")).lower(),
        model_max_length=NO_LIMIT if limit is None else limit,
        pad_token_id=pad,
        eos_token_id=ids.get("eos_token"),
        added_tokens=frozenset(token["id"] for token in file["added_tokens"]),
    )


def _content(token: Any) -> str | None:
    """Return a special token of tokenizer_config.json, where it is a string or an object."""
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content


def _adds_nothing(
    folder: Path, file: Mapping[str, Any], config: Mapping[str, Any], tokens: Mapping[str, str | None]
) -> bool:
    """Return whether every special token of the folder's other files is in tokenizer.json already."""
    if (folder / ADDED_TOKENS).exists() or len(file["model"].get("vocab", ())) > MAX_VOCABULARY:
        return False
    added = {token["content"]: token for token in file["added_tokens"]}
    named: dict[str, Any] = {name: config[name] for name in NAMED if name in config}
    if (folder / SPECIAL_TOKENS).exists():
        legacy = atomic_io.read_json(folder / SPECIAL_TOKENS)
        if any(_content(value) != tokens.get(name) for name, value in legacy.items() if name in NAMED):
            return False
        named |= legacy
    extra = [name for name in (*named, *config) if name.endswith(("_token", "_tokens")) and name not in NAMED]
    if any(named.get(name) or config.get(name) for name in extra):
        return False
    for token in named.values():
        if isinstance(token, dict) and not _same_token(token, added.get(token.get("content"), {})):
            return False
    decoder = config.get("added_tokens_decoder")
    if decoder is not None and decoder != {str(token["id"]): _without_id(token) for token in added.values()}:
        return False
    return all(token is None or (token in added and added[token]["special"]) for token in tokens.values())


def _same_token(token: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("lstrip", "rstrip", "single_word", "normalized")
    return all(token.get(name, False) == other.get(name, False) for name in names)


def _without_id(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in token.items() if name != "id"}


def _is_bert(file: Mapping[str, Any], config: Mapping[str, Any], tokens: Mapping[str, str | None]) -> bool:
    """Return whether the file equals what `BertTokenizer` builds."""
    model, normalizer = file["model"], file.get("normalizer") or {}
    return (
        (model.get("type"), model.get("unk_token")) == ("WordPiece", tokens["unk_token"])
        and (model.get("continuing_subword_prefix"), model.get("max_input_chars_per_word")) == ("##", 100)
        and normalizer
        == {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        }
        and file.get("pre_tokenizer") == {"type": "BertPreTokenizer"}
        and _wraps_in(file, tokens)
    )


def _wraps_in(file: Mapping[str, Any], tokens: Mapping[str, str | None]) -> bool:
    """Return whether the post-processor puts one text between the class token and the separator."""
    added = {token["content"]: token["id"] for token in file["added_tokens"]}
    post = file.get("post_processor") or {}
    first, last = tokens["cls_token"], tokens["sep_token"]
    single = [next(iter(part.values()))["id"] for part in post.get("single", ())]
    special = {name: token.get("ids") for name, token in post.get("special_tokens", {}).items()}
    return (
        post.get("type") == "TemplateProcessing"
        and single == [first, "A", last]
        and all(special.get(str(token)) == [added.get(str(token))] for token in (first, last))
    )


def _is_roberta(file: Mapping[str, Any], config: Mapping[str, Any], tokens: Mapping[str, str | None]) -> bool:
    """Return whether the file equals what `RobertaTokenizer` builds."""
    model, pre, post = file["model"], file.get("pre_tokenizer") or {}, file.get("post_processor") or {}
    added = {token["content"]: token["id"] for token in file["added_tokens"]}
    unset = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
    return (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in (*unset, "ignore_merges"))
        and file.get("normalizer") is None
        and (pre.get("type"), pre.get("use_regex", True)) == ("ByteLevel", True)
        and pre.get("add_prefix_space") == config.get("add_prefix_space", False)
        and post.get("type") == "RobertaProcessing"
        and post.get("cls") == [tokens["cls_token"], added.get(str(tokens["cls_token"]))]
        and post.get("sep") == [tokens["sep_token"], added.get(str(tokens["sep_token"]))]
    )
