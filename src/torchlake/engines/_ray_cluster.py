"""A Ray cluster: joined or started here, what its nodes hold, and what one process of a job takes of it."""

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
"The addresses of the Rays that were started here."
FREED_S = 5.0  # for Ray to free what a job held that has just ended


@dataclass(frozen=True, kw_only=True)
class Share:
    """What Ray reserves for one process."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    "In bytes; None: not counted."
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def amounts(self) -> dict[str, float]:
        """By Ray's names, as a bundle of a placement group has them."""
        own = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory or 0, **self.resources}
        return {name: amount for name, amount in own.items() if amount}

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of an actor."""
        own = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}
        return own if self.memory is None else {**own, "memory": self.memory}

    @property
    def variables(self) -> dict[str, str]:
        """As many threads as CPUs."""
        return thread_variables(max(1, int(self.cpus)))

    def times(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """How many processes fit into such nodes."""
        return sum(
            int(min((node.get(name, 0.0) / amount for name, amount in self.amounts.items()), default=math.inf))
            for node in nodes
        )


def join(address: str | None, processes: int | None) -> bool:
    """Join the cluster, or start one; whether it is this machine alone."""
    address = address or os.environ.get("RAY_ADDRESS")  # Ray sets it for what `ray job submit` runs
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
    """What each node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def free_nodes() -> list[dict[str, float]]:
    """What is free on each node that answers. Ray counts a node that is lost for half a minute longer."""
    free, found = available_resources_per_node(), []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] in free:
            with suppress(OSError), socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 2):
                found.append(free[node["NodeID"]])
    return found


def free_for(most: int, share: Share, *, held: int = 0, wait_s: float = FREED_S) -> int:
    """Processes, up to `most`, that there is free room for besides the `held` ones, waiting a while for all."""
    deadline = time.monotonic() + wait_s
    while (found := held + share.times(free_nodes())) < most and time.monotonic() < deadline:
        time.sleep(0.2)
    return min(most, found)


def widest(share: Share, number: int, nodes: Sequence[Mapping[str, float]]) -> Share:
    """The share with the most CPUs of which such nodes hold `number`; with one CPU where they hold fewer."""
    largest = max((int(node.get("CPU", 0)) for node in nodes), default=1)
    tried = (replace(share, cpus=float(cpus)) for cpus in range(largest, 1, -1))
    return next((one for one in tried if one.times(nodes) >= number), replace(share, cpus=1.0))


def granted_gpus() -> list[str] | None:
    """In an actor: the devices that Ray gave it, in CUDA's words; None where it gave none."""
    granted = os.environ.get("CUDA_VISIBLE_DEVICES") if ray.get_gpu_ids() else None
    return None if granted is None else granted.split(",")


def in_words(amounts: Mapping[str, float]) -> str:
    """Resources for people: "2 CPUs, 1 GPU"."""
    kinds = {name: f"{name}{'s' * (amount != 1)}" for name, amount in amounts.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{amount:,g} {kinds.get(name, name)}" for name, amount in amounts.items()) or "nothing"


def _start_here(cpus: int) -> None:
    """Start Ray on this machine, reached from this machine alone.

    That takes the switch by which Ray keeps to itself on laptops with macOS and Windows; on Linux its processes listen
    to the whole network, whatever address `ray.init` is given.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(
            "local",  # not another Ray that runs on this machine
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},  # 15 by default: the job would yield to everything else
        )
        _started.append(ray.get_runtime_context().gcs_address)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
