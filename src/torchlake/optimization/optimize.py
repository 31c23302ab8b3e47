"""`optimize`: finds the fastest runtime that agrees with `eager`, on the user's rows and this machine.

    sample -> eager, the reference -> every other runtime -> other thread counts for the best two -> runtime.json

A candidate is a runtime with a number of threads per process, at its best batch size. It runs in as many processes as
`predict` would start, so its rows per second are those of `predict`. It is inside the tolerance if no probability
differs from eager's by more than 0.001, or if `min_agreement` of the labels agree and, on a labeled sample, the metric
does not drop by more than allowed; vectors are compared by their cosines (`agreement.py`). A candidate that crashes,
hangs, raises, or does not fit into the budget is reported and skipped.
Cost: the budget, and the exports of the candidates, which stay in the model folder.
"""

import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from torchlake import plugins
from torchlake.config.arguments import check_arguments, plain_numbers, refuse_unknown
from torchlake.config.measuring import OptimizeOptions
from torchlake.config.options import FilterArguments, GenerationArguments
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.config.types import parse_seconds
from torchlake.display import Shown, plain, shown
from torchlake.engines import Engine, as_engine
from torchlake.engines.local import Local
from torchlake.errors import TorchlakeError, UsageError
from torchlake.models import folders
from torchlake.models.spec import EMBEDS
from torchlake.optimization.agreement import MAX_DROP, MIN_AGREEMENT
from torchlake.optimization.candidates import (
    AGREES,
    Bench,
    Candidate,
    find_shapes,
    judge,
    measure,
    rate,
    reference_of,
    try_runtime,
)
from torchlake.optimization.measure import Stopped, write_rows
from torchlake.optimization.sample import Sample, draw_prompts, draw_sample
from torchlake.optimization.texts import ROWS as TEXT_ROWS
from torchlake.processes.hardware import cores, gpus
from torchlake.scoring.options.settings import known_spec, scoring_settings, with_columns
from torchlake.scoring.options.table import checked_input, with_table
from torchlake.scoring.rows import Runtime, ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import REFERENCE, write_choice
from torchlake.tables.record import local_output
from torchlake.tables.sources._options import ReadOptions, read_options
from torchlake.tables.sources.frames import is_frame
from torchlake.tables.sources.streams import Input
from torchlake.tasks import Task

log = logging.getLogger(__name__)

LARGE = 100_000
ROWS = 1000
PROMISING = 2
"The number of best runtimes that are tried with other thread counts."
MIN_REFERENCE_S = 600.0
"The time limit of eager, even if the budget is smaller: without eager there is no reference."


@shown
@dataclass(frozen=True, kw_only=True)
class Optimized:
    """The choice of `optimize`."""

    runtime: str
    batch_tokens: int
    threads: int
    rows_per_s: float
    candidates: tuple[Candidate, ...]
    "Fastest first, then those without a measurement."
    ratio: float
    "Rows per second (if the task writes, tokens per second) divided by eager's."
    tokens_per_s: float | None = None
    "Tokens per second that are written, if the task writes."

    def _shown(self) -> Shown:
        line = f"{self.runtime}, {self.speed}, {self.ratio:.2f} times eager"
        head = ("runtime", "threads", "batch tokens", "rows/s", "verdict")
        rows = [(one.runtime, one.threads, one.batch_tokens, one.rows_per_s, one.verdict) for one in self.candidates]
        return line, [[head, *rows]]

    @property
    def speed(self) -> str:
        """The speed in words; of a task that writes, with the time of a large table."""
        if self.tokens_per_s is None:
            return f"{self.rows_per_s:,.0f} rows/s"
        minutes = LARGE / self.rows_per_s / 60 if self.rows_per_s else math.inf
        needed = f"{minutes:,.1f} minutes" if minutes < 60 else f"{minutes / 60:,.1f} hours"
        return f"{self.tokens_per_s:,.1f} tokens/s ({LARGE:,} such rows in {needed})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; undefined numbers are null."""
        value: dict[str, Any] = plain(self)
        return value


