"""What this machine has (cores, GPUs, a free port) and the environment that a child process starts with.

Thread counts and device lists have to be in the environment before the child's interpreter starts: OpenMP, MKL and
CUDA read them once, when their libraries load.
"""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from torchlake.errors import UsageError

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
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """The cores this process may run on, and no more than its container's share of time keeps busy."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cgroup_cores()
    return allowed if quota is None else min(allowed, max(1, math.ceil(quota)))


def available_memory() -> int:
    """Bytes that new processes may take: the machine's free memory, or what the container's limit leaves of it."""
    available = psutil.virtual_memory().available
    limit = cgroup_memory()
    return available if limit is None else min(available, max(0, limit - _cgroup_memory_used()))


def cgroup_cores() -> float | None:
    """Cores' worth of time that a container may use (cgroup v2, then v1); None: no limit."""
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if not quota:
        quota, period = _cgroup("cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def cgroup_memory() -> int | None:
    """Bytes of memory that a container may use (cgroup v2, then v1); None: no limit."""
    limit = _cgroup("memory.max") or _cgroup("memory/memory.limit_in_bytes")
    # cgroup v1 writes "no limit" as a number near 2^63.
    return int(limit) if limit.isdigit() and int(limit) < 2**60 else None


def _cgroup_memory_used() -> int:
    """Bytes that count against the limit, but for cached file pages: the kernel gives those up when asked for more."""
    used = _cgroup("memory.current") or _cgroup("memory/memory.usage_in_bytes")
    lines = (_cgroup("memory.stat") or _cgroup("memory/memory.stat")).splitlines()
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    # cgroup v1 counts the groups below under "total_" names only.
    cached = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return int(used or 0) - cached


def _cgroup(name: str) -> str:
    """A file of the control group; empty where there is none."""
    try:
        return (CGROUP / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def most_processes(memory_per_process: int, threads_per_process: int = 1) -> int:
    """One process for every `threads_per_process` cores, but no more than half of the available memory holds.

    `memory_per_process` is in bytes; 0: any number fits.
    """
    wanted = max(1, cores() // threads_per_process)
    if memory_per_process == 0:
        return wanted
    return max(1, min(wanted, available_memory() // 2 // memory_per_process))


def gpus() -> list[str]:
    """The GPUs this process may use, in CUDA's own words; found without torch and without opening a device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(_count_gpus())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    negative = next((index for index, name in enumerate(names) if name.startswith("-")), len(names))
    return names[:negative]  # CUDA ignores what follows a negative number


def _count_gpus() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        folder = Path("/proc/driver/nvidia/gpus")
        return len(list(folder.iterdir())) if folder.is_dir() else 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


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

    While it is bound the kernel gives the port to nobody who asks for any free one, yet lets a socket that names it,
    with SO_REUSEADDR as torch's store sets it, listen: there is no moment at which the port could be lost. Rank 0
    inherits the socket as the open file TORCHLAKE_MASTER_FD and may listen on it itself (`master_listen_fd` of torch's
    TCPStore): that store is reached at `address` alone, while the one that `env://` makes listens everywhere.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder
