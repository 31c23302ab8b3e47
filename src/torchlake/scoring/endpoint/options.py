"""The options of `predict` by an endpoint: checked, and converted to plain values for workers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from torchlake import plugins
from torchlake.config.options import EndpointArguments, GenerationArguments, JobArguments, PromptArguments
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.models.generation import PromptOptions, generation_options
from torchlake.runtimes import http
from torchlake.runtimes._http.limits import LimitOptions
from torchlake.runtimes._http.requests import Api, Endpoint, body_options, checked_key_env, checked_url, json_format
from torchlake.scoring.endpoint.budget import Amount
from torchlake.scoring.endpoint.job import EMBEDS, WRITES, EndpointJob
from torchlake.scoring.endpoint.rows import EndpointSettings
from torchlake.scoring.endpoint.usage import Price, read_price
from torchlake.scoring.options.settings import kept_columns, named_columns
from torchlake.tasks._prompts import OF_CHATS, with_prompts

BATCH_SHARE = 0.5
"Of the price that hosted models take for requests in batches."
PACED = ("concurrency", "requests_per_minute", "tokens_per_minute")
TAKEN = {
    *JobArguments.__annotations__,
    *GenerationArguments.__annotations__,
    *EndpointArguments.__annotations__,
    *("chat", "task", "inputs", "null", "prefix"),
}


def endpoint_job(
    given: Mapping[str, Any],
    *,
    text: str | Sequence[str] | None,
    key: str | None,
    columns: Sequence[str],
    engine: Engine | None,
) -> EndpointJob:
    """Return the work of the options of `predict`. Raises UsageError, and ConfigError for a file of prices."""
    http.check_library()
    refused = sorted(name for name in given if name not in TAKEN and given[name] not in (None, False))
    if refused:
        raise UsageError(f"{', '.join(refused)}: for a model folder; the runtime 'http' does not have it.")
    endpoint, generation, prompts, spec = _endpoint(given, text)
    price = None if given.get("price") is None else read_price(given["price"], endpoint.model)
    if price is not None and given.get("batch_api"):
        price = Price(**{name: BATCH_SHARE * each for name, each in asdict(price).items()})
    for name in (*PACED, "max_cost", "max_tokens_total"):
        if given.get(name) is not None and not 0 < given[name] < math.inf:
            raise UsageError(f"{name}: expected a number above 0, got {given[name]}.")
    limits = {name: given[name] for name in PACED if given.get(name) is not None}
    if given.get("batch_api") and limits:
        raise UsageError(
            f"batch_api and {', '.join(limits)}: an endpoint works on a batch at its own pace; leave them out."
        )
    most = [math.inf if given.get(name) is None else given[name] for name in ("max_cost", "max_tokens_total")]
    if price is None and given.get("max_cost") is not None:
        raise UsageError("max_cost: the prices of the model are needed: price (--price prices.yaml).")
    settings = EndpointSettings(
        endpoint=endpoint,
        spec=spec,
        generation=generation,
        prompts=prompts,
        keep=kept_columns(key, columns),
        key=key,
        prefix=given.get("prefix", ""),
        null=given.get("null", "error"),
        price=price,
        limits=LimitOptions(**limits),
        budget=Amount(*most),
        batch_api=bool(given.get("batch_api")),
        row_timeout_s=endpoint.timeout_s,
    )
    return EndpointJob(settings=settings, engine=engine or Local())


def _endpoint(
    given: Mapping[str, Any], text: str | Sequence[str] | None
) -> tuple[Endpoint, Any, PromptOptions, TaskSpec]:
    """Return the endpoint, the options of generation (None: vectors) and of prompts, and the task."""
    if not given.get("endpoint") or not given.get("model_name"):
        raise UsageError(
            "The runtime 'http' needs endpoint and model_name: --endpoint https://host/v1 --model-name NAME."
        )
    task, api = given.get("task"), given.get("api")
    if task not in (None, WRITES, EMBEDS):
        raise UsageError(f"task={task!r}: the runtime 'http' has {WRITES} and {EMBEDS}.")
    if api is not None and task is not None and (api == "embeddings") != (task == EMBEDS):
        raise UsageError(f"api={api!r} and task={task!r} do not fit; leave one of them out.")
    kind: Api = api or ("embeddings" if task == EMBEDS else "chat")
    writes = kind != "embeddings"
    writing = (*GenerationArguments.__annotations__, "chat")
    sampling = {name: given[name] for name in writing if name in given and name not in PromptArguments.__annotations__}
    if given.get("sample") is not None and not given.get("temperature"):
        sampling.pop("seed", None)
    generation = generation_options(WRITES if writes else EMBEDS, writes=writes, **sampling)
    spec = TaskSpec(
        task=WRITES if writes else EMBEDS,
        problem="next_token" if writes else "",
        labels=(),
        text="text" if text is None else named_columns("text", text),
        label=None,
        max_length=0,
        inputs=dict(given.get("inputs") or {}),
    )
    if given.get("prompt") is not None and text is not None:
        raise UsageError("text and prompt: prompt has the columns of the text; leave one of them out.")
    asked = {name: given[name] for name in PromptArguments.__annotations__ if name in given}
    prompts, spec = with_prompts(asked, plugins.load("tasks", spec.task), spec, None, chat=bool(given.get("chat")))
    spec = replace(spec, rows=replace(spec.rows, chat=bool(given.get("chat"))))
    if prompts.chat_template is not None:
        raise UsageError("chat_template: an endpoint renders conversations by its own.")
    if generation is not None and generation.structure and generation.structure.columns and generation.n > 1:
        raise UsageError("json_columns and n: the columns are those of one answer.")
    around = ["chat"] if given.get("chat") else []
    around += [name for name in OF_CHATS if getattr(prompts, name)]
    if around and kind == "completions":
        raise UsageError(f"{', '.join(around)}: for chat completions, and api is {kind!r}.")
    own = {} if generation is None else _fields(sampling, generation)
    form, choices = _structure(kind, None if generation is None else generation.structure)
    more = given.get("request_options") or {}
    _refuse_replaced(more, form, prompts, spec)
    return (
        Endpoint(
            url=checked_url(given["endpoint"], insecure=bool(given.get("insecure_endpoint"))),
            model=given["model_name"],
            api=kind,
            key_env=checked_key_env(given.get("key_env")),
            options=body_options(kind, own, {**form, **more}),
            choices=choices,
            timeout_s=given.get("row_timeout_s", 600.0),
            max_retries=given.get("max_retries", 8),
        ),
        generation,
        prompts,
        spec,
    )


def _structure(api: Api, structure: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the field of a body for the structure of texts, and the choices that they are from.

    Raises UsageError for a structure that the API does not have.
    """
    if structure is None:
        return {}, ()
    if structure.kind not in ("json_schema", "choices") or api != "chat":
        raise UsageError(
            f"{structure.kind}: the runtime 'http' has json_schema and choices, in chat completions. What an endpoint "
            "takes besides can be sent with request_options (--request-option NAME=VALUE)."
        )
    return {"response_format": json_format(structure.schema, structure.choices)}, tuple(structure.choices)


def _refuse_replaced(more: Mapping[str, Any], form: Mapping[str, Any], prompts: Any, spec: TaskSpec) -> None:
    """Raise UsageError for a field of `request_options` that another option of the job sets."""
    tools = prompts.tools or "tools" in spec.inputs
    own = {"response_format": form, "tools": tools, "chat_template_kwargs": prompts.template_options}
    for name in own.keys() & more.keys():
        if own[name]:
            raise UsageError(f"request_options: {name!r} is there already, by another option of the job. Keep one.")


def _fields(sampling: Mapping[str, Any], generation: Any) -> dict[str, Any]:
    """Return the options that requests have: those that were given, and the maximum of tokens and the temperature."""
    given = {name for name in sampling if sampling[name] not in (None, False)}
    own = {one.name for one in fields(generation)} - {"chat"}
    return {name: getattr(generation, name) for name in sorted(own & (given | {"max_new_tokens", "temperature"}))}
