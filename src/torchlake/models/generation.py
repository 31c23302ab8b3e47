"""The options of text generation, what a model's folder says about it, and the encoding of answers.

    answers (B, W) int32    token ids of each row; END where the model ended its answer, NOTHING after an answer;
                            NON_FINITE in the whole row if the model gave NaN or infinity; STUCK where a grammar
                            allows no token

Runtimes return answers, and the task decodes them. Both search for stop strings in the text of `decoded`, so the text
is cut where generation stopped.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.known_keys import check_keys
from torchlake.config.options import LOGPROBS
from torchlake.errors import DataError, UsageError
from torchlake.models.config import decoder_start, in_words, load_config
from torchlake.models.structured.structure import STRUCTURE_OPTIONS, Structure, read_structure
from torchlake.models.structured.tokens import check_structure
from torchlake.models.tokenizer import language_token, load_tokenizer
from torchlake.models.write import quiet

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

MOST_ANSWERS = 256
"The most answers of a row, and the most beams."
NOTHING, END, NON_FINITE, STUCK = -1, -2, -3, -4
CONFIG = "generation_config.json"
MARKS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"What chat templates have around reasoning."


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
    seed_by: str = "text"
    "`key`: the row's key determines them, too, so that equal texts get different answers."
    n: int = 1
    "Answers of each row."
    min_p: float | None = None
    "Sample only from tokens with this share of the probability of the most probable one."
    min_new_tokens: int = 0
    "Tokens before which no end token is chosen."
    repetition_penalty: float = 1.0
    "Divisor of the positive logits of tokens in the prompt and the answer, and factor of the negative ones."
    presence_penalty: float = 0.0
    "Subtracted from the logits of tokens in the answer."
    frequency_penalty: float = 0.0
    "Subtracted from them as often as the token is in the answer."
    stop_token_ids: tuple[int, ...] = ()
    "Further tokens that end an answer."
    num_beams: int = 1
    "Answers that are kept at each step; the one with the highest mean log-probability is returned."
    logprobs: str | None = None
    "`mean`: the mean log-probability of an answer's tokens; `tokens`: that of each, too."
    chat: bool = False
    "Whether rows are conversations, to be rendered by the tokenizer's chat template."
    structure: Structure | None = None
    "What the text has to fit."


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts are made of rows. All of it affects the texts and is part of a job's fingerprint."""

    prompt: str | None = None
    'The text of a row, such as "Summarize: {title}"; None: that of the text column.'
    system: str | None = None
    "A system text before conversations that have none; None: the one that the model learned with."
    examples: tuple[Mapping[str, str], ...] = ()
    "Messages that come after the system text, by turns of the user and the assistant."
    tools: tuple[Mapping[str, Any], ...] = ()
    "JSON schemas of the tools of every conversation."
    chat_template: str | None = None
    "The chat template; None: the tokenizer's."
    template_options: Mapping[str, Any] = field(default_factory=dict)
    "Further variables of the chat template."
    continue_final_message: bool = False
    "Whether the assistant's last message is continued if a conversation ends with one."
    marks: tuple[str, str] | None = None
    "What the chat template has before and after reasoning."

    def given(self) -> dict[str, Any]:
        """Return what is not as by default."""
        plain = PromptOptions()
        return {
            one.name: value for one in fields(self) if (value := getattr(self, one.name)) != getattr(plain, one.name)
        }


def generation_options(task: str, *, writes: bool, **given: Any) -> GenerationOptions | None:
    """Return the options for a task that generates text, with the values of `given` that are not None; else None.

    Raises UsageError for a value that is invalid, contradicts another one, or does not apply to this task.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    given |= {"logprobs": "mean"} if given.get("logprobs") is True else {}
    if given.get("logprobs", "mean") not in LOGPROBS:
        raise UsageError(f"logprobs: expected true, or one of {', '.join(LOGPROBS)}; got {given['logprobs']!r}.")
    if not writes:
        if given:
            raise UsageError(f"{', '.join(given)}: for text generation only; this model's task is {task}.")
        return None
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    if "stop_token_ids" in given:
        ids = given["stop_token_ids"]
        given["stop_token_ids"] = (ids,) if isinstance(ids, int) else tuple(ids)
    structure = read_structure(given)
    given = {name: value for name, value in given.items() if name not in STRUCTURE_OPTIONS}
    if structure is not None:
        _check_beside(structure, given)
    options = GenerationOptions(**given, structure=structure)
    drawing: list[str] = [name for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    drawing += [name for name in ("n",) if options.n > 1] + [name for name in ("seed_by",) if options.seed_by == "key"]
    check_values(options)
    if options.num_beams > 1 and (options.temperature > 0 or drawing):
        others = ", ".join(["temperature"] * (options.temperature > 0) + drawing)
        raise UsageError(f"num_beams and {others}: beams are searched without sampling. Leave one of them out.")
    of_steps = [name for name in ("presence_penalty", "frequency_penalty") if given.get(name)]
    if options.num_beams > 1 and of_steps:
        raise UsageError(f"num_beams and {', '.join(of_steps)}: beams have the penalty repetition_penalty only.")
    if options.temperature == 0 and drawing:
        raise UsageError(
            f"{', '.join(drawing)}: there is no sampling at temperature 0. Set a temperature above 0 as well."
        )
    return options


def _check_beside(structure: Structure, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that would end an answer before it fits, or that are not for choices."""
    refused = ["stop", "min_new_tokens", "num_beams"]
    if structure.choices:
        refused += ["top_k", "top_p", "min_p", "logprobs", "repetition_penalty", "presence_penalty"]
        refused += ["frequency_penalty", "stop_token_ids"]
    found = [name for name in refused if given.get(name)]
    if found:
        raise UsageError(f"{', '.join(found)}: {structure.kind} decides what is written. Leave one of them out.")


