"""Rows that are packed whole: conversations, completions and texts, as sequences no longer than a block.

    conversation that the template does not change later   one sequence, with several answers
    any other conversation                                 a sequence for each answer

A longer row is cut, dropped, or an error (`data.too_long`). A conversation is cut at its beginning, before a message
that the assistant has not written, with its system text kept, and rendered again: it is what `predict` would read. As
many messages are kept as fit. A row without a learned token is an error row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import RowOptions
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.features import Features, text_features
from torchlake.tasks._assistant_turns import AnswerEncoder, Rendered
from torchlake.tasks._chat import (
    Names,
    check_reasoning,
    is_chat,
    looks_like_chats,
    names_of,
    read_chats,
    read_messages,
    read_tools,
    row_error,
    with_system,
)
from torchlake.tasks._completions import ended, joined, request_of
from torchlake.tasks._conversation_cuts import beginning_at, largest, places_of
from torchlake.tasks._null_rows import NULL_INPUT
from torchlake.tasks._rendering import Request, render

SEQUENCES, LEARNED, MERGED = "sequences", "learned", "merged"
"Beside a row's tokens: the lengths of its sequences, its targets, its answers after what predict would not feed."
TYPES = {SEQUENCES: pa.list_(pa.int32()), LEARNED: pa.int32(), MERGED: pa.int32()}
NO_ANSWER, TOO_LONG = "no_answer_left", "too_long"
MOST_TURNS = 64
"A conversation with more answers is measured before they are found, which takes two renderings for each."


@dataclass(kw_only=True)
class _Sequence:
    """A sequence of a row, and where it comes from."""

    row: int
    ids: np.ndarray
    "(T,) int32, ~id for a token that is not learned."
    merged: int = 0
    request: Request | None = None
    "What it was rendered from; None: it is not a conversation."
    cut: int = 0


@dataclass(kw_only=True)
class _Making:
    """Rows of a table on their way to sequences."""

    encoder: AnswerEncoder
    length: int
    "Tokens of a block."
    too_long: str | None
    sequences: dict[int, list[_Sequence]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def texts(self, rows: Mapping[int, Rendered]) -> None:
        """Add rows that are texts, each with an end token."""
        for row, (ids, merged) in zip(rows, self.encoder.encode([*rows.values()], whole=False), strict=True):
            self.sequences[row] = [_Sequence(row=row, ids=ended(ids, self.encoder, turn=False), merged=merged)]

    def chats(self, requests: Mapping[int, Request]) -> None:
        """Add rows that are conversations."""
        for row, each in self._rendered(requests).items():
            if isinstance(each, ValueError):
                self.errors[row] = row_error(each)
            else:
                self.sequences[row] = each

    def fit(self) -> None:
        """Make every sequence fit a block, or its row an error; find the answers of those that were only measured."""
        long = [one for some in self.sequences.values() for one in some if len(one.ids) > self.length]
        if self.too_long in ("drop", "error"):
            for one in long:
                self.errors[one.row] = f"{TOO_LONG}: {len(one.ids):,} tokens, and model.max_length is {self.length:,}"
                self.sequences.pop(one.row, None)
            return
        chats = {at: one.request for at, one in enumerate(long) if one.request and self.too_long != "cut_end"}
        found = self._cut_before(chats, None)
        found |= self._cut_before({at: each for at, each in chats.items() if at not in found}, "user")
        shorter = self._rendered(found)
        for at, request in chats.items():
            if at in shorter:
                self._replace(long[at], shorter[at])
            elif request.want != "whole":
                long[at].cut, long[at].ids = len(long[at].ids), long[at].ids[:0]
        for one in (one for one in long if len(one.ids) > self.length):
            self._cut_tokens(one)

    def _cut_tokens(self, one: _Sequence) -> None:
        over = len(one.ids) - self.length
        from_end = self.too_long == "cut_end" or (self.too_long is None and one.request is None and one.ids[0] >= 0)
        begin = self.encoder.tokenizer.bos_token_id
        kept = int(begin is not None and one.ids[0] in (begin, ~begin))
        one.ids = one.ids[: self.length] if from_end else np.delete(one.ids, np.s_[kept : kept + over])
        one.cut += over

    def _replace(self, one: _Sequence, made: list[_Sequence] | ValueError) -> None:
        """Replace a sequence by those of a shorter conversation."""
        place = next(at for at, each in enumerate(self.sequences[one.row]) if each is one)
        fitting = [] if isinstance(made, ValueError) else [each for each in made if len(each.ids) <= self.length]
        if isinstance(made, ValueError):
            self.errors[one.row] = row_error(made)
        if fitting:
            fitting[0].cut = max(0, len(one.ids) - sum(len(each.ids) for each in fitting))
        else:
            one.cut, one.ids = len(one.ids), one.ids[:0]
            fitting = [one]
        self.sequences[one.row][place : place + 1] = fitting

    def _rendered(self, requests: Mapping[int, Request]) -> dict[int, list[_Sequence] | ValueError]:
        """Return the sequences of conversations, or why one has none."""
        made = dict(zip(requests, render(self.encoder.tokenizer, [*requests.values()]), strict=True))
        texts = [(row, each) for row, some in made.items() if not isinstance(some, ValueError) for each in some]
        found: dict[int, list[_Sequence] | ValueError] = {
            row: each if isinstance(each, ValueError) else [] for row, each in made.items()
        }
        encoded = self.encoder.encode([each for _, each in texts], whole=True)
        for (row, text), (ids, merged) in zip(texts, encoded, strict=True):
            request, sequences = requests[row], found[row]
            assert isinstance(sequences, list), "it has texts"
            if text.messages < len(request.messages):
                request = replace(request, messages=request.messages[: text.messages], want="last")
            check_reasoning(request.messages, text.text)
            ids = self._with_end(ids, text)
            sequences.append(_Sequence(row=row, ids=ids, merged=merged, request=request))
        return found

    def _with_end(self, ids: np.ndarray, text: Rendered) -> np.ndarray:
        """Return the tokens with the tokenizer's end token, unless the template ends the last turn with a token."""
        plain = np.maximum(ids, ~ids)
        last, blank = len(ids) - 1, text.text != text.text.rstrip()
        while last > 0 and blank and not self.encoder.tokenizer.decode([plain[last]]).strip():
            last -= 1
        if len(ids) and int(plain[last]) in self.encoder.ends:
            return ids
        end = self.encoder.tokenizer.eos_token_id
        return np.append(ids, np.int32(end if not len(ids) or ids[-1] >= 0 else ~end))

    def _cut_before(self, long: Mapping[int, Request], role: str | None) -> dict[int, Request]:
        """Return for each conversation its longest end that fits and begins at one of its `places_of`, if there is
        one."""
        places = {at: places_of(each, role) for at, each in long.items()}

        def cut(at: int, count: int, want: Any) -> Request:
            return beginning_at(long[at], places[at][-count], want)

        def fitting(tried: Mapping[int, int]) -> set[int]:
            made = self._rendered({at: cut(at, count, "whole") for at, count in tried.items()})
            return {at for at, each in made.items() if isinstance(each, list) and len(each[0].ids) <= self.length}

        counts = largest({at: len(each) for at, each in places.items()}, fitting)
        return {at: cut(at, count, long[at].want) for at, count in counts.items() if count}


