"""The settings of a job by an endpoint, and rows made ready for it: prompts with their bodies, or named errors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.jobs.worker.read_ahead import Workspace
from torchlake.models.generation import GenerationOptions, PromptOptions
from torchlake.runtimes._http.answers import Answer
from torchlake.runtimes._http.limits import LimitOptions
from torchlake.runtimes._http.requests import Endpoint, Prompt, body_options
from torchlake.scoring.endpoint.budget import UNLIMITED, Amount, Asked
from torchlake.scoring.endpoint.usage import CHARACTERS, Price, usage_columns
from torchlake.tables.arrays import from_strings, is_blank, nulls_as_empty, string_column, without_rows
from torchlake.tasks._chat import chat_requests, names_of
from torchlake.tasks._json_columns import json_columns, json_schema_of
from torchlake.tasks._null_rows import NULL_INPUT, join_texts
from torchlake.tasks._prompts import with_examples
from torchlake.tasks._row_options import KINDS, OPTIONS, row_options
from torchlake.tasks._writing import EACH, MEAN, REASONING, TEXT

MESSAGE_TOKENS = 4
"Of what an endpoint writes around a message, in a guess."


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """Settings of a worker, as plain values without a secret, so that every engine can send them."""

    endpoint: Endpoint
    spec: TaskSpec
    "The task with the columns of this job."
    generation: GenerationOptions | None
    "None for vectors."
    prompts: PromptOptions
    keep: tuple[str, ...]
    "Columns copied from the input to the output, key first."
    key: str | None
    prefix: str = ""
    null: str = "error"
    price: Price | None = None
    limits: LimitOptions = field(default_factory=LimitOptions)
    budget: Amount = UNLIMITED
    batch_api: bool = False
    "Whether the rows of a chunk are asked as one batch."
    row_timeout_s: float = 600.0
    chunks_ahead: int = 1
    workspace: Workspace | None = None
    "Where the worker writes; set when the job starts."

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(dict.fromkeys((*self.keep, *self.spec.input_columns)))


def read_rows(
    table: pa.Table, unreadable: Mapping[int, str], settings: EndpointSettings
) -> tuple[dict[int, Asked], dict[int, str]]:
    """Return the requests of a table's rows, and {row: reason} for rows that cannot be asked."""
    prompts, errors = read_prompts(table, unreadable, settings)
    own: list[Mapping[str, Any]] = [{}] * len(table)
    named = settings.spec.inputs.get(OPTIONS)
    if named is not None and settings.generation is not None:
        options, bad = row_options(table[str(named)].to_pylist(), settings.generation)
        errors = {**bad, **errors}
        of_all = _row_fields(settings, settings.generation)
        own = [{n: v for n, v in _row_fields(settings, one).items() if of_all.get(n) != v} for one in options]
    asked = {
        row: _asked(settings.endpoint, prompt, {**extra, **own[row]})
        for row, (prompt, extra) in prompts.items()
        if row not in errors
    }
    return asked, errors


def _asked(endpoint: Endpoint, prompt: Prompt, own: Mapping[str, Any]) -> Asked:
    """Return the request of a row with fields of its `own`, and what it may take."""
    whole = replace(endpoint, options={**endpoint.options, **own})
    tools, form = (_size(whole.options[name]) if name in whole.options else 0 for name in ("tools", "response_format"))
    return Asked(
        body=whole.body(prompt),
        tokens=guess_tokens(prompt) + tools / CHARACTERS,
        size=size_of(prompt) + tools + form,
        most=whole.most_tokens,
    )


def read_prompts(
    table: pa.Table, unreadable: Mapping[int, str], settings: EndpointSettings
) -> tuple[dict[int, tuple[Prompt, Mapping[str, Any]]], dict[int, str]]:
    """Return the prompt of each row with further fields of its body, and {row: reason} for rows that have none."""
    spec, options = settings.spec, settings.prompts
    columns = as_columns(spec.text)
    held = False
    if len(columns) > 1 or options.prompt is not None:
        texts = join_texts(table, columns, spec, unreadable)
    else:
        texts = without_rows(string_column(table[columns[0]]), unreadable)
        held = spec.rows.chat or pa.types.is_nested(texts.type)
    errors = dict(unreadable)
    if not held:
        if settings.null == "error":
            errors |= dict.fromkeys(pc.indices_nonzero(is_blank(texts)).to_pylist(), NULL_INPUT) | errors
        texts = nulls_as_empty(texts)
    if settings.endpoint.api != "chat":
        texts = with_examples(texts, options)
        return {row: (text, {}) for row, text in enumerate(texts.to_pylist()) if row not in errors}, errors
    named = spec.inputs.get("tools")
    found, bad = chat_requests(
        texts if held else pa.array([[{"role": "user", "content": one}] for one in texts.to_pylist()]),
        None if named is None else table[str(named)].combine_chunks(),
        names=names_of(spec.rows) if held else None,
        system=options.system,
        options=options,
    )
    errors = {**bad, **errors}
    for row in range(len(table)):
        if row not in found:
            errors.setdefault(row, NULL_INPUT)
    made: dict[int, tuple[Prompt, Mapping[str, Any]]] = {}
    for row, one in found.items():
        extra: dict[str, Any] = {"tools": [_tool(each) for each in one.tools]} if one.tools else {}
        if one.want == "continue":
            extra |= {"add_generation_prompt": False, "continue_final_message": True}
        if one.options:
            extra["chat_template_kwargs"] = dict(one.options)
        made[row] = (list(one.messages), extra)
    return made, errors


