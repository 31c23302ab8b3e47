"""Runtimes that compete with `eager` in tests of `optimize`: some right, some wrong, some the end of their process.

Module-level functions with the signature of a runtime's `load`, where other processes can import them.
"""

import os
import signal
import threading
from pathlib import Path

import numpy as np

from torchlake.models import load
from torchlake.optimization import measure
from torchlake.runtimes import eager


def remembering(folder: Path, spec: load.TaskSpec, *, device: str):
    """Eager's answers, from memory when a batch comes again: right, and faster than any model."""
    forward, known = eager.load(folder, spec, device=device), {}

    def remember(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        key = (input_ids.shape, input_ids.tobytes())
        if key not in known:
            known[key] = forward(input_ids=input_ids, attention_mask=attention_mask)
        return known[key]

    return remember


def _in_a_hurry() -> None:
    """Measure what is wrong no longer than its answers take: each candidate has a process of its own."""
    measure.MIN_S = 0.0


def guessing(folder: Path, spec: load.TaskSpec, *, device: str):
    """As fast as can be, and wrong: always the first class."""
    _in_a_hurry()

    def guess(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        return np.eye(1, len(spec.labels), dtype=np.float32).repeat(len(input_ids), axis=0)

    return guess


def not_a_number(folder: Path, spec: load.TaskSpec, *, device: str):
    _in_a_hurry()
    return lambda input_ids, attention_mask: np.full((len(input_ids), len(spec.labels)), np.nan, dtype=np.float32)


def killed(folder: Path, spec: load.TaskSpec, *, device: str):
    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("dead by now")

    return forward


def leaving(folder: Path, spec: load.TaskSpec, *, device: str):
    os._exit(3)


def raising(folder: Path, spec: load.TaskSpec, *, device: str):
    raise RuntimeError("this engine has no wings")


def hanging(folder: Path, spec: load.TaskSpec, *, device: str):
    return lambda input_ids, attention_mask: threading.Event().wait()


# not a runtime, but what a process may do to itself


def die(index: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(index: int) -> None:
    threading.Event().wait()


def one_of_two_dies(index: int) -> None:
    if index == 1:
        os._exit(3)
    threading.Event().wait()
