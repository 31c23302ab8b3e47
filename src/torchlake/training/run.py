"""One training run, in the caller's process: it makes all decisions once, and locks the run folder.

    open the tables -> find the labels -> prepare (token Parquet) -> launch the ranks -> model folder, report

`restarts.py` launches the ranks, and `loop.py` is what each rank runs.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchlake import atomic_io, plugins
from torchlake.checkpoints import location
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.display import Shown, count, shown, wrapped
from torchlake.engines import Engine, ProcessRange, as_engine, make_engine
from torchlake.errors import DataError, FingerprintError, OutputError, TableError
from torchlake.models.folders import base_folder, model_hash
from torchlake.optim import optimizers
from torchlake.outputs.find import folder_output
from torchlake.preparation import summary
from torchlake.preparation.checks import check_metric, check_tables, choose_metric
from torchlake.preparation.findings import Finding
from torchlake.preparation.prepare import prepare
from torchlake.preparation.problem import find_task_spec
from torchlake.preparation.reference import find_reference
from torchlake.reporting import tracking
from torchlake.runs import folder as run_folder
from torchlake.runs.metrics_log import OnStep
from torchlake.runs.tables import load_with_frames, pinned_job, read_options_of, stored_tables
from torchlake.storage import lease
from torchlake.storage.versions import ContentChecker
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import check_key
from torchlake.tables.sources import streams
from torchlake.tables.sources.frames import engine_of
from torchlake.tables.table import open_table
from torchlake.training import restarts
from torchlake.training.model import lora
from torchlake.training.model.strategy import check_strategy, check_tensor_parallel, choose_strategy

log = logging.getLogger(__name__)


@shown
@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training run."""

    path: Path
    "The run folder."
    model: Path
    "The model folder in it."
    steps: int
    "The optimizer steps of this call: fewer than those of the run if it was resumed."
    seconds: float
    "The seconds that this call took."
    metrics: dict[str, float]
    "The metrics of the best validation; without validation, the last step's loss."
    complete: bool
    "Whether the run was finished before this call."
    findings: tuple[Finding, ...] = ()
    "What the data checks found."

    def _shown(self) -> Shown:
        done = "complete before" if self.complete else f"{count(self.steps, 'step')} in {self.seconds:,.1f} s"
        return f"{done} -> {self.path}", [[("metric", "value"), *self.metrics.items()]]


def train_run(
    job: str | Path | Job | None,
    *,
    run: str | Path | None,
    engine: Engine | str | None,
    overrides: Sequence[str],
    sections: Mapping[str, Any],
    on_step: OnStep | None,
) -> Run:
    """Train `job` in the folder `run`; arguments and errors are those of `train`."""
    began = time.monotonic()
    for folder in run_folder.candidates(job, run):
        frames, wanted = load_with_frames(job, overrides, sections, folder, **named_engine(engine))
        if run != run_folder.AUTO or run_folder.accepts(folder, wanted):
            break
    _check_libraries(wanted)
    check_metric(wanted)
    engine = job_engine(wanted, engine)
    processes = wanted.engine.processes or engine.process_range or engine.default_ranks()
    checked = _check_new(wanted, processes, folder, engine, frames)
    store = location.find_store(wanted.train.checkpoint_folder, folder)
    staging = folder / ".training.staging"
    with lease.acquire(staging, name=str(folder)) as mine:
        run_folder.claim(folder, wanted)
        for path, frame in frames.items():
            store_frame(frame, path, engine)
        if (finished := run_folder.finished(folder)) is not None:
            return _complete(wanted, folder, engine, finished, began)
        trained = run_folder.is_trained(folder, wanted)
        wanted = pinned_job(folder, wanted, begun=trained)
        if not checked:
            check_tables(wanted, spread=engine.spread, trained=folder if trained else None)
            check_strategy(wanted, processes)
        base = base_folder(wanted.model.base)
        run_folder.check_base(folder, base, "" if base is None else model_hash(base), begun=trained)
        check_tensor_parallel(wanted, base, processes)
        spec = find_task_spec(wanted, base, folder, trained=trained, spread=engine.spread)
        metric = choose_metric(wanted, spec)
        prepared = _prepare(wanted, base, spec, engine, folder, trained=trained)
        _summarize(wanted, spec, prepared, folder)
        settings = {
            "job": wanted,
            "spec": spec,
            "run": str(folder),
            "tokens": str(prepared[0]),
            "validation_tokens": str(prepared[1]) if len(prepared) == 2 else None,
            "metric": metric,
            "lease": (str(staging), mine.mine["token"]),
            "on_step": on_step,
        }
        identity = run_folder.run_identity(wanted, spec, folder)
        with tracking.tracked(wanted, folder):
            strategy_for = partial(choose_strategy, wanted)
            done = restarts.run_with_restarts(engine, settings, processes, strategy_for, store, identity)
            result = {
                "steps": done["total_steps"],
                "metrics": done["metrics"],
                "metric": metric,
                "world_size": done["world_size"],
                "stopped_by": done["stopped_by"],
            }
            from torchlake.evaluation import held_out

            # Before the trackers end, which send it.
            result |= held_out.write_page(folder, wanted, spec, result, engine)
            atomic_io.write_json(folder / run_folder.RESULT, result, site="run.result")
    from torchlake.reporting import report

    report.report(folder)
    return _as_run(folder, result, steps=done["steps"], began=began, complete=False)


