"""Prompts of tasks that write: the texts that rows become, and what is around them (`PromptOptions`).

    columns    the text of `prompt`, "Summarize: {title}", or of the text column
    examples   texts before it, or turns before the conversation
    system, tools, template_options, continue_final_message    of conversations, which the chat template renders

Text goes to the model as it is. With a system text, tools or options of the template, and if `prompt` makes it and
`chat` is set, it is a turn of the user.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.arguments import read_named, read_named_json
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.errors import UsageError
from torchlake.models.folders import chat_template
from torchlake.models.generation import MARKS, PromptOptions
from torchlake.tables.arrays import is_blank, string_column, without_rows
from torchlake.tables.chunks import sample_rows
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import missing_column, open_table
from torchlake.tasks._chat import chat_requests, is_chat, names_of, read_messages, read_tools, render_chats
from torchlake.tasks._inputs import PROMPT
from torchlake.tasks._null_rows import columns_in, join_texts

log = logging.getLogger(__name__)

OF_CHATS = ("system", "tools", "chat_template", "template_options", "continue_final_message")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversations")
MOST_EXAMPLES = 1_000
ANSWER = "completion"
BEFORE_ANSWER, AFTER_ANSWER = " ", "\n\n"
"In text, between the prompt of an example and its answer, unless there is space, and after the answer."


def with_prompts(
    given: Mapping[str, Any], task: Any, spec: TaskSpec, folder: Path | None, *, chat: bool
) -> tuple[PromptOptions, TaskSpec]:
    """Return how prompts are made, and the task with their columns; `given` has some of `PromptArguments`.
    `folder` has the chat template; None: an endpoint renders conversations by its own.

    Raises UsageError for options that the task or the model's tokenizer cannot use.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    given = {name: value for name, value in given.items() if not (isinstance(value, list | dict) and not value)}
    if not task.generates:
        if given:
            raise UsageError(f"{', '.join(given)}: for text generation only; this model's task is {spec.task}.")
        return PromptOptions(), spec
    chats = [name for name in OF_CHATS if name in given]
    template = "" if folder is None else chat_template(folder)
    if "chat_template" in given:
        template = _template(given["chat_template"])
    if (chats or chat) and task.inputs["text"] != PROMPT:
        raise UsageError(f"{', '.join(['chat'] * chat + chats)}: for conversations, and {spec.task} reads text.")
    if chats and template is None:
        raise UsageError(
            f"{', '.join(chats)}: for conversations, and the tokenizer in {folder} has no chat template. Use a model "
            "that was tuned on conversations."
        )
    if "prompt" in given:
        if "continue_final_message" in given:
            raise UsageError("continue_final_message: for a column of conversations, and prompt makes text.")
        columns = _columns(given["prompt"])
        spec = replace(spec, text=columns[0] if len(columns) == 1 else columns, template=given["prompt"])
        if template and not (chat or chats):
            log.info("prompt: its text goes to the model as it is; with --chat (chat=True) it is a turn of the user")
    tools = given.get("tools", ())
    if isinstance(tools, str | Path):
        if isinstance(tools, Path) or tools.endswith(".json"):
            tools = read_named_json("tools", tools)
        else:
            spec, tools = replace(spec, inputs={**spec.inputs, "tools": str(tools)}), ()
    return PromptOptions(
        **{name: given[name] for name in ("prompt", "system", "continue_final_message") if name in given},
        tools=_tools(tools),
        chat_template=template if "chat_template" in given else None,
        template_options=_template_options(given.get("template_options", {}), template or "", folder),
        examples=_examples(given["examples"], spec) if "examples" in given else (),
        marks=next((marks for marks in MARKS if template is not None and marks[1] in template), None),
    ), spec


def check_prompt_columns(schema: pa.Schema, columns: Sequence[str], where: str) -> None:
    """Raise UsageError for a column of `prompt` that is missing, with near names, or that cannot be text."""
    for column in columns:
        if column not in schema.names:
            raise UsageError(f"prompt: {missing_column(where, column, schema)}")
        kind = schema.field(column).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_nested(plain) or (pa.types.is_binary(plain) or pa.types.is_large_binary(plain)):
            raise UsageError(f"prompt: {where}: {column!r} holds {kind}, which is not text, a number or a date.")


def read_prompts(
    table: pa.Table,
    unreadable: Mapping[int, str],
    tokenizer: Any,
    spec: TaskSpec,
    options: PromptOptions,
    *,
    chat: bool,
) -> tuple[pa.Array, dict[int, str], bool]:
    """Return the prompts of all rows, {row: reason} for bad ones, and whether the chat template rendered them.

    `chat`: a column of text has conversations as JSON, or what `prompt` makes is a turn of the user.
    """
    columns = as_columns(spec.text)
    if len(columns) > 1 or options.prompt is not None:
        texts, held = join_texts(table, columns, spec, unreadable), False
    else:
        texts = without_rows(string_column(table[columns[0]]), unreadable)
        held = chat or pa.types.is_nested(texts.type)
    named = spec.inputs.get("tools")
    around = options.tools or options.template_options or options.chat_template or options.system is not None or named
    if not (held or chat or around):
        return with_examples(texts, options), dict(unreadable), False
    requests, bad = chat_requests(
        texts,
        None if named is None else table[str(named)].combine_chunks(),
        names=names_of(spec.rows),
        system=spec.rows.system if options.system is None else options.system,
        options=options,
        turns=not held,
    )
    texts, failed = render_chats(tokenizer, requests, len(texts))
    return texts, {**bad, **failed, **unreadable}, True


