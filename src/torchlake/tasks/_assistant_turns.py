"""Where the answers are in rendered conversations, for templates with and without {% generation %}.

    messages before a turn, with the generation prompt   "<user>Hi<end>\n<assistant>"                a prompt
    messages up to it, without                           "<user>Hi<end>\n<assistant>Hello<end>\n"    the answer after it

The difference is the answer, up to the end token of the turn; a newline after it is not learned. If every prompt begins
every longer text, the conversation is one text with several answers. Otherwise (Qwen 3 leaves out earlier reasoning)
each answer has its own text, the one that `predict` would write. Marks in the template say what is learned of a
turn. The renderer (`_rendering.py`) finds the places, in characters, and the worker the tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchlake.tasks._tool_calls import called, check_written

Spans = Sequence[Sequence[int]]
"Places in text: (first character, one past the last)."
Make = Callable[[Sequence[Mapping[str, Any]], bool], tuple[str, Spans]]
"Renders messages, with the generation prompt or without, and returns the text and the marks of the template."
End = tuple[str | None, str]
"How a turn of the assistant ends, and what follows the last one; see `turn_end`."
ROWS_AT_ONCE = 1_000
SAMPLE = "SampleAnswer"
"An answer that no template changes."


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text, and what of it is learned."""

    text: str
    spans: Spans | None = None
    "The answers; None: the whole text is learned."
    prompts: Sequence[int] = ()
    "For each answer, how many characters `predict` feeds before it; -1 if it feeds another text."
    messages: int = 0
    "How many messages of the conversation it has."


def turn_end(make: Make, tokens: Sequence[str]) -> End:
    """Return how the template ends an assistant's turn, and what it writes after the end of the last one.

    The end is up to the first of `tokens`, and those at once after it that stand before another turn, too; None if
    there is none of them.
    """
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": SAMPLE}
    after, before_another = "", ""
    with suppress(Exception):  # it may need other messages
        after = make([asked, said], False)[0].rpartition(SAMPLE)[2]
        before_another = make([asked, said, asked], False)[0].rpartition(SAMPLE)[2]
    special = _special(tokens)
    found = special.search(after)
    if found is None:
        return None, ""
    stop = found.end()
    while (more := special.match(after, stop)) and before_another.startswith(after[: more.end()]):
        stop = more.end()
    return after[:stop], after[stop:]


def answers_in(
    make: Make,
    messages: Sequence[Mapping[str, Any]],
    *,
    first: int,
    last: bool,
    end: End,
    marked: bool,
) -> list[Rendered]:
    """Return the text of a conversation with its answers, or one text for each answer; `last`: of the last one only.

    Turns before message `first` are not answers. `end` is from `turn_end`; `marked`: the template has marks. Raises
    ValueError if there is no answer, and what the template raises.
    """
    turns = [at for at, message in enumerate(messages) if at >= first and message["role"] == "assistant"]
    if last and turns:
        turns, messages = turns[-1:], messages[: turns[-1] + 1]
    whole, marks = make(messages, False)
    found, equal = list[Rendered](), True
    for at in turns:
        try:
            prompt, _ = make(messages[:at], True)
        except Exception:
            if len(turns) == 1 or any(message["role"] == "user" for message in messages[:at]):
                raise
            continue  # the assistant begins, and the template has no prompt for that
        text, own = (whole, marks) if at + 1 == len(messages) else make(messages[: at + 1], False)
        start, fed = len(prompt), text.startswith(prompt)
        equal = equal and fed
        if not fed:
            start, alone = _common(prompt, text), _alone(make, messages[:at])
            if place := _after_prompt(prompt, alone, text, start, messages[at]):
                moved = len(prompt) - place
                own = [(max(len(prompt), begin + moved), stop + moved) for begin, stop in own]
                start, text, fed = len(prompt), prompt + text[place:], True
            elif start < len(alone) and text[: start + 1] == alone[: start + 1]:
                raise ValueError("the template changes the messages before an answer, once it is there")
        check_written(at + 1, messages[at], text[start:])
        spans = [each for each in own if each[1] > start] if marked else [(start, _stop(text, start, end))]
        if spans:
            found.append(Rendered(text, spans, [len(prompt) if fed else -1], at + 1))
            equal = equal and whole.startswith(text[: spans[-1][1]])
    if not found:
        raise ValueError("it has no turn of the assistant to learn")
    if not equal:
        return found
    spans = [span for each in found for span in each.spans or ()]
    learned = marks if marked and not (first or last) else spans
    return [Rendered(whole, learned, [each.prompts[0] for each in found], len(messages))]