def _check_new(job: Job, processes: ProcessRange, folder: Path, engine: Engine, frames: Mapping[Path, Any]) -> bool:
    """Check a new run's tables and strategy and return whether that was done: what is refused leaves no run folder.

    Frames are tables only when they are stored, which may take hours: then the strategy is checked before.
    """
    fresh = not os.path.exists(folder) and not frames
    if fresh:
        check_tables(job, spread=engine.spread)
    if fresh or frames:
        check_strategy(job, processes)
    return fresh


def _check_libraries(job: Job) -> None:
    """Raise MissingExtra for a library that the job needs and that is not installed."""
    tracking.check(job.track)
    optimizers.check_installed(job.train)
    lora.check_lora(job, plugins.load("tasks", job.task))


def _complete(job: Job, folder: Path, engine: Engine, finished: Mapping[str, Any], began: float) -> Run:
    """Return the result of a run that was finished before this call."""
    _refuse_changed_input(job, folder, engine)
    try:
        base = base_folder(job.model.base)
    except DataError:  # it was deleted since
        base = None
    run_folder.check_base(folder, base, "" if base is None else model_hash(base), begun=True)
    log.info("%s: already complete, %d steps", folder, finished["steps"])
    with tracking.tracked(job, folder):  # send what the trackers missed
        pass
    return _as_run(folder, finished, steps=0, began=began, complete=True)


def named_engine(engine: Engine | str | None) -> dict[str, Any]:
    """Return the argument `engine` as sections of a job: a name becomes the section `engine`."""
    return {"engine": {"name": engine}} if isinstance(engine, str) else {}


def job_engine(job: Job, engine: Engine | str | None) -> Engine:
    """Return the engine given as an object, else the job's engine."""
    given = None if isinstance(engine, str) else as_engine(engine)
    return given or make_engine(job.engine.name, job.engine.processes, **job.engine.options)


def store_frame(frame: Any, path: Path, engine: Engine) -> None:
    """Store a frame or a stream in the run folder; a Spark or Ray frame is written there by its own engine, once."""
    native_engine = engine_of(frame)
    if native_engine is None:
        streams.store(frame, path)
    elif path.exists():
        # Computing the frame again may take hours and may reorder its rows.
        log.info("%s: using the rows that the run began with", path)
    else:
        if type(engine).__name__.lower() != native_engine:
            engine = make_engine(native_engine, None)
        temporary = path.with_name(f".{path.name}.spool")
        atomic_io.remove([temporary])
        path.parent.mkdir(parents=True, exist_ok=True)
        engine.materialize(frame, str(temporary))
        temporary.rename(path)


