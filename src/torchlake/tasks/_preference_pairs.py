"""Pairs of answers as tokens: columns of strings or conversations, with the prompt beside them or in front of both.

    prompt, chosen, rejected    any of them a string, a list of messages, or such a list as JSON
    no prompt                   what both answers begin with is the prompt: characters, or whole messages

A prompt is a string beside answers that are whole conversations in some published tables: it is then left out, because
the conversations begin with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchlake.config.task_spec import RowOptions
from torchlake.tasks._chat import (
    INSTEAD,
    Names,
    looks_like_chats,
    names_of,
    read_messages,
    read_tools,
    row_error,
    system_of,
    with_system,
)
from torchlake.tasks._completions import all_completion_ids
from torchlake.tasks._conversation_cuts import largest
from torchlake.tasks._inputs import Inputs
from torchlake.tasks._null_rows import NULL_INPUT
from torchlake.tasks._whole_rows import NO_ANSWER, TOO_LONG

NO_PREFERENCE = "no_preference"
Text = str | list[dict[str, Any]]
"A string, or the messages of a conversation."
Asked = tuple[Text, Text, Any]
"A prompt, an answer and the tools."


class TokenPairs(NamedTuple):
    """The tokens of N rows; those with an error have none."""

    pairs: list[tuple[list[int], list[int]]]
    "The chosen and the rejected answer, each after the prompt, whose tokens are ~id."
    cut: list[int]
    "Tokens removed from each row."
    errors: dict[int, str]


def tokenize_pairs(tokenizer: Any, inputs: Inputs, how: RowOptions, length: int) -> TokenPairs:
    """Tokenize the columns of pairs in at most `length` tokens, as `how` says.

    Answers that are equal are the error `no_preference`, a blank one `null_input`.
    """
    columns = [inputs[name].to_pylist() if name in inputs else None for name in ("text", "chosen", "rejected", "tools")]
    (prompts, chosen, rejected, tools), names = columns, names_of(how)
    assert chosen is not None, "a pair has two answers"
    assert rejected is not None, "a pair has two answers"
    found = TokenPairs([([], []) for _ in chosen], [0] * len(chosen), {})
    asked: list[Asked] = []
    rows: list[int] = []
    for row, (one, other) in enumerate(zip(chosen, rejected, strict=True)):
        try:
            answers = _read(one, names), _read(other, names)
            if any(map(_is_blank, answers)):
                found.errors[row] = NULL_INPUT
                continue
            parts = _parts(None if prompts is None else _read(prompts[row], names), *answers)
            own = None if tools is None else read_tools(tools[row])
        except (ValueError, RecursionError) as error:
            found.errors[row] = row_error(error)
            continue
        if any(_is_blank(answer) for answer in parts[1:]):
            found.errors[row] = NULL_INPUT
        elif parts[1] == parts[2]:
            found.errors[row] = NO_PREFERENCE
        else:
            rows.append(row)
            first = parts[0]
            if how.system is not None and isinstance(first, list) and first:
                first = with_system(first, how.system)
            asked += [(first, answer, own) for answer in parts[1:]]
    made = all_completion_ids(tokenizer, asked)
    before = [0 if isinstance(each, ValueError) else len(each) for each in made]
    if how.too_long in (None, "cut_start"):
        _cut_at_messages(tokenizer, asked, made, length)
    for at, row in enumerate(rows):
        one, other = made[2 * at : 2 * at + 2]
        if isinstance(one, ValueError) or isinstance(other, ValueError):
            found.errors[row] = next(row_error(each) for each in (one, other) if isinstance(each, ValueError))
            continue
        over = max(len(one), len(other))
        if over > length and how.too_long in ("drop", "error"):
            found.errors[row] = f"{TOO_LONG}: {over:,} tokens, and model.max_length is {length:,}"
            continue
        pair = _fitted(_from_one_prompt(one, other), length, tokenizer.bos_token_id, at_end=how.too_long == "cut_end")
        found.cut[row] = sum(before[2 * at : 2 * at + 2]) - len(pair[0]) - len(pair[1])
        if not all(any(token >= 0 for token in ids[1:]) for ids in pair):
            found.errors[row] = f"{NO_ANSWER}: the prompt alone fills the {length:,} tokens of a row"
        elif pair[0] == pair[1]:
            found.errors[row] = f"{NO_PREFERENCE}: the answers have the same {len(pair[0]):,} tokens"
        else:
            found.pairs[row] = pair
    return found


def _read(value: Any, names: Names | None) -> Text:
    """Return a value of a column as a string, or as messages if it is a list of them or such a list in JSON."""
    if isinstance(value, str) and not (value.lstrip().startswith("[") and looks_like_chats([value], names)):
        return value
    return [] if isinstance(value, list) and not value else read_messages(value, names)


def _parts(prompt: Text | None, chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Return a prompt and two answers to it, all texts or all messages."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("one answer is a string, the other a conversation")
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None:
            return _after_common_start(chosen, rejected)
        if isinstance(prompt, list):
            return prompt, _as_message("assistant", chosen), _as_message("assistant", rejected)
        return prompt, chosen, rejected
    whole = len(chosen) > 0 and len(rejected) > 0 and chosen[0] == rejected[0] and chosen[0].get("role") != "assistant"
    if prompt is None or (whole and isinstance(prompt, str)):
        return _after_common_start(chosen, rejected)
    if isinstance(prompt, str):
        return _as_message("user", prompt), chosen, rejected
    start = len(prompt)
    if whole and chosen[:start] == rejected[:start] == prompt:
        return prompt, chosen[start:], rejected[start:]
    return prompt, chosen, rejected


def _as_message(role: str, text: Text) -> list[dict[str, Any]]:
    return [] if not str(text).strip() else [{"role": role, "content": text}]


def _after_common_start(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Return what both begin with, and the rest of each, which is not empty.

    The space before a word belongs to the answers, as tokenizers have it.
    """
    shorter = min(len(chosen), len(rejected))
    same = next((place for place in range(shorter) if chosen[place] != rejected[place]), max(0, shorter - 1))
    if same and isinstance(chosen, str) and same < shorter and chosen[same - 1] == " ":
        same -= 1
    if not same and not isinstance(chosen, str):
        raise ValueError("the answers begin with different messages: there is no prompt; name its column in data.text")
    return chosen[:same], chosen[same:], rejected[same:]