def whole_rows(tokenizer: Any, inputs: Mapping[str, Any], options: RowOptions, length: int, learn: str) -> Features:
    """Return rows as sequences of at most `length` tokens; `learn` is `all`, `answers` or `last`."""
    making = _Making(encoder=AnswerEncoder.of(tokenizer), length=length, too_long=options.too_long)
    texts, requests = _rows_of(inputs, options, making.errors, learn)
    turns = {row: sum(one["role"] == "assistant" for one in each.messages) for row, each in requests.items()}
    measured = {row: requests[row] for row, count in turns.items() if count > MOST_TURNS and learn == "answers"}
    making.texts(texts)
    making.chats({**requests, **{row: replace(each, want="whole") for row, each in measured.items()}})
    wanted = dict[int, Request]()
    for row in measured.keys() & making.sequences.keys():
        [one] = making.sequences[row]
        if len(one.ids) <= length:
            wanted[row] = measured[row]
        elif options.too_long == "cut_end":  # as many messages fill a block
            wanted[row] = replace(measured[row], messages=measured[row].messages[:length])
        one.request = measured[row]
    making.chats(wanted)
    making.fit()
    count = len(inputs["text"])
    return _features([_finished(making, row) for row in range(count)], making.errors)


def _rows_of(
    inputs: Mapping[str, Any], options: RowOptions, errors: dict[int, str], learn: str
) -> tuple[dict[int, Rendered], dict[int, Request]]:
    """Return the rows that are texts, and those that are conversations."""
    column, completion, tools = inputs["text"], inputs.get("completion"), inputs.get("tools")
    names = names_of(options)
    values, answers = column.to_pylist(), None if completion is None else completion.to_pylist()
    called = None if tools is None else tools.to_pylist()
    chat = options.chat or is_chat(column.type, names)
    want: Any = {"all": "whole", "answers": "answers", "last": "last"}[learn]
    if answers is None and chat:
        requests, bad = read_chats(values, called, names=names, system=options.system)
        errors |= bad
        return {}, {row: replace(each, want=want) for row, each in requests.items()}
    texts, requests = dict[int, Rendered](), dict[int, Request]()
    for row, value in enumerate(values):
        if isinstance(value, str) and not value.strip():
            continue
        if answers is None:
            texts[row] = Rendered(value)
        elif isinstance(answers[row], str) and not answers[row].strip():
            continue
        elif chat or _is_chat(answers[row], names):
            try:
                read = not isinstance(value, str) or (options.chat and value.lstrip()[:1] == "[")
                asked = read_messages(value, names) if read else value
                answer = read_messages(answers[row], names) if _is_chat(answers[row], names) else answers[row]
                made = request_of(asked, answer, None if called is None else read_tools(called[row]))
                messages = with_system([*made.messages], options.system)
                first = made.first + len(messages) - len(made.messages)
                requests[row] = replace(made, messages=messages, first=first, want=want)
            except (ValueError, RecursionError) as error:
                errors[row] = row_error(error)
        else:
            texts[row] = joined(value, answers[row])
    return texts, requests


