"""How fast a rank trains: tokens a second, the share of the device's matrix rate, the memory at its peak.

The operations of a step are those that its tokens need, so neither padding nor recomputation raises the share: 6 per
trained and 4 per frozen number of a matrix for each token (Kaplan et al. 2020), and the products of attention. Those of
the last layer count for all tokens, even if it computes the first one only. They are
compared with what the device does in a bare matrix product of the model's shape, measured at the start.
Cost: 0.5 s on a GPU. On a CPU it is not measured.
"""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

MEASURED_S = 0.5
ROWS = {"cuda": 16_384, "cpu": 1024}
"Rows of the measured matrix product: enough to fill a large GPU."
WIDENED = 4
"Width of the measured product's result, in widths of the model."


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The figures that a step's speed is derived from; made by `measure`."""

    rate: float | None
    "Operations a second of a matrix product on one rank; None: on a CPU, or if the model's shape is unknown."
    per_token: float
    "Operations of a training step per token, without attention's products."
    per_pair: float
    "The same per pair of tokens of a row."

    def operations(self, lengths: np.ndarray) -> float:
        """Return the operations of a training step over rows of `lengths` (N,)."""
        wide = lengths.astype(np.float64)
        return float(wide.sum() * self.per_token + np.square(wide).sum() * self.per_pair)

    def share(self, operations: float, seconds: float, ranks: int) -> float | None:
        """Return the share of the matrix rate of `ranks` ranks (model FLOPs utilization); None if it is not known."""
        if self.rate is None or seconds <= 0:
            return None
        return operations / seconds / (self.rate * ranks)


def measure(
    repeated: Sequence[nn.Module], config: Any, *, per_token: bool, device: torch.device, dtype: torch.dtype
) -> Speed:
    """Count the operations of a model's `repeated` layers and measure the rate of `device` in `dtype`.

    `per_token`: the model predicts each token from the previous ones.
    """
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(hidden, int) or not repeated:
        return Speed(rate=None, per_token=0.0, per_pair=0.0)
    times = max(1.0, (getattr(config, "num_hidden_layers", None) or len(repeated)) / len(repeated))  # shared layers
    # A packed weight holds two numbers of its layer in a byte.
    sizes = {id(each.weight): each.in_features * each.out_features for each in _linear(repeated)}
    matrices = [each for layer in repeated for each in layer.parameters() if each.ndim == 2]
    counted = sum((6 if each.requires_grad else 4) * sizes.get(id(each), each.numel()) for each in matrices) * times
    head = 6 * hidden * int(getattr(config, "vocab_size", 0)) if per_token else 0
    # A token that predicts the next one attends to half of its row on average.
    pairs = 12 * len(repeated) * times * hidden * (0.5 if per_token else 1)
    rate = None  # a CPU's depends on what else it does: a rate measured at the start is not a limit
    if device.type == "cuda":
        rate = matrix_rate(hidden, WIDENED * hidden, device=device, dtype=dtype, seconds=MEASURED_S)
    return Speed(rate=rate, per_token=counted + head, per_pair=pairs)


def _linear(layers: Sequence[nn.Module]) -> list[nn.Linear]:
    return [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]


def matrix_rate(inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Measure the operations per second of the product of random matrices (rows, inputs) and (inputs, outputs).

    The matrices are random because GPUs multiply constant ones faster; torch's global generators are left alone.
    """
    rows = ROWS.get(device.type, ROWS["cpu"])
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(shape, device=device, generator=generator).to(dtype)
        for shape in ((rows, inputs), (inputs, outputs))
    )
    float((left @ right).sum())  # initializes the library
    done, spent, began = 0, 0.0, time.perf_counter()
    while spent < seconds:
        for _ in range(10 if device.type == "cuda" else 1):
            product = left @ right
            done += 1
        float(product[0, 0])  # waits for the device
        spent = time.perf_counter() - began
    return 2.0 * rows * inputs * outputs * done / spent


def peak_memory(device: torch.device) -> int:
    """Return the bytes at the peak so far: of tensors on a GPU, of the process in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
