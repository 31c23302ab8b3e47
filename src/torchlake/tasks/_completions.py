"""Prompts with their completions as tokens, of which the completion is learned: ~id, below zero, is not learned.

Strings are joined as they are, and the completion ends with the tokenizer's end token. Messages are rendered by the
chat template, and end with the end token of the last turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchlake.tasks._assistant_turns import SAMPLE, AnswerEncoder, Rendered
from torchlake.tasks._chat import check_reasoning
from torchlake.tasks._rendering import Request, render

Side = str | list[dict[str, Any]]
"A prompt or a completion: text, or messages."


def all_completion_ids(
    tokenizer: Any,
    rows: Sequence[tuple[Side, Side, Sequence[Mapping[str, Any]] | None]],
) -> list[list[int] | ValueError]:
    """Return for rows of prompt, completion and tools the tokens of the prompt, as ~id, and of the completion, which
    ends with the end token; or why a row has none, in words for `row_error`."""
    found: list[list[int] | ValueError] = [ValueError("it has no text")] * len(rows)
    texts, requests = dict[int, Rendered](), dict[int, Request]()
    for row, (prompt, completion, tools) in enumerate(rows):
        if isinstance(prompt, str) and isinstance(completion, str):
            texts[row] = joined(prompt, completion)
            continue
        try:
            requests[row] = request_of(prompt, completion, tools)
        except (ValueError, RecursionError) as error:
            found[row] = ValueError(str(error))
    chats = dict[int, Rendered]()
    for row, made in zip(requests, render(tokenizer, [*requests.values()]), strict=True):
        if isinstance(made, ValueError):
            found[row] = made
        elif len(made) > 1:
            found[row] = ValueError("the template changes an answer of the completion after it; keep one answer in it")
        else:
            chats[row] = made[0]
            check_reasoning(requests[row].messages, made[0].text)
    encoder = AnswerEncoder.of(tokenizer)
    for some, turn in ((texts, False), (chats, True)):
        for row, (ids, _) in zip(some, encoder.encode([*some.values()], whole=turn), strict=True):
            found[row] = ended(ids, encoder, turn=turn).tolist()
    return found


def turn_end(tokenizer: Any) -> int | None:
    """Return the token with which the chat template ends an assistant's turn; None: it has no template, or no token."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SAMPLE}]
    [made] = render(tokenizer, [Request(messages=messages)])
    if isinstance(made, ValueError):
        return None
    encoder = AnswerEncoder.of(tokenizer)
    [(ids, _)] = encoder.encode(made[-1:], whole=True)
    last = int(ids[ids >= 0][-1])
    return last if last in encoder.added else None


def joined(prompt: str, completion: str) -> Rendered:
    """Return a prompt and its completion as one text, of which the completion is learned."""
    whole = prompt + completion
    return Rendered(whole, [(len(prompt), len(whole))], [len(prompt)])


def request_of(prompt: Side, completion: Side, tools: Sequence[Mapping[str, Any]] | None = None) -> Request:
    """Return the conversation of which the completion's turns are learned; a string is a turn of the user or answer.

    Messages are as `read_messages` returns them.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if not asked or not answer:
        raise ValueError("it is not a list of messages, or it is empty")
    return Request(messages=[*asked, *answer], tools=tools, first=len(asked))


def ended(ids: np.ndarray, encoder: AnswerEncoder, *, turn: bool) -> np.ndarray:
    """Return tokens (T,) up to the last learned one, and the tokenizer's end token unless they end with it.

    `turn`: any special token ends an assistant's turn.
    """
    learned = np.flatnonzero(ids >= 0)
    kept = ids[: learned[-1] + 1] if len(learned) else ids
    end = encoder.tokenizer.eos_token_id
    if len(kept) and int(kept[-1]) in (encoder.ends if turn else {end}):
        return kept
    return np.append(kept, np.int32(end))
