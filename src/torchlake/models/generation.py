"""The options of text generation, what a model's folder says about it, and the encoding of answers.

    answers (B, W) int32    token ids of each row; END where the model ended its answer, NOTHING after an answer;
                            NON_FINITE in the whole row if the model gave NaN or infinity; STUCK where a grammar
                            allows no token

Runtimes return answers, and the task decodes them. Both search for stop strings in the text of `decoded`, so the text
is cut where generation stopped.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.known_keys import check_keys
from torchlake.errors import DataError, UsageError
from torchlake.models.config import in_words, load_config
from torchlake.models.structured.structure import OPTIONS, Structure, read_structure
from torchlake.models.structured.tokens import check_structure
from torchlake.models.tokenizer import load_tokenizer
from torchlake.models.write import quiet

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

NOTHING, END, NON_FINITE, STUCK = -1, -2, -3, -4
CONFIG = "generation_config.json"
LANGUAGE = re.compile(r"__([a-z]{2,3})__|([a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3})")
"The tokens of languages: __de__ of M2M100, de_DE of mBART, deu_Latn of NLLB."


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of text generation. All of them affect the text and are part of a job's fingerprint."""

    max_new_tokens: int = 64
    "Maximum tokens generated per row."
    temperature: float = 0.0
    "Divisor of the logits before sampling; 0: take the most probable token, without sampling."
    top_k: int | None = None
    "Sample only from this many most probable tokens."
    top_p: float | None = None
    "Sample only from the most probable tokens that together have this probability."
    language: str | None = None
    "The language that a multilingual translator writes, by its name in the tokenizer; None: that of its folder."
    stop: tuple[str, ...] = ()
    "Strings that end the text; it is cut before the first of them."
    seed: int = 0
    "The seed that, with the row's text, determines the sampled tokens."
    chat: bool = False
    "Whether rows are conversations, to be rendered by the tokenizer's chat template."
    structure: Structure | None = None
    "What the text has to fit."


def generation_options(task: str, *, writes: bool, **given: Any) -> GenerationOptions | None:
    """Return the options for a task that generates text, with the values of `given` that are not None; else None.

    Raises UsageError for a value that is invalid, contradicts another one, or does not apply to this task.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if not writes:
        if given:
            raise UsageError(f"{', '.join(given)}: for text generation only; this model's task is {task}.")
        return None
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    structure = read_structure(given)
    given = {name: value for name, value in given.items() if name not in OPTIONS}
    if structure is not None and "stop" in given:
        raise UsageError(f"stop: {structure.kind} decides where an answer ends. Leave one of them out.")
    options = GenerationOptions(**given, structure=structure)
    drawing = [name for name in ("top_k", "top_p", "seed") if name in given]
    if options.temperature == 0 and drawing:
        raise UsageError(
            f"{', '.join(drawing)}: there is no sampling at temperature 0. Set a temperature above 0 as well."
        )
    _check(options)
    return options


def _check(options: GenerationOptions) -> None:
    wrong = {
        "max_new_tokens": options.max_new_tokens < 1 and "is 1 or more",
        "temperature": not 0 <= options.temperature <= 100 and "is a number from 0 to 100",
        "top_k": options.top_k is not None and options.top_k < 1 and "is 1 or more",
        "top_p": options.top_p is not None and not 0 < options.top_p <= 1 and "is a share above 0, up to 1",
        "stop": not all(options.stop) and "must not contain an empty string",
        "seed": not 0 <= options.seed < 2**63 and "is a whole number from 0 to 2^63 - 1",
    }
    assert wrong.keys() | {"chat", "language", "structure"} == {field.name for field in fields(options)}
    for name, problem in wrong.items():
        if problem:
            raise UsageError(f"{name} {problem}; {getattr(options, name)!r} was given.")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json, or else config.json, says about the model, not about sampling.

    These are tokens that are forced, suppressed or end an answer. Raises DataError for an unknown key.
    """
    from transformers import GenerationConfig

    own = (folder / CONFIG).is_file()
    if own:
        given = atomic_io.read_json(folder / CONFIG)
        if isinstance(given, dict):
            given = {key: value for key, value in given.items() if key not in known_keys.SAMPLING}
        check_keys(folder / CONFIG, given, known_keys.GENERATION)
    origin: dict[str, Any] = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    try:
        with quiet():
            found: Any = GenerationConfig.from_pretrained(folder, local_files_only=True, **origin)
    except Exception as error:
        raise DataError(f"{folder / CONFIG}: cannot be loaded: {in_words(error)}") from error
    values = {name: getattr(found, name) for name in known_keys.GENERATION.computed.split()}
    if not load_config(folder).is_encoder_decoder and values["forced_bos_token_id"] is not None:
        raise DataError(f"{folder / CONFIG}: forced_bos_token_id is for encoder-decoders; this model is a decoder.")
    if isinstance(values["decoder_start_token_id"], list):
        raise DataError(f"{folder / CONFIG}: decoder_start_token_id is a list; torchlake supports one token.")
    return {name: value for name, value in values.items() if value is not None}


def end_tokens(own: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the end tokens: the model's (chat models have several), or else the tokenizer's."""
    named = own.get("eos_token_id", tokenizer.eos_token_id)
    return sorted(named) if isinstance(named, list) else [named]


def check_settings(folder: Path, options: GenerationOptions) -> None:
    """Raise the errors of `settings_of` and `language_token`; log the settings that the job's options replace."""
    own = settings_of(folder)
    if options.language is not None:
        language_token(folder, options.language)
    if options.structure is not None:
        check_structure(
            options.structure, folder, ends=end_tokens(own, load_tokenizer(folder)), new_tokens=options.max_new_tokens
        )
    file = next(folder / name for name in (CONFIG, "config.json") if (folder / name).is_file())
    values = atomic_io.read_json(file).items()
    left = sorted(key for key, value in values if key in known_keys.SAMPLING and value not in (None, False, 0, 1))
    if left:
        log.info("%s: %s: not used; the options of the job replace these", file, ", ".join(left))


def language_token(folder: Path, language: str) -> int:
    """Return the token of a language that a translator writes. Raises UsageError with the known languages."""
    tokenizer = load_tokenizer(folder)
    tokens = ((LANGUAGE.fullmatch(token), number) for token, number in tokenizer.get_vocab().items())
    names = {found[1] or found[2]: int(number) for found, number in tokens if found is not None}
    if language.strip("_") not in names:
        known = f"It knows {', '.join(sorted(names))}." if names else "Its tokenizer has no tokens of languages."
        raise UsageError(f"language={language!r}: {folder} does not translate into it. {known}")
    return names[language.strip("_")]


def decoded(tokenizer: Any, tokens: "np.ndarray | Sequence[int]", *, exact: bool = False) -> str:
    """Return the text of one row's tokens, without special tokens.

    `exact`: as the tokens spell it; some tokenizers remove the space before punctuation.
    """
    changes = {"clean_up_tokenization_spaces": False} if exact else {}
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, **changes)
    return text


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the first stop string in `text`, or None."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return min(places, default=None)
