"""Ranks on Ray: a placement group, so that all start or none, and an actor in each bundle that holds one rank's child.

The actors say where they are, the driver numbers them by machine and starts the ranks; a generator of each actor brings
what its rank says and prints, and a call of the actor sends it a signal. An actor that is lost is an event of its rank.
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

from torchlake.engines._ray_cluster import Share, granted_gpus, in_words, total_nodes
from torchlake.errors import RankFailed, UsageError
from torchlake.processes.children import Children
from torchlake.processes.remote import Driver, Node, captured, group_variables, held_node, rank_environment, show
from torchlake.processes.serialization import LOST, Failure, describe, rebuild

PLACES_S = 600.0  # for a busy cluster to give all ranks their places
GROW_S = 300.0  # for a cluster that is too small to grow
STOP_S = 5.0  # for actors to end their ranks, before they are killed with them

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What is launched, and what each of the ranks takes."""

    payload: bytes
    number: int
    share: Share
    strategy: str
    name: str
    stdout_to_stderr: bool

    @property
    def text(self) -> str:
        return f"{self.number} ranks that run at the same time and need {in_words(self.share.amounts)} each"

    def lacking(self) -> str | None:
        """Why the cluster, as large as it is now, can never hold the ranks."""
        nodes = total_nodes()
        room = self.share.times(nodes)
        if self.strategy == "STRICT_SPREAD":
            room = sum(self.share.times([node]) > 0 for node in nodes)
        elif self.strategy == "STRICT_PACK":
            room = max((self.share.times([node]) for node in nodes), default=0)
        return None if room >= self.number else f"Ray has room for {room} of {self.text}."


class RankActor:
    """The actor of one rank."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held = ExitStack()
        self._children: Children | None = None

    def place(self) -> Node | Failure:
        """Where this is; why the driver's functions cannot run here."""
        try:
            self._driver.check()
        except RankFailed as error:
            return describe(error)
        node, self._holder = self._held.enter_context(held_node(ray.util.get_node_ip_address(), granted_gpus()))
        return node

    @ray.method(num_returns="streaming")
    def run(self, payload: bytes, variables: Mapping[str, str]) -> Iterator[list[tuple[str, Any]]]:
        """Run the rank; yields its events, and ("output", (stream, lines)) for what it prints. The exit is the last."""
        said = SimpleQueue[tuple[str, Any]]()
        with ExitStack() as stack:
            output = stack.enter_context(captured(lambda stream, lines: said.put(("output", (stream, lines)))))
            self._children = stack.enter_context(Children(output=output, **self._driver.setting()))
            environment, descriptors = rank_environment(variables, self._holder)
            self._children.start(0, "rank", payload, environment, descriptors)
            threading.Thread(target=_pass_on, args=(self._children, said), daemon=True).start()
            last = None
            while last is None:
                batch = [said.get()]
                while not said.empty():
                    batch.append(said.get())
                last = next((one for one in batch if one[0] == "exit"), None)
                yield [one for one in batch if one is not last]
        yield [*(said.get() for _ in range(said.qsize())), last]  # with the last words that the stack's end brought

    def signal(self, number: int) -> None:
        if self._children is not None:
            self._children.signal(number)

    def stop(self) -> None:
        """End the rank."""
        if self._children is not None:
            self._children.__exit__(None, None, None)


@dataclass(eq=False)
class _Rank:
    number: int
    handle: Any
    node: str


class ActorRanks:
    """The driver's side of a launch, as `processes.ranks.run_ranks` takes it: alive inside `with`."""

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
        """End all ranks, then all actors, and give their places back."""
        try:
            ends = [rank.handle.stop.remote() for rank in self._ranks]
            ends += [rank.handle.__ray_terminate__.remote() for rank in self._ranks]  # so their last calls are shown
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=STOP_S)
        finally:
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
            if self._listening is not None:
                self._listening.join(STOP_S)

    def start(self) -> None:
        """Wait for room for all ranks and start them. Raises UsageError where there is none, RankFailed where ranks
        cannot run."""
        job = self._job
        self._group = placement_group([job.share.amounts] * job.number, strategy=job.strategy, name=job.name)
        self._wait_for_room(self._group)
        place = ray.remote(RankActor)
        self._actors = [
            place.options(
                **job.share.options,
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote(Driver.here())
            for number in range(job.number)
        ]
        nodes = self._places()
        machines = list(dict.fromkeys(node.address for node in nodes))
        order = sorted(range(job.number), key=lambda one: (machines.index(nodes[one].address), one))
        variables = group_variables([nodes[one] for one in order], max(1, int(job.share.cpus)))
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

    def _wait_for_room(self, group: PlacementGroup) -> None:
        began, ready, warned = time.monotonic(), group.ready(), False
        while not ray.wait([ready], timeout=1.0)[0]:
            waited_s, lacking = time.monotonic() - began, self._job.lacking()
            if waited_s > (GROW_S if lacking else PLACES_S):
                raise UsageError(lacking or f"Ray had no room for {self._job.text} within {PLACES_S:.0f} s.")
            if lacking and not warned:
                log.warning("%s Waiting %.0f s for it to grow.", lacking, GROW_S)
                warned = True

    def _places(self) -> list[Node]:
        try:
            places = ray.get([actor.place.options(name=f"{self._job.name}: start").remote() for actor in self._actors])
        except RayError as error:
            raise RankFailed(f"an actor of {self._job.name} could not start: {error}", rank=0) from error
        for rank, place in enumerate(places):
            if isinstance(place, Failure):
                raise rebuild(place, rank=rank, who="rank")
        return places

    def _listen(self, calls: dict[Any, _Rank]) -> None:
        """Turn what the actors say into events until all have ended."""
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
                            show(*value, stdout_to_stderr=self._job.stdout_to_stderr)
                        else:
                            self.events.put((rank, kind, value))


def _pass_on(children: Children, said: "SimpleQueue[tuple[str, Any]]") -> None:
    kind = ""
    while kind != "exit":
        _, kind, value = children.events.get()
        said.put((kind, value))
