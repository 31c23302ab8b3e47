"""Measures one candidate of `optimize` in separate processes, so that a crash or a hang becomes a verdict.

    each process   load -> a small share of the rows at every batch size -> all its rows at the best one
    together       a barrier before each measurement, and scoring until all processes have finished theirs

All processes compute while any of them is measured, as in `predict`: they share memory bandwidth, caches and the clock
rate in the same way, and their rows per second add up. The barrier consists of small files. A process that waits scores
rows, which keeps the load constant.

Before it loads the model, a process creates an empty file and starts faulthandler's watchdog on it (a C thread, which
notices a hang inside a kernel too). The engine replaces a process that dies. Its successor finds the file and returns
its content as the verdict. Cost: one start of Python and one load of the model per candidate and process.
"""

import faulthandler
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.engines import Engine, Resources
from torchlake.errors import Interrupted, TorchlakeError, UsageError
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import Scorer, prepare_runtime

# CPU: around the size of a core's caches. GPU: from a small batch to one that fills the card.
TRIED_TOKENS = {"cpu": (256, 512, 1024, 2048), "cuda": (8192, 16384, 32768, 65536)}
SHARE = {"cpu": 8, "cuda": 1}
"Every batch size is measured on one row in this many. A GPU needs all rows to fill its batches."
MIN_ROWS = 256
"Processes share the sample, but each gets at least this many rows: fewer do not fill batches of equal lengths."
DROPPING = 0.9
"Larger batches are not tried once the rate drops below this share of the best."
MIN_S = 0.5
"A measurement repeats its rows for at least this long: shorter times are noise."
FILLER_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class RuntimeTrial:
    """The input of the processes that measure one candidate; plain values."""

    settings: ScoringSettings
    rows: str
    "The sample's input columns, an Arrow file."
    folder: str
    "An empty folder that only this trial uses."
    processes: int
    deadline_s: float
    min_rate: float = 0.0
    "Below this rate (rows per second) on the share, a candidate is not measured on all rows: a faster one is known."


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one process."""

    rows: np.ndarray
    "(M,) positions in the sample."
    probabilities: np.ndarray
    "(M, C) float32; NaN where a row failed."
    errors: dict[int, str]
    "The reasons of failed rows, by position in the sample."
    by_batch_tokens: dict[int, float]
    "Rows per second of all processes together, for each batch size that was tried."
    batch_tokens: int
    rows_per_s: float
    "The rate of all processes together, on their rows."
    device: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Why a candidate has no measurement: "crashed: ...", "hung: ...", "failed: ..." or "refused: ..."."""

    verdict: str


def measure(engine: Engine, trial: RuntimeTrial) -> list[Measured] | Stopped:
    """Run the trial's processes at the same time. Return their measurements, or why the first one stopped."""
    work = plugins.carried(trial.settings.spec.task, partial(_measure, trial))
    return run_guarded(engine, work, Path(trial.folder), trial.processes, trial.deadline_s)


def prepare(
    engine: Engine, settings: ScoringSettings, runtime: str, calibration: str, folder: Path, deadline_s: float
) -> Stopped | None:
    """Let the runtime write its export of the model in a separate process. Return why that failed, or None."""
    work = plugins.carried(settings.spec.task, partial(_prepare, settings, runtime, calibration))
    done = run_guarded(engine, work, folder, 1, deadline_s)
    return done if isinstance(done, Stopped) else None


def run_guarded(
    engine: Engine, work: Callable[[int], Any], folder: Path, processes: int, deadline_s: float
) -> list[Any] | Stopped:
    """Run `work(0)`, `work(1)`, ... in a process each, at the same time. Return all results, or why one stopped."""
    made: list[Any] = []
    guarded = partial(_guarded_worker, work, str(folder), deadline_s)
    try:
        # The callers start at most one process per GPU.
        running = engine.run_chunks(guarded, range(processes), resources=Resources(processes=processes, gpus=None))
        with closing(running) as results:
            for result in results:
                if isinstance(result, Stopped):
                    return result
                made.append(result)
    except Interrupted:
        raise
    except TorchlakeError as error:
        return Stopped(verdict=f"failed: {_first_line(error)}")
    return made


def read_rows(path: str) -> pa.Table:
    """Read the rows written by `write_rows`."""
    with pa.memory_map(path) as source, pa.ipc.open_file(source) as file:
        return file.read_all()