def optimize(
    model: str | Path,
    sample: Input,
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    max_drop: float = MAX_DROP,
    min_agreement: float = MIN_AGREEMENT,
    budget: str | float = "5min",
    runtimes: Sequence[Runtime] | None = None,
    engine: Engine | str | None = None,
    rows: int | None = None,
    **options: Unpack[OptimizeOptions],
) -> Optimized:
    """Find the fastest runtime for `model` that agrees with `eager`, and let `predict` use it from now on.

    `sample` is a stored table, a frame or a stream, as in `predict`; at most `rows` of its rows (default: 1,000; of a
    model that writes, 32) are scored, in the proportions of the table. `where` and `limit` restrict these to the first
    `limit` rows for which `where` is true.
    `text`, `text_pair`, `inputs` and `label` name the columns if they differ from those of the training table; the
    sample does not need labels. `task` is as in `predict`. A candidate is inside the tolerance if at least
    `min_agreement` of the labels are eager's and the accuracy (several labels per row: the task's F1; regression: the
    error, in standard deviations of the target) drops by no more than `max_drop`; vectors, if their mean cosine to
    eager's is at least `min_agreement`, and the lowest not ten times as far from 1. `budget` ("5min", or seconds) is
    for all candidates together; eager, the reference, is always measured. `runtimes` are the names to try (default:
    all), or functions as in `predict`.

    Writing is measured in tokens per second: fp32 has to give `min_agreement` of eager's texts, and the log-probability
    of their tokens may change by 0.01 on average.

    The choice is written into the model folder (runtime.json), beside the exports of the runtimes. A function can be
    measured but not written there: that file would name code to run.

    Raises UsageError for invalid arguments and for a model folder in the hub's cache or without write permission,
    DataError for a sample without usable rows, TorchlakeError if eager cannot score it, and the errors of `predict`.
    """
    check_arguments({"max_drop": max_drop, "min_agreement": min_agreement, "rows": rows}, optimize.__annotations__)
    if not (0 <= max_drop <= 1 and 0 <= min_agreement <= 1) or (rows is not None and rows < 1):
        raise UsageError("max_drop and min_agreement must be shares from 0 to 1, and rows must be 1 or more.")
    unmeasured = sorted(options.keys() & GenerationArguments.__annotations__.keys() - OptimizeOptions.__annotations__)
    if unmeasured:
        named = ", ".join(unmeasured)
        raise UsageError(f"{named}: optimize measures one text for each row of a column; leave it out.")
    refuse_unknown("optimize", options, OptimizeOptions.__annotations__)
    options = plain_numbers(options)
    generation = {name: value for name, value in options.items() if name in GenerationArguments.__annotations__}
    read = read_options({name: value for name, value in options.items() if name in FilterArguments.__annotations__})
    columns: Any = {"text": text, "text_pair": options.get("text_pair"), "inputs": options.get("inputs")}
    task = options.get("task")
    if is_frame(sample):
        read.refuse_for_frames()
    try:
        until = time.monotonic() + parse_seconds(budget)
    except ValueError as error:
        raise UsageError(f"budget: {error}") from None
    runs_on = as_engine(engine) or Local()
    folder = _own_folder(model)
    spec = with_columns(known_spec(folder, task), folder, **columns)
    _check_comparable(folder, plugins.load("tasks", spec.task), label)
    others = _sorted_by_effort(plugins.names("runtimes") if runtimes is None else runtimes)
    settings, spec, _ = scoring_settings(folder, REFERENCE, generation, task=task, **columns)
    if settings.generation is None:
        drawn = draw_sample(sample, spec, label=label, rows=rows or ROWS, options=read)
        settings = replace(settings, all_probabilities=spec.task != EMBEDS)
    else:
        settings, drawn = _draw_prompts(sample, settings, spec, rows or TEXT_ROWS, read)
    settings = replace(settings, row_timeout_s=MIN_REFERENCE_S)
    with tempfile.TemporaryDirectory(prefix="torchlake-optimize-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(
            engine=runs_on,
            settings=settings,
            spec=spec,
            sample=drawn,
            scratch=Path(scratch),
            until=until,
            min_agreement=min_agreement,
            max_drop=max_drop,
        )
        write_rows(bench.scratch / "rows", drawn.rows)
        write_rows(bench.scratch / "calibration", drawn.calibration)
        found, device = _try_all(bench, others)
    return _choose(folder, spec.task, found, device, len(drawn.rows))


def _draw_prompts(
    sample: Input, settings: ScoringSettings, spec: TaskSpec, rows: int, read: ReadOptions
) -> tuple[ScoringSettings, Sample]:
    """Return the settings with the columns that the sample has, and its prompts. Raises TableError and UsageError."""

    def columns_of(schema: pa.Schema, where: str, first: Callable[[str], pa.Table]) -> Sequence[str]:
        nonlocal settings
        found, task = with_table(settings, spec, schema, first)
        settings = checked_input(found, task, schema, where)
        return tuple(dict.fromkeys([*as_columns(settings.text), *map(str, settings.inputs.values())]))

    prompts = draw_prompts(sample, columns_of, rows=rows, options=read)
    return settings, Sample(rows=prompts, targets=None, calibration=prompts.slice(0, 0))


