"""The environment of a child process, and the port at which ranks rendezvous.

Thread counts and device lists (`hardware.visible_devices`) must be set before the child's interpreter starts, because
OpenMP, MKL and CUDA read them once, when their libraries load.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from torchlake.logs import PROGRESS
from torchlake.processes.hardware import cores
from torchlake.progress import NOTEBOOK, in_notebook

MASTER_FD = "TORCHLAKE_MASTER_FD"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"For glibc: keep up to 4 GiB of freed memory. By default it asks the kernel for each large tensor again."
MALLOPT = (-3, -1)
"The numbers of these two settings in malloc.h; values are ints there."
SPINS = "2000"
"How often a thread of GNU's OpenMP looks for work before it sleeps."
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", MASTER_FD,
)  # fmt: skip


def child_environment(variables: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """Return ALLOCATOR and this process's environment, without its own rank variables, updated with `gpus` and
    `variables`."""
    result = ALLOCATOR | {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    if gpus is not None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**result, **variables}


def local_environment(
    processes: int, gpus: Sequence[str] | None, rank_variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of one of `processes` children on this machine, which share its cores equally."""
    threads = thread_variables(max(1, cores() // processes))
    shown = {PROGRESS: os.environ.get(PROGRESS) or NOTEBOOK} if in_notebook() else {}
    return child_environment({**threads, **shown, **(rank_variables or {})}, gpus)


def thread_variables(threads: int) -> dict[str, str]:
    """Return the thread counts of a child with `threads` cores, and how they wait; what the user set in the environment
    wins.

    OMP_NUM_THREADS is also used for MKL, because torch takes MKL's count if that is set. Threads that wait for others
    look for work a moment, then sleep. By default they keep their core busy, so on a busy machine the others wait for
    that core; if they sleep at once, small products wait for them to wake up.
    """
    counts = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
    counts["MKL_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    counts["OMP_WAIT_POLICY"] = "PASSIVE"
    if "OMP_WAIT_POLICY" not in os.environ:
        counts["GOMP_SPINCOUNT"] = SPINS
    counts["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return {name: os.environ.get(name, value) for name, value in counts.items()}


def keep_freed_memory() -> None:
    """Let this process do what ALLOCATOR, which is read at the start only, lets a child do; without glibc, nothing."""
    with suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        for number, (name, value) in zip(MALLOPT, ALLOCATOR.items(), strict=True):
            if name not in os.environ:
                set_option(number, min(int(value), (1 << 31) - 1))


def rank_variables(
    rank: int, *, machines: Sequence[int], master: str, port: int, interface: str | None
) -> dict[str, str]:
    """Return the variables that torchrun sets for `rank` of a group.

    `machines[i]` is the number of the machine that runs rank i; the ranks of a machine are consecutive. They rendezvous
    at `master` and `port`, which this rank reaches through the network `interface`.
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
        "TORCHELASTIC_RUN_ID": "torchlake",  # Lightning and others detect an external launcher by it
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return variables | ({"GLOO_SOCKET_IFNAME": interface} if sys.platform == "linux" and interface else {})


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has the address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


@contextmanager
def reserve_port(address: str) -> Iterator[socket.socket]:
    """Yield a socket bound to a free port of `address` (a name or number, IPv4 or IPv6), on which rank 0 can listen.

    While the socket is bound but not listening, the kernel does not hand out the port as a free one, but a socket that
    binds to it explicitly with SO_REUSEADDR, as torch's store does, can listen: the port cannot be lost in between.
    Rank 0 inherits the socket as the file descriptor TORCHLAKE_MASTER_FD and may listen on it directly
    (`master_listen_fd` of torch's TCPStore). Such a store is reachable at `address` only, while one from `env://`
    listens on all interfaces.
    """
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(place)
        yield holder
