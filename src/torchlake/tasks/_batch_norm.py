"""BatchNorm layers in training.

    frozen   they compute with the statistics of the base model, which stay; scale and shift are trained. A row's output
             does not depend on other rows, so every number of ranks and size of micro-batches gives the same losses.
    batch    they compute with the statistics of the batch, summed over all ranks, as a model without statistics needs
             it. Losses are the same on any number of ranks as long as a step is one micro-batch: the rows of a
             micro-batch are those that share statistics.

Plain PyTorch under DDP has each rank normalize by its own rows, and keeps the running statistics of rank 0.
"""

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from torchlake.errors import ConfigError


class FrozenBatchNorm(nn.BatchNorm2d):
    """A BatchNorm that is always in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode."""
        return super().train(False)


class SharedBatchNorm(nn.BatchNorm2d):
    """A BatchNorm over the rows of all ranks, on any device (torch's SyncBatchNorm is for GPUs only)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (B, C, H, W)."""
        mean, variance, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None, "checked in set_up"
        assert variance is not None, "checked in set_up"
        assert tracked is not None, "checked in set_up"
        if not (self.training and torch.is_grad_enabled()):  # without gradients one rank may be trying the model alone
            return nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.eps)
        wide = x.float()
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        sums = _summed(torch.cat([wide.sum((0, 2, 3)), count]))
        center, count = sums[:-1] / sums[-1], sums[-1].detach()
        centered = wide - center[:, None, None]
        spread = _summed((centered * centered).sum((0, 2, 3))) / count
        with torch.no_grad():
            tracked += 1
            rate = 1 / float(tracked) if self.momentum is None else self.momentum
            mean.lerp_(center.to(mean.dtype), rate)
            variance.lerp_((spread * count / (count - 1).clamp(min=1)).to(variance.dtype), rate)
        made = centered * torch.rsqrt(spread + self.eps)[:, None, None]
        if self.affine:
            made = made * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]
        return made.to(x.dtype)


def _summed(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, through which gradients flow."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return values
    from torch.distributed.nn.functional import all_reduce

    summed: torch.Tensor = all_reduce(values)
    return summed


def set_up(model: nn.Module, how: str, base: Path, *, check: bool) -> None:
    """Turn the model's BatchNorm layers into those of `how`.

    Raises ConfigError if layers are to be frozen that have no statistics (only if `check`: the model has its values).
    """
    for name, layer in model.named_modules():
        if type(layer) is not nn.BatchNorm2d or layer.running_mean is None:
            continue
        if how == "frozen" and check and not layer.running_mean.any():
            raise ConfigError(
                f"{base}: the BatchNorm layer {name} has no statistics: the model was never trained. Set "
                "model.task_options.batch_norm=batch, which computes them from the batches."
            )
        layer.__class__ = FrozenBatchNorm if how == "frozen" else SharedBatchNorm
        layer.train(layer.training)
