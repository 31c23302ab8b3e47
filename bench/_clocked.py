"""Clocks for benchmarks: the local engine with the start of its workers apart, and the CPU time of training steps."""

import os
import time
from collections.abc import Generator
from typing import Any

import torchlake as tl

CLOCK = "TORCHLAKE_BENCH_CLOCK"
"Names the file that `tick` writes."


def tick(line: dict[str, Any]) -> None:
    """Note the CPU time of a rank at a line of its metrics; an `on_step` of `train`."""
    with open(os.environ[CLOCK], "a") as file:
        file.write(f"{time.process_time()}\n")


class Clocked(tl.Local):
    """The local engine, and when it was asked for workers."""

    asked = 0.0

    def run_chunks(self, *args: Any, **options: Any) -> Generator[Any, None, None]:
        self.asked = time.monotonic()
        return super().run_chunks(*args, **options)
