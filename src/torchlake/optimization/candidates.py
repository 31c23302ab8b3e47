"""Tries the candidates of `optimize` one after another: refusal, export, measurement, verdict.

A candidate is a runtime with a number of threads per process, at its best batch size. `measure.py` runs it in separate
processes; `agreement.py` compares its predictions with the reference. Cost: a candidate that is clearly
slower on a share of the rows is not measured on all of them.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.display import Shown, shown
from torchlake.engines import Engine
from torchlake.errors import TorchlakeError
from torchlake.optimization import measure as trials
from torchlake.optimization.agreement import compare, outside
from torchlake.optimization.measure import Measured, RuntimeTrial, Stopped
from torchlake.optimization.sample import Sample
from torchlake.optimization.texts import (
    EXACT,
    MeasuredTexts,
    ReferenceTexts,
    compare_texts,
    measure_texts,
    outside_texts,
    write_reference,
)
from torchlake.processes.hardware import cores, gpus, max_processes
from torchlake.runtimes import _exports
from torchlake.scoring.rows import Runtime, ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import REFERENCE, refusal, refuse_unable, worker_memory

NEAR = 0.8
"A candidate below this share of the best rate so far is measured on a share of the rows only."
REFERENCE_FILE = "reference"
AGREES, NOT_TRIED = "agrees", "not tried (budget)"


@shown
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One runtime with one number of threads, and its measurements. None: not measured."""

    runtime: str
    verdict: str
    '"chosen", "agrees", "outside: ...", "refused: ...", "failed: ...", "crashed: ...", "hung: ..." or "not tried ...".'
    threads: int | None = None
    "Threads of each process."
    processes: int | None = None
    batch_tokens: int | None = None
    by_batch_tokens: dict[int, float] | None = None
    "Rows per second on a share of the sample, for each batch size that was tried."
    rows_per_s: float | None = None
    "Rows per second of all processes together, including tokenizing."
    tokens_per_s: float | None = None
    "Tokens per second that they write, if the task writes; `by_batch_tokens` then has these, too."
    common: float | None = None
    "Mean share of each text up to the first difference from eager's; `agreement` is the share of equal texts."
    nats: float | None = None
    "The mean change of the log-probability of a token of eager's texts."
    rows: int | None = None
    "Rows of the sample that the numbers below are based on."
    failed: int | None = None
    agreement: float | None = None
    difference: float | None = None
    vectors: bool = False
    metric: str | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    drop: float | None = None
    "`failed` to `drop` are those of `agreement.Agreement`."

    def _shown(self) -> Shown:
        return f"{self.runtime}: {self.verdict}{self.speed}", []

    @property
    def speed(self) -> str:
        """The speed in words, after a comma; empty if it was not measured."""
        if self.tokens_per_s is not None:
            return f", {self.tokens_per_s:,.1f} tokens/s"
        return "" if self.rows_per_s is None else f", {self.rows_per_s:,.0f} rows/s"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The settings that all trials share."""

    engine: Engine
    settings: ScoringSettings
    spec: TaskSpec
    sample: Sample
    scratch: Path
    until: float
    "time.monotonic() at which the budget is spent."
    min_agreement: float
    max_drop: float

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def folder(self) -> Path:
        """Return a new empty folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


