"""What one rank has: memory, speed and links to the others, each given, measured here, or assumed and said so.

A GPU that is asked about and not here is taken for an A100. The speed of a rank that is here is measured with a matrix
product of the model's own shape, on as many threads as a rank would have. Price: half a second.
"""

import math
import re
import time
from typing import Any

from torchlake.errors import UsageError
from torchlake.planning.costs import Cluster, Link
from torchlake.planning.workload import Case
from torchlake.processes.hardware import available_memory, cores

REACHED = 0.6
"Share of a bare matrix product's speed that a training step reaches; bench/training.py: about two thirds."
MEASURED_S = 0.5
LINKS = {
    # gloo on the loopback and on 10 Gbit/s; nccl on NVLink and on 100 Gbit/s for each GPU.
    False: (Link(bandwidth=2e9, latency=50e-6), Link(bandwidth=1.25e9, latency=100e-6)),
    True: (Link(bandwidth=200e9, latency=10e-6), Link(bandwidth=12.5e9, latency=20e-6)),
}
GPU_FLOPS = {True: 120e12, False: 12e12}
"Taken for a GPU that is not here, in 16 bits and in fp32: what training reaches on an A100 (40 and 60 % of its peak)."
SMALLEST = 2**20
"Bytes; no device has less, and no link is slower."
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS |= {"KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}


def operations(value: str | float, name: str) -> float:
    """Operations a second: a positive number, or a text such as "120T" or "1e14".

    Raises UsageError naming the option `name`.
    """
    number, _ = _number_and_unit(value, name, "FLOP", '"120T" or "1e14"')
    return number


def size_in_bytes(value: str | float, name: str) -> float:
    """Bytes, or bytes a second: a text with a unit such as "80GiB" or "12.5GB", or a number of bytes, 1 MiB or more.

    A number that stands for so few bytes was meant in another unit. Raises UsageError naming the option `name`.
    """
    number, unit = _number_and_unit(value, name, "B", '"80GB" or "80GiB"')
    if (isinstance(value, str) and not unit) or (not isinstance(value, str) and value < SMALLEST):
        plain = str(value).strip()
        raise UsageError(f'{name}: {plain} has no unit; write "{plain}GB" or "{plain}GiB".')
    return number


def _number_and_unit(value: str | float, name: str, counted: str, examples: str) -> tuple[float, str]:
    """The number of `counted` (bytes or operations), and the unit that was written: "" for none."""
    text = str(value).strip().upper().removesuffix("/S")
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:E\+?\d+)?)\s*(([KMGTP]?I?)({counted})?)", text)
    if match is None or match[3] not in UNITS or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"{name}: {value!r} is not an amount; write a number above 0 and a unit, such as {examples}.")
    return float(match[1]) * UNITS[match[3]], match[2]


def device(limit: float | None, ranks: int) -> tuple[bool, float]:
    """Whether ranks have GPUs, and the bytes that each has."""
    import torch

    if limit is not None:
        return True, limit
    if torch.cuda.is_available():
        return True, float(torch.cuda.get_device_properties(0).total_memory)
    return False, available_memory() / ranks


def describe_cluster(
    case: Case, ranks: int, *, flops: float | None, bandwidth: float | None, latency: float | None
) -> tuple[Cluster, tuple[str, ...]]:
    """The machines, and sentences that say what of them is given, measured or assumed."""
    import torch

    gpu = case.setting.gpu
    if flops is not None:
        said = f"{flops:.3g} operations a second on each rank, as given"
    elif gpu and not torch.cuda.is_available():
        flops = GPU_FLOPS[case.setting.bf16]
        said = f"{flops:.3g} operations a second on each rank, assumed (an A100's); give --flops"
    else:
        measured = matmul_flops(case, ranks)
        flops = REACHED * measured
        said = f"{flops:.3g} operations a second on each rank: {REACHED:.0%} of a matrix product's {measured:.3g} here"
    links = tuple(Link(bandwidth=bandwidth or link.bandwidth, latency=latency or link.latency) for link in LINKS[gpu])
    source = ["assumed" if value is None else "given" for value in (bandwidth, latency)]
    cluster = Cluster(flops=flops, within=links[0], across=links[1])
    shown = " and ".join(
        f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us {where}"
        for link, where in zip(links, (f"up to {cluster.ranks_per_machine} ranks", "beyond"), strict=True)
    )
    return cluster, (said, f"links of {shown} (bandwidth {source[0]}, latency {source[1]})")


def matmul_flops(case: Case, ranks: int) -> float:
    """Operations a second of a matrix product of the model's feed-forward shape, on the threads that a rank has."""
    import torch

    options: dict[str, Any] = {
        "device": "cuda" if case.setting.gpu else "cpu",
        "dtype": torch.bfloat16 if case.setting.bf16 else torch.float32,
    }
    rows, width, made = 1024, case.shape.hidden, case.shape.feed_forward
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores() // ranks)))
    try:
        left, right = torch.ones(rows, width, **options), torch.ones(width, made, **options)
        float((left @ right).sum())  # the first one sets the library up
        done, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < MEASURED_S:
            for _ in range(10):
                product = left @ right
            float(product[0, 0])  # waits for the device
            done += 10
    finally:
        torch.set_num_threads(threads)
    return 2.0 * rows * width * made * done / spent


def size(number: float) -> str:
    """Bytes in words."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"
