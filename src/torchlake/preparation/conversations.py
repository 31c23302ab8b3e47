"""What a language model's columns hold: texts, conversations or completions; the settings that fit them; and counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.sections.data import DataConfig
from torchlake.config.task_spec import RowOptions, TaskSpec
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.bins import pack_whole
from torchlake.data.packing import num_blocks
from torchlake.errors import UsageError
from torchlake.scoring.rows import check_prompts
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.arrays import from_numpy
from torchlake.tables.chunks import first_rows
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import open_table
from torchlake.tasks._inputs import PROMPT, check_columns
from torchlake.tasks._whole_rows import LEARNED, MERGED, SEQUENCES, TOO_LONG, TYPES


def with_table(spec: TaskSpec, table: StoredTable, options: ReadOptions, spread: Spread = in_process) -> TaskSpec:
    """Return the task, completed by what a table holds. Raises TableError if it cannot be read."""
    task = plugins.load("tasks", spec.task)
    if not (task.packs or task.pairs):
        return spec
    opened = open_table(table, options=options, spread=spread)
    found: TaskSpec = task.find_columns(opened.schema, spec, lambda column: first_rows(opened, [column]))
    check_settings_of_chats(opened.schema, task, found, opened.source)
    return found


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
        check_prompts(schema, completion, source, task, tokenizer, spec, name="completion")
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
    if spec.rows.pack == "stream" and chat:
        raise UsageError(f"data.pack: stream: {spec.text!r} holds conversations, which are packed whole. Remove it.")
    check_settings_of_chats(schema, task, spec, source)


def check_settings_of_chats(schema: pa.Schema, task: Any, spec: TaskSpec, source: str) -> None:
    """Raise UsageError for settings that would change nothing, because the columns hold text."""
    name = "data.system" if spec.rows.system else "data.messages" if spec.rows.messages else None
    sides = [one for one in (spec.text, spec.inputs.get("completion")) if isinstance(one, str) and one in schema.names]
    if name is None or not task.packs or (isinstance(spec.text, str) and spec.text not in schema.names):
        return
    if not (spec.rows.chat or any(task.holds_chats(schema.field(one).type, spec) for one in sides)):
        raise UsageError(f"{name}: {source}: {spec.text!r} holds text, not conversations. Remove the setting.")


def packed_facts(prepared: Path, training: np.ndarray, spec: TaskSpec) -> dict[str, Any]:
    """Return what the blocks of the rows `training` (N,), of those that can be trained on, are made of.

    `learned` tokens, `blocks`, and the share of them that is `filled`; rows that are `cut`, and rows of the table that
    are `dropped`; rows in which an answer does not follow the tokens that `predict` feeds (`other_prompt`).
    """
    pieces, dropped = list[pa.Table](), 0
    for path in committed_files(prepared):
        with pq.ParquetFile(path) as file:
            names = [name for name in ("length", "cut", *TYPES, "error") if name in file.schema_arrow.names]
            table = file.read(columns=names)
        dropped += pc.sum(pc.starts_with(table["error"], f"{TOO_LONG}:")).as_py() or 0
        pieces.append(table.filter(pc.is_null(table["error"])))
    if not pieces or not len(training):
        return {"learned": 0, "blocks": 0, "filled": 0.0, "cut": 0, "dropped": dropped, "other_prompt": 0}
    rows = pa.concat_tables(pieces).take(from_numpy(training))
    lengths, length = rows["length"].to_numpy().astype(np.int64), spec.max_length
    learned, other, total = int(lengths.sum()) - 1, 0, int(lengths.sum())
    if spec.whole:
        sizes = rows[SEQUENCES].combine_chunks().flatten().to_numpy().astype(np.int64)
        blocks = len(pack_whole(Ragged(np.zeros(0, np.int32), offsets_of(sizes)), np.arange(len(sizes)), length))
        learned, other = (int(pc.sum(each).as_py()) for each in (rows[LEARNED], pc.greater(rows[MERGED], 0)))
    else:
        blocks = num_blocks(max(2, total), length)
        total += blocks - 1  # blocks overlap by a token
    filled, cut = total / (blocks * length), int((rows["cut"].to_numpy() > 0).sum())
    found = {"learned": learned, "blocks": blocks, "filled": filled, "cut": cut, "dropped": dropped}
    return {**found, "other_prompt": other}


def packed_lines(packed: Mapping[str, Any]) -> list[str]:
    """Return `packed_facts` as text."""
    first = f"{packed['learned']:,} tokens to learn in {packed['blocks']:,} blocks, {packed['filled']:.1%} filled"
    lines = [f"{first}; {packed['cut']:,} rows cut, {packed['dropped']:,} dropped"]
    if other := packed["other_prompt"]:
        lines.append(f"{other:,} rows have an answer that does not follow the tokens that predict feeds")
    return lines
