"""Where long conversations may begin, and the search for the most that fits a block."""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from torchlake.tasks._chat import system_of
from torchlake.tasks._rendering import Request

FOLLOWING = ("assistant", "tool", "function")
"Roles that answer a message before them."


def largest(counts: Mapping[int, int], fitting: Callable[[Mapping[int, int]], Container[int]]) -> dict[int, int]:
    """Return for each key the largest number up to its count that fits, 0 if 1 does not.

    `fitting` tries a number for each of several keys at once. They double until one does not fit, then the interval is
    halved.
    """
    good, bad = dict.fromkeys(counts, 0), {key: count + 1 for key, count in counts.items()}
    tried = {key: 1 for key, count in counts.items() if count}
    while tried:
        fits = fitting(tried)
        for key, number in tried.items():
            (good if key in fits else bad)[key] = number
        middle = {
            key: min(2 * good[key], counts[key]) if bad[key] > counts[key] else (good[key] + bad[key]) // 2
            for key in tried
        }
        tried = {key: number for key, number in middle.items() if good[key] < number < bad[key]}
    return good


def places_of(request: Request, role: str | None) -> list[int]:
    """Return the messages with which a conversation may begin, after the first: those of a role, or of any that does
    not answer."""
    messages = request.messages
    answers = [at for at, each in enumerate(messages) if each["role"] == "assistant" and at >= request.first]
    last = len(messages) if request.want == "whole" or not answers else answers[-1]
    return [
        at
        for at in range(len(system_of(messages)) + 1, min(last, request.first or last))
        if (messages[at]["role"] == role if role else messages[at]["role"] not in FOLLOWING)
    ]


def beginning_at(request: Request, begin: int, want: Any) -> Request:
    """Return a conversation that begins with message `begin`, after its system text."""
    head = system_of(request.messages)
    first = max(0, request.first - begin + len(head)) if request.first else 0
    return replace(request, messages=[*head, *request.messages[begin:]], first=first, want=want)
