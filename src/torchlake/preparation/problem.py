"""The training problem, derived from the label column: its kind, the classes, the scale of a regression.

It is decided once, before the first step, and stored in the run folder; a resumed run does not read the table again.
Cost: one pass over the label column.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchlake import atomic_io, plugins
from torchlake.config.job import Job
from torchlake.config.sections.data import DataConfig
from torchlake.config.sections.preference import PreferenceOptions
from torchlake.config.task_spec import (
    TASK_FILE,
    LabelColumn,
    RowOptions,
    TaskSpec,
    as_columns,
    spec_from_json,
    spec_to_json,
)
from torchlake.errors import ConfigError
from torchlake.labels.column import label_warnings, read_labels
from torchlake.loss import check_objective
from torchlake.models.spec import head_spec
from torchlake.preparation.conversations import row_options, with_table
from torchlake.runs.tables import read_options_of
from torchlake.storage.spread import Spread, in_process
from torchlake.tasks import PAIR

OF_ROWS = ("completion", "messages", "system", "pack", "too_long")
"Settings of data for a language model's rows."
log = logging.getLogger(__name__)


def find_task_spec(
    job: Job, base: Path | None, folder: Path, *, trained: bool, spread: Spread = in_process
) -> TaskSpec:
    """Return the model's task: derived from the label column, if the task has one, then stored in the run folder."""
    path = folder / TASK_FILE
    if path.exists() and trained:
        return spec_from_json(path, atomic_io.read_json(path))
    data = job.data
    task = plugins.load("tasks", job.task)
    options = read_options_of(job, "train")
    drafted = with_table(draft_spec(job), data.train, options, spread)
    found = read_labels(data, drafted, task, options, spread=spread) if drafted.label is not None else None
    for warning in [] if found is None else label_warnings(found):
        log.warning("column %r: %s", data.label, warning)
    known = complete_spec(drafted, found, max_length=task.max_length(base, job.model.max_length))
    spec: TaskSpec = task.complete(replace(known, **_scale(found, base)), base)
    check_objective(job.train, spec)
    atomic_io.write_json(path, spec_to_json(spec), site="run.task")
    # Like the stored one: whether texts are conversations as JSON is found in each table.
    return replace(spec, rows=replace(spec.rows, chat=False))


def draft_spec(job: Job) -> TaskSpec:
    """Return the job's task and its columns, before the table is read. Raises ConfigError for a setting that it
    ignores."""
    data, task = job.data, plugins.load("tasks", job.task)
    if not task.trains:
        raise ConfigError(f"model.task: models of {job.model.task} cannot be trained with torchlake, only scored.")
    defaults, labeled = DataConfig.model_fields, task.has_labels or data.problem in task.labeled
    ignored = {
        "data.label": not labeled and data.label != defaults["label"].default,
        "data.problem": not labeled and data.problem is not None,
        "data.label_separator": data.label_separator is not None and "multi_label" not in task.default_metric,
        "data.learn": not task.packs and data.learn not in (None, "all"),
        **{f"data.{name}": getattr(data, name) is not None for name in _unread(task)},
        "data.text": "text" not in task.inputs and data.text != defaults["text"].default,
        "data.chosen": not task.pairs and data.chosen is not None,
        "train.preference": not task.pairs and job.train.preference is not None,
        "data.text_pair": PAIR not in task.inputs and data.text_pair is not None,
        "data.separator": data.separator is not None and len(as_columns(data.text or "")) < 2,
        "data.template": data.template is not None and len(as_columns(data.text or "")) < 2,
        "train.batch_norm": job.train.batch_norm == "local" and job.model.task_options.get("batch_norm") != "batch",
    }
    for name in (name for name, unused in ignored.items() if unused):
        raise ConfigError(f"{name}: {task.name} {_reasons(task)[name]}; remove the setting")
    if job.model.base is None and task.needs_base:
        raise ConfigError(f"model.base: {task.name} starts from a model; name its folder, or a name on the Hub")
    named = {**data.inputs, **_answers(data)}
    others = [name for name in task.inputs if name not in ("text", PAIR)]
    unknown = [name for name in data.inputs if name not in others]
    if unknown:
        known = f"its other inputs are {', '.join(others)}" if others else "it has no other inputs"
        raise ConfigError(f"data.inputs: {task.name} has no input {unknown[0]!r}; {known}")
    inputs = {name: named.get(name, name) for name in others if name in named or name not in task.optional}
    if data.completion is not None:
        inputs["completion"] = data.completion
    return TaskSpec(
        task=task.name,
        problem=task.problems.get(data.learn or ("assistant" if "completion" in inputs else "all"), task.name),
        labels=(),
        text=(data.text or "") if "text" in task.inputs else "",
        label=data.label if labeled else None,
        max_length=0,
        separator=data.separator,
        template=data.template,
        text_pair=data.text_pair,
        label_separator=data.label_separator,
        inputs=inputs,
        options=task.checked_options(job.model.task_options, ConfigError),
        rows=row_options(data) if task.packs or task.pairs else RowOptions(),
        preference=_preference(job) if task.pairs else {},
    )


