"""What this machine offers to processes: cores, memory and GPUs within the container's limits, and CPU instructions."""

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil

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


@cache
def cpu_words() -> frozenset[str]:
    """The words of /proc/cpuinfo, "AuthenticAMD" and "avx512_vnni" among them; none where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    return frozenset(text.split())


def multiplies_bf16() -> bool:
    """Whether there is a product of bf16 numbers (AVX512-BF16 or AMX)."""
    return bool({"avx512_bf16", "amx_bf16"} & cpu_words())


def int8_overflow() -> str | None:
    """Why products of 8-bit integers would be wrong here; None where they are right.

    x86 without VNNI adds two products in 16 bits, which overflow: oneDNN and ONNX Runtime both take that instruction.
    """
    if "avx2" in cpu_words() and not {"avx512_vnni", "avx_vnni"} & cpu_words():
        return "this CPU has no product of 8-bit integers (VNNI), and what it has overflows: take 'openvino_int8'"
    return None
