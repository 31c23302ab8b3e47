"""What the pipe costs: rows written by an engine in another process, beside the same engine in this one.

    python bench/foreign.py [--rows 10000] [--rounds 3]

The engine is the echo of tests/fake_engine.py, so nearly all of the time is the pipe's; with `--token-us` it computes
so long for each token. Prints rows/s of one-token answers, and tokens/s as a share of those without a pipe.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fake_engine
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import vllm
from torchlake.runtimes._foreign.process import EngineProcess
from torchlake.runtimes._foreign.writer import EngineModel, ForeignWriter

HELLO = {"model": "m", "tokenizer": "m", "adapter": None, "device": "cpu", "devices": 1}


def by_pipe(prompts: list[np.ndarray], tokens: int, token_us: float) -> float:
    """Return the seconds in which another process writes the rows, without its start."""
    with tempfile.TemporaryDirectory() as folder:
        python = fake_engine.interpreter(folder, open=512, token_us=token_us)
        model = EngineModel(
            ends=[0], vocabulary=1 << 16, positions=None, translate=partial(vllm.sampling, (0,)), silent_s=60.0
        )
        writer = ForeignWriter(lambda length: EngineProcess(python, vllm.SERVER, {**HELLO, "length": length}), model)
        options, done = GenerationOptions(max_new_tokens=tokens), []
        for number in range(-1, len(prompts)):  # the first one waits for the start
            writer.add(number, prompts[number], options)
            while number < 0 and writer.rows:
                writer.step(done.extend)
        began = time.perf_counter()
        while writer.rows:
            writer.step(done.extend)
        seconds = time.perf_counter() - began
        writer.close()
        assert len(done) == len(prompts) + 1
    return seconds


def here(prompts: list[np.ndarray], tokens: int, token_us: float) -> float:
    """Return the seconds in which this process writes them by the same engine."""
    engine = fake_engine.Echo({**HELLO, "length": 1024})
    engine.token_s = token_us / 1e6
    began = time.perf_counter()
    for first in range(0, len(prompts), 512):
        for number, ids in enumerate(prompts[first : first + 512]):
            engine.add(number, ids.tolist(), {"stop_token_ids": [0], "max_tokens": tokens})
        while engine.busy:
            engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-us", type=float, default=100.0)
    given = parser.parse_args()
    prompts = [np.arange(1, 33) + row % 1000 for row in range(given.rows)]
    fastest = min(by_pipe(prompts, 1, 0.0) for _ in range(given.rounds))
    print(f"one-token answers: {given.rows / fastest:,.0f} rows/s")
    some = prompts[: given.rows // 10]
    pairs = [(by_pipe(some, 32, given.token_us), here(some, 32, given.token_us)) for _ in range(given.rounds)]
    share = min(pipe for pipe, _ in pairs) / min(alone for _, alone in pairs) - 1
    print(f"{len(some):,} rows of 32 tokens at {given.token_us:g} us: the pipe costs {share:.2%}")


if __name__ == "__main__":
    main()
