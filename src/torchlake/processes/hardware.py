"""Cores, memory, GPUs and CPU instructions of this machine, within the container's limits; which GPU a rank sees."""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from torchlake.errors import UsageError

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
CLASSES = Path(__file__).with_name("cpus.json")

CPU_FEATURES = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
}
"The instruction sets that a result or a choice depends on: the name in /proc/cpuinfo -> the name in messages."
TEST_CPU = "TORCHLAKE_TEST_CPU"
CPU_CLASSES = {
    "avx2": ("avx2",),
    "avx2_vnni": ("avx2", "avx_vnni"),
    "avx512_core": ("avx2", "avx512f"),
    "avx512_core_vnni": ("avx2", "avx512f", "avx512_vnni"),
    "avx512_core_bf16": ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
}
"The values of TORCHLAKE_TEST_CPU, named as in oneDNN's ONEDNN_MAX_CPU_ISA: the instruction sets that tests may use."


def cores() -> int:
    """Return the number of cores this process may use: its CPU affinity, limited by the container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cgroup_cores()
    return allowed if quota is None else min(allowed, max(1, math.ceil(quota)))


def threads() -> int:
    """Return the threads of this process: OMP_NUM_THREADS, as in torch, else all cores that it may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else cores()


def available_memory() -> int:
    """Return the bytes available to new processes: the machine's free memory, within the container's limit."""
    available = psutil.virtual_memory().available
    limit = cgroup_memory()
    return available if limit is None else min(available, max(0, limit - _cgroup_memory_used()))


