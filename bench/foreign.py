"""What the pipe costs: rows written by an engine in another process, beside the same engine in this one.

The engine is the echo of tests/fake_engine.py, so nearly all of the time is the pipe's; then it computes `--token-us`
for each token. Rows/s of one-token answers are counted after the engine's start, by the clock and per CPU second of
each process; then what the pipe adds to the engine's CPU seconds.
"""

import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from _common import finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fake_engine
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import vllm
from torchlake.runtimes._foreign.process import EngineProcess
from torchlake.runtimes._foreign.writer import EngineModel, ForeignWriter

HELLO = {"model": "m", "tokenizer": "m", "adapter": None, "device": "cpu", "devices": 1}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What rows took: wall seconds, and CPU seconds of both processes."""

    wall: float
    engine: float
    torchlake: float


def by_pipe(prompts: list[np.ndarray], tokens: int, token_us: float) -> Cost:
    """Return what it takes to write the rows in another process, its start included."""
    with tempfile.TemporaryDirectory() as folder:
        python = fake_engine.interpreter(folder, open=512, token_us=token_us)
        model = EngineModel(
            ends=[0], vocabulary=1 << 16, positions=None, translate=partial(vllm.sampling, (0,)), silent_s=60.0
        )
        writer = ForeignWriter(lambda length: EngineProcess(python, vllm.SERVER, {**HELLO, "length": length}), model)
        options, done = GenerationOptions(max_new_tokens=tokens), []
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        began, own = time.perf_counter(), time.process_time()
        for number, ids in enumerate(prompts):
            writer.add(number, ids, options)
        while writer.rows:
            writer.step(done.extend)
        wall, own = time.perf_counter() - began, time.process_time() - own
        writer.close()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert len(done) == len(prompts)
    engine = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    return Cost(wall=wall, engine=engine, torchlake=own)


def here(prompts: list[np.ndarray], tokens: int, token_us: float) -> float:
    """Return the CPU seconds in which this process writes them by the same engine."""
    engine = fake_engine.Echo({**HELLO, "length": 1024})
    engine.token_s = token_us / 1e6
    began = time.process_time()
    for first in range(0, len(prompts), 512):
        for number, ids in enumerate(prompts[first : first + 512]):
            engine.add(number, ids.tolist(), {"stop_token_ids": [0], "max_tokens": tokens})
        while engine.busy:
            engine.step()
    return time.process_time() - began


def main() -> None:
    made = parser(__doc__, rows=10_000, rounds=3)
    made.add_argument("--token-us", type=float, default=100.0)
    given = made.parse_args()
    prompts = [np.arange(1, 33) + row % 1000 for row in range(given.rows)]
    starts = [by_pipe(prompts[:1], 1, 0.0) for _ in range(given.rounds)]
    start, wait = min(one.engine for one in starts), min(one.wall for one in starts)
    costs = [by_pipe(prompts, 1, 0.0) for _ in range(given.rounds)]
    engine, own = min(one.engine for one in costs) - start, min(one.torchlake for one in costs)
    some = prompts[: given.rows // 10]
    piped = min(by_pipe(some, 32, given.token_us).engine for _ in range(given.rounds)) - start
    alone = min(here(some, 32, given.token_us) for _ in range(given.rounds))
    answers = {
        "name": "one-token answers",
        "rows_per_s": given.rows / (min(one.wall for one in costs) - wait),
        "per_engine_cpu_s": given.rows / engine,
        "per_torchlake_cpu_s": given.rows / own,
    }
    tokens = {"name": f"32 tokens at {given.token_us:g} us", "more_cpu": piped / alone - 1}
    note = f"{given.rows:,} and {len(some):,} rows, best of {given.rounds}"
    finish("foreign", [answers, tokens], as_json=given.json, note=note)


if __name__ == "__main__":
    main()
