"""The memory, speed and network links of a rank: given, measured here, or assumed.

A GPU that is not in this machine is assumed to be an A100. Speed here is measured with a matrix product of the model's
shape, on as many threads as a rank would have. Cost: half a second.
"""

from torchlake.planning.terms import Cluster, Link
from torchlake.planning.workload import Workload
from torchlake.processes.hardware import available_memory, cores

TRAINING_EFFICIENCY = 0.6
"Speed of a training step relative to a bare matrix product; bench/training.py: about two thirds."
MEASURED_S = 0.5
LINKS = {
    # gloo on the loopback and on 10 Gbit/s; nccl on NVLink and on 100 Gbit/s for each GPU.
    False: (Link(bandwidth=2e9, latency=50e-6), Link(bandwidth=1.25e9, latency=100e-6)),
    True: (Link(bandwidth=200e9, latency=10e-6), Link(bandwidth=12.5e9, latency=20e-6)),
}
GPU_FLOPS = {True: 120e12, False: 12e12}
"The assumed training speed of a GPU elsewhere, in 16 bits and in fp32: an A100's (40 and 60 % of its peak)."


def device(limit: float | None, ranks: int) -> tuple[bool, float]:
    """Return whether ranks have GPUs, and the bytes of memory per rank."""
    import torch

    if limit is not None:
        return True, limit
    if torch.cuda.is_available():
        return True, float(torch.cuda.get_device_properties(0).total_memory)
    return False, available_memory() / ranks


def describe_cluster(
    case: Workload, ranks: int, *, flops: float | None, bandwidth: float | None, latency: float | None
) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster, and sentences on what is given, measured or assumed."""
    import torch

    gpu = case.setting.gpu
    if flops is not None:
        source = f"{flops:.3g} operations per second on each rank, as given"
    elif gpu and not torch.cuda.is_available():
        flops = GPU_FLOPS[case.setting.bf16]
        source = f"{flops:.3g} operations per second on each rank, assumed (an A100's); set --flops"
    else:
        measured = matmul_flops(case, ranks)
        flops = TRAINING_EFFICIENCY * measured
        share = f"{TRAINING_EFFICIENCY:.0%} of a matrix product's {measured:.3g} here"
        source = f"{flops:.3g} operations per second on each rank: {share}"
    links = tuple(Link(bandwidth=bandwidth or link.bandwidth, latency=latency or link.latency) for link in LINKS[gpu])
    origin = ["assumed" if value is None else "given" for value in (bandwidth, latency)]
    cluster = Cluster(flops=flops, within=links[0], across=links[1])
    shown = " and ".join(
        f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us {where}"
        for link, where in zip(links, (f"up to {cluster.ranks_per_machine} ranks", "beyond"), strict=True)
    )
    return cluster, (source, f"links of {shown} (bandwidth {origin[0]}, latency {origin[1]})")


def matmul_flops(case: Workload, ranks: int) -> float:
    """Measure operations per second of a matrix product of the model's feed-forward shape, on a rank's threads."""
    import torch

    from torchlake.runs.speed import matrix_rate

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores() // ranks)))
    try:
        return matrix_rate(
            case.shape.hidden,
            case.shape.feed_forward,
            device=torch.device("cuda" if case.setting.gpu else "cpu"),
            dtype=torch.bfloat16 if case.setting.bf16 else torch.float32,
            seconds=MEASURED_S,
        )
    finally:
        torch.set_num_threads(threads)


def size(number: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"