def cgroup_cores() -> float | None:
    """Return the container's CPU quota in cores (cgroup v2, then v1); None: no limit."""
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if not quota:
        quota, period = _cgroup("cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def cgroup_memory() -> int | None:
    """Return the container's memory limit in bytes (cgroup v2, then v1); None: no limit."""
    limit = _cgroup("memory.max") or _cgroup("memory/memory.limit_in_bytes")
    # cgroup v1 writes "no limit" as a number near 2^63.
    return int(limit) if limit.isdigit() and int(limit) < 2**60 else None


def _cgroup_memory_used() -> int:
    """Return the bytes in use, without cached file pages, which the kernel reclaims on demand."""
    used = _cgroup("memory.current") or _cgroup("memory/memory.usage_in_bytes")
    lines = (_cgroup("memory.stat") or _cgroup("memory/memory.stat")).splitlines()
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    # In cgroup v1 only the "total_" names include child groups.
    cached = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return int(used or 0) - cached


def _cgroup(name: str) -> str:
    """Return the content of a control group file, or an empty string."""
    try:
        return (CGROUP / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def max_processes(memory_per_process: int, threads_per_process: int = 1) -> int:
    """Return one process per `threads_per_process` cores, limited to half of the available memory.

    `memory_per_process` is in bytes; 0: no limit.
    """
    wanted = max(1, cores() // threads_per_process)
    if memory_per_process == 0:
        return wanted
    return max(1, min(wanted, available_memory() // 2 // memory_per_process))


def gpus() -> list[str]:
    """Return the GPUs this process may use, as in CUDA_VISIBLE_DEVICES, without torch and without opening a device."""
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


def assign_gpus(processes: int, gpus_per_process: int) -> list[list[str]] | None:
    """Return the GPUs of each process, or None for no assignment (`gpus_per_process` is 0).

    Raises UsageError if the machine has fewer than `processes` x `gpus_per_process`.
    """
    if gpus_per_process == 0:
        return None
    if gpus_per_process < 0:
        raise UsageError(f"gpus_per_process: expected 0 or more, got {gpus_per_process}.")
    found = gpus()
    if len(found) < processes * gpus_per_process:
        raise UsageError(
            f"{processes} processes with {gpus_per_process} GPUs each need {processes * gpus_per_process} GPUs, but "
            f"{len(found)} were found (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). "
            "Ask for fewer processes or fewer GPUs for each."
        )
    return [
        found[first : first + gpus_per_process] for first in range(0, processes * gpus_per_process, gpus_per_process)
    ]


def visible_devices(shares: Sequence[Sequence[str]]) -> str:
    """Return CUDA_VISIBLE_DEVICES for each rank of a machine, which lists the devices of all ranks, as under torchrun.

    `shares` are the devices assigned to each rank. The first device of every rank comes first, so that index LOCAL_RANK
    is one of the rank's own. Raises UsageError if two ranks share a device, and for several ranks on instances of a
    partitioned GPU (MIG).
    """
    names = [share[place] for place in range(max(map(len, shares))) for share in shares if place < len(share)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"GPU {twice} was granted to several ranks, but ranks cannot communicate over a GPU that they share. Grant "
            "whole GPUs (spark.task.resource.gpu.amount=1, gpus_per_process=1), or ask for fewer processes."
        )
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        raise UsageError(
            f"{len(shares)} rank{'s' * (len(shares) > 1)} on instances of a partitioned GPU ({', '.join(names)}): a "
            "process sees one instance, and NCCL does not connect them. Train with one process, or on whole GPUs."
        )
    return ",".join(names)


def cpu_facts() -> dict[str, str]:
    """Return what /proc/cpuinfo says about the first processor, such as "vendor_id"; empty on other systems."""
    return _cpu_facts(CPUINFO)


@cache
def _cpu_facts(path: Path) -> dict[str, str]:
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_features() -> frozenset[str]:
    """Return those of CPU_FEATURES that the CPU has; within a class of CPUs if TORCHLAKE_TEST_CPU names one.

    Raises UsageError for a class that is not in CPU_CLASSES.
    """
    found = CPU_FEATURES.keys() & cpu_facts().get("flags", "").split()
    name = os.environ.get(TEST_CPU)
    if not name:
        return frozenset(found)
    if name not in CPU_CLASSES:
        raise UsageError(f"{TEST_CPU} is {name!r}; it has to be one of {', '.join(CPU_CLASSES)}.")
    return frozenset(found.intersection(CPU_CLASSES[name]))


def supports_bf16() -> bool:
    """Return whether the CPU multiplies bf16 numbers (AVX512-BF16 or AMX)."""
    return bool({"avx512_bf16", "amx_bf16"} & cpu_features())


@dataclass(frozen=True, kw_only=True)
class CpuClass:
    """A class of CPUs and what follows from it, a row of cpus.json; the default: nothing is known of it."""

    name: str = "unknown"
    maker: str = ""
    needs: Sequence[str] = ()
    "The features that a CPU of the class has. The first row that fits is the CPU's class."
    products: Mapping[str, str] = field(default_factory=lambda: {"few": "torch", "many": "torch"})
    'The library of fp32 products of few and of many rows: "onednn", or "torch" for what torch does by default.'
    rates: Mapping[str, float] = field(default_factory=dict)
    "Rows/s of runtimes relative to `varlen`, as far as they were measured."
    source: str = "not measured: torch's default"
    "Where products and rates come from."


def in_words(products: Mapping[str, str]) -> str:
    """Return the libraries of products for messages, such as "by oneDNN"."""
    few, many = ({"torch": "torch's default", "onednn": "oneDNN"}[products[one]] for one in ("few", "many"))
    return f"by {many}" if few == many else f"by {many}, of few rows by {few}"


@cache
def _cpu_classes() -> tuple[CpuClass, ...]:
    return tuple(CpuClass(**row) for row in json.loads(CLASSES.read_text(encoding="utf-8")))


def cpu_class() -> CpuClass:
    """Return the class of this CPU. It is never timed, so that a retry computes the same bytes."""
    facts, found = cpu_facts(), cpu_features()
    arm = "asimd" in facts.get("Features", "").split() or platform.machine() == "arm64"
    maker = "Arm" if arm else facts.get("vendor_id")
    fitting = (one for one in _cpu_classes() if one.maker == maker and found.issuperset(one.needs))
    return next(fitting, CpuClass())


def bf16_refusal() -> str | None:
    """Return why products of bf16 numbers would be emulated on this CPU; None if it has them."""
    if supports_bf16():
        return None
    return "this CPU has no product of bf16 numbers (AVX512-BF16 or AMX): use 'varlen' or 'compiled'"


def int8_refusal() -> str | None:
    """Return why 8-bit products would be wrong on this CPU; None if they are right.

    On x86 without VNNI, oneDNN, OpenVINO and ONNX Runtime use an instruction that adds two products in 16 bits. 255 x
    127 + 255 x 127 is 64,770, and it gives 32,767.
    """
    x86 = "flags" in cpu_facts()  # others call them features
    if not x86 or {"avx512_vnni", "avx_vnni"} & cpu_features():
        return None
    here, gain = cpu_class(), "what 8 bits gain was not measured"
    if {"openvino", "openvino_int8"} <= here.rates.keys():
        times = here.rates["openvino_int8"] / here.rates["openvino"]
        gain = f"'openvino_int8' is {times:.2f} times as fast as 'openvino'"
    return (
        "this CPU lacks an 8-bit product that does not overflow (VNNI), and on CPUs of its class "
        f"({here.name}) {gain}: use 'varlen' or 'openvino'"
    )
