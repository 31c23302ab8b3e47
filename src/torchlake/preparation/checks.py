"""What a job's tables and settings lack, found before a library is loaded, a model fetched or a row read."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import ConfigError, TableError, TaskError, UsageError
from torchlake.metrics import DIRECTIONS
from torchlake.preparation.conversations import with_table
from torchlake.preparation.problem import draft_spec
from torchlake.runs.tables import read_options_of, stored_tables
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.table import open_table
from torchlake.tasks import Task


def check_tables(job: Job, *, spread: Spread = in_process, trained: Path | None = None) -> None:
    """Raise TableError for a missing table or column, UsageError for settings that its rows do not use.

    `trained`: a run folder that continues with these tables only.
    """
    drafted = draft_spec(job)
    task = plugins.load("tasks", drafted.task)
    for name, table in stored_tables(job).items():
        try:
            read, options = drafted, read_options_of(job, name)
            if drafted.rows.system or drafted.rows.messages:
                read = with_table(drafted, table, options, spread)
            elif task.packs:
                read = task.find_columns(open_table(table, options=options, spread=spread).schema, drafted, None)
            columns = tuple(column for column in (*read.columns, job.data.key) if column is not None)
            open_table(table, columns=columns, options=options, spread=spread)
        except TableError as error:
            kept = f" The training in {trained} continues with {table} only; train another in a new run folder (--run)."
            raise type(error)(f"data.{name}: {error}{'' if trained is None else kept}") from error


def check_metric(job: Job) -> None:
    """Raise ConfigError for a `train.metric` that no validation of the task can have."""
    task, wanted = plugins.load("tasks", job.task), job.train.metric
    if job.data.validation is None and (wanted is not None or job.train.patience is not None):
        raise ConfigError("train.metric and train.patience need a validation; data.validation is null")
    _check_language(job, task)
    writing = job.train.validate_writing
    choices = list(dict.fromkeys(["loss", *task.directions, *([] if writing is None else [writing.metric])]))
    if wanted is not None and wanted not in choices:
        raise ConfigError(_unknown_metric(wanted, task.name, choices))


def choose_metric(job: Job, spec: TaskSpec) -> str:
    """Return the metric that selects the best model. Raises ConfigError for one that the rows do not have."""
    task = plugins.load("tasks", spec.task)
    wanted, writing = job.train.metric, job.train.validate_writing
    _check_writing(job, spec)
    if wanted is None:
        default = str(task.default_metric.get(spec.problem, "loss"))
        if default not in {**DIRECTIONS, **task.directions}:
            raise TaskError(
                f"the task {task.name!r}: its directions lack {default!r}, its default_metric for {spec.problem}; say "
                "there whether higher or lower is better"
            )
        return default
    choices = ["loss", *task.metric_names(spec), *([] if writing is None else [writing.metric])]
    if wanted not in choices:
        raise ConfigError(_unknown_metric(wanted, spec.problem, choices))
    return wanted


def _check_writing(job: Job, spec: TaskSpec) -> None:
    """Raise ConfigError for train.validate_writing if the rows have no answers apart from their prompts."""
    if job.train.validate_writing is None or spec.problem in ("next_answer_token", "text"):
        return
    if spec.problem != "next_token":
        raise ConfigError(f"train.validate_writing: the rows of model.task={spec.task} have no answer that is expected")
    raise ConfigError(
        f"train.validate_writing needs prompts and answers, and data.text ({spec.text}) is learned whole, as one text. "
        "Name conversations with data.learn=assistant, or a column of answers (data.completion), or leave it out."
    )


def _check_language(job: Job, task: Task) -> None:
    """Raise UsageError for settings that only language models have."""
    if job.train.neftune is not None and not (task.generates and task.packs):
        raise UsageError(
            f"train.neftune is noise for causal language models (model.task=text_generation); model.task={task.name} "
            "does not train one. Leave it out."
        )
    if job.train.validate_writing is None:
        return
    if not task.generates:
        raise UsageError(
            f"train.validate_writing: models of model.task={task.name} do not write texts. Leave it out; "
            "train.metric names what a validation measures."
        )
    if job.data.validation is None:
        raise ConfigError("train.validate_writing needs validation rows; data.validation is null")


def _unknown_metric(wanted: str, of: str, choices: Sequence[str]) -> str:
    """Return the message for a metric that `of`, a task or a problem, does not have."""
    close = get_close_matches(wanted, choices, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"train.metric: there is no {wanted!r} for {of}{hint}; choose from {', '.join(choices)}"