def _as_run(folder: Path, result: Mapping[str, Any], *, steps: int, began: float, complete: bool) -> Run:
    return Run(
        path=folder,
        model=folder / "model",
        steps=steps,
        seconds=time.monotonic() - began,
        metrics=result["metrics"],
        complete=complete,
        findings=summary.findings_of(atomic_io.read_json(folder / summary.FILE)),
    )


def _prepare(job: Job, base: Path | None, spec: TaskSpec, engine: Engine, folder: Path, *, trained: bool) -> list[Path]:
    """Tokenize the training table and the validation table, if any; return the folders of token Parquet."""
    folders, reference = [], find_reference(job, base, spec)
    for name, table in stored_tables(job).items():
        options = read_options_of(job, name)
        output = folder / "prepared" / name
        output.parent.mkdir(exist_ok=True)
        if job.data.key is not None and not trained:
            keyed = open_table(table, columns=(job.data.key,), options=options, spread=engine.spread)
            plan = plan_chunks(keyed, columns=(job.data.key,), hashed=False, spread=engine.spread)
            check_key(keyed, plan, job.data.key, spread=engine.spread, scratch=output.parent)
        try:
            done = prepare(
                table,
                output,
                tokenizer=base,
                spec=spec,
                engine=engine,
                bad_rows=job.data.bad_rows,
                overwrite=not trained,
                options=options,
                reference=reference,
            )
        except FingerprintError as error:
            lines = str(error).splitlines()
            different = "\n".join(lines[:-1] or lines)  # without the last line, which is advice for outputs
            why = f"cannot continue with a different {name} table: use the original table"
            if "\n  format: " in different:
                why = "cannot continue with rows that another version of torchlake prepared: go on with that version"
            raise FingerprintError(
                f"{different}\nThe training in {folder} {why}, or name a new run folder (--run)."
            ) from error
        except OutputError as error:
            raise OutputError(f"{error} Delete {output}, and run the same command again.") from error
        if done["failed"]:
            log.warning("%s: %d of %d rows are left out (data.bad_rows=drop)", table, done["failed"], done["rows"])
        folders.append(output)
    return folders


def _summarize(job: Job, spec: TaskSpec, prepared: Sequence[Path], folder: Path) -> None:
    """Log a summary of the data, and store it in the run folder."""
    facts = summary.summarize(job, spec, prepared)
    atomic_io.write_json(folder / summary.FILE, facts, site="run.data")
    for line in summary.summary_lines(facts):
        log.info("%s", line)
    for finding in summary.findings_of(facts):
        log.warning("%s", "\n".join(wrapped([f"data: {finding.line}"])))


def _refuse_changed_input(job: Job, folder: Path, engine: Engine) -> None:
    """Raise FingerprintError if a table of a finished run has changed; a deleted table is accepted."""
    for name, table in stored_tables(job).items():
        planned = {one.name: one for one in folder_output(folder / "prepared" / name).earlier().inputs}
        try:
            now = open_table(table, options=read_options_of(job, name), spread=engine.spread)
            paths, unchanged = dict(zip(now.names, now.files, strict=True)), ContentChecker()
            if now.options.selection.asked:
                plan = plan_chunks(now, columns=(), hashed=False, spread=engine.spread)
                paths = {one.name: one.path for one in plan.inputs}
            changed = sorted(planned.keys() ^ paths.keys()) or [
                one.path
                for one in planned.values()
                if not unchanged.is_unchanged(paths[one.name], one.version, one.sha256)
            ]
        except (TableError, OSError):
            continue
        if changed and planned:
            raise FingerprintError(
                f"{folder}: the run is finished, but its {name} table has changed since then: {changed[0]}. "
                "Name a new run folder (--run) to train on it."
            )
