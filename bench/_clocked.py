"""The local engine with a clock, for benchmarks that take the start of the workers apart."""

import time
from collections.abc import Generator
from typing import Any

import torchlake as tl


class Clocked(tl.Local):
    """The local engine, and when it was asked for workers."""

    asked = 0.0

    def run_chunks(self, *args: Any, **options: Any) -> Generator[Any, None, None]:
        self.asked = time.monotonic()
        return super().run_chunks(*args, **options)
