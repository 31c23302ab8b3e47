"""The options of text generation, and the encoding of answers.

    answers (B, W) int32    token ids of each row; END where the model ended its answer, NOTHING after an answer;
                            NON_FINITE in the whole row if the model gave NaN or infinity

Runtimes return answers, and the task decodes them. Both search for stop strings in the text of `decoded`, so the text
is cut where generation stopped.
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
    """Options of text generation. All of them affect the text and are part of a job's fingerprint."""

    max_new_tokens: int = 64
    "Maximum tokens generated per row."
    temperature: float = 0.0
    "Divisor of the logits before sampling; 0: take the most probable token, without sampling."
    top_k: int | None = None
    "Sample only from this many most probable tokens."
    top_p: float | None = None
    "Sample only from the most probable tokens that together have this probability."
    stop: tuple[str, ...] = ()
    "Strings that end the text; it is cut before the first of them."
    seed: int = 0
    "The seed that, with the row's text, determines the sampled tokens."
    chat: bool = False
    "Whether rows are conversations, to be rendered by the tokenizer's chat template."


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
    options = GenerationOptions(**given)
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
    assert wrong.keys() | {"chat"} == {field.name for field in fields(options)}
    for name, problem in wrong.items():
        if problem:
            raise UsageError(f"{name} {problem}; {getattr(options, name)!r} was given.")


def decoded(tokenizer: Any, tokens: "np.ndarray | Sequence[int]") -> str:
    """Return the text of one row's tokens, without special tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the first stop string in `text`, or None."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return min(places, default=None)
