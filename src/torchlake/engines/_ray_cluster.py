"""A Ray cluster: joining or starting it, the capacity of its nodes, and the resources of one process of a job."""

import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.util.client
from ray._private import ray_constants
from ray._private.state import available_resources_per_node

from torchlake.errors import UsageError
from torchlake.processes.environment import thread_variables
from torchlake.processes.hardware import cores

_started: list[str] = []
"Addresses of the Ray clusters started by this process."
RELEASE_S = 5.0  # for Ray to release the resources of a job that has just ended
STOP_S = 5.0  # for actors to end their children, before they are killed


@dataclass(frozen=True, kw_only=True)
class ProcessResources:
    """The resources that Ray reserves for one process."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    "Bytes of memory; None: not counted."
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts by Ray's names, as for a bundle of a placement group."""
        own = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory or 0, **self.resources}
        return {name: amount for name, amount in own.items() if amount}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of an actor."""
        own = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}
        return own if self.memory is None else {**own, "memory": self.memory}

    @property
    def variables(self) -> dict[str, str]:
        """Return environment variables for as many threads as CPUs."""
        return thread_variables(max(1, int(self.cpus)))

    def count_on(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """Return how many processes fit on these nodes."""
        return sum(
            int(min((node.get(name, 0.0) / amount for name, amount in self.amounts.items()), default=math.inf))
            for node in nodes
        )


def join(address: str | None, processes: int | None) -> bool:
    """Join the cluster or start one; return whether this process started it."""
    address = address or os.environ.get("RAY_ADDRESS")  # set by `ray job submit`
    if not ray.is_initialized():
        if address is not None:
            ray.init(address=address, log_to_driver=False)
        else:
            _start_here(max(cores(), processes or 1))
    if ray.util.client.ray.is_connected():
        raise UsageError(
            "This is a Ray Client connection (ray://), whose driver is not on the cluster. Run the job there: "
            "as a Ray job (ray job submit), or from a notebook on its head node with address='auto'."
        )
    return ray.get_runtime_context().gcs_address in _started


def total_nodes() -> list[dict[str, float]]:
    """Return the total resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def free_nodes() -> list[dict[str, float]]:
    """Return the free resources of each reachable node (Ray lists a lost node for half a minute)."""
    free, found = available_resources_per_node(), []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] in free:
            with suppress(OSError), socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 2):
                found.append(free[node["NodeID"]])
    return found


def free_capacity(most: int, share: ProcessResources, *, running: int = 0, wait_s: float = RELEASE_S) -> int:
    """Return how many processes fit now, up to `most`, including the `running` ones. Waits up to `wait_s` for all."""
    deadline = time.monotonic() + wait_s
    while (found := running + share.count_on(free_nodes())) < most and time.monotonic() < deadline:
        time.sleep(0.2)
    return min(most, found)


def with_most_cpus(share: ProcessResources, number: int, nodes: Sequence[Mapping[str, float]]) -> ProcessResources:
    """Return `share` with the most CPUs such that `number` processes fit on these nodes, or with one CPU."""
    largest = max((int(node.get("CPU", 0)) for node in nodes), default=1)
    tried = (replace(share, cpus=float(cpus)) for cpus in range(largest, 1, -1))
    return next((one for one in tried if one.count_on(nodes) >= number), replace(share, cpus=1.0))


def granted_gpus() -> list[str] | None:
    """Return the devices that Ray assigned to this actor, as in CUDA_VISIBLE_DEVICES; None if it assigned none."""
    granted = os.environ.get("CUDA_VISIBLE_DEVICES") if ray.get_gpu_ids() else None
    return None if granted is None else granted.split(",")


def end_actors(calls: Iterable[Any], actors: Iterable[Any]) -> None:
    """Wait up to `STOP_S` for the calls, which are made here, then kill the actors."""
    try:
        pending = list(calls)
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=STOP_S)
    finally:
        for actor in actors:
            ray.kill(actor)


def format_resources(amounts: Mapping[str, float]) -> str:
    """Format resources, for example as "2 CPUs, 1 GPU"."""
    kinds = {name: f"{name}{'s' * (amount != 1)}" for name, amount in amounts.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{amount:,g} {kinds.get(name, name)}" for name, amount in amounts.items()) or "nothing"


def missing_resources(share: ProcessResources, number: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return which resources of the cluster are too few for that many processes, and by how much, as a sentence."""
    found = {name: sum(node.get(name, 0.0) for node in nodes) for name in share.amounts}
    missing = {name: amount * number - found[name] for name, amount in share.amounts.items()}
    missing = {name: amount for name, amount in missing.items() if amount > 0}
    if missing:
        return f"Missing: {format_resources(missing)}."
    return f"Enough in all, but no node has room: each process needs {format_resources(share.amounts)} on one node."


def _start_here(cpus: int) -> None:
    """Start Ray on this machine, reachable only from it.

    On Linux Ray's processes listen on all interfaces, whatever address `ray.init` gets, unless this switch is off; on
    macOS and Windows Ray turns it off itself.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(
            "local",  # never a Ray that is already running here
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},  # the default of 15 would give way to all other processes
        )
        _started.append(ray.get_runtime_context().gcs_address)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