def check_values(options: GenerationOptions) -> None:
    """Raise UsageError for a value out of range."""
    ids = options.stop_token_ids
    wrong: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens < 1 and "is 1 or more",
        "temperature": not 0 <= options.temperature <= 100 and "is a number from 0 to 100",
        "top_k": options.top_k is not None and options.top_k < 1 and "is 1 or more",
        "top_p": options.top_p is not None and not 0 < options.top_p <= 1 and "is a share above 0, up to 1",
        "stop": not all(options.stop) and "must not contain an empty string",
        "seed": not 0 <= options.seed < 2**63 and "is a whole number from 0 to 2^63 - 1",
        "n": not 1 <= options.n <= MOST_ANSWERS and f"is from 1 to {MOST_ANSWERS}",
        "min_p": options.min_p is not None and not 0 <= options.min_p <= 1 and "is a share from 0 to 1",
        "min_new_tokens": not 0 <= options.min_new_tokens <= options.max_new_tokens
        and f"is from 0 to max_new_tokens, {options.max_new_tokens}",
        "repetition_penalty": not 0 < options.repetition_penalty <= 100 and "is a number above 0, up to 100",
        "presence_penalty": not -100 <= options.presence_penalty <= 100 and "is a number from -100 to 100",
        "frequency_penalty": not -100 <= options.frequency_penalty <= 100 and "is a number from -100 to 100",
        "stop_token_ids": not all(type(one) is int and one >= 0 for one in ids) and "holds ids of tokens, 0 or more",
        "num_beams": not 1 <= options.num_beams <= MOST_ANSWERS and f"is from 1 to {MOST_ANSWERS}",
    }
    others = {"chat", "language", "seed_by", "logprobs", "structure"}
    assert wrong.keys() | others == {field.name for field in fields(options)}
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


def settings_for(folder: Path, options: GenerationOptions) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer, and the settings of the model with the job's language and all end tokens."""
    tokenizer, own = load_tokenizer(folder), settings_of(folder)
    if options.language is not None:
        own["forced_bos_token_id"] = language_token(folder, options.language)
    return tokenizer, {**own, "eos_token_id": end_tokens(own, tokenizer)}


def end_tokens(own: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the end tokens: the model's (chat models have several), or else the tokenizer's."""
    named = own.get("eos_token_id", tokenizer.eos_token_id)
    return sorted(named) if isinstance(named, list) else [named]


def start_token(folder: Path, config: Any) -> int:
    """Return the token that the answers of an encoder-decoder begin with. Raises DataError if there is none."""
    own = settings_of(folder)
    named = own.get("decoder_start_token_id", own.get("bos_token_id"))
    return decoder_start(config) if named is None else int(named)


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


def decoded(tokenizer: Any, tokens: "np.ndarray | Sequence[int]", *, marked: bool = False, exact: bool = False) -> str:
    """Return the text of one row's tokens, without special tokens; `marked`: but with those that are marks of
    reasoning, so that no stop string is found across one.

    `exact`: as the tokens spell it; some tokenizers remove the space before punctuation.
    """
    changes = {"clean_up_tokenization_spaces": False} if exact else {}
    special = special_marks(tokenizer) if marked else {}
    found = [place for place, token in enumerate(tokens) if token in special] if special else []
    pieces, start = list[str](), 0
    for place in found:
        some = tokenizer.decode(tokens[start:place], skip_special_tokens=True, **changes)
        pieces += [some, special[int(tokens[place])]]
        start = place + 1
    return "".join([*pieces, tokenizer.decode(tokens[start:], skip_special_tokens=True, **changes)])


@lru_cache(maxsize=8)
def special_marks(tokenizer: Any) -> Mapping[int, str]:
    """Return the marks of reasoning that are special tokens, by their ids."""
    special = {*tokenizer.all_special_tokens}
    return {tokenizer.convert_tokens_to_ids(mark): mark for marks in MARKS for mark in marks if mark in special}


def without_reasoning(text: str, marks: tuple[str, str], *, begun: bool | None) -> tuple[str | None, str]:
    """Return the reasoning in an answer, None if there is none, and the answer without it.

    `begun`: the prompt leaves reasoning open (True), or has closed it. Reasoning without a second mark is all of the
    text.
    """
    before, closed, after = text.partition(marks[1])
    inside = begun or (begun is None and bool(closed) and marks[0] not in before)
    if not inside and not before.lstrip().startswith(marks[0]):
        return None, text
    return before.lstrip().removeprefix(marks[0]).strip("\n"), after.lstrip("\n") if closed else ""


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the first stop string in `text`, or None."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return min(places, default=None)