def _alone(make: Make, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages without the generation prompt; "" if the template wants an answer after them."""
    with suppress(Exception):
        return make(messages, False)[0]
    return ""


def _after_prompt(prompt: str, alone: str, text: str, start: int, message: Mapping[str, Any]) -> int:
    """Return where an answer begins in `text`, which differs from its prompt at `start`: after the longest end of the
    prompt that is there before what the message says. 0 if that is not after `start`, or not the whole generation
    prompt, which is missing in `alone`.

    Templates that write a system text or tools into the last question give it other words once it is answered.
    """
    said = [each.strip() for name, each in message.items() if name != "role" and isinstance(each, str)]
    said += (name for names in called(message) for name in names)
    places = [text.find(each, start) for each in said if each]
    before = text[: min((each for each in places if each >= 0), default=len(text))]
    size = bisect_left(range(len(prompt)), True, key=lambda first: prompt[first:] in before)
    known, missing = prompt[size:], prompt[_common(prompt, alone) : size]
    place = before.rfind(known) + len(known)
    return place if known.strip() and place > start and not missing.strip() else 0


def _common(one: str, other: str) -> int:
    """Return how many characters two strings have in common at their beginning."""
    differing = (at for at, (first, second) in enumerate(zip(one, other, strict=False)) if first != second)
    return next(differing, min(len(one), len(other)))


def _stop(text: str, start: int, end: End) -> int:
    """Return where the turn that begins at `start` ends, the last one of the text."""
    closing, after = end
    if closing is not None and after and text.endswith(closing + after, start):
        return len(text) - len(after)
    place = -1 if closing is None else text.rfind(closing, start)
    return len(text) if closing is None or place < 0 else place + len(closing)


def _special(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@dataclass(frozen=True, kw_only=True)
class AnswerEncoder:
    """Encodes texts with one tokenizer."""

    tokenizer: Any
    added: frozenset[int]
    "Tokens before and after which texts are tokenized by themselves."
    ends: frozenset[int]
    "Tokens that may end a turn: special ones."
    known: dict[str, list[int]]
    "The tokens of ends of prompts."

    @classmethod
    def of(cls, tokenizer: Any) -> "AnswerEncoder":
        """Return the encoder of a tokenizer."""
        added = tokenizer.added_tokens_decoder
        ends = {tokenizer.eos_token_id, *(token for token, about in added.items() if about.special)}
        return cls(tokenizer=tokenizer, added=frozenset(added), ends=frozenset(ends), known={})

    def encode(self, made: Sequence[Rendered], *, whole: bool) -> list[tuple[np.ndarray, int]]:
        """Return the tokens (T,) int32 of each text, ~id (below zero) where they are not learned, and its `_merged`.

        `whole`: the texts have their special tokens already, as a chat template writes them.
        """
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        found = []
        for first in range(0, len(made), ROWS_AT_ONCE):
            some = made[first : first + ROWS_AT_ONCE]
            encodings = backend.encode_batch([each.text for each in some], add_special_tokens=not whole)
            found += [self._learned(one, each, whole) for one, each in zip(encodings, some, strict=True)]
        return found

    def _learned(self, encoding: Any, made: Rendered, whole: bool) -> tuple[np.ndarray, int]:
        ids = np.fromiter(encoding.ids, np.int32)
        if made.spans is None:
            return ids, 0
        learned = np.zeros(len(ids), dtype=bool)
        for start, stop in made.spans:
            # Some characters have no token, such as spaces that the tokenizer strips.
            tokens = (encoding.char_to_token(place) for place in range(start, stop))
            first = next((token for token in tokens if token is not None), None)
            if first is not None:  # None: the span is empty, or the text ends before it
                tokens = (encoding.char_to_token(place) for place in range(stop - 1, start - 1, -1))
                last = next(token for token in tokens if token is not None)
                # A character of several bytes may be several tokens, of which that is the first.
                while last + 1 < len(ids) and _begins_before(encoding, last + 1, stop):
                    last += 1
                learned[first : last + 1] = True
        return np.where(learned, ids, ~ids), self._merged(encoding, made, ids, whole)

    def _merged(self, encoding: Any, made: Rendered, ids: np.ndarray, whole: bool) -> int:
        """Return how many answers do not follow the tokens that `predict` feeds.

        One of its tokens also covers the end of the prompt, or the prompt alone has other tokens, or `predict` feeds
        another text.
        """
        starts = {start for start, _ in made.spans or ()}
        good = (place in starts and self._follows(encoding, made.text, place, ids, whole) for place in made.prompts)
        return len(made.prompts) - sum(good)

    def _follows(self, encoding: Any, text: str, place: int, ids: np.ndarray, whole: bool) -> bool:
        """Return whether the tokens before the character `place` are those of the prompt alone.

        Added tokens split the string, so only what follows the last one before it has to be tokenized.
        """
        first = encoding.char_to_token(place)
        if first is None or encoding.token_to_chars(first)[0] != place:
            return False
        begin = next((at for at in range(first - 1, -1, -1) if int(ids[at]) in self.added), 0)
        start = encoding.token_to_chars(begin)[0] if whole and begin else 0
        if start == 0:
            alone = self.tokenizer.backend_tokenizer.encode(text[:place], add_special_tokens=not whole).ids
            if alone and alone[-1] == self.tokenizer.eos_token_id and len(alone) == first + 1:
                alone = alone[:-1]
            return bool(alone == ids[:first].tolist())
        piece = text[start:place]
        if piece not in self.known:
            self.known[piece] = self.tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids
        return bool(self.known[piece] == ids[begin:first].tolist())


def _begins_before(encoding: Any, token: int, stop: int) -> bool:
    """Return whether a token is of a character before `stop`; special tokens that were added are of none."""
    characters = encoding.token_to_chars(token)
    return characters is not None and characters[0] < stop and characters[1] > characters[0]
