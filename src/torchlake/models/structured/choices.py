"""Choices as answers: their tokens, and the numbers that a runtime returns in place of tokens.

    answers (B, C+1) int32    the place of the answer among the choices, then the bits of each choice's probability

So an answer is kept by the journal, and sent by engines, like one of tokens; float32 from 0 to 1 has no sign.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.errors import UsageError


def tokens_of(choices: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each choice, as they follow a prompt."""
    return [list(tokenizer(choice, add_special_tokens=False)["input_ids"]) for choice in choices]


def check_choices(choices: Sequence[str], tokenizer: Any, new_tokens: int) -> None:
    """Raise UsageError for choices of too many tokens, and for two with the same tokens."""
    found = tokens_of(choices, tokenizer)
    unknown = [name for name, tokens in zip(choices, found, strict=True) if tokenizer.unk_token_id in tokens]
    if unknown:
        raise UsageError(f"choices: the tokenizer has no tokens for {unknown[0]!r}.")
    same = next(((one, other) for one in range(len(found)) for other in range(one) if found[one] == found[other]), None)
    if same is not None:
        raise UsageError(f"choices: {choices[same[1]]!r} and {choices[same[0]]!r} are the same tokens.")
    longest = max(range(len(found)), key=lambda place: len(found[place]))
    needed = max(len(found[longest]) + 1, len(found) + 1)
    if needed > new_tokens:
        raise UsageError(
            f"choices: {len(found)} choices, of which {choices[longest]!r} has {len(found[longest])} tokens, need "
            f"max_new_tokens={needed} or more; it is {new_tokens}."
        )


def answer_of(scores: np.ndarray, temperature: float, drawn: float) -> np.ndarray:
    """Return the answer (C+1,) of log-probabilities (C,); a random number chooses it above temperature 0."""
    below = _shares(scores / (temperature or 1.0)).cumsum()
    chosen = int((below < drawn * below[-1]).sum()) if temperature else int(scores.argmax())
    return np.append(np.int32(chosen), _shares(scores).astype(np.float32).view(np.int32))


def read_answers(answers: np.ndarray, choices: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the text of each answer, and the probabilities (B, C) float32 of the choices."""
    bits = np.ascontiguousarray(answers[:, 1 : len(choices) + 1], dtype=np.int32)
    return [choices[place] for place in answers[:, 0]], bits.view(np.float32)


def probability_fields(choices: Sequence[str]) -> list[pa.Field]:
    """Return the columns of the probabilities, like those of classes; Spark and Hive ignore case in names."""
    names: dict[str, str] = {}
    for choice in choices:
        name, number = f"prob_{choice}", 1
        while (plain := "".join(name.split()).casefold()) in names:
            number += 1
            name = f"prob_{choice}_{number}"
        names[plain] = name
    return [pa.field(name, pa.float32()) for name in names.values()]


def _shares(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    shares: np.ndarray = powers / powers.sum()
    return shares
