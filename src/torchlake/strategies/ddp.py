"""Every rank holds the whole model; gradients are averaged during the backward pass.

Cost: the model, its gradients and its optimizer state on every rank, and one all_reduce of the gradients per step, in
buckets of `train.ddp.bucket_mib`; on CPUs, of large embeddings only the rows that were used. `train.ddp.compress` sends
all in 16 bits, which changes the losses.
"""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.strategies import _native, _split, _weights
from torchlake.strategies._used_rows import send_used_rows

MAX_RANKS: int | None = None
never: dict[str, str] = {}
HOOKS: dict[str, Any] = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
model_ranks = _native.model_ranks
reduces_in_main_memory, backward, clip_norm = _native.reduces_in_main_memory, _native.backward, _native.clip_norm
step, discard_gradients, restore = _native.step, _native.discard_gradients, _native.restore
model_shard, optimizer_shard = _split.model_shard, _split.optimizer_shard


def refusal(train: TrainConfig) -> str | None:
    """Return why it cannot run here: only NCCL sums bf16."""
    if train.ddp.compress == "bf16" and not torch.cuda.is_available():
        return "train.ddp.compress=bf16 needs GPUs (NCCL sums bf16, gloo does not); use train.ddp.compress=fp16"
    return None


def receives(train: TrainConfig, group: Group) -> bool:
    """Return whether the copies are on GPUs. On CPUs every rank maps the files: frozen weights then share their
    memory."""
    return group.device.type == "cuda"


def wrap(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    group: Group,
    train: TrainConfig,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model under DistributedDataParallel; needs a process group.

    DDP itself broadcasts no buffers: ranks start with the same, and statistics of batches are those of all ranks.
    Gradients live in the communication buckets, which saves a copy.
    """
    if receives(train, group):
        _weights.broadcast(model, group)
    nn.Module.to(model, group.device)
    # The gradient of a convolution may have strides that differ from its bucket's, into which it is copied.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    # torch 2.13 renamed the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
    if group.device.type == "cuda":
        options["device_ids"] = [group.device]
    computed = _native.with_compute_weights(model, group=group, train=train)
    module = DistributedDataParallel(computed, bucket_cap_mb=train.ddp.bucket_mib, **options)
    if train.ddp.compress != "none":
        module.register_comm_hook(None, HOOKS[train.ddp.compress])
    elif group.device.type == "cpu":
        send_used_rows(module)
    _fix_buckets(module)
    return module, make_optimizer(model)


def _fix_buckets(module: DistributedDataParallel) -> None:
    """Have DDP order its buckets now, by a backward pass of zeros through all parameters, the last one first.

    Else it does so after the first step. Where an element is in its bucket decides in which order three or more ranks
    are summed, so the first step of a resumed run would have sums that differ from those of a run that was not killed.
    """
    weights = [one for one in module.parameters() if one.requires_grad]
    module.reducer.prepare_for_backward([])
    torch.stack([one.flatten()[:1].sum() * 0 for one in weights]).sum().backward()
    module.zero_grad()


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients on each rank without reducing them."""
    assert isinstance(module, DistributedDataParallel), "wrap() was not called"
    return cast(AbstractContextManager[None], module.no_sync())
