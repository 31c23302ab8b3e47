"""One contender of a benchmark in a process of its own: its library, its crash and its memory are its own.

The parent starts `python <script>`, writes JSON lines to its standard input and reads JSON lines from its standard
output, one contender at work at a time:

    {"model": folder, "group": name, "texts": [...], "scratch": folder, "core": number}   once; "texts" calibrate and
        warm up; without "core" it runs where its parent does
        -> {"ready": [name, ...]}                 the ways of scoring that this process offers, loaded and warm
        -> {"reason": "..."}                      why there are none
    {"go": name, "texts": [...]}                  every time it is its turn
        -> {"seconds", "probabilities", "computed_tokens", "peak_memory_mib"}  or {"reason"}

This file is imported by interpreters that have neither torchlake nor its dependencies: the standard library only.
"""

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Score = Callable[[list[str]], tuple[Any, int]]
"""Texts (N) in; probabilities (N, C) and the number of computed tokens, padding included, out."""

LIMIT_S = 900.0  # for an answer: exporting and calibrating take minutes
ONE_THREAD = {
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "RAYON")},
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


class Contender:
    """A child process as the parent sees it. `reason` says why it takes no part (any more); None while it does."""

    def __init__(self, python: Path, script: str, setup: Mapping[str, Any], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.process = subprocess.Popen(
            [str(python), str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "w"),  # noqa: SIM115  the child's, as long as it lives
            env={**os.environ, **ONE_THREAD},
        )
        self._buffer = b""
        answer = self.ask(dict(setup))
        self.names: list[str] = answer.get("ready", [])
        self.reason: str | None = answer.get("reason")
        if self.reason is not None:
            self.close()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer."""
        self.tell(message)
        return self.hear()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message; its answer is to be heard."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for an answer; one with a `reason` when the process died or took too long."""
        line = self._line()
        return json.loads(line) if line is not None else {"reason": self._ended()}

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _line(self) -> bytes | None:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + LIMIT_S
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.process.kill()
                return None
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> str:
        code = self.process.wait()
        last = (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        return f"the process ended with {code}: {last[:200]}"


def serve(make: Callable[[dict[str, Any]], Mapping[str, Score]]) -> None:
    """The child's main: build what `make` offers for the set-up message, then answer until the parent closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline())
    if "core" in setup:
        os.sched_setaffinity(0, {setup["core"]})
    try:
        offers = make(setup)
        for score in offers.values():
            score(setup["texts"][:8])
    except Exception as error:
        answer({"reason": in_words(error)})
        raise
    answer({"ready": list(offers)})
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer(_measured(offers[message["go"]], message["texts"]))
        except Exception as error:
            answer({"reason": in_words(error)})


def in_words(error: BaseException) -> str:
    """The error's first line, with its kind."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _measured(score: Score, texts: list[str]) -> dict[str, Any]:
    forget_peak()
    began = time.perf_counter()
    probabilities, computed = score(texts)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "probabilities": [[float(value) for value in row] for row in probabilities],
        "computed_tokens": int(computed),
        "peak_memory_mib": peak_mib(),
    }


def forget_peak() -> None:
    """Give back what is free and reset the peak: a turn's peak is the model's and this turn's, no other's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return None