def _is_blank(answer: Text) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    return all(not str(one.get("content") or "").strip() and not any(map(one.get, INSTEAD)) for one in answer)


def _from_one_prompt(chosen: list[int], rejected: list[int]) -> tuple[list[int], list[int]]:
    """Return both after the same prompt, which ends where the first of them begins to be learned.

    Turns of others between those of an answer stay unlearned.
    """
    first, second = (
        next((place for place, token in enumerate(ids) if token >= 0), len(ids)) for ids in (chosen, rejected)
    )
    start = min(first, second)
    one, other = (
        [*ids[:start], *(~token for token in ids[start:own]), *ids[own:]]
        for ids, own in ((chosen, first), (rejected, second))
    )
    return one, other


def _cut_at_messages(tokenizer: Any, asked: list[Asked], made: list[list[int] | ValueError], length: int) -> None:
    """Replace the tokens of long pairs by those with the longest end of their prompt with which both answers fit.

    `asked` and `made` have the two answers of a pair in turn. A prompt is cut before a message of the user, and keeps
    its system text; one that does not fit in this way keeps its last question.
    """
    places = dict[int, list[int]]()
    for at in range(0, len(asked), 2):
        prompt, both = asked[at][0], made[at : at + 2]
        if isinstance(prompt, list) and not _fit(both, length):
            users = [place for place, one in enumerate(prompt) if one.get("role") == "user"][1:]
            if users and not any(isinstance(each, ValueError) for each in both):
                places[at] = users

    def tokens_of(tried: Mapping[int, int]) -> Iterator[tuple[int, list[list[int] | ValueError]]]:
        shorter = [
            (_from_message(prompt, places[at][-count]), answer, tools)
            for at, count in tried.items()
            for prompt, answer, tools in asked[at : at + 2]
        ]
        tokens = all_completion_ids(tokenizer, shorter)
        return zip(tried, (tokens[place : place + 2] for place in range(0, len(tokens), 2)), strict=True)

    def fitting(tried: Mapping[int, int]) -> set[int]:
        return {at for at, both in tokens_of(tried) if _fit(both, length)}

    counts = largest({at: len(users) for at, users in places.items()}, fitting)
    for at, both in tokens_of({at: max(1, count) for at, count in counts.items()}):
        made[at : at + 2] = both


def _fit(both: list[list[int] | ValueError], length: int) -> bool:
    return all(not isinstance(each, ValueError) and len(each) <= length for each in both)


def _from_message(prompt: Text, place: int) -> Text:
    """Return the system text of a conversation and its messages from `place` on."""
    assert isinstance(prompt, list), "texts have no messages"
    return [*system_of(prompt), *prompt[place:]]


def _fitted(
    pair: tuple[list[int], list[int]], length: int, begin: int | None, *, at_end: bool
) -> tuple[list[int], list[int]]:
    """Return both answers in at most `length` tokens: without the end, or without the start of the prompt first.

    The token `begin` stays.
    """
    prompt = next((place for place, token in enumerate(pair[0]) if token >= 0), len(pair[0]))
    over = max(0, max(map(len, pair)) - length)
    kept = int(begin is not None and pair[0][:1] == [~begin])
    end = kept + (0 if at_end else min(over, max(0, prompt - 1 - kept)))
    one, other = ([*ids[:kept], *ids[end:]][:length] for ids in pair)
    return one, other