def with_examples(texts: pa.Array, options: PromptOptions) -> pa.Array:
    """Return texts after the examples, which are as text."""
    shown, messages = "", iter(options.examples)
    for asked, answer in zip(messages, messages, strict=True):
        prompt, written = asked["content"], answer["content"]
        between = "" if prompt[-1:].isspace() or written[:1].isspace() else BEFORE_ANSWER
        shown += f"{prompt}{between}{written}{AFTER_ANSWER}"
    if not shown:
        return texts
    made = pc.binary_join_element_wise(pa.scalar(shown, texts.type), texts, pa.scalar("", texts.type))
    return pc.if_else(is_blank(texts), texts, made)


def _columns(prompt: str) -> tuple[str, ...]:
    """Return the columns that a prompt has in braces. Raises UsageError if it has none, or something else in them."""
    try:
        parts = [(name, kind, how) for _, name, how, kind in Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise UsageError(f"prompt {prompt!r}: {error}; write a brace itself as {{{{ or }}}}.") from None
    if not parts or any(kind or how or not name for name, kind, how in parts):
        raise UsageError(
            f"prompt {prompt!r}: it needs the names of columns in braces, such as {{title}}, and nothing else in them; "
            "write a brace itself as {{ or }}."
        )
    return columns_in(prompt)


def _template(given: str | Path) -> str:
    """Return a template that is given as a file, or in Python as its text."""
    if isinstance(given, Path) or Path(given).suffix in (".jinja", ".jinja2", ".j2", ".txt") or "{" not in given:
        return read_named("chat_template", given)
    return given


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    """Return tools as JSON schemas. Raises UsageError for anything else."""
    given = given["tools"] if isinstance(given, Mapping) and given.keys() == {"tools"} else given
    try:
        return tuple(read_tools(list(given) if isinstance(given, Sequence) else [given]) or ())
    except ValueError:
        raise UsageError("tools: expected a list of JSON schemas of functions, a file with it, or a column.") from None


def _template_options(given: Mapping[str, Any], template: str, folder: Path | None) -> Mapping[str, Any]:
    """Return the variables of the chat template; log those that it does not have. Raises UsageError."""
    for name in given:
        if name in RESERVED or not str(name).isidentifier():
            own = "torchlake sets it" if name in RESERVED else "it is not the name of a variable"
            raise UsageError(f"template_options: {name!r}: {own}.")
        if template and not re.search(rf"\b{re.escape(name)}\b", template):
            log.warning("template_options: the chat template in %s does not use %r", folder, name)
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise UsageError(f"template_options: {error}") from None
    return dict(given)


def _examples(source: Any, spec: TaskSpec) -> tuple[Mapping[str, str], ...]:
    """Return examples as messages: a table's conversations, or its prompts and answers as turns.

    A prompt is in the columns of the job's prompts, or in `prompt`; its answer in `completion`, or the only other
    column. Raises UsageError for a table without them, and for rows that lack one.
    """
    if is_frame(source):
        table, where = to_arrow(source), "examples"
    elif isinstance(source, Sequence) and source and all(isinstance(one, Mapping) for one in source):
        table, where = pa.Table.from_pylist([dict(one) for one in source]), "examples"
    else:
        opened = open_table(source)
        table, where = sample_rows(opened, opened.schema.names)[0], f"examples: {opened.source}"
    if not 0 < len(table) <= MOST_EXAMPLES:
        raise UsageError(f"{where}: it has {len(table):,} rows; examples are from 1 to {MOST_EXAMPLES:,}.")
    names, names_of_parts = table.column_names, names_of(spec.rows)
    chats = next((one.name for one in table.schema if is_chat(one.type, names_of_parts)), None)
    if chats is not None:
        try:
            rows = [read_messages(each, names_of_parts) for each in table[chats].to_pylist()]
        except ValueError as error:
            raise UsageError(f"{where}: {chats!r}: {error}") from None
        return tuple(message for row in rows for message in row)
    columns = as_columns(spec.text)
    columns = columns if set(columns) <= set(names) or "prompt" not in names else ("prompt",)
    if missing := [name for name in columns if name not in names]:
        raise UsageError(str(missing_column(where, missing[0], table.schema)))
    others = [name for name in names if name not in columns]
    if ANSWER not in others and len(others) != 1:
        raise UsageError(
            f"{where}: its answers are in the column {ANSWER!r}, or in the only one besides {', '.join(columns)}; it "
            f"has {', '.join(others) or 'no other'}."
        )
    prompts = join_texts(table, columns, spec, {}).to_pylist()
    answers = string_column(table[ANSWER if ANSWER in others else others[0]]).to_pylist()
    made = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not (prompt and prompt.strip() and answer):
            raise UsageError(f"{where}: row {row} lacks a prompt or an answer.")
        made += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return tuple(made)
