"""What a language model's columns hold: texts, conversations or completions; the settings that fit them; and counts."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.sections.data import DataConfig
from torchlake.config.task_spec import RowOptions, TaskSpec
from torchlake.errors import UsageError
from torchlake.scoring.rows import check_prompts
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.chunks import first_rows
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import open_table
from torchlake.tasks._inputs import PROMPT, check_columns


def with_table(spec: TaskSpec, table: StoredTable, options: ReadOptions, spread: Spread = in_process) -> TaskSpec:
    """Return the task, completed by what a table holds. Raises TableError if it cannot be read."""
    task = plugins.load("tasks", spec.task)
    if not task.packs:
        return spec
    opened = open_table(table, options=options, spread=spread)
    return task.find_columns(opened.schema, spec, lambda column: first_rows(opened, [column]))


def row_options(data: DataConfig) -> RowOptions:
    """Return how the rows of a language model are made. Raises UsageError for settings that exclude each other."""
    answers = "data.completion" if data.completion else "data.learn" if data.learn in ("assistant", "last") else None
    if data.completion is not None and data.learn == "all":
        raise UsageError(
            "data.completion and data.learn: all exclude each other: the loss is over the completion, or over all. "
            "Remove one of them."
        )
    if data.pack == "stream" and (answers or data.too_long):
        name = answers or "data.too_long"
        raise UsageError(f"{name} and data.pack: stream exclude each other: it is for rows that are packed whole.")
    return RowOptions(
        pack="whole" if answers else data.pack,
        too_long=data.too_long,
        last=data.learn == "last",
        system=data.system,
        messages=None if data.messages is None else data.messages.model_dump(),
    )


def check_training_columns(schema: pa.Schema, task: Any, spec: TaskSpec, source: str, tokenizer: Path | None) -> None:
    """Raise TableError for columns that are not the task's inputs, UsageError for settings that do not fit them."""
    if not task.generates or task.inputs["text"] != PROMPT:
        check_columns(schema, task.inputs, spec, source)
        return
    assert tokenizer is not None, "the tasks that read prompts start from a model"
    chat, completion = False, spec.inputs.get("completion")
    if isinstance(spec.text, str):
        chat = check_prompts(schema, spec.text, source, task, tokenizer, spec)
    else:
        check_columns(schema, {"text": "text"}, spec, source)
    if isinstance(completion, str):
        check_prompts(schema, completion, source, task, tokenizer, spec)
    if completion is None and not chat and spec.problem == "next_answer_token":
        learn = "last" if spec.rows.last else "assistant"
        raise UsageError(
            f"{source}: data.learn is {learn}, and {spec.text!r} holds text, not conversations (lists of messages with "
            "role and content, or their JSON text). Leave data.learn out."
        )
    if spec.rows.too_long is not None and not spec.whole:
        raise UsageError(
            f"data.too_long: rows of {spec.text!r} go on in the next block. Remove it, or set data.pack: whole."
        )
    if (spec.rows.system or spec.rows.messages) and not chat:
        name = "data.system" if spec.rows.system else "data.messages"
        raise UsageError(f"{name}: {spec.text!r} holds text, not conversations. Remove the setting.")
