"""Chunk jobs on Ray: a pool of actors with a child process each; a bundle of chunks is one named call of an actor.

An actor gets a bundle when it is idle, and another when its child needs a chunk beyond that, so that reading the next
chunk overlaps with the model and no chunk waits behind a slow one. The call is a generator: results arrive one by one.
The pool grows as Ray places actors (waiting actors are the demand that an autoscaler sees) and shrinks when no chunk
is left. Unfinished chunks of a lost actor run first in another one.
Cost: about 1 s to start an actor, then 1 ms per call; while there are many chunks they travel in bundles.
"""

import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from torchlake.engines._ray_cluster import (
    ProcessResources,
    end_actors,
    format_resources,
    granted_gpus,
    missing_resources,
    total_nodes,
)
from torchlake.errors import RankFailed, UsageError
from torchlake.processes.chunk_process import MAX_DEATHS, MAX_EARLY_DEATHS, Message
from torchlake.processes.remote import Driver, drain
from torchlake.processes.serialization import Failure, pack, to_exception, unpack

MAX_BUNDLE_CHUNKS = 64
BUNDLES_PER_ACTOR = 16  # before chunks are bundled: enough to balance slow ones
WARN_S = 30.0  # without a place for any actor, before the first message; then twice as long each time
GROW_S = 300.0  # for a cluster on which no process fits

log = logging.getLogger(__name__)


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


@dataclass(eq=False)
class _Chunk:
    number: int
    value: Any
    deaths: int = 0


