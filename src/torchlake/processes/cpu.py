"""This machine's CPU: its maker, and the products that it has instructions for, as /proc/cpuinfo lists them."""

from functools import cache
from pathlib import Path


@cache
def words() -> frozenset[str]:
    """The words of /proc/cpuinfo, "AuthenticAMD" and "avx512_vnni" among them; none where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    return frozenset(text.split())


def multiplies_bf16() -> bool:
    """Whether there is a product of bf16 numbers (AVX512-BF16 or AMX)."""
    return bool({"avx512_bf16", "amx_bf16"} & words())


def overflow() -> str | None:
    """Why products of 8-bit integers would be wrong here; None where they are right.

    x86 without VNNI adds two products in 16 bits, which overflow: oneDNN and ONNX Runtime both take that instruction.
    """
    if "avx2" in words() and not {"avx512_vnni", "avx_vnni"} & words():
        return "this CPU has no product of 8-bit integers (VNNI), and what it has overflows: take 'openvino_int8'"
    return None