def guess_tokens(prompt: Prompt) -> float:
    """Return about how many tokens a prompt has, from its characters."""
    if isinstance(prompt, str):
        return max(1.0, len(prompt) / CHARACTERS)
    return sum(len(str(one.get("content") or "")) / CHARACTERS + MESSAGE_TOKENS for one in prompt)


def size_of(prompt: Prompt) -> int:
    """Return the bytes of a prompt, which is not more tokens; roles count for what is around messages."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(each.encode()) if isinstance(each, str) else _size(each) for one in prompt for each in one.values())


def output_schema(settings: EndpointSettings, source: pa.Schema) -> pa.Schema:
    """Return the schema of the output: key or row id, copied columns, what the endpoint gives, `error`."""
    keys = [pa.field("row_id", pa.string())] if settings.key is None else []
    kept = [source.field(name).remove_metadata().with_nullable(True) for name in settings.keep]
    added = [*(one for one, _ in _columns(settings, [])), *_form(settings)]
    made = [one.with_name(settings.prefix + one.name) for one in added]
    return pa.schema([*keys, *kept, *made, pa.field("error", pa.string())])


def answer_columns(settings: EndpointSettings, answers: list[Answer | None], errors: Mapping[int, str]) -> pa.Table:
    """Return the columns of answers in row order, None for rows that were not asked, and `error`."""
    made, form = _columns(settings, answers), _form(settings)
    reasons = [errors.get(row) if one is None else one.error for row, one in enumerate(answers)]
    if form:
        texts = [one.texts[0] if one is not None and one.texts else "" for one in answers]
        values, bad = json_columns(texts, pa.schema(form))
        made += list(zip(values.schema, values.columns, strict=True))
        reasons = [reason or bad.get(row) for row, reason in enumerate(reasons)]
    names = [*(settings.prefix + one.name for one, _ in made), "error"]
    return pa.table([*(array for _, array in made), from_strings(reasons)], names)


def _form(settings: EndpointSettings) -> list[pa.Field]:
    """Return the columns of the properties of a JSON schema, if they were asked for."""
    structure = None if settings.generation is None else settings.generation.structure
    return list(json_schema_of(structure.schema)) if structure is not None and structure.columns else []


def _columns(settings: EndpointSettings, answers: list[Answer | None]) -> list[tuple[pa.Field, pa.Array]]:
    """Return what the endpoint gives: texts or a vector, counts, cost, and the id of the request."""
    used = usage_columns(answers, settings.price)
    request_id = _column("request_id", pa.string(), [one and one.request_id for one in answers])
    if settings.generation is None:
        vectors = [None if one is None else one.numbers for one in answers]
        return [_column("embedding", pa.list_(pa.float32()), vectors), used[0], *used[3:], request_id]
    several = settings.generation.n > 1
    kind = pa.list_(pa.string()) if several else pa.string()

    def each(values: tuple[str, ...] | None) -> Any:
        return None if not values else list(values) if several else values[0]

    columns = [_column(TEXT.name, kind, [one and each(one.texts) for one in answers])]
    if settings.endpoint.api == "chat":
        columns.append(_column(REASONING.name, pa.string(), [one and one.reasoning for one in answers]))
    if settings.prompts.tools or "tools" in settings.spec.inputs or "tools" in settings.endpoint.options:
        columns.append(_column("tool_calls", pa.string(), [one and one.tool_calls for one in answers]))
    columns += [*used, _column("finish_reason", kind, [one and each(one.reasons) for one in answers])]
    if settings.generation.logprobs is not None:
        found = [None if one is None or not one.logprobs else np.array(one.logprobs, np.float32) for one in answers]
        means = [None if one is None else float(one.mean()) for one in found]
        columns.append(_column(MEAN.name, MEAN.type, means))
        if settings.generation.logprobs == "tokens":
            columns.append(_column(EACH.name, EACH.type, found))
    return [*columns, request_id]


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _column(name: str, kind: pa.DataType, values: list[Any]) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, kind), pa.array(values, kind)


def _row_fields(settings: EndpointSettings, options: GenerationOptions) -> dict[str, Any]:
    """Return the fields of a body that a row may have of its own."""
    found = body_options(settings.endpoint.api, {name: getattr(options, name) for name in KINDS}, {})
    if "max_completion_tokens" in settings.endpoint.options:
        found["max_completion_tokens"] = found.pop("max_tokens")
    return found


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as endpoints take it; a table may have the schema of the function alone."""
    return dict(given) if "function" in given or "type" in given else {"type": "function", "function": dict(given)}