def _reasons(task: Any) -> dict[str, str]:
    """Return why a task ignores a setting, by its name."""
    unless = f", unless data.problem is {' or '.join(task.labeled)}" if task.labeled else ""
    return {
        "data.label": f"learns the text itself and reads no label{unless}",
        "data.problem": f"learns the text itself and reads no label{unless}",
        "data.label_separator": "reads no several classes per row",
        "data.learn": "learns labels, not the turns of a conversation",
        **dict.fromkeys((f"data.{name}" for name in OF_ROWS), "reads no conversations or completions"),
        "data.text": "reads no text",
        "data.chosen": "learns from no pairs of answers, which text_generation does",
        "train.preference": "learns from no pairs of answers (data.chosen and data.rejected)",
        "data.text_pair": "reads no pairs of texts",
        "data.separator": "reads one column of texts (data.text)",
        "data.template": "reads one column of texts (data.text)",
        "train.batch_norm": "has no statistics of batches here, as model.task_options.batch_norm=batch has",
    }


def _unread(task: Any) -> Sequence[str]:
    """Return the settings of a language model's rows that do not apply to a task's."""
    return () if task.packs else ("completion", "pack") if task.pairs else OF_ROWS


def _preference(job: Job) -> dict[str, Any]:
    """Return the loss of pairs of answers, with the name of the reference, by default the base.

    Raises ConfigError for prompts in several columns.
    """
    if not isinstance(job.data.text, str | None):
        raise ConfigError("data.text: the prompt of two answers is one column; name one")
    how = (job.train.preference or PreferenceOptions()).model_dump()
    return {**how, "reference": None if how["loss"] == "orpo" else how["reference"] or job.model.base}


def _answers(data: DataConfig) -> dict[str, str]:
    """Return the columns of pairs of answers by the input's name."""
    return {name: column for name in ("chosen", "rejected") if (column := getattr(data, name)) is not None}


def complete_spec(drafted: TaskSpec, found: LabelColumn | None, *, max_length: int) -> TaskSpec:
    """Return the task, completed by the content of its label column."""
    if found is None:
        return replace(drafted, max_length=max_length)
    return replace(drafted, max_length=max_length, problem=found.problem, labels=found.labels)


def _scale(found: LabelColumn | None, base: Path | None) -> dict[str, Any]:
    """Return the mean and deviation by which a regression standardizes its targets.

    They are those of the base model if it predicts numbers of a similar scale; its head is then kept.
    """
    if found is None or found.mean is None or found.deviation is None:
        return {}
    trained = None if base is None else head_spec(base)
    if trained is not None and trained.mean is not None and trained.deviation is not None:
        near = abs(found.mean - trained.mean) <= trained.deviation
        if near and trained.deviation / 2 <= found.deviation <= trained.deviation * 2:
            return {"mean": trained.mean, "deviation": trained.deviation}
    return {"mean": found.mean, "deviation": found.deviation}
