"""Marks for tests that need a feature of the CPU: they are skipped elsewhere, with the reason.

TORCHLAKE_TEST_CPU limits the tests and their child processes to a class of CPUs, on any machine: `make test-avx2`.
"""

import pytest

from torchlake.processes import hardware


def _unless(refusal: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(refusal is not None, reason=str(refusal))


needs_int8 = _unless(hardware.int8_refusal())
needs_bf16 = _unless(hardware.bf16_refusal())
