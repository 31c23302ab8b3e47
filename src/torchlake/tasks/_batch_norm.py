"""BatchNorm layers in training.

    frozen   they compute with the statistics of the base model, which do not change; scale and shift are trained. A
             row's output does not depend on other rows, so every number of ranks and size of micro-batches gives the
             same losses.
    batch    they compute with the statistics of the batch, summed over all ranks; a model without statistics needs
             this. Losses are the same on any number of ranks as long as a step is one micro-batch: the rows of a
             micro-batch are those that share statistics. With train.batch_norm=local each rank normalizes by its own
             rows, and one sum per forward pass makes the stored statistics those of all rows.

Plain PyTorch under DDP has each rank normalize by its own rows, and keeps the running statistics of rank 0.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from torchlake.errors import ConfigError

counts = True
"Whether the rows that this process computes count in the statistics. Set before each forward pass."


class FrozenBatchNorm(nn.BatchNorm2d):
    """A BatchNorm that is always in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode."""
        return super().train(False)


class SharedBatchNorm(nn.BatchNorm2d):
    """A BatchNorm over the rows of all ranks, on any device (torch's SyncBatchNorm is for GPUs only)."""

    local = False
    "Whether it normalizes by the rows of its rank."
    sums: torch.Tensor | None = None
    "Of the rows of its rank in this forward pass: the values (C,), their squares (C,), and their number; if local."

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (B, C, H, W)."""
        if not (self.training and torch.is_grad_enabled()):  # without gradients one rank may be trying the model alone
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if self.local:
            return self._by_own_rows(x)
        made, *statistics = _Shared.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        self.track(*statistics)
        return made  # type: ignore[no-any-return]

    def _by_own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (B, C, H, W) by its own rows, and keep their sums for `_track_all`."""
        number, wide = x.numel() // x.shape[1], x.float()
        center, spread = (torch.zeros(x.shape[1], device=x.device) for _ in range(2))
        # torch.batch_norm: that of nn.functional refuses one value per channel.
        weight, bias = (each if each is None else each.float() for each in (self.weight, self.bias))
        made = torch.batch_norm(wide, weight, bias, center, spread, True, 1.0, self.eps, True)
        center = center.double()
        spread = (spread.double() * ((number - 1) / number)).nan_to_num()  # torch's variance of one number is NaN
        count = center.new_tensor([counts * number])
        self.sums = torch.cat([center * count, (spread + center * center) * count, count])
        return made.to(x.dtype)

    @torch.no_grad()
    def track(self, center: torch.Tensor, spread: torch.Tensor, count: torch.Tensor) -> None:
        """Move the stored statistics toward those of a batch: mean (C,), variance (C,) and number of values, ()."""
        mean, variance, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None, "checked in set_up"
        assert variance is not None, "checked in set_up"
        assert tracked is not None, "checked in set_up"
        tracked += 1
        rate = 1 / float(tracked) if self.momentum is None else self.momentum
        mean.lerp_(center.to(mean.dtype), rate)
        variance.lerp_((spread * count / (count - 1).clamp(min=1)).to(variance.dtype), rate)


class _Shared(torch.autograd.Function):
    """Batch normalization over all ranks: one small collective forward, one backward (Ioffe and Szegedy 2015)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the normalized (B, C, H, W), and mean (C,), variance (C,) and number of values of each channel."""
        wide = x.float()
        center, spread = _moments(wide)
        count = center.new_tensor([counts * wide.numel() / wide.shape[1]])
        sums = _summed(torch.cat([center * count, (spread + center * center) * count, count]))
        mean, variance = _of_sums(sums)
        scale = torch.ones_like(mean) if weight is None else weight.float()
        shift = None if bias is None else bias.float()
        ctx.save_for_backward(wide, scale, mean, variance, sums[-1].float())
        ctx.eps, ctx.counts, ctx.types = eps, counts, (x.dtype, None if weight is None else weight.dtype)
        made = nn.functional.batch_norm(wide, mean, variance, scale, shift, eps=eps)
        statistics = (mean, variance, sums[-1].float())
        ctx.mark_non_differentiable(*statistics)
        return made.to(x.dtype), *statistics

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, scale, mean, variance, count = ctx.saved_tensors
        none = mean.new_empty(0)  # CUDA's kernel wants a tensor where CPUs take None
        by_x, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(
            gradient.float(), x, scale, mean, variance, none, none, False, ctx.eps, [True, True, True]
        )
        all_scale, all_shift = _summed(torch.cat([by_scale, by_shift])).chunk(2)
        if ctx.counts:
            factor = torch.rsqrt(variance + ctx.eps)
            slope = scale * factor * factor * all_scale / count
            offset = scale * factor * all_shift / count - slope * mean
            by_x -= torch.addcmul(offset[:, None, None], x, slope[:, None, None])
        of_x, of_weight = ctx.types
        affine = (None, None) if of_weight is None else (by_scale.to(of_weight), by_shift.to(of_weight))
        return by_x.to(of_x), *affine, None


def _of_sums(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean (C,) and variance (C,) by sums of values and squares and their number (2 C + 1,) float64."""
    center, squares = (sums[:-1] / sums[-1]).chunk(2)
    return center.float(), (squares - center * center).clamp(min=0).float()


def _track_all(layers: list[SharedBatchNorm], *_: Any) -> None:
    """Update the statistics that local layers store, with one sum over all ranks for all of them."""
    found = [(layer, layer.sums) for layer in layers if layer.sums is not None]
    if not found or not (found[0][0].training and torch.is_grad_enabled()):
        return
    parts = _summed(torch.cat([sums for _, sums in found])).split([len(sums) for _, sums in found])
    for (layer, _own), total in zip(found, parts, strict=True):
        layer.track(*_of_sums(total), total[-1].float())
        layer.sums = None


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean (C,) and variance (C,) of x (B, C, H, W) in float64, so that squares can be subtracted.

    The sums over rows come first: on CPUs that is about ten times as fast as torch.var_mean. In ResNet-50 at its start
    the outputs are 50 times nearer to those in float64 than with torch's batch normalization in fp32.
    """
    channels, rows = x.shape[1], x.flatten(1)
    numbers = x.numel() // channels
    mean = rows.sum(0).view(channels, -1).double().sum(1) / numbers
    centered = rows - mean.float().repeat_interleave(rows.shape[1] // channels)
    squares = centered.square_().sum(0).view(channels, -1).double().sum(1)
    return mean, squares / numbers - (mean - mean.float()).square()


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks; possibly in place."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(values)
    return values


def set_up(model: nn.Module, how: str, base: Path, *, check: bool) -> None:
    """Replace the model's BatchNorm layers by those that `how` names.

    Raises ConfigError for layers without statistics that are to be frozen (only if `check`: the model has its values).
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
    model.register_forward_hook(
        partial(_track_all, [each for each in model.modules() if type(each) is SharedBatchNorm])
    )
