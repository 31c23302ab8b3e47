"""The tokenizer of a model folder, the padding that a classifier's head can tell from a row, and the longest row.

Scoring with an encoder needs only ids: `load_text_tokenizer` reads tokenizer.json with the library `tokenizers` if the
ids are the same as transformers' (`tokenizer_file.py`), which saves importing transformers.
"""

import inspect
import re
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.known_keys import check_keys
from torchlake.errors import ConfigError, DataError, UsageError
from torchlake.models.config import ENCODERS, NO_TOKEN, embeddings, in_words, load_config, pad_id, padding_id, positions
from torchlake.models.folders import file_hash, model_folder, tokenizer_hash
from torchlake.models.safety import check_folder
from torchlake.models.tokenizer_file import CONFIG, TextTokenizer, check_library, read_tokenizer_file
from torchlake.models.write import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

MAX_LENGTH = 512
"The longest input in training by default, and of models that do not limit it."
NO_LIMIT = 10**8
"A tokenizer with a limit above this, such as 1e30, does not have one."
TOKEN_TYPES = "token_type_ids"
FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
INNER_END = -2
"Hides an end token within a row from a head; no tokenizer writes this id."
RESERVED = re.compile(r"\W*((right_|finetune_right_)?pad|reserved|unused)", re.IGNORECASE)
"Names of special tokens that rows do not have."
LANGUAGE = re.compile(r"__([a-z]{2,3})__|([a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3})")
"The tokens of languages: __de__ of M2M100, de_DE of mBART, deu_Latn of NLLB."


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerFast":
    """Return the fast tokenizer of a model folder, with a padding token.

    The padding token is the first of these with an embedding in the model: that of config.json if it is a special
    token of the tokenizer, the tokenizer's, the end-of-text token. Any token works, because attention masks padding, as
    long as model and tokenizer agree. Raises DataError without a tokenizer or such a token.
    """
    folder = model_folder(folder)
    _check_config(folder)
    if not has_tokenizer(folder):
        raise DataError(f"{folder}: has no tokenizer (tokenizer.json). Save the model's tokenizer there too.")
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{folder}: its tokenizer cannot be loaded: {in_words(error)}") from error
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: {type(tokenizer).__name__} is a slow tokenizer in Python; torchlake needs a fast one "
            "(tokenizer.json). Convert it with transformers, or choose a model that has one."
        )
    token = _padding_token(folder, tokenizer.added_tokens_decoder, [tokenizer.pad_token_id, tokenizer.eos_token_id])
    if token != tokenizer.pad_token_id:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token)
    loaded: PreTrainedTokenizerFast = tokenizer
    return loaded


def language_token(folder: Path, language: str) -> int:
    """Return the token of a language that a translator writes. Raises UsageError with the known languages."""
    tokenizer = load_tokenizer(folder)
    tokens = ((LANGUAGE.fullmatch(token), number) for token, number in tokenizer.get_vocab().items())
    names = {found[1] or found[2]: int(number) for found, number in tokens if found is not None}
    if language.strip("_") not in names:
        known = f"It knows {', '.join(sorted(names))}." if names else "Its tokenizer has no tokens of languages."
        raise UsageError(f"language={language!r}: {folder} does not translate into it. {known}")
    return names[language.strip("_")]


