"""The ranks of one launch, and the collectives that they use besides gradients.

A rank reads the variables that torchrun sets. At world size 1 everything here works without a process group, so the
training loop has one path. Every wait is limited by `collective_timeout`: when a rank hangs, its peers time out, report
this and fail, and the launch restarts from the last checkpoint.
"""

import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchlake.errors import UsageError, ran_out_of_memory

LOST_PEER_WORDS = ("timed out", "timeout", "connection", "socket", "broken pipe", "nccl", "unhandled system error")


@dataclass(frozen=True, kw_only=True)
class Group:
    """This process's `rank` of `world_size`, and its `local_rank` on this machine."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    model_ranks: int = 1
    "Number of adjacent ranks that compute the same rows, each a part of every layer (tensor parallelism)."

    @property
    def data_ranks(self) -> int:
        """The number of groups of such ranks, among which the rows of a batch are divided."""
        return self.world_size // self.model_ranks

    @property
    def data_rank(self) -> int:
        """The number of this rank's group, which determines its share of the rows."""
        return self.rank // self.model_ranks

    @property
    def counts(self) -> bool:
        """Whether sums over all ranks include this rank's results: they include one rank of each group."""
        return self.rank % self.model_ranks == 0


@contextmanager
def process_group(
    timeout_s: float, *, alone: bool = False, main_memory: bool = False, model_ranks: int = 1
) -> Iterator[Group]:
    """Join the ranks of this launch: nccl between GPUs, gloo between CPUs.

    At world size 1 there is a group only if `alone`, for strategies that shard a model. `main_memory`: ranks with GPUs
    also join by gloo, for tensors in main memory. `model_ranks` as in `Group`. Raises UsageError when a machine has
    GPUs, but fewer than ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local_rank)
    group = Group(rank=rank, local_rank=local_rank, world_size=world_size, device=device, model_ranks=model_ranks)
    if world_size == 1 and not alone:
        yield group
        return
    on_gpus = "cpu:gloo,cuda:nccl" if main_memory else "nccl"
    with explain_lost_peers(group, "joining the other ranks"):
        dist.init_process_group(
            on_gpus if device.type == "cuda" else "gloo",
            store=_store(group, timedelta(seconds=timeout_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    yield group
    # Only after success: after a failure the peers have exited or hang, and leaving the group would hang too. Modules
    # that hold the group must be collected first: the last one would join the group's threads while holding the GIL,
    # which one of them may be waiting for.
    gc.collect()
    dist.destroy_process_group()


def all_sum(group: Group, values: Sequence[float], doing: str) -> list[float]:
    """Return the sum of each number over all ranks, in float64; every rank passes the same number of values."""
    if group.world_size == 1:
        return [float(value) for value in values]
    vector = torch.tensor(values, dtype=torch.float64, device=group.device)
    with explain_lost_peers(group, doing):
        dist.all_reduce(vector)
        return vector.tolist()


def sum_on_device(group: Group, values: torch.Tensor, doing: str) -> torch.Tensor:
    """Return the sum of each number over all ranks, on the device; with nccl no process waits for it."""
    if group.world_size > 1:
        with explain_lost_peers(group, doing):
            dist.all_reduce(values)
    return values


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Numbers on their way from a device to main memory."""

    host: torch.Tensor
    copied: torch.cuda.Event | None
    "Recorded after the copy; None: the numbers have arrived."

    def wait(self) -> list[float]:
        """Wait until the device has computed and sent the numbers, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        values: list[float] = self.host.tolist()
        return values


def start_reading(values: torch.Tensor) -> Reading:
    """Start copying `values` (N,) into a page-locked buffer, without waiting for the device."""
    if values.device.type != "cuda":
        return Reading(host=values, copied=None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Reading(host=host, copied=copied)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array on the device; a copy to a GPU does not wait, because it comes from page-locked memory.

    torch's allocator of such memory keeps a buffer until the copy from it is done, and uses it again afterwards.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def any_rank(group: Group, flag: bool, doing: str) -> bool:
    """Return whether `flag` is true on any rank; every rank calls it at the same point."""
    return all_sum(group, [flag], doing)[0] > 0


def all_sum_array(group: Group, array: np.ndarray, doing: str) -> np.ndarray:
    """Return the sum of a float32 array over all ranks, elementwise."""
    if group.world_size == 1:
        return array
    tensor = torch.from_numpy(array).to(group.device)
    with explain_lost_peers(group, doing):
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()


def from_rank_0(group: Group, value: Any, doing: str) -> Any:
    """Return rank 0's `value`, sent as JSON, on every rank; the other ranks' values are ignored."""
    if group.world_size == 1:
        return value
    sent = json.dumps(value).encode() if group.rank == 0 else b""
    (size,) = all_sum(group, [len(sent)], doing)
    data = torch.zeros(int(size), dtype=torch.uint8, device=group.device)
    if group.rank == 0:
        data.copy_(torch.from_numpy(np.frombuffer(sent, dtype=np.uint8).copy()))
    with explain_lost_peers(group, doing):
        dist.broadcast(data, 0)
        return json.loads(data.cpu().numpy().tobytes())


def barrier(group: Group, doing: str) -> None:
    """Wait until every rank has reached this point."""
    all_sum(group, [0.0], doing)


class LostPeers(RuntimeError):
    """A collective failed because of another rank, whose own error is the one to report."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.by_a_peer = True  # `processes/ranks.py` looks at it


@contextmanager
def explain_lost_peers(group: Group, doing: str) -> Iterator[None]:
    """Re-raise the failure of a collective because of a lost peer, naming this rank and what it was doing."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).lower()
        lost = any(word in words for word in LOST_PEER_WORDS) and not ran_out_of_memory(error)
        if group.world_size == 1 or not lost:
            raise
        raise LostPeers(
            f"rank {group.rank} of {group.world_size} gave up waiting for the other ranks while {doing}: one of them "
            "died, hangs, or took longer than train.collective_timeout"
        ) from error


def _store(group: Group, timeout: timedelta) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT where the ranks meet; a single rank needs no address.

    Rank 0 listens. torchlake's launcher passes it a socket bound to 127.0.0.1, which keeps the store off the network.
    Under another launcher the store listens as torch's `env://` does; torchrun has its own store, which survives its
    restarts.
    """
    if group.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    held = os.environ.get("TORCHLAKE_MASTER_FD")
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch forgets to export it by name
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        group.world_size,
        is_master=group.rank == 0 and not agents,
        timeout=timeout,
        master_listen_fd=None if held is None or group.rank != 0 else int(held),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"/worker/attempt_{attempt}", store) if agents else store  # type: ignore[attr-defined]


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        raise UsageError(
            f"{ranks} processes on a machine with {gpus} GPU{'s' * (gpus > 1)}: each rank needs its own. Ask for "
            f"{gpus} (engine.processes), or train on CPUs with CUDA_VISIBLE_DEVICES= (empty) in the environment."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
