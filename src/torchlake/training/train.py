"""`train`: a table and a base model in, a model folder out; the same call again resumes an interrupted run.

`run.py` has one run, and `folds.py` one run for each fold.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, overload

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.engines import Engine
from torchlake.runs.arguments import Sections
from torchlake.runs.metrics_log import OnStep
from torchlake.tasks import Task
from torchlake.training.folds import Folds, train_folds
from torchlake.training.run import Run, train_run


@overload
def train(
    job: str | Path | Job | None = None,
    *,
    run: str | Path | None = None,
    engine: Engine | str | None = None,
    overrides: Sequence[str] = (),
    task: Task | None = None,
    on_step: OnStep | None = None,
    folds: None = None,
    **sections: Unpack[Sections],
) -> Run: ...


@overload
def train(
    job: str | Path | Job | None = None,
    *,
    run: str | Path | None = None,
    engine: Engine | str | None = None,
    overrides: Sequence[str] = (),
    task: Task | None = None,
    on_step: OnStep | None = None,
    folds: int,
    **sections: Unpack[Sections],
) -> Folds: ...


def train(
    job: str | Path | Job | None = None,
    *,
    run: str | Path | None = None,
    engine: Engine | str | None = None,
    overrides: Sequence[str] = (),
    task: Task | None = None,
    on_step: OnStep | None = None,
    folds: int | None = None,
    **sections: Unpack[Sections],
) -> Run | Folds:
    """Fine-tune a model as described by `job` (a job file or a Job), by sections, or by both.

    Sections are the mappings `data`, `model`, `train` and `track` (`runs/arguments.py` has their keys), or models of
    `config/sections/`. Sections and then `overrides` ("train.epochs=5") replace values of the job. `engine` is an
    engine, or its name: "spark" has the options of the job's section `engine`, and by default runs on the active
    session. `data.train` and `data.validation` may be frames (pyarrow, pandas, polars, Spark, Ray Data), or streams as
    in `predict`; they are stored in the run folder first, Spark and Ray frames by their own engine, once per run. `run`
    is the run folder, by default runs/ and the job file's name; "auto" adds -2, -3, ... to that name if the folder
    holds another job. The same call again resumes an interrupted run, and returns a finished one; with more epochs it
    continues it. With `folds=5` it trains five times, each time validating on another fifth of the rows, in fold_1 to
    fold_5 below the run folder, and returns `Folds`: the mean and the standard deviation of the metrics.

    `task` is an instance of your own subclass of `torchlake.Task`; it replaces `model.task`. Pass it again to resume,
    and to `predict` and `evaluate`. `on_step` is called in rank 0's process with the numbers of each step and
    validation (the lines of metrics.jsonl); if it returns True, the run stops after a checkpoint, and the same call
    continues it.

    Raises ConfigError for an invalid job, DataError for unusable tables, labels, models or checkpoints,
    FingerprintError if the run folder or the checkpoint folder holds another job or the input has changed, Locked if
    another process trains in it, Interrupted when stopped (after a checkpoint; StopAsked by `on_step` or a file `stop`
    in the run folder), Diverged if the loss stays non-finite, StorageError if the disk is full or a storage cannot be
    reached, RankFailed with all attempts if the ranks failed more often than `max_restarts`.
    """
    overrides = (*overrides, *([] if task is None else [f"model.task={plugins.give(task)}"]))
    if folds is not None:
        return train_folds(job, folds, run=run, engine=engine, overrides=overrides, sections=sections, on_step=on_step)
    return train_run(job, run=run, engine=engine, overrides=overrides, sections=sections, on_step=on_step)
