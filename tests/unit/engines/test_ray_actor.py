"""Calls of one actor that overlap: each gets its own results, and a failure is not lost."""

from collections.abc import Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from torchlake.engines._ray_actor import ChunkActor
from torchlake.processes.serialization import pack

pytestmark = pytest.mark.usefixtures("ray")  # beside the tests with a cluster: importing Ray takes seconds


class Process:
    """A child process as the actor knows it; the test says what comes from it."""

    def __init__(self) -> None:
        self.queues: list[SimpleQueue[Any]] = []

    def submit(self, chunks: Sequence[Any], messages: "SimpleQueue[Any]") -> None:
        self.queues.append(messages)
        messages.put((self, "needs_chunk", None))


def actor_of(process: Process) -> Any:
    driver: Any = SimpleNamespace(chunk_process=lambda *_: process)
    return ChunkActor(driver, b"", {})


def test_a_second_call_leaves_the_results_of_the_first_to_it() -> None:
    process = Process()
    actor = actor_of(process)
    first = actor.run(pack(1))
    assert next(first) == [("needs_chunk", None)]
    process.queues[0].put((process, "result", "of the first"))
    second = actor.run(pack(2))
    assert next(second) == [("needs_chunk", None)]
    assert not process.queues[0].empty(), "the first call would wait for its result for ever"
    assert next(first) == [("result", "of the first")]


def test_a_failure_after_the_results_reaches_the_next_call_whenever_it_starts() -> None:
    for starts_early in (False, True):
        process = Process()
        actor = actor_of(process)
        first = actor.run(pack(1))
        next(first)
        process.queues[0].put((process, "result", "one"))
        assert next(first) == [("result", "one")]
        process.queues[0].put((process, "failed", "later"))
        if not starts_early:
            assert list(first) == []
        second = actor.run(pack(2))
        events = next(second)
        if starts_early:
            assert list(first) == []
            events += next(second)
        assert ("failed", "later") in events