@dataclass(eq=False)
class _Actor:
    """The driver's view of an actor; `calls` are its running bundles, oldest first."""

    number: int
    handle: Any
    ready: bool = False
    needs_chunk: bool = False
    ending: bool = False
    ended: bool = False
    calls: list[deque[_Chunk]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The resources of a chunk job."""

    share: ProcessResources
    most: int
    "Maximum number of processes."
    at_once: int
    "How many of them are requested before any is placed."
    strategy: str


class RayChunkJob:
    """The driver's side of a chunk job: `run` yields the results."""

    def __init__(
        self, payload: bytes, chunks: Sequence[Any], demand: Demand, name: str, label: Callable[[Any], str]
    ) -> None:
        self._payload = payload
        self._demand, self._name, self._label = demand, name, label
        self._todo = deque(_Chunk(number, value) for number, value in enumerate(chunks))
        self._left = len(chunks)
        self._actors: list[_Actor] = []
        self._made = self._early_deaths = 0
        self._calls: dict[Any, tuple[_Actor, deque[_Chunk] | None]] = {}  # by the generator or the reference
        self._waiting_since: float | None = time.monotonic()  # for the first actor's place; None: no longer
        self._warn_s = WARN_S

    def run(self) -> Generator[Any, None, None]:
        """Run all chunks, then stop all actors."""
        share, strategy = self._demand.share, self._demand.strategy
        # Three calls of an actor at a time: a bundle, the next one, and `finish` or `stop`, which must not wait behind
        # them.
        self._actor_class = ray.remote(ChunkActor).options(
            **share.options, scheduling_strategy=strategy, max_concurrency=3
        )
        self._arguments = (Driver.here(), ray.put(self._payload), share.variables)
        try:
            while self._left or self._calls:
                self._dispatch()
                self._resize()
                for call in self._wait():
                    if call in self._calls:  # else its actor was just lost
                        yield from self._receive(call)
        finally:
            self._stop()

    def _dispatch(self) -> None:
        """Send a bundle to every actor that needs one, and finish those for which none is left.

        A busy actor gets no chunk that an idle or a starting actor could run.
        """
        starting = sum(not actor.ready for actor in self._actors)
        # Idle actors first: a bundle behind a busy one would wait although a process is free.
        for actor in sorted(self._actors, key=lambda one: bool(one.calls)):
            if not actor.ready or actor.ending:
                continue
            if self._todo and (not actor.calls or (actor.needs_chunk and len(self._todo) > starting)):
                # Smaller bundles toward the end, so that the last ones end at about the same time.
                size = len(self._todo) // (max(len(self._actors), self._demand.at_once) * BUNDLES_PER_ACTOR)
                bundle = deque(self._todo.popleft() for _ in range(max(1, min(MAX_BUNDLE_CHUNKS, size))))
                call = actor.handle.run.options(name=self._title(bundle))
                packed = pack(*(chunk.value for chunk in bundle))
                actor.calls.append(bundle)
                actor.needs_chunk = False
                self._calls[call.remote(packed)] = (actor, bundle)
            elif not self._todo and (actor.needs_chunk or not actor.calls):
                actor.ending = True
                self._calls[actor.handle.finish.options(name=f"{self._name}: end").remote()] = (actor, None)

    def _title(self, bundle: Sequence[_Chunk]) -> str:
        more = f" and {len(bundle) - 1} more" if len(bundle) > 1 else ""
        return f"{self._name}: {self._label(bundle[0].value)[:100]}{more}"

    def _resize(self) -> None:
        """Start an actor for every waiting chunk, as far as the demand allows, and remove superfluous ones."""
        starting = [actor for actor in self._actors if not actor.ready]
        others = sum(actor.ready and not actor.ending for actor in self._actors)
        # Actors without a place are demand that an autoscaler serves: more of them than chunks would start idle nodes.
        for actor in starting[len(self._todo) :]:
            self._remove(actor)
        most = min(len(self._todo), self._demand.most - others, max(1, others, self._demand.at_once - others))
        for _ in range(most - len(starting)):
            actor = _Actor(self._made, self._actor_class.remote(*self._arguments))
            self._made += 1
            self._actors.append(actor)
            self._calls[actor.handle.ready.options(name=f"{self._name}: start").remote()] = (actor, None)

    def _wait(self) -> list[Any]:
        """Return the calls that have results or have ended."""
        calls = list(self._calls)
        wait_s = None
        if self._waiting_since is not None:
            wait_s = max(0.0, self._waiting_since + self._warn_s - time.monotonic())
        found, _ = ray.wait(calls, num_returns=1, timeout=wait_s)
        # All that are ready: one at a time, a busy actor at the head of the list could keep the others waiting.
        if found:
            return list(ray.wait(calls, num_returns=len(calls), timeout=0)[0])
        assert self._waiting_since is not None
        share, nodes, waited_s = self._demand.share, total_nodes(), time.monotonic() - self._waiting_since
        missing = "" if share.count_on(nodes) else f" {missing_resources(share, 1, nodes)}"
        if missing and waited_s > GROW_S:
            raise UsageError(f"{self._name} has waited {waited_s:.0f} s for Ray to grow.{missing}")
        log.warning(
            "%s has waited %.0f s for a place on Ray. Each process asks for %s; the cluster has %s, free: %s.%s",
            *(self._name, waited_s, format_resources(share.amounts)),
            *(format_resources(ray.cluster_resources()), format_resources(ray.available_resources()), missing),
        )
        self._warn_s *= 2
        return []

    def _receive(self, call: Any) -> Iterator[Any]:
        """Process the results or the end of a call; yield results."""
        actor, bundle = self._calls[call]
        try:
            news = ray.get(call if bundle is None else next(call))
        except StopIteration:
            del self._calls[call]
        # An exception of the actor's own code, not of a chunk: another actor would raise it again.
        except RayTaskError as error:
            raise RankFailed(f"worker {actor.number} failed: {error}", rank=actor.number) from error
        except RayError as error:
            self._handle_lost_actor(actor, error)
        else:
            if bundle is not None:
                yield from self._results(actor, bundle, news)
            else:
                del self._calls[call]
                if news is not None:
                    raise to_exception(news, rank=actor.number, who="worker")
                # The first answer of an actor is that of `ready`, the second that of `finish`.
                actor.ended = actor.ready
                actor.ready, self._early_deaths, self._waiting_since = True, 0, None
            if actor.ended and not actor.calls:
                self._remove(actor)

    def _results(self, actor: _Actor, bundle: deque[_Chunk], events: Sequence[tuple[str, Any]]) -> Iterator[Any]:
        for kind, value in events:
            if kind == "failed":
                raise to_exception(value, rank=actor.number, who="worker")
            if kind == "ended":
                continue
            if kind == "needs_chunk":
                actor.needs_chunk = bool(actor.calls) and bundle is actor.calls[-1]  # else it has the next one
                continue
            bundle.popleft()
            if not bundle:
                actor.calls.remove(bundle)
            self._left -= 1
            yield unpack(value)

    def _handle_lost_actor(self, actor: _Actor, error: RayError) -> None:
        """Requeue the unfinished chunks of a lost actor. Raises RankFailed if that has happened too often."""
        self._remove(actor)
        # To the front, in their order: a chunk that kills its processes is found before many others have waited.
        lost = [chunk for bundle in actor.calls for chunk in bundle]
        self._todo.extendleft(reversed(lost))
        log.info("%s: the actor of worker %d was lost: %s", self._name, actor.number, error)
        # Otherwise a pool that cannot start, for example without a library, would be replaced forever. The number of
        # actors is added because one lost machine may take several that are starting.
        if not actor.ready:
            self._early_deaths += 1
            if self._early_deaths >= MAX_EARLY_DEATHS + len(self._actors):
                raise RankFailed(f"{self._early_deaths} actors died before they were ready; the last: {error}", rank=0)
        if lost:
            lost[0].deaths += 1  # results come in order, so the first chunk was being processed
            if lost[0].deaths > MAX_DEATHS:
                what = f"{lost[0].deaths} actors died while working on {self._label(lost[0].value)[:300]}"
                raise RankFailed(f"{what}; the last: {error}", rank=actor.number)
        if self._waiting_since is None and not any(one.ready for one in self._actors):
            self._waiting_since, self._warn_s = time.monotonic(), WARN_S

    def _remove(self, actor: _Actor) -> None:
        self._actors.remove(actor)
        self._calls = {call: owner for call, owner in self._calls.items() if owner[0] is not actor}
        if actor.ended:
            actor.handle.__ray_terminate__.remote()  # a regular exit, so that Ray records its last calls
        else:
            ray.kill(actor.handle)

    def _stop(self) -> None:
        """End all children, then all actors, including those that are not placed yet."""
        ends = (actor.handle.stop.remote() for actor in self._actors if actor.ready)
        end_actors(ends, [actor.handle for actor in self._actors])
        self._calls.clear()
