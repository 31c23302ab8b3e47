"""Marks for tests that need what not every CPU has; what a CPU lacks is asked of `torchlake.processes.hardware` alone.

TORCHLAKE_TEST_CPU limits the tests to a class of CPUs, on any machine and in child processes as well: `make test-avx2`.
"""

import pytest

from torchlake.processes import hardware


def _unless(refusal: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(refusal is not None, reason=str(refusal))


needs_int8 = _unless(hardware.int8_refusal())
needs_bf16 = _unless(hardware.bf16_refusal())