def write_rows(path: Path, table: pa.Table) -> str:
    """Write rows to a file for other processes. Return its path."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return str(path)


def _guarded_worker(work: Callable[[int], Any], folder: str, deadline_s: float) -> Callable[..., Iterator[Any]]:
    def worker(items: Iterator[int]) -> Iterator[Any]:
        for index in items:
            yield _run_guarded(work, index, Path(folder, f"{index}.trace"), deadline_s)

    return worker


def _run_guarded(work: Callable[[int], Any], index: int, trace: Path, deadline_s: float) -> Any:
    if trace.exists():  # an earlier process died while running it
        return Stopped(verdict=_crash_verdict(trace.read_text(encoding="utf-8", errors="replace"), deadline_s))
    with open(trace, "w", encoding="utf-8") as file:
        faulthandler.enable(file=file)
        faulthandler.dump_traceback_later(max(deadline_s, 0.001), exit=True, file=file)
        try:
            return work(index)
        except Interrupted:
            raise
        except UsageError as error:  # for example, the runtime does not support this device
            return Stopped(verdict=f"refused: {_first_line(error)}")
        except Exception as error:
            return Stopped(verdict=f"failed: {type(error).__name__}: {_first_line(error)}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()  # its file closes now


def _measure(trial: RuntimeTrial, index: int) -> Measured:
    scorer = Scorer(settings=trial.settings)
    table = read_rows(trial.rows)
    shares = max(1, min(trial.processes, len(table) // MIN_ROWS))
    rows = np.arange(index % shares, len(table), shares)
    mine = table.take(pa.array(rows))
    places = np.arange(0, len(rows), SHARE[scorer.device])
    few, filler = mine.take(pa.array(places)), mine.slice(0, FILLER_ROWS)
    meet = partial(barrier, trial, index, lambda: score(scorer, filler))
    meet("loaded", 0.0)
    rates: dict[int, float] = {}
    for batch_tokens in TRIED_TOKENS[scorer.device]:
        scorer.batch_tokens = batch_tokens
        # The first pass compiles kernels and allocates memory.
        scored, own_rate = _rate(scorer, few, passes=2)
        rates[batch_tokens] = meet(f"{batch_tokens}", own_rate)
        if rates[batch_tokens] < DROPPING * max(rates.values()):
            break
    best = max(rates, key=lambda tokens: rates[tokens])
    scorer.batch_tokens, rate = best, rates[best]
    if rate < trial.min_rate:
        rows = rows[places]
    else:
        scored, own_rate = _rate(scorer, mine)
        if own_rate * trial.processes < DROPPING * rate:  # kernels were compiled for lengths that the share lacks
            scored, own_rate = _rate(scorer, mine)
        rate = meet("all", own_rate)
    probabilities, reasons = _answers(scorer, scored)
    return Measured(
        rows=rows,
        probabilities=probabilities,
        errors={int(rows[place]): reason for place, reason in reasons.items()},
        by_batch_tokens=rates,
        batch_tokens=best,
        rows_per_s=rate,
        device=scorer.device,
    )


def _prepare(settings: ScoringSettings, runtime: str, calibration: str, index: int) -> None:
    prepare_runtime(settings, runtime, read_rows(calibration))


def score(scorer: Scorer, rows: pa.Table) -> pa.Table:
    """Do everything that `predict` does for these rows, including tokenizing, which uses the same core."""
    return scorer.score(scorer.read(rows, {}))


def _rate(scorer: Scorer, rows: pa.Table, passes: int = 1) -> tuple[pa.Table, float]:
    """Return the scored rows, and this process's rows per second in the fastest pass."""
    began = time.perf_counter()
    fastest, done = math.inf, 0
    while done < passes or time.perf_counter() - began < MIN_S:
        start = time.perf_counter()
        scored = score(scorer, rows)
        fastest, done = min(fastest, time.perf_counter() - start), done + 1
    return scored, len(rows) / fastest


def barrier(trial: RuntimeTrial, index: int, meanwhile: Callable[[], Any], place: str, value: float) -> float:
    """Wait until every process has reached `place`, calling `meanwhile`. Return the sum of their values."""
    folder = Path(trial.folder)
    unfinished = folder / f".{place}-{index}"
    unfinished.write_text(repr(value), encoding="ascii")
    os.replace(unfinished, folder / f"{place}-{index}.met")
    while True:
        files = [folder / f"{place}-{process}.met" for process in range(trial.processes)]
        if all(file.exists() for file in files):
            return sum(float(file.read_text(encoding="ascii")) for file in files)
        meanwhile()


def _answers(scorer: Scorer, scored: pa.Table) -> tuple[np.ndarray, dict[int, str]]:
    """Return the answers (M, C) in a scored table, NaN where a row failed, and the reasons by position."""
    reasons = enumerate(scored["error"].to_pylist())
    answers = scorer.task.read_answers(scored, scorer.spec).astype(np.float32)
    return answers, {row: reason for row, reason in reasons if reason is not None}


def _crash_verdict(trace: str, deadline_s: float) -> str:
    """Return the verdict for a process that died, from its faulthandler trace."""
    if not trace.strip():
        return "crashed: its process died without a traceback (killed, out of memory, or ended by a library)"
    blocks = re.split(r"\n(?=Current thread |Thread )", trace)
    block = next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
    place = re.search(r'File "([^"]*)", line (\d+) in (\S+)', block)
    where = f", in {place[3]} ({os.path.basename(place[1])}:{place[2]})" if place else ""
    if trace.startswith("Timeout"):
        return f"hung: no result in the remaining {deadline_s:,.0f} s{where}"
    return f"crashed: {trace.splitlines()[0].removeprefix('Fatal Python error: ')}{where}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
