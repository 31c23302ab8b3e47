"""The training problem, derived from the label column: its kind, the classes, the scale of a regression.

It is decided once, before the first step, and stored in the run folder; a resumed run does not read the table again.
Cost: one pass over the label column.
"""

import logging
from pathlib import Path
from types import ModuleType

from torchlake import atomic_io, plugins
from torchlake.config.job import DataConfig, Job
from torchlake.config.task_spec import TASK_FILE, LabelColumn, TaskSpec, spec_from_json, spec_to_json
from torchlake.errors import ConfigError, DataError
from torchlake.loss import check_objective
from torchlake.models.load import head_spec, max_length
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

log = logging.getLogger(__name__)

MAX_SINGLETON_CLASSES = 10
"Classes with one row that are accepted in a table of any size."


def find_task_spec(job: Job, base: Path, folder: Path, *, trained: bool) -> TaskSpec:
    """The model's task: derived from the label column, if the task has one, then stored in the run folder."""
    path = folder / TASK_FILE
    if path.exists() and trained:
        return spec_from_json(path, atomic_io.read_json(path))
    data = job.data
    task = plugins.load("tasks", job.model.task)
    if task.PACKED and data.label != DataConfig.model_fields["label"].default:
        raise ConfigError(f"data.label: {job.model.task} learns the text itself and reads no label; leave it out")
    if not task.PACKED and data.learn != "all":
        raise ConfigError(f"data.learn: {job.model.task} learns labels, not what is said; leave it out")
    if task.PACKED and data.problem is not None:
        raise ConfigError(f"data.problem: {job.model.task} learns the text itself and reads no label; leave it out")
    found = None if task.PACKED else _find_labels(job, task)
    spec = TaskSpec(
        task=job.model.task,
        problem=task.PROBLEMS[data.learn] if found is None else found.problem,
        labels=() if found is None else found.labels,
        text=data.text,
        label=None if task.PACKED else data.label,
        max_length=max_length(base, job.model.max_length),
        **_scale(found, base),
    )
    check_objective(job.train, spec)
    atomic_io.write_json(path, spec_to_json(spec), site="run.task")
    return spec


def _scale(found: LabelColumn | None, base: Path) -> dict[str, float | None]:
    """The mean and deviation by which a regression standardizes its targets.

    Those of the base if it predicts numbers of a similar scale: its head is then kept.
    """
    if found is None or found.mean is None or found.deviation is None:
        return {}
    trained = head_spec(base)
    if trained is not None and trained.mean is not None and trained.deviation is not None:
        near = abs(found.mean - trained.mean) <= trained.deviation
        if near and trained.deviation / 2 <= found.deviation <= trained.deviation * 2:
            return {"mean": trained.mean, "deviation": trained.deviation}
    return {"mean": found.mean, "deviation": found.deviation}


def _find_labels(job: Job, task: ModuleType) -> LabelColumn:
    """The content of the label column. Raises DataError naming the column."""
    data = job.data
    table = open_table(data.train, columns=(data.text, data.label))
    reader = ChunkReader((data.label,))
    chunks = plan_chunks(table, columns=(data.label,)).chunks
    try:
        pieces = (reader.read(chunk)[0][data.label] for chunk in chunks)
        found: LabelColumn = task.find_labels(pieces, data.problem, drop_bad=data.bad_rows == "drop")
        _check_classes(found)
    except DataError as error:
        raise DataError(f"{table.source}, column {data.label!r}: {error}") from error
    finally:
        reader.close()
    if found.note is not None:
        log.warning("column %r: %s", data.label, found.note)
    return found


def _check_classes(found: LabelColumn) -> None:
    """Raise DataError when most labels occur once, as in a column of identifiers; warn about single ones."""
    if found.problem != "single_label":
        return
    single = [label for label, rows in zip(found.labels, found.counts, strict=True) if rows == 1]
    shown = ", ".join(map(repr, single[:3])) + (" ..." if len(single) > 3 else "")
    if len(single) > max(MAX_SINGLETON_CLASSES, found.rows // 2):
        number = "" if isinstance(single[0], str) else " If it is a number to predict, set data.problem to regression."
        raise DataError(
            f"{len(single):,} of {found.rows:,} rows have a label that no other row has ({shown}): it identifies rows "
            f"and cannot be learned. Name the column of the classes with data.label.{number}"
        )
    if single:
        log.warning(
            "%d of %d classes have a single row (%s): such classes are hard to learn, and are not in the validation "
            "rows taken from the training table",
            len(single),
            len(found.labels),
            shown,
        )