def load_pair_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Return the tokenizer for pairs of texts; its `model_input_names` has token types only if the model has them.

    Tokenizers of RoBERTa and DistilBERT may return types, which these models do not have.
    """
    tokenizer = load_tokenizer(folder)
    if not has_token_types(load_config(model_folder(folder))):
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != TOKEN_TYPES]
    return tokenizer


def has_token_types(config: "PretrainedConfig") -> bool:
    """Return whether models of this configuration separate the two texts of a pair by token types."""
    import transformers

    types = getattr(config, "type_vocab_size", None)
    if types is not None:
        return bool(types > 1)
    kind = transformers.AutoModel._model_mapping.get(type(config), None)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return any(TOKEN_TYPES in inspect.signature(each.forward).parameters for each in kinds if each is not None)


def load_text_tokenizer(folder: str | Path) -> "TextTokenizer | PreTrainedTokenizerFast":
    """Load a tokenizer for a task with labels as `load_tokenizer` does, if possible without transformers."""
    folder = model_folder(folder)
    _check_config(folder)
    read = read_tokenizer_file(folder)
    if read is None:
        return load_tokenizer(folder)
    choices = [read.pad_token_id, read.eos_token_id]
    return replace(read, pad_token_id=_padding_token(folder, read.added_tokens, choices))


def _check_config(folder: Path) -> None:
    """Check the folder and the library, and refuse an unknown key of the tokenizer."""
    check_library()
    check_folder(folder, weights=False)
    if (folder / CONFIG).is_file():
        check_keys(folder / CONFIG, atomic_io.read_json(folder / CONFIG), known_keys.TOKENIZER)


def _padding_token(folder: Path, added_tokens: Container[int], choices: Sequence[int | None]) -> int:
    """Return the id of the token for padding. Raises DataError if there is none."""
    named, known = padding_id(folder), embeddings(folder)
    for token in (named if named in added_tokens else None, *choices):
        # The model may lack an embedding for a padding token that was added to the tokenizer.
        if token is not None and (known is None or token < known):
            return token
    raise DataError(
        f"{folder}: its tokenizer has no padding token (pad_token in tokenizer_config.json), and no end token "
        "that the model has an embedding for"
    )


def choose_padding_of_head(config: "PretrainedConfig", folder: Path) -> None:
    """Set the padding token of a classifier that is trained: a special token with which no row of its tokenizer ends.

    A decoder's head reads the last token that is not padding, in torchlake and in transformers. An end token that rows
    may have is the last choice; if the tokenizer itself ends rows with the only one, there is none (`read_by_place`).
    """
    if config.model_type in ENCODERS or config.is_encoder_decoder or not has_tokenizer(folder):
        return
    tokenizer = load_tokenizer(folder)
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    if pad_id(config) in added:
        return
    last, known = tokenizer("a")["input_ids"][-1:], embeddings(folder)
    special = [one for one, token in sorted(added.items()) if token.special and (known is None or one < known)]
    reserved = [one for one in special if RESERVED.match(added[one].content)]
    choices = [one for one in (tokenizer.pad_token_id, *reserved, *special) if one not in last]
    end = tokenizer.eos_token_id
    avoided = {end} if added.keys() & set(last) else {end, tokenizer.unk_token_id}  # a word may be unknown
    first = [one for one in choices if one not in avoided] or [one for one in choices if one == end]
    config.get_text_config().pad_token_id = config.pad_token_id = first[0] if first else None


def read_by_place(model: "PreTrainedModel") -> None:
    """Let the head of a classifier find padding, and the end of a row, by their places and not by their ids.

    Heads of transformers compare ids: decoders take the last token that is not `pad_token_id`, BART and T5 the last
    end token, in rows that all have the same number of them. So the model gets other ids where the mask hides a row's
    padding and where an end token is not its last one; its embeddings get those that the tokenizer wrote.
    """
    import torch
    from torch import nn

    config: Any = model.config.get_text_config()
    if config.model_type in ENCODERS:
        return
    pad, size = pad_id(config), getattr(config, "vocab_size", None)
    if pad is None or (isinstance(size, int) and pad >= size):
        pad = config.pad_token_id = NO_TOKEN
    end = config.eos_token_id if model.config.is_encoder_decoder and isinstance(config.eos_token_id, int) else None

    def hide(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids, mask = options.get("input_ids"), options.get("attention_mask")
        if ids is None:
            return args, options
        if mask is not None:
            ids = ids.masked_fill(mask == 0, pad)
        if end is not None:
            from_end = (ids == end).flip(-1).cumsum(-1).flip(-1)
            ids = ids.masked_fill((ids == end) & (from_end > 1), INNER_END)
        return args, {**options, "input_ids": ids}

    def show(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], torch.Tensor):  # some count positions from a shape
            return args
        ids = args[0] if end is None else args[0].masked_fill(args[0] == INNER_END, end)
        return (ids.clamp(min=0), *args[1:])

    model.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    if pad == NO_TOKEN or end is not None:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(show, prepend=True)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer's files."""
    return any((folder / name).is_file() for name in FILES) or any(folder.glob("*.model"))


@lru_cache(maxsize=16)  # a job asks for each of its stages, and a large vocabulary takes a second
def _limit_of(folder: Path, tokenizer: str, config: str) -> int:
    """Return the limit of a tokenizer whose files have these hashes."""
    return int(load_text_tokenizer(folder).model_max_length)


def max_length(folder: str | Path, requested: int | None = None) -> int:
    """Return the maximum tokens of a row: `requested`, or the tokenizer's limit, at most the model's positions.

    Without either limit it is MAX_LENGTH. Raises ConfigError if more are requested than the model has positions.
    """
    folder = model_folder(folder)
    check_folder(folder)
    limit = positions(folder)
    if requested is not None:
        if limit is not None and requested > limit:
            raise ConfigError(f"model.max_length is {requested}, but {folder} has positions for {limit} tokens only")
        return requested
    config = folder / "config.json"
    named = _limit_of(folder, tokenizer_hash(folder), file_hash(config) if config.exists() else "")
    return min((int(one) for one in (limit, named) if one is not None and 0 < one < NO_LIMIT), default=MAX_LENGTH)
