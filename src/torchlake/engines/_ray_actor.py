"""The actors of a chunk job on Ray: each runs chunks in a child process, and streams their results."""

import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray

from torchlake.engines._ray_cluster import granted_gpus
from torchlake.processes.chunk_process import Message
from torchlake.processes.remote import Driver, drain
from torchlake.processes.serialization import Failure


class ChunkActor:
    """One child process, which is restarted here if a chunk kills it."""

    def __init__(self, driver: Driver, payload: bytes, variables: Mapping[str, str]) -> None:
        self._driver = driver
        self._messages, self._ended = SimpleQueue[Message](), True
        # Calls of one actor overlap: the next bundle arrives while the last one still waits for its results.
        self._lock, self._reading = threading.Lock(), set[SimpleQueue[Message]]()
        self._process = driver.chunk_process(payload, variables, granted_gpus())

    def ready(self) -> Failure | None:
        """Return why the driver's functions cannot run here, or None."""
        return self._driver.version_failure()

    @ray.method(num_returns="streaming")
    def run(self, bundle: bytes) -> Iterator[list[tuple[str, Any]]]:
        """Run the chunks in order; yield lists of (kind, value) as in `chunk_process.Message`."""
        chunks, messages = pickle.loads(bundle), SimpleQueue[Message]()
        with self._lock:
            # Replaced under the lock, because a call that ends at this moment passes a late failure on to
            # `self._messages`.
            before, self._messages, self._ended = self._messages, messages, False
            is_read = before in self._reading  # the last call still waits for results: they are its own
            self._reading.add(messages)
        self._process.submit(chunks, messages)
        # Between two calls no call reads. A failure of the child in that time is in the old queue, and without it the
        # driver would wait forever for results.
        if not is_read:
            _pass_on_failures(before, messages)
        left = len(chunks)
        while left > 0:
            events = [message[1:] for message in drain(messages)]
            kinds = [kind for kind, _ in events]
            self._ended = "ended" in kinds or "failed" in kinds
            # After a failure no result follows; to wait for one would block the actor for good.
            left = 0 if "failed" in kinds else left - kinds.count("result")
            yield events
        with self._lock:
            self._reading.remove(messages)
            latest = self._messages
        # A failure after the last result belongs to the next bundle, which reads another queue.
        if latest is not messages:
            _pass_on_failures(messages, latest)

    def finish(self) -> Failure | None:
        """Let the child end its generator; return its failure, or None."""
        while not self._ended:
            self._process.finish()
            # A call that is still running reads the messages itself; taking one here would keep it from that call.
            if self._reading:  # by calls
                time.sleep(0.01)
                continue
            with suppress(Empty):
                _, kind, value = self._messages.get(timeout=0.01)
                if kind == "failed":
                    return value  # type: ignore[no-any-return]
                self._ended = kind == "ended"
        self.stop()
        return None

    def stop(self) -> None:
        """Kill the child."""
        self._process.__exit__()


def _pass_on_failures(done: "SimpleQueue[Message]", latest: "SimpleQueue[Message]") -> None:
    """Move a failure that came after the last result of a call to the latest call."""
    while not done.empty():
        message = done.get()
        if message[1] == "failed":
            latest.put(message)
