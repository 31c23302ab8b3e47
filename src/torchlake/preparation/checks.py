"""What a job's tables and settings lack, found before a library is loaded, a model fetched or a row read."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.errors import ConfigError, TableError
from torchlake.preparation.problem import draft_spec
from torchlake.runs.folder import read_options_of, stored_tables
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.table import open_table


def check_tables(job: Job, *, spread: Spread = in_process, trained: Path | None = None) -> None:
    """Raise TableError for a missing table or column. `trained`: a run folder that continues with these tables only."""
    drafted = draft_spec(job)
    task = plugins.load("tasks", drafted.task)
    for name, table in stored_tables(job).items():
        try:
            read, options = drafted, read_options_of(job, name)
            if task.packs:
                read = task.find_columns(open_table(table, options=options, spread=spread).schema, drafted, None)
            columns = tuple(column for column in (*read.columns, job.data.key) if column is not None)
            open_table(table, columns=columns, options=options, spread=spread)
        except TableError as error:
            kept = f" The training in {trained} continues with {table} only; train another in a new run folder (--run)."
            raise type(error)(f"data.{name}: {error}{'' if trained is None else kept}") from error


def check_metric(job: Job) -> None:
    """Raise ConfigError for a `train.metric` that no validation of the task can have."""
    task, wanted = plugins.load("tasks", job.model.task), job.train.metric
    if job.data.validation is None and (wanted is not None or job.train.patience is not None):
        raise ConfigError("train.metric and train.patience need a validation; data.validation is null")
    choices = list(dict.fromkeys(["loss", *task.directions]))
    if wanted is not None and wanted not in choices:
        raise ConfigError(unknown_metric(wanted, task.name, choices))


def unknown_metric(wanted: str, of: str, choices: Sequence[str]) -> str:
    """Return the message for a metric that `of`, a task or a problem, does not have."""
    close = get_close_matches(wanted, choices, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"train.metric: there is no {wanted!r} for {of}{hint}; choose from {', '.join(choices)}"
