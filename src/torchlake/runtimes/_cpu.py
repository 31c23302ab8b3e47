"""What this machine's CPU says of itself: its maker, and the products that it has instructions for."""

from functools import cache
from pathlib import Path


@cache
def words() -> frozenset[str]:
    """The words of /proc/cpuinfo, "AuthenticAMD" and "avx512_vnni" among them; none where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    return frozenset(text.split())
