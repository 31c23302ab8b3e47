"""Write a first job file for a table: the columns are guessed, and comments state what was found.

    open the table -> a sample of its rows -> text and label column -> one pass over the labels -> job.yaml

The JSON Schema is written beside it, so that an editor can check and complete the file without a network.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import yaml

from torchlake import atomic_io, plugins
from torchlake.config.arguments import plain_numbers
from torchlake.config.job import load_job
from torchlake.config.options import ReadArguments
from torchlake.config.schema import job_schema
from torchlake.config.sections.data import DataConfig
from torchlake.config.sections.train import TrainConfig
from torchlake.config.task_spec import LabelColumn, TaskSpec, label_name
from torchlake.errors import UsageError
from torchlake.labels.column import found_separator, label_warnings, read_labels
from torchlake.preparation.findings import (
    CheckedRows,
    Finding,
    constant_column,
    repeated_ids,
    row_findings,
    similar_classes,
)
from torchlake.preparation.guessed_columns import (
    SampledRows,
    Surveyed,
    choose_label,
    choose_texts,
    describe_label,
    survey_columns,
)
from torchlake.preparation.row_checks import hashed_columns, numbers_of, row_checks, usable_rows
from torchlake.preparation.summary import describe_classes
from torchlake.tables.arrays import from_numpy
from torchlake.tables.formats.layout import format_of, is_table_file
from torchlake.tables.formats.sniffing import recognized
from torchlake.tables.formats.streams import Dialect
from torchlake.tables.record import local_output
from torchlake.tables.sources._find import pinned, source_of
from torchlake.tables.sources._options import read_options
from torchlake.tables.sources.files import find
from torchlake.tables.table import open_table

TASK = "text_classification"
MODEL = "roberta-base"
SCHEMA = "torchlake.schema.json"
FEW_ROWS = 10
"Rows of a class below which it is rare."
SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class FirstJob:
    """What `write_first_job` found and wrote."""

    path: Path
    "The job file."
    schema: Path
    rows: int
    "The number of rows of the table."
    sampled: int
    "The number of rows whose texts were read."
    text: str
    text_pair: str | None
    "The column of the second text; None: a row has one text."
    characters: dict[str, int]
    "Median, 95 % quantile (p95) and maximum (longest) of the sampled texts, of pairs the first ones."
    label: str
    kind: str
    "The label in words: its problem, and its number of classes or its mean."
    classes: dict[str, int]
    "Rows of each class, the largest first; empty for regression."
    warnings: tuple[str, ...]
    "What a user should know or change, the findings among it."
    findings: tuple[Finding, ...]
    "What the data checks found in the rows whose texts were read."


def write_first_job(
    table: str | Sequence[str],
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    output: str | Path = "job.yaml",
    model: str = MODEL,
    force: bool = False,
    **read: Unpack[ReadArguments],
) -> FirstJob:
    """Write a job file that trains a classifier (or a regression) on `table`, and return what was found.

    `text`, `text_pair` and `label` name the columns; by default they are guessed, a pair only by the names of its
    columns, such as premise and hypothesis. `force` replaces an existing file. The job reads the rows that `where`,
    `sample` and `limit` select, and CSV files by `csv`, as in `predict`. Raises UsageError if the columns are not clear
    or the file exists, TableError for a table that cannot be read, DataError for a label column that cannot be learned.
    """
    path, read = local_output(output), plain_numbers(read)
    version = pinned(table)
    csv = recognized_csv(version, read_options(read).csv)
    read = {**read, "csv": {**(read.get("csv") or {}), **csv}}
    options = read_options(read)
    source, task = open_table(version, options=options), plugins.load("tasks", TASK)
    sample = survey_columns(source, task)
    columns, rows, sampled = sample.columns, sample.rows, len(sample.values)
    texts, pair = choose_texts(source, columns, text, text_pair)
    second = {} if pair is None else {"text_pair": pair.name}
    labels = choose_label(source, columns, {texts.name, *second.values()}, label)
    if path.exists() and not force:
        raise UsageError(f"{path}: exists. Replace it with --force, or name another file with --output.")
    train = table if isinstance(table, str) else tuple(table)
    asked = {name: value for name, value in options.asked.items() if name != "seed"}
    data = DataConfig(train=train, text=texts.name, label=labels.name, bad_rows="drop", **second, **asked)
    read_now = tuple(map(str, version)) if isinstance(version, list) else str(version)
    drafted = TaskSpec(task=TASK, problem="single_label", labels=(), text=texts.name, label=labels.name, max_length=0)
    found = read_labels(data.model_copy(update={"train": read_now}), drafted, task, options)
    spec = replace(drafted, problem=found.problem, labels=found.labels, text_pair=data.text_pair)
    findings = _findings(sample, spec, task)
    counts = dict(zip(map(label_name, found.labels), found.counts, strict=True))
    done = FirstJob(
        path=path,
        schema=path.with_name(SCHEMA),
        rows=rows,
        sampled=sampled,
        text=texts.name,
        text_pair=None if pair is None else pair.name,
        characters=_quantiles(texts),
        label=labels.name,
        kind=describe_label(found),
        classes=dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))),
        warnings=(
            *([f"the file is read with {_csv_flags(csv)}, in the job data.csv"] if csv else []),
            *_warnings(found, texts, pair, columns, rows=rows, sampled=sampled),
            *(finding.line for finding in findings),
        ),
        findings=tuple(findings),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_json(done.schema, job_schema(), site="init.schema")
    content = _job_text(done, data, model, found, drop=bool(texts.empty or (pair and pair.empty)) or found.rows < rows)
    atomic_io.write_bytes(path, content.encode(), site="init.job")
    load_job(path)
    return done


def recognized_csv(source: Any, csv: Dialect) -> dict[str, str]:
    """Return how the CSV files of a table are written, where that is not by default or as given."""
    one = source[0] if isinstance(source, list | tuple) else source
    if source_of(one) is not None:
        return {}
    file = find(one, is_table_file)[0].file
    return recognized(file, csv) if format_of(file) == "csv" else {}


def _csv_flags(csv: Mapping[str, str]) -> str:
    return " ".join(f"--csv {shlex.quote(f'{name}={value}')}" for name, value in csv.items())


def _findings(sample: SampledRows, spec: TaskSpec, task: Any) -> list[Finding]:
    """Return what the data checks find in the sample."""
    findings, total = [*similar_classes(spec.labels)], len(sample.values)
    for one in (each for each in sample.columns if each.name not in spec.columns):
        if one.repeated:
            findings.append(repeated_ids(one.name, one.repeated, total))
        if one.distinct == 1 < total and not one.empty:
            findings.append(constant_column(one.name, total))
    rows, inputs, labels, _ = usable_rows(task, sample.values, {}, spec, bad_rows="drop")
    targets = task.encode_labels(labels, spec)
    checked = CheckedRows(
        columns=hashed_columns(task, spec),
        **row_checks(task, spec, sample.values.take(from_numpy(rows)), inputs, targets),
        targets=numbers_of(targets),
        names=lambda some: sample.names([int(rows[row]) for row in some]),
    )
    return [*findings, *row_findings(checked, spec, deduplicate=False)]


def _warnings(
    found: LabelColumn,
    texts: Surveyed,
    pair: Surveyed | None,
    columns: list[Surveyed],
    *,
    rows: int,
    sampled: int,
) -> list[str]:
    rare = [(label, count) for label, count in zip(found.labels, found.counts, strict=True) if 1 < count < FEW_ROWS]
    shown = ", ".join(f"{label!r} {count}" for label, count in rare[:SHOWN]) + (" ..." if len(rare) > SHOWN else "")
    keys = [one.name for one in columns if one.is_key and one not in (texts, pair)]
    lines = label_warnings(found)
    if rare:
        lines.append(
            f"{len(rare):,} of {len(found.labels):,} classes have fewer than {FEW_ROWS} rows ({shown}); "
            "train.class_weights: balanced gives them more weight"
        )
    if rows > found.rows:
        lines.append(
            f"{rows - found.rows:,} of {rows:,} rows have no usable label; data.bad_rows: drop leaves them out"
        )
    for one in (texts, *([] if pair is None else [pair])):
        if one.empty:
            where = "text" if pair is None else one.name
            lines.append(f"{one.empty:,} of {sampled:,} rows have no {where}; data.bad_rows: drop leaves them out")
    if keys:
        lines.append(f"{keys[0]} identifies rows: copy it to predictions with predict --key {keys[0]}")
    return lines


def _quantiles(texts: Surveyed) -> dict[str, int]:
    assert texts.lengths is not None
    lengths = texts.lengths if len(texts.lengths) else np.zeros(1)
    median, often = np.quantile(lengths, [0.5, 0.95], method="higher")
    return {"median": int(median), "p95": int(often), "longest": int(lengths.max())}


def _job_text(done: FirstJob, data: DataConfig, model: str, found: LabelColumn, *, drop: bool) -> str:
    """Return the job file. Comments hold what was found, and the settings that a user is likely to change next."""
    characters, train, note = done.characters, TrainConfig(), found.note
    numbers = len(found.labels) > 2 and all(type(label) is int for label in found.labels)
    classes = f": {describe_classes(done.classes, sum(done.classes.values()))}" if done.classes else ""
    problem, pair = "", ""
    if done.text_pair is not None:
        pair = "  # The second text of each pair. Delete this line if the rows are not pairs.\n"
        pair += f"  text_pair: {_scalar(done.text_pair)}\n"
    if note:
        problem = f"  # {_comment(note)}\n  problem: {done.kind.partition(',')[0]}\n"
    elif numbers:
        problem = "  # To predict a number instead of a class:\n  # problem: regression\n"
    elif mark := found_separator(found)[0]:
        problem = f"  # If a cell may hold several labels:\n  # label_separator: {_scalar(mark)}\n"
    return f"""\
