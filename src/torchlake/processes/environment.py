"""The environment that a child process starts with, and the port at which ranks meet.

Thread counts and device lists have to be in the environment before the child's interpreter starts: OpenMP, MKL and
CUDA read them once, when their libraries load.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from torchlake.errors import UsageError
from torchlake.processes.hardware import cores, gpus

MASTER_FD = "TORCHLAKE_MASTER_FD"
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    MASTER_FD,
)


def share_gpus(processes: int, gpus_per_process: int) -> list[list[str]] | None:
    """Each process's GPUs; None when it asks for none, and then the environment is left as it is.

    Raises UsageError when the machine has fewer than `processes` x `gpus_per_process`.
    """
    if gpus_per_process == 0:
        return None
    if gpus_per_process < 0:
        raise UsageError(f"gpus_per_process is {gpus_per_process}; it has to be 0 or more.")
    found = gpus()
    if len(found) < processes * gpus_per_process:
        raise UsageError(
            f"{processes} processes with {gpus_per_process} GPUs each need {processes * gpus_per_process} GPUs; "
            f"{len(found)} found (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). "
            "Ask for fewer processes or fewer GPUs for each."
        )
    return [
        found[first : first + gpus_per_process] for first in range(0, processes * gpus_per_process, gpus_per_process)
    ]


def visible_to_all(shares: Sequence[Sequence[str]]) -> str:
    """CUDA_VISIBLE_DEVICES of a machine's ranks, which see the devices of all, as under torchrun: `shares` are theirs.

    The first devices come first, so that the number LOCAL_RANK is one that was given to this rank. Raises UsageError
    where two ranks share a device, and for several ranks on the instances of a partitioned GPU (MIG).
    """
    names = [share[place] for place in range(max(map(len, shares))) for share in shares if place < len(share)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"GPU {twice} was granted to more than one rank, and ranks cannot talk over a GPU that they share. Grant "
            "whole GPUs (spark.task.resource.gpu.amount=1, gpus_per_process=1), or ask for fewer processes."
        )
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        raise UsageError(
            f"{len(shares)} rank{'s' * (len(shares) > 1)} on instances of a partitioned GPU ({', '.join(names)}): a "
            "process sees one instance, and NCCL does not connect them. Train with one process, or on whole GPUs."
        )
    return ",".join(names)


def environment(processes: int, devices: list[str] | None, ranks: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for one of `processes` children; thread counts that the user set stay.

    `ranks` are the variables of a launched rank, empty for a worker, which must not take itself for one.
    """
    result = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    result |= thread_variables(max(1, cores() // processes))
    if devices is not None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {**result, **ranks}


def thread_variables(threads: int) -> dict[str, str]:
    """The thread counts of a child that has `threads` cores to itself, but for those that the user set here."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
    counts["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return {name: os.environ.get(name, value) for name, value in counts.items()}


def rank_variables(
    rank: int, *, machines: Sequence[int], master: str, port: int, interface: str | None
) -> dict[str, str]:
    """The variables that torchrun sets for `rank` of a group whose ranks 0, 1, ... run on `machines` (numbers).

    Ranks of one machine follow each other. They meet at `master` and `port`, an address that this rank reaches through
    its machine's network `interface`.
    """
    machine = machines[rank]
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - machines.index(machine)),
        "WORLD_SIZE": str(len(machines)),
        "LOCAL_WORLD_SIZE": str(machines.count(machine)),
        "GROUP_RANK": str(machine),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "torchlake",  # by which Lightning and others see that ranks were started for them
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return variables | ({"GLOO_SOCKET_IFNAME": interface} if sys.platform == "linux" and interface else {})


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address; None where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


@contextmanager
def held_port(address: str) -> Iterator[socket.socket]:
    """A socket that holds a free port of `address` without listening on it, so that rank 0 can listen there.

    While it is bound the kernel gives the port to no socket that asks for any free one, yet lets a socket that names
    it, with SO_REUSEADDR as torch's store sets it, listen: there is no moment at which the port could be lost. Rank 0
    inherits the socket as the open file TORCHLAKE_MASTER_FD and may listen on it itself (`master_listen_fd` of torch's
    TCPStore): that store is reached at `address` alone, while the one that `env://` makes listens everywhere.
    `address` is a name or a number, of IPv4 or IPv6.
    """
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(place)
        yield holder