def _is_chat(completion: Any, names: Names | None) -> bool:
    """Return whether a completion is messages, or their JSON text; one in brackets may be text, too."""
    if not isinstance(completion, str):
        return True
    return completion.lstrip()[:1] == "[" and looks_like_chats([completion], names)


def _finished(making: _Making, row: int) -> list[_Sequence]:
    """Return the sequences of a row that have targets; add an error for a row without any."""
    sequences = making.sequences.get(row, [])
    kept = [one for one in sequences if (one.ids[1:] >= 0).any()]
    if kept:  # what is cut of the answers that do not fit is of the row, too
        kept[0].cut += sum(one.cut for one in sequences) - sum(one.cut for one in kept)
    if row not in making.errors and not kept:
        cut = any(one.cut for one in sequences)
        why = f"none of what is learned fits, with the message before it, into {making.length:,} tokens"
        left_out = "no token is left of what is learned: the chat template or the tokenizer leaves it out"
        why = f"{NO_ANSWER}: {f'{why} (model.max_length)' if cut else left_out}"
        making.errors[row] = why if row in making.sequences else NULL_INPUT
    return [] if row in making.errors else kept


def _features(rows: Sequence[Sequence[_Sequence]], errors: Mapping[int, str]) -> Features:
    """Return rows as arrays."""
    ids = [one.ids for row in rows for one in row]
    values = np.concatenate([np.zeros(0, np.int32), *ids])
    lengths = np.array([sum(len(one.ids) for one in row) for row in rows], np.int64)
    sizes = np.array([len(one) for one in ids], np.int32)
    cut = np.array([sum(one.cut for one in row) for row in rows], np.int64)
    return replace(
        text_features(
            (values, offsets_of(lengths), cut),
            sequences=Ragged(sizes, offsets_of(np.array([len(row) for row in rows], np.int64))),
            learned=np.array([sum(int((one.ids[1:] >= 0).sum()) for one in row) for row in rows], np.int32),
            merged=np.array([sum(one.merged for one in row) for row in rows], np.int32),
        ),
        errors=errors,
    )
