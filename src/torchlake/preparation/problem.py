"""The training problem, derived from the label column: its kind, the classes, the scale of a regression.

It is decided once, before the first step, and stored in the run folder; a resumed run does not read the table again.
Cost: one pass over the label column.
"""

import logging
from pathlib import Path

from torchlake import atomic_io, plugins
from torchlake.config.job import Job
from torchlake.config.sections.data import DataConfig
from torchlake.config.task_spec import TASK_FILE, LabelColumn, TaskSpec, spec_from_json, spec_to_json
from torchlake.errors import ConfigError
from torchlake.loss import check_objective
from torchlake.models.load import head_spec, max_length
from torchlake.preparation.labels import label_warnings, read_labels
from torchlake.runs.folder import read_options_of
from torchlake.tables.storage.spread import Spread, in_process

log = logging.getLogger(__name__)


def find_task_spec(job: Job, base: Path, folder: Path, *, trained: bool, spread: Spread = in_process) -> TaskSpec:
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
    found = None if task.PACKED else read_labels(data, task, read_options_of(job, "train"), spread=spread)
    for warning in [] if found is None else label_warnings(found):
        log.warning("column %r: %s", data.label, warning)
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
