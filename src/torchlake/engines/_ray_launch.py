"""Ranks on Ray: a placement group, so that all or none start, with an actor for each rank, which runs it as a child.

The actors report their nodes, and the driver numbers them by machine and starts the ranks. A generator of each actor
returns the events and the output of its rank, and a call of the actor sends it a signal. The loss of an actor is an
event of its rank.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchlake.engines._ray_cluster import (
    STOP_S,
    ProcessResources,
    end_actors,
    format_resources,
    granted_gpus,
    missing_resources,
    total_nodes,
)
from torchlake.errors import RankFailed, UsageError
from torchlake.processes.children import Children
from torchlake.processes.remote import (
    Driver,
    Node,
    capture_output,
    drain,
    group_variables,
    print_output,
    rank_environment,
    reserve_node,
)
from torchlake.processes.serialization import LOST, Failure, to_exception

PLACEMENT_S = 600.0  # for a busy cluster to place all ranks
GROW_S = 300.0  # for a cluster that is too small to grow
SAY_S = 60.0  # between two messages about what is missing

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """A launch and the resources of each rank."""

    payload: bytes
    number: int
    share: ProcessResources
    strategy: str
    name: str
    stdout_to_stderr: bool

    @property
    def text(self) -> str:
        return f"{self.number} ranks that run at the same time and need {format_resources(self.share.amounts)} each"

    def shortage(self) -> str | None:
        """Return why the ranks do not fit on the cluster at its present size, or None."""
        nodes = total_nodes()
        room = self.share.count_on(nodes)
        if self.strategy == "STRICT_SPREAD":
            room = sum(self.share.count_on([node]) > 0 for node in nodes)
        elif self.strategy == "STRICT_PACK":
            room = max((self.share.count_on([node]) for node in nodes), default=0)
        if room >= self.number:
            return None
        return f"Ray has room for {room} of {self.text}. {missing_resources(self.share, self.number, nodes)}"


class RankActor:
    """The actor of a rank."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held = ExitStack()
        self._children: Children | None = None

    def place(self) -> Node | Failure:
        """Return this node, or why the driver's functions cannot run here."""
        if failure := self._driver.version_failure():
            return failure
        node, self._holder = self._held.enter_context(reserve_node(ray.util.get_node_ip_address(), granted_gpus()))
        return node

    @ray.method(num_returns="streaming")
    def run(self, payload: bytes, variables: Mapping[str, str]) -> Iterator[list[tuple[str, Any]]]:
        """Run the rank; yield its events and ("output", (stream, lines)). The last event is its exit."""
        said = SimpleQueue[tuple[str, Any]]()
        with ExitStack() as stack:
            output = stack.enter_context(capture_output(lambda stream, lines: said.put(("output", (stream, lines)))))
            self._children = stack.enter_context(Children(output=output, **self._driver.child_options()))
            environment, descriptors = rank_environment(variables, self._holder)
            self._children.start(0, "rank", payload, environment, descriptors)
            threading.Thread(target=_pass_on, args=(self._children, said), daemon=True).start()
            last = None
            while last is None:
                batch = drain(said)
                last = next((one for one in batch if one[0] == "exit"), None)
                yield [one for one in batch if one is not last]
        yield [*(said.get() for _ in range(said.qsize())), last]  # with the remaining output

    def signal(self, number: int) -> None:
        if self._children is not None:
            self._children.signal(number)

    def stop(self) -> None:
        """Kill the rank."""
        if self._children is not None:
            self._children.__exit__(None, None, None)


@dataclass(eq=False)
class _Rank:
    number: int
    handle: Any
    node: str


class ActorRanks:
    """The driver's side of a launch: a `processes.ranks.RankSet`, alive inside `with`."""

    def __init__(self, job: RankJob) -> None:
        self.events: SimpleQueue[tuple[Any, str, Any]] = SimpleQueue()
        self._job = job
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._ranks: list[_Rank] = []
        self._listening: threading.Thread | None = None

    def __enter__(self) -> "ActorRanks":
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks, then all actors, and remove the placement group."""
        methods = [rank.handle.stop for rank in self._ranks]
        methods += [rank.handle.__ray_terminate__ for rank in self._ranks]  # so that Ray records the last calls
        try:
            end_actors((method.remote() for method in methods), self._actors)
        finally:
            if self._group is not None:
                remove_placement_group(self._group)
            if self._listening is not None:
                self._listening.join(STOP_S)

    def start(self) -> None:
        """Wait until all ranks are placed and start them. Raises UsageError without capacity, RankFailed if ranks
        cannot run."""
        job = self._job
        self._group = placement_group([job.share.amounts] * job.number, strategy=job.strategy, name=job.name)
        self._wait_for_placement(self._group)
        place = ray.remote(RankActor)
        self._actors = [
            place.options(
                **job.share.options,
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote(Driver.here())
            for number in range(job.number)
        ]
        nodes = self._nodes()
        order, variables = group_variables(nodes, max(1, int(job.share.cpus)))
        payload = ray.put(job.payload)
        self._ranks = [_Rank(rank, self._actors[one], nodes[one].address) for rank, one in enumerate(order)]
        calls = {
            rank.handle.run.options(name=f"{job.name}: rank {rank.number}").remote(
                payload, variables[rank.number]
            ): rank
            for rank in self._ranks
        }
        self._listening = threading.Thread(target=self._listen, args=(calls,), daemon=True)
        self._listening.start()

    def signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.handle.signal.remote(number)

    def _wait_for_placement(self, group: PlacementGroup) -> None:
        began, ready, next_s = time.monotonic(), group.ready(), 0.0
        while not ray.wait([ready], timeout=1.0)[0]:
            waited_s, shortage = time.monotonic() - began, self._job.shortage()
            if waited_s > (GROW_S if shortage else PLACEMENT_S):
                raise UsageError(shortage or f"Ray had no room for {self._job.text} within {PLACEMENT_S:.0f} s.")
            if waited_s >= next_s and (shortage or waited_s >= SAY_S):
                log.warning(
                    "%s Waiting since %.0f s.", shortage or f"Ray has no room yet for {self._job.text}.", waited_s
                )
                next_s = waited_s + SAY_S

    def _nodes(self) -> list[Node]:
        try:
            places = ray.get([actor.place.options(name=f"{self._job.name}: start").remote() for actor in self._actors])
        except RayError as error:
            raise RankFailed(f"an actor of {self._job.name} could not start: {error}", rank=0) from error
        for rank, place in enumerate(places):
            if isinstance(place, Failure):
                raise to_exception(place, rank=rank, who="rank")
        return places

    def _listen(self, calls: dict[Any, _Rank]) -> None:
        """Put the actors' events into the queue until all have ended."""
        while calls:
            found: list[Any] = ray.wait(list(calls), num_returns=1)[0]
            for call in found:
                rank = calls[call]
                try:
                    said = ray.get(next(call))
                except StopIteration:
                    del calls[call]
                except Exception as error:  # the actor is lost
                    log.info("rank %d was lost on %s: %s", rank.number, rank.node, error)
                    self.events.put((rank, "exit", LOST))
                    del calls[call]
                else:
                    for kind, value in said:
                        if kind == "output":
                            print_output(*value, stdout_to_stderr=self._job.stdout_to_stderr)
                        else:
                            self.events.put((rank, kind, value))


def _pass_on(children: Children, said: "SimpleQueue[tuple[str, Any]]") -> None:
    kind = ""
    while kind != "exit":
        _, kind, value = children.events.get()
        said.put((kind, value))
