"""What it means to let a model write: the options of it, and answers as numbers.

    answers (B, W) int32    token ids of each row; END where the model ended its answer, NOTHING after an answer;
                            NON_FINITE everywhere in a row for which the model gave NaN or infinity

Runtimes write answers, the task reads them. Both look for stop strings in the same text, that of `decoded`, so the text
is cut where the writing stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torchlake.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

NOTHING, END, NON_FINITE = -1, -2, -3


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How a model continues a text. All of it decides the text, and is part of a job's fingerprint."""

    max_new_tokens: int = 64
    "Tokens written for a row, at most."
    temperature: float = 0.0
    "What the logits are divided by before a token is drawn; 0: the likeliest token is taken, nothing is drawn."
    top_k: int | None = None
    "Draw among so many likeliest tokens only."
    top_p: float | None = None
    "Draw among the likeliest tokens only that together have this probability."
    stop: tuple[str, ...] = ()
    "Strings that end a text; it is cut before the first of them."
    seed: int = 0
    "Together with the row's own text decides what is drawn."
    chat: bool = False
    "Whether rows are conversations, which the tokenizer's chat template makes texts of."


def generation_options(task: str, *, writes: bool, **given: Any) -> GenerationOptions | None:
    """The options of a task that writes text, with the values of `given` that are not None; None for another task.

    Raises UsageError for a value that means nothing, alone or beside the others, or for this task.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if not writes:
        if given:
            raise UsageError(f"{', '.join(given)}: for text generation only; this model's task is {task}.")
        return None
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    options = GenerationOptions(**given)
    drawing = [name for name in ("top_k", "top_p", "seed") if name in given]
    if options.temperature == 0 and drawing:
        raise UsageError(f"{', '.join(drawing)}: nothing is drawn at temperature 0; give a temperature above 0 too.")
    _check(options)
    return options


def _check(options: GenerationOptions) -> None:
    wrong = {
        "max_new_tokens": options.max_new_tokens < 1 and "is 1 or more",
        "temperature": not 0 <= options.temperature <= 100 and "is a number from 0 to 100",
        "top_k": options.top_k is not None and options.top_k < 1 and "is 1 or more",
        "top_p": options.top_p is not None and not 0 < options.top_p <= 1 and "is a share above 0, up to 1",
        "stop": not all(options.stop) and "has no empty string in it",
        "seed": not 0 <= options.seed < 2**63 and "is a whole number from 0 to 2^63 - 1",
    }
    assert wrong.keys() | {"chat"} == {field.name for field in fields(options)}
    for name, problem in wrong.items():
        if problem:
            raise UsageError(f"{name} {problem}; {getattr(options, name)!r} was given.")


def decoded(tokenizer: Any, tokens: "np.ndarray | Sequence[int]") -> str:
    """The text of one row's tokens, special tokens left out."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Where in `text` the first of the stop strings begins; None when there is none."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return min(places, default=None)