def _check_comparable(folder: Path, task: Task, label: str | None) -> None:
    """Raise UsageError for a task whose answers cannot be compared: they are neither classes, nor numbers, nor
    vectors, nor texts; and for a label of texts."""
    if task.generates and label is not None:
        raise UsageError(f"label: {task.name} is compared with the texts of {REFERENCE}; leave it out.")
    classes = task.has_labels and type(task).output_columns is Task.output_columns
    if not classes and not task.generates and task.name != EMBEDS:
        raise UsageError(f"{folder}: {task.name} runs only under {REFERENCE}; there is nothing to choose from.")


def _own_folder(model: str | Path) -> Path:
    """Return the model's folder. Raises UsageError if it is in the hub's cache or cannot be written."""
    folder = folders.model_folder(model)
    if not local_output(model).is_dir() or (folder / "config.json").is_symlink():
        raise UsageError(
            f"{model}: the model is a snapshot in the cache of the Hugging Face Hub ({folder}), which must not be "
            f"changed. Copy it (cp -rL {folder} my-model), then optimize and use the copy."
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"{folder}: cannot be written, and the choice is stored in the model folder. Copy the folder to a place "
            "that you can write to, then optimize and use the copy."
        )
    return folder


def _sorted_by_effort(runtimes: Sequence[Runtime]) -> list[Runtime]:
    """Return all but the reference: those that run directly, then those with an export, then calibrated ones.

    Raises UsageError for an unknown name.
    """
    for runtime in runtimes:
        if isinstance(runtime, str) and runtime not in plugins.names("runtimes"):
            plugins.load("runtimes", runtime)

    def effort(runtime: Runtime) -> tuple[bool, bool]:
        try:
            module = plugins.load("runtimes", runtime) if isinstance(runtime, str) else None
        except TorchlakeError:  # its library is missing: `try_runtime` will refuse it
            module = None
        return hasattr(module, "prepare"), bool(getattr(module, "CALIBRATED", False))

    return sorted((one for one in dict.fromkeys(runtimes) if one != REFERENCE), key=effort)


def _try_all(bench: Bench, others: Sequence[Runtime]) -> tuple[list[Candidate], str]:
    """Measure eager, the others, and the best of them with other thread counts. Return them and the device."""
    shapes = find_shapes(bench)
    measured = measure(bench, REFERENCE, shapes[0], deadline_s=max(bench.left_s, MIN_REFERENCE_S))
    if isinstance(measured, Stopped):
        raise TorchlakeError(f"eager, the reference of all others, could not score the sample: {measured.verdict}")
    reference = reference_of(bench, measured)
    found = [_logged(judge(bench, REFERENCE, shapes[0], measured, reference))]
    for runtime in others:
        found.append(_logged(try_runtime(bench, runtime, shapes[0], reference, found)))
    agreeing = sorted((one for one in found if one.verdict == AGREES), key=rate, reverse=True)
    for shape in shapes[1:]:
        for name in [one.runtime for one in agreeing[:PROMISING]]:
            runtime = next(one for one in [REFERENCE, *others] if runtime_name(one) == name)
            found.append(_logged(try_runtime(bench, runtime, shape, reference, found, again=True)))
    return found, measured[0].device


def _choose(folder: Path, task: str, found: list[Candidate], device: str, sample_rows: int) -> Optimized:
    """Choose the fastest candidate that agrees, and write the choice into the model folder."""
    best = max((one for one in found if one.verdict == AGREES), key=rate)
    assert best.batch_tokens is not None
    assert best.threads is not None
    assert best.rows_per_s is not None
    ranked = [replace(one, verdict="chosen") if one is best else one for one in sorted(found, key=rate, reverse=True)]
    done = Optimized(
        runtime=best.runtime,
        batch_tokens=best.batch_tokens,
        threads=best.threads,
        rows_per_s=best.rows_per_s,
        ratio=rate(best) / rate(found[0]),
        tokens_per_s=best.tokens_per_s,
        candidates=tuple(ranked),
    )
    if best.runtime not in plugins.names("runtimes"):
        log.warning("%s is the fastest, but a function: nothing is written. Pass it to predict: runtime=", best.runtime)
        return done
    write_choice(
        folder,
        task=task,
        runtime=done.runtime,
        batch_tokens=done.batch_tokens,
        threads=done.threads,
        device=device,
        sample_rows=sample_rows,
        measured=done.to_json()["candidates"],
        machine={"system": platform.platform(), "processor": platform.machine(), "cores": cores(), "gpus": len(gpus())},
    )
    return done


def _logged(candidate: Candidate) -> Candidate:
    """Log a candidate as soon as its verdict is known: the next one may take minutes."""
    threads = "" if candidate.threads is None else f", threads {candidate.threads}"
    log.info("optimize: %s%s%s: %s", candidate.runtime, threads, candidate.speed, candidate.verdict)
    return candidate
