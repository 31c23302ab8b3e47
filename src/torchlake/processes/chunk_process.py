"""Run chunks in a child process: one model load for any number of an engine's tasks.

The child starts with the first chunk and keeps running. If a chunk kills it, it is restarted here, so that the engine's
task continues: the k-th result of a series belongs to the k-th chunk that the child pulled, and unfinished chunks run
again first. Cost: one small message each way per chunk.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from torchlake.processes.children import Child, Children
from torchlake.processes.serialization import Failure, describe_exit, signal_of, to_exception, unpack

MAX_DEATHS = 20  # processes that one chunk may kill before the job fails
MAX_EARLY_DEATHS = 3  # consecutive deaths of processes that never became ready

_NO_CHILD: Any = None
Message = tuple["ChunkProcess", str, Any]
"""result (packed) | needs_chunk: the child asked for one, but none is left | ended: the series | failed (a Failure)"""


@dataclass(eq=False)
class _Chunk:
    value: Any
    messages: "SimpleQueue[Message]"
    deaths: int = 0


class ChunkProcess:
    """A child that runs chunks, alive inside `with`; `children` is a set for it alone.

    The child exits after `idle_s` seconds without a chunk (None: never) and starts again with the next one.
    """

    def __init__(
        self,
        payload: bytes,
        environment: Mapping[str, str],
        children: Children,
        *,
        number: int = 0,
        idle_s: float | None = None,
    ) -> None:
        self.number = number
        self._payload, self._environment, self._idle_s = payload, dict(environment), idle_s
        self._children = children
        self._lock = threading.Lock()  # guards everything below
        self._child: Child | None = None
        self._closed = self._in_series = self._ready = self._is_pulling = self._is_idle = False
        self._startup_failures = 0  # consecutive deaths without a chunk
        self._todo: deque[_Chunk] = deque()
        self._pulled: deque[_Chunk] = deque()
        self._messages: SimpleQueue[Message] = SimpleQueue()

    def __enter__(self) -> "ChunkProcess":
        self._children.__enter__()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self._children.__exit__(None, None, None)
        self._children.events.put((_NO_CHILD, "closed", None))
        self._thread.join()

    def submit(self, chunks: Sequence[Any], messages: "SimpleQueue[Message]") -> None:
        """Run the chunks in order and put the outcome of each into `messages`.

        The series of chunks continues until `finish`: after "needs_chunk", submit more chunks or finish the series.
        """
        with self._lock:
            self._messages, self._in_series = messages, True
            self._todo.extend(_Chunk(chunk, messages) for chunk in chunks)
            self._feed()

    def run(self, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Run a series of chunks; yield ("result", packed) for each in order, or ("failed", Failure) as the last."""
        messages: SimpleQueue[Message] = SimpleQueue()
        self.submit(chunks, messages)
        kind = ""
        while kind not in ("ended", "failed"):
            _, kind, value = messages.get()
            if kind == "needs_chunk":
                self.finish()
            elif kind != "ended":
                yield kind, value

    def finish(self) -> None:
        """End the series if the child is pulling and no chunk is left; the child stays for the next series."""
        with self._lock:
            if self._child is not None and self._is_pulling and not self._todo:
                self._is_pulling = False
                self._child.send()

    def _feed(self) -> None:
        """Start the child if there is none, or send it what it waits for; the caller holds the lock."""
        if not self._todo or self._closed:
            return
        if self._child is None:
            self._ready = self._is_pulling = self._is_idle = False
            self._child = self._children.start(self.number, "worker", self._payload, self._environment)
        elif self._is_idle:
            self._is_idle = False
            self._child.send(True)
        elif self._is_pulling:
            self._is_pulling = False
            self._pulled.append(self._todo.popleft())
            self._child.send(self._pulled[-1].value)

    def _listen(self) -> None:
        while True:
            try:
                child, kind, value = self._children.events.get(timeout=self._idle_s)
            except Empty:
                # Decided under the lock: `submit` may have given the child another series in the meantime.
                with self._lock:
                    if self._child is not None and self._is_idle:
                        self._is_idle = False
                        self._child.send()
                continue
            if kind == "closed":
                return
            with self._lock:
                # Events of a child that was replaced may still be in the queue; they do not concern its successor.
                if child is self._child:
                    self._handle_event(kind, value)

    def _handle_event(self, kind: str, value: Any) -> None:
        """Process one event of the child; the caller holds the lock."""
        if kind == "ready":
            self._ready = True
        elif kind == "pull":
            self._is_pulling = True
            if self._todo:
                self._feed()
            else:
                self._messages.put((self, "needs_chunk", None))
        elif kind == "result":
            self._startup_failures = 0
            self._pulled.popleft().messages.put((self, "result", value))
        elif kind == "ended":
            self._is_idle = True
            self._end_series()
            self._feed()
        elif kind == "error":
            self._fail(unpack(value))
        elif kind == "exit":
            self._handle_death(value)

    def _handle_death(self, code: int) -> None:
        """Requeue the unfinished chunks of a child that died, unless they have killed too many."""
        # A child may have pulled two chunks, because it reads ahead. Both go back to the front in their order: callers
        # take the k-th result for the k-th chunk.
        lost, self._child = list(self._pulled), None
        self._pulled.clear()
        self._todo.extendleft(reversed(lost))
        if lost:
            # Results come in order, so the first chunk was being processed. The count is high, because a chunk with
            # many poison rows kills two processes for each of them (`poison_rows.py`); it only ends jobs in which every
            # attempt dies, for example for lack of memory.
            lost[0].deaths += 1
            if lost[0].deaths > MAX_DEATHS:
                names = " and ".join(repr(chunk.value)[:300] for chunk in lost)
                advice = "Take these rows out, or give each process more memory."
                self._fail(_died(lost[0].deaths, f"while working on {names}", code, advice))
        elif self._todo:
            # No chunk is to blame: the child died while it loaded the model, or between two chunks. Before it was ever
            # ready the cause is most likely permanent (a missing library, too little memory for the model), so few
            # attempts are enough to say so.
            self._startup_failures += 1
            if self._startup_failures >= (MAX_DEATHS if self._ready else MAX_EARLY_DEATHS):
                self._fail(_died(self._startup_failures, "before they took a chunk", code, "See their stderr."))
        else:
            # All results have arrived, so the death cost nothing. The caller still waits for the end of the series.
            self._end_series()
        self._feed()

    def _end_series(self) -> None:
        if self._in_series:
            self._in_series = False
            self._messages.put((self, "ended", None))

    def _fail(self, failure: Failure) -> None:
        """Fail all chunks."""
        # Chunks of several callers may be queued. Each queue gets the failure once, so that no caller waits forever.
        self._in_series = False
        queues = {id(chunk.messages): chunk.messages for chunk in (*self._pulled, *self._todo)}
        self._pulled.clear()
        self._todo.clear()
        for messages in (queues or {0: self._messages}).values():
            messages.put((self, "failed", failure))


def run_chunks_locally(
    payload: bytes, todo: Sequence[Any], environments: Sequence[Mapping[str, str]], children: Callable[[], Children]
) -> Generator[Any, None, None]:
    """Run chunks in child processes of this process, one per environment; each gets the next chunk when it pulls."""
    pending, left = deque(todo), len(todo)
    messages: SimpleQueue[Message] = SimpleQueue()
    workers = [ChunkProcess(payload, one, children(), number=number) for number, one in enumerate(environments)]
    with ExitStack() as stack:
        for worker in workers[:left]:
            stack.enter_context(worker).submit([pending.popleft()], messages)
        running = min(left, len(workers))
        while running:
            worker, kind, value = messages.get()
            if kind == "failed":
                raise to_exception(value, rank=worker.number, who="worker")
            if kind == "result":
                yield unpack(value)
            elif kind == "ended":
                running -= 1
            elif pending:
                worker.submit([pending.popleft()], messages)
            else:
                worker.finish()


def _died(times: int, when: str, code: int, advice: str) -> Failure:
    return Failure(
        kind="RankFailed",
        message=f"{times} worker processes died {when}; the last one {describe_exit(code)}. {advice}",
        fields={"rank": 0, "signal": signal_of(code), "traceback": ""},
    )
