"""What a table adds to the settings of a scoring job: columns of conversations, tools and options of rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.errors import UsageError
from torchlake.scoring.rows import ScoringSettings, check_prompts
from torchlake.scoring.workers.output import output_schema
from torchlake.tables.plan import SAMPLE
from torchlake.tasks import EXTRA, PROMPT, TEXT
from torchlake.tasks._inputs import check_columns
from torchlake.tasks._prompts import check_prompt_columns
from torchlake.tasks._row_options import OPTIONS, find_options

COLUMN = "prompt"
"The column of prompts that is found by its name if there is no other."


def checked_input(settings: ScoringSettings, spec: TaskSpec, schema: pa.Schema, where: str) -> ScoringSettings:
    """Return the settings, with `chat` set if the column holds conversations. Raises TableError and UsageError."""
    task, inputs = plugins.load("tasks", spec.task), dict(plugins.load("tasks", spec.task).inputs)
    if settings.prompts.prompt is not None:
        check_prompt_columns(schema, as_columns(settings.text), where)
        del inputs["text"]
    if settings.generation is None or "text" not in inputs or inputs["text"] != PROMPT:
        check_columns(schema, inputs, spec, where)
        return settings
    if "tools" in spec.inputs:
        check_columns(schema, {"tools": EXTRA}, spec, where)
    held = settings.text in schema.names and pa.types.is_nested(schema.field(settings.text).type)
    if settings.prompts.continue_final_message and not (settings.generation.chat or held):
        raise UsageError(f"continue_final_message: for conversations, and {where} has texts (chat: they are JSON).")
    if not isinstance(settings.text, str):
        check_columns(schema, {"text": TEXT}, settings.spec, where)
        return settings
    read = replace(settings.spec, rows=replace(spec.rows, chat=settings.generation.chat))
    folder = Path(settings.model) if settings.prompts.chat_template is None else None
    chat = check_prompts(schema, settings.text, where, task, folder, read)
    return replace(settings, generation=replace(settings.generation, chat=chat))


def with_table(
    settings: ScoringSettings, spec: TaskSpec, schema: pa.Schema, first: Callable[[str], pa.Table] | None
) -> tuple[ScoringSettings, TaskSpec]:
    """Return the settings and the task with the columns of conversations, tools and options that a table has."""
    task, generation = plugins.load("tasks", spec.task), settings.generation
    if generation is None:
        return settings, spec
    if not task.packs or settings.prompts.prompt is not None:
        columns = {**spec.inputs, **_options_column(settings, schema, first)}
        return replace(settings, inputs=columns), replace(spec, inputs=columns)
    if spec.text == TEXT and TEXT not in schema.names and COLUMN in schema.names:
        spec = replace(spec, text=COLUMN)
    known = replace(spec, rows=replace(spec.rows, chat=generation.chat))
    found = task.find_columns(schema, known, None if generation.chat else first)
    chat = replace(generation, chat=generation.chat or found.rows.chat)
    columns = {**found.inputs, **settings.inputs, **_options_column(settings, schema, first)}
    if settings.prompts.tools and "tools" not in settings.inputs:
        columns.pop("tools", None)
    read = replace(settings, text=found.text, inputs=columns, generation=chat)
    return read, replace(found, rows=spec.rows, inputs=columns)


def _options_column(
    settings: ScoringSettings, schema: pa.Schema, first: Callable[[str], pa.Table] | None
) -> dict[str, str]:
    """Return {} or the column of the options of rows. Raises UsageError."""
    named = settings.inputs.get(OPTIONS)
    column = find_options(schema, None if named is None else str(named), first)
    return {} if column is None else {OPTIONS: column}


def added_columns(settings: ScoringSettings, spec: TaskSpec, schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that predictions add to a frame."""
    return [column for column in output_schema(settings, spec, schema) if column.name != "row_id"]


def refuse_collisions(names: Sequence[str], new: Sequence[str]) -> None:
    """Raise UsageError if one of the `new` names occurs twice; Spark and Hive ignore case in names."""
    folded = [name.casefold() for name in names]
    twice = sorted({name for name in new if folded.count(name.casefold()) > 1})
    if twice and twice[0] in ("row_id", SAMPLE, "truncated", "error"):
        raise UsageError(
            f"torchlake adds a column {twice[0]!r} to every output: rename the input's column, or drop it from columns."
        )
    if twice:
        raise UsageError(
            f"The column {twice[0]!r} is both in the input and predicted. "
            "Give the predictions another name, for example prefix='predicted_' (--prefix predicted_), or rename the "
            "column."
        )
