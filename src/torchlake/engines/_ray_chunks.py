"""Chunk jobs on Ray: a pool of actors with a child process each; a bundle of chunks is one named call of an actor.

An actor gets a bundle when it is idle, and another when its child needs a chunk beyond that, so that reading the next
chunk overlaps with the model and no chunk waits behind a slow one. The call is a generator: results arrive one by one.
The pool grows as Ray places actors (waiting actors are the demand that an autoscaler sees) and shrinks when no chunk
is left. Unfinished chunks of a lost actor run first in another one.
Cost: about 1 s to start an actor, then 1 ms per call; while there are many chunks they travel in bundles.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from torchlake.engines._ray_actor import ChunkActor
from torchlake.engines._ray_cluster import (
    ProcessResources,
    end_actors,
    format_resources,
    missing_resources,
    total_nodes,
)
from torchlake.errors import RankFailed, UsageError
from torchlake.processes.chunk_process import MAX_DEATHS, MAX_EARLY_DEATHS
from torchlake.processes.remote import Driver
from torchlake.processes.serialization import pack, to_exception, unpack

MAX_BUNDLE_CHUNKS = 64
BUNDLES_PER_ACTOR = 16  # before chunks are bundled: enough to balance slow ones
WARN_S = 30.0  # without a place for any actor, before the first message; then twice as long each time
GROW_S = 300.0  # for a cluster on which no process fits

log = logging.getLogger(__name__)


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