def find_shapes(bench: Bench) -> list[tuple[int, int]]:
    """Return the pairs (processes, threads per process) to try: the defaults of `predict`, and one process with all
    cores."""
    memory, threads = worker_memory(bench.settings.model), os.environ.get("OMP_NUM_THREADS", "")
    if bench.engine.processes is not None:
        numbers = [bench.engine.processes]
    elif threads.isdigit():  # set by the user; the engine uses it too
        numbers = [max_processes(memory, max(1, int(threads)))]
    else:
        numbers = [max_processes(memory), max_processes(memory, cores())]
    if cards := len(gpus()):
        numbers = [min(numbers[0], cards)]  # one process per GPU; the CPU's threads matter little there
    return [(one, int(threads) if threads.isdigit() else max(1, cores() // one)) for one in dict.fromkeys(numbers)]


def try_runtime(
    bench: Bench,
    runtime: Runtime,
    shape: tuple[int, int],
    reference: np.ndarray | ReferenceTexts,
    found: Sequence[Candidate],
    *,
    again: bool = False,
) -> Candidate:
    """Try one candidate and return it with its verdict."""
    name, stopped = runtime_name(runtime), _refused(bench, runtime)
    if stopped is None and not again and bench.left_s > 0:
        stopped = _export(bench, runtime)
    if stopped is None and bench.left_s <= 0:
        stopped = Stopped(verdict=NOT_TRIED)
    if stopped is not None:
        return Candidate(runtime=name, verdict=stopped.verdict)
    min_rate = NEAR * max((rate(one) for one in found if one.verdict == AGREES), default=0.0)
    measured = measure(bench, runtime, shape, deadline_s=bench.left_s, min_rate=min_rate)
    if isinstance(measured, Stopped):
        return Candidate(runtime=name, verdict=measured.verdict, processes=shape[0], threads=shape[1])
    return judge(bench, runtime, shape, measured, reference)


def _refused(bench: Bench, runtime: Runtime) -> Stopped | None:
    """Return why the runtime cannot run this model or task here, or None."""
    try:
        refuse_unable(runtime, bench.spec.task)
        folder, options = Path(bench.settings.model), bench.settings.generation
        reason = refusal(runtime, folder, bench.spec.task, pairs=bench.spec.text_pair is not None, options=options)
    except TorchlakeError as error:
        reason = str(error)
    return None if reason is None else Stopped(verdict=f"refused: {reason}")


def _export(bench: Bench, runtime: Runtime) -> Stopped | None:
    """Let the runtime write its export. A calibrated one is always written again, with rows that are not measured."""
    module = plugins.load("runtimes", runtime) if isinstance(runtime, str) else None
    if module is None or not hasattr(module, "prepare"):
        return None
    folder, name = Path(bench.settings.model), runtime_name(runtime)
    if not module.CALIBRATED and _exports.current(folder, name, bench.spec.task) is not None:
        return None
    if module.CALIBRATED and len(bench.sample.calibration) == 0:
        return Stopped(verdict="not tried: the sample has no rows to calibrate with")
    calibration = str(bench.scratch / "calibration")
    return trials.prepare(
        bench.engine, bench.settings, runtime_name(runtime), calibration, bench.folder(), deadline_s=bench.left_s
    )


def measure(
    bench: Bench, runtime: Runtime, shape: tuple[int, int], *, deadline_s: float, min_rate: float = 0.0
) -> list[Measured] | list[MeasuredTexts] | Stopped:
    """Measure a runtime in as many processes as `shape` says."""
    trial = RuntimeTrial(
        settings=replace(bench.settings, runtime=runtime),
        rows=str(bench.scratch / "rows"),
        folder=str(bench.folder()),
        processes=shape[0],
        deadline_s=deadline_s,
        min_rate=min_rate,
    )
    if bench.settings.generation is not None:
        return measure_texts(bench.engine, trial, bench.scratch / REFERENCE_FILE)
    return trials.measure(bench.engine, trial)


def reference_of(bench: Bench, measured: Sequence[Any]) -> np.ndarray | ReferenceTexts:
    """Return eager's answers, which those of the others are compared with, from what `measure` returned.

    Raises TorchlakeError without any.
    """
    if isinstance(measured[0], MeasuredTexts):
        return write_reference(bench.scratch / REFERENCE_FILE, measured, len(bench.sample.rows))
    answers = merged(bench, measured)[0]
    if not np.isfinite(answers).all(axis=1).any():
        raise TorchlakeError(f"eager could score no row of the sample: {next(iter(measured[0].errors.values()))}")
    return answers


def merged(bench: Bench, measured: Sequence[Measured]) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, C) probabilities of the sample's rows, NaN where missing, and (N,) which rows were scored."""
    answers = np.full((len(bench.sample.rows), measured[0].probabilities.shape[1]), np.nan, dtype=np.float32)
    scored = np.zeros(len(answers), dtype=bool)
    for one in measured:
        answers[one.rows], scored[one.rows] = one.probabilities, True
    return answers, scored


def judge(
    bench: Bench,
    runtime: Runtime,
    shape: tuple[int, int],
    measured: Sequence[Any],
    reference: np.ndarray | ReferenceTexts,
) -> Candidate:
    """Return the candidate with its measurements and whether it is inside the tolerance."""
    if isinstance(reference, ReferenceTexts):
        return _judge_texts(bench, runtime, shape, measured, reference)
    answers, scored = merged(bench, measured)
    targets = bench.sample.targets
    found = compare(answers[scored], reference[scored], None if targets is None else targets[scored], bench.spec)
    reason = outside(found, min_agreement=bench.min_agreement, max_drop=bench.max_drop)
    failures = [failure for one in measured for failure in one.errors.values()]
    if runtime == REFERENCE:
        verdict = AGREES
    elif failures and found.failed == found.rows:
        verdict = f"failed: {failures[0]}"
    elif reason is not None:
        verdict = f"outside: {reason}" + (f" ({failures[0]})" if found.failed and failures else "")
    else:
        verdict = AGREES if scored.all() else f"{AGREES}, but is slower"
    return Candidate(
        runtime=runtime_name(runtime),
        verdict=verdict,
        processes=shape[0],
        threads=shape[1],
        batch_tokens=measured[0].batch_tokens,
        by_batch_tokens=measured[0].by_batch_tokens,
        rows_per_s=measured[0].rows_per_s,
        **asdict(found),
    )


def _judge_texts(
    bench: Bench, runtime: Runtime, shape: tuple[int, int], measured: Sequence[Any], reference: ReferenceTexts
) -> Candidate:
    found = compare_texts(measured, reference)
    module = plugins.load("runtimes", runtime) if isinstance(runtime, str) else None
    exact = module is None or module.TOLERANCE <= EXACT
    reason = None
    if runtime != REFERENCE:
        reason = outside_texts(found, exact=exact, min_agreement=bench.min_agreement)
    failure = next((one for each in measured for one in each.errors.values()), None)
    first = measured[0]
    return Candidate(
        runtime=runtime_name(runtime),
        verdict=AGREES if reason is None else f"outside: {reason}" + (f" ({failure})" if found.failed else ""),
        processes=shape[0],
        threads=shape[1],
        batch_tokens=first.batch_tokens,
        by_batch_tokens=first.by_batch_tokens,
        rows_per_s=first.rows_per_s,
        tokens_per_s=first.tokens_per_s,
        **asdict(found),
    )


def rate(candidate: Candidate) -> float:
    """Return the tokens per second, or rows per second of a task that does not write; 0 if not measured."""
    return candidate.tokens_per_s or candidate.rows_per_s or 0.0