# yaml-language-server: $schema={SCHEMA}
# The line above lets an editor check and complete this file. All settings: torchlake schema
# To train: torchlake train {_comment(str(done.path))}

data:
  # {done.rows:,} rows
  train: {_scalar(data.train if isinstance(data.train, str) else list(data.train))}
{_selection(data)}\
  # A share of the rows, or another table.
  validation: {{fraction: 0.1}}
  # Characters per text: median {characters["median"]:,}, 95 % at most {characters["p95"]:,}, \
longest {characters["longest"]:,}.
  text: {_scalar(done.text)}
{pair}\
  # {_comment(done.kind + classes)}
  label: {_scalar(done.label)}
{problem}\
  # Leave out rows that lack text or label; by default they stop the job.
  {"" if drop else "# "}bad_rows: drop

model:
  # A model folder, or a name on the Hugging Face Hub.
  base: {_scalar(model)}
  task: {TASK}

train:
  epochs: {train.epochs}
  batch_size: {train.batch_size}
  learning_rate: {train.learning_rate}
  # More weight for rare classes:
  # class_weights: balanced
"""


def _selection(data: DataConfig) -> str:
    """Return the settings of the rows that are read, and of CSV files, one per line."""
    given = {name: getattr(data, name) for name in ("where", "sample", "limit")}
    given["csv"] = data.csv.model_dump(exclude_unset=True) or None
    return "".join(f"  {name}: {_scalar(value)}\n" for name, value in given.items() if value is not None)


def _comment(text: str) -> str:
    """Return the text on one line, as at most 200 printable characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= 200 else f"{plain[:197]}..."


def _scalar(value: Any) -> str:
    """Return the value as YAML on one line."""
    # PyYAML writes some line breaks unescaped and reads them back as spaces.
    strange = not str(value).isprintable()
    text = yaml.safe_dump(value, allow_unicode=not strange, width=2**31, default_flow_style=True)
    return re.sub(r"\n(\.\.\.\n)?$", "", text)
