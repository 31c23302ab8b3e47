"""The options of `predict`: checked, completed from the model folder, and converted to plain values for workers.

Stored tables, frames and SQL functions share them. Nothing here reads a row.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.arguments import check_arguments
from torchlake.config.options import EndpointArguments, JobArguments, PredictOptions, PromptArguments, ReadArguments
from torchlake.config.task_spec import TASK_FILE, Columns, TaskSpec, as_columns
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.jobs.options import OutputOptions, check_values, output_options, refuse_unknown
from torchlake.models import exports, folders
from torchlake.models.config import load_config, positions, tensor_parallel_refusal
from torchlake.models.generation import GenerationOptions, check_settings, generation_options
from torchlake.models.load import EMBEDS, embeddings, load_spec
from torchlake.models.structured.structure import STRUCTURE_OPTIONS
from torchlake.processes.hardware import cpu_class, gpus, in_words
from torchlake.scoring.rows import (
    Runtime,
    ScoringSettings,
    check_prompts,
    max_prompt_tokens,
    runtime_name,
)
from torchlake.scoring.runtime_choice import (
    FAST_DEFAULTS,
    REFERENCE,
    RuntimeChoice,
    chosen,
    foreign_python,
    lacks_export,
    refusal,
    requested,
)
from torchlake.scoring.scorer import device
from torchlake.scoring.workers.output import output_schema
from torchlake.scoring.workers.tables import make_preparing_worker, make_versions_worker
from torchlake.tables.chunks import RowCost
from torchlake.tables.plan import SAMPLE
from torchlake.tasks import EXTRA, PROMPT, TEXT
from torchlake.tasks._inputs import PAIR, check_columns
from torchlake.tasks._prompts import check_prompt_columns, with_prompts
from torchlake.tasks._row_options import OPTIONS, find_options

log = logging.getLogger(__name__)

COLUMN = "prompt"
"The column of prompts that is found by its name if there is no other."
FIRST_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "chat")
PROMPTS = tuple(PromptArguments.__annotations__)
COMMON_NAMES = {"template": "prompt", "chat_template_kwargs": "template_options"}
"What other libraries call some of the options."
RATED = "varlen"
"The runtime that the rates of a class of CPUs are relative to."
EXACT_EXPORTS = ("openvino", "onnx")
LARGE_ROWS, WORTH_IT = 100_000, 1.2
"From which number of rows, and how many times as fast, another runtime is worth the minutes of `optimize`."
WEIGHT_BYTES_PER_S = 16e9
"""Bytes of fp32 weights times tokens that a core multiplies per second: a Llama of 160 million parameters writes 28
tokens. Faster machines get chunks that end sooner."""
BYTES_PER_TOKEN = 4


def split_options(
    given: PredictOptions,
) -> tuple[dict[str, Any], dict[str, Any], OutputOptions]:
    """Split into the fields of `ScoringSettings`, of `GenerationOptions`, and the options of input and output.

    A `seed` applies to the sample of rows, and to the sampling of tokens if there is any.
    Raises TypeError for an unknown option, UsageError for a value out of range.
    """
    named = with_common_names(given)
    refuse_unknown("predict", named, PredictOptions.__annotations__)
    check_options(named)
    refuse_endpoint(named)
    names = [{one.name for one in fields(group)} for group in (ScoringSettings, GenerationOptions)]
    names[0] |= {"task"}
    names[1] |= set(STRUCTURE_OPTIONS)
    scoring, generation = ({name: named[name] for name in named if name in own} for own in names)
    if named.get("sample") is not None and not named.get("temperature"):
        generation.pop("seed", None)
    scoring["prompts"] = {name: named[name] for name in PROMPTS if name in named}
    return scoring, generation, output_options(named)


def with_common_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by their names here, also those that other libraries call otherwise. Raises UsageError."""
    named = {COMMON_NAMES.get(name, name): value for name, value in given.items()}
    if len(named) < len(given):
        twice = next(name for name in COMMON_NAMES if name in given)
        raise UsageError(f"{twice}: the same as {COMMON_NAMES[twice]}; leave one of them out.")
    return named


def scoring_settings(
    model: str | Path,
    runtime: Runtime | None,
    generation: Mapping[str, Any],
    *,
    text: str | Sequence[str] | None = None,
    task: Any = None,
    text_pair: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    recorded: str | None = None,
    key: str | None = None,
    columns: Sequence[str] = (),
    batch_tokens: int | None = None,
    all_probabilities: bool = False,
    **settings: Any,
) -> tuple[ScoringSettings, TaskSpec, RuntimeChoice]:
    """Return the workers' settings, the task and the runtime for a model folder.

    `generation` holds fields of `GenerationOptions` (None: the default), `settings` further fields of
    `ScoringSettings`, of which `task_options` are those that differ from the model's. `recorded` is the runtime of the
    output that this job continues: it replaces another default. Raises UsageError for options that the model does not
    support.
    """
    if isinstance(runtime, str):
        plugins.load("runtimes", runtime)  # refuse an unknown name before downloading a model
    folder = folders.model_folder(model).absolute()  # workers may run in another folder
    known = known_spec(folder, task, settings.pop("task_options", None))
    prompts = settings.pop("prompts", {})
    if prompts.get("prompt") is not None and text is not None:
        raise UsageError("text and prompt: prompt has the columns of the text; leave one of them out.")
    spec = with_columns(known, folder, text=text, text_pair=text_pair, inputs=inputs)
    asked, spec = with_prompts(
        prompts, plugins.load("tasks", spec.task), spec, folder, chat=bool(generation.get("chat"))
    )
    spec = _with_length(folder, spec, settings.get("max_length"))
    if plugins.load("tasks", spec.task).packs:  # the prompt alone; tools if the table or the caller names a column
        named = {*(inputs or {}), *({"tools"} if isinstance(prompts.get("tools"), str) else ())}
        spec = replace(spec, inputs={name: spec.inputs[name] for name in spec.inputs if name in named})
    options = generation_options(spec.task, writes=plugins.load("tasks", spec.task).generates, **generation)
    _check_generation(folder, options, all_probabilities)
    if options is not None and options.seed_by == "key" and key is None:
        raise UsageError("seed_by='key': there is no key. Name a column of unique values (--key, key=).")
    if settings.get("explode") and (options is None or options.n == 1):
        raise UsageError("explode: a row has one answer; set n (--n) as well.")
    devices, pairs = settings.get("gpus_per_process", 1), spec.text_pair is not None
    if devices > 1 and not has_own_python(runtime):
        choice = replace(requested(folder, spec.task, _shared_runtime(runtime, devices), pairs=pairs), why="default")
    elif runtime is None:
        choice = chosen(folder, spec.task, lambda: device() if gpus() else "cpu", pairs=pairs, options=options)
        if choice.why == "default" and recorded == REFERENCE:
            choice = replace(choice, runtime=recorded)
    else:
        choice = requested(folder, spec.task, runtime, pairs=pairs, options=options)
    if settings.get("runtime_python") is not None:  # workers may run in another folder; links are kept
        settings["runtime_python"] = os.path.abspath(os.path.expanduser(settings["runtime_python"]))
    if "embedding" in settings and spec.task != EMBEDS:
        raise UsageError(
            f"embedding={settings['embedding']!r} applies to {EMBEDS} only; the task of {folder} is {spec.task}."
        )
    made = ScoringSettings(
        model=str(folder),
        model_hash=folders.model_hash(folder),
        task=task if isinstance(task, str) else None,
        runtime=choice.runtime,
        exact=choice.why == "default",
        text=spec.text,
        text_pair=spec.text_pair,
        inputs=dict(spec.inputs),
        task_options=dict(spec.options),
        keep=tuple(dict.fromkeys([key, *columns] if key else columns)),
        key=key,
        batch_tokens=batch_tokens or choice.batch_tokens,
        all_probabilities=all_probabilities,
        generation=options,
        prompts=asked,
        **settings,
    )
    if options is not None and options.structure is not None:
        plugins.load("tasks", spec.task).output_schema(spec, made.column_options)  # or it refuses what has no column
    return made, spec, choice


def known_spec(folder: Path, task: Any, task_options: Mapping[str, Any] | None = None) -> TaskSpec:
    """Return the task of a model folder, with some of its options; its code is installed, or passed as `task`.

    Raises UsageError if there is no such code, or for an option that the task does not have.
    """
    if isinstance(task, str):
        plugins.load("tasks", task)  # refuse an unknown name
    spec = load_spec(folder, task if isinstance(task, str) else None)
    given = task if task is None or isinstance(task, str) else plugins.give(task)
    if given not in (None, spec.task):
        raise UsageError(f"{folder}: the model's task is {spec.task!r}, not {given!r}.")
    if plugins.explain_unknown("tasks", spec.task) is not None:
        raise UsageError(
            f"{folder}: the model's task {spec.task!r} is not installed here, and code is never loaded "
            "from a model folder. Pass the task in Python (task=), or install the package that has it."
        )
    known = plugins.load("tasks", spec.task)
    return replace(spec, options=known.checked_options({**spec.options, **(task_options or {})}, UsageError))


def _with_length(folder: Path, spec: TaskSpec, longest: int | None) -> TaskSpec:
    """Return the task for rows of at most `longest` tokens. Raises UsageError if the model does not read such rows."""
    if longest is None:
        return spec
    if not spec.max_length or plugins.load("tasks", spec.task).inputs.get("text") == PROMPT:
        raise UsageError(f"max_length={longest}: {spec.task} does not truncate its input.")
    limit = positions(folder)
    if limit is not None and longest > limit:
        raise UsageError(f"max_length={longest}: {folder} has positions for {limit} tokens only.")
    return replace(spec, max_length=longest)


def with_columns(
    spec: TaskSpec,
    folder: Path,
    *,
    text: str | Sequence[str] | None = None,
    text_pair: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
) -> TaskSpec:
    """Return the task with other columns. Raises UsageError for inputs that it does not have.

    A folder without task.json does not say whether its classifier reads texts or pairs, so either is possible.
    """
    if text is not None and not spec.text:
        raise UsageError(f"text: {spec.task} reads no text; its inputs are {', '.join(spec.inputs)} (inputs=).")
    if text_pair is not None and spec.text_pair is None:
        if PAIR not in plugins.load("tasks", spec.task).inputs:
            raise UsageError(f"text_pair: {spec.task} reads no pairs of texts.")
        if (folder / TASK_FILE).exists():
            raise UsageError("text_pair (rank: document): the model was trained on single texts.")
    unknown = sorted((inputs or {}).keys() - spec.inputs.keys() - set(plugins.load("tasks", spec.task).optional))
    if unknown:
        has = f"its other inputs are {', '.join(spec.inputs)}" if spec.inputs else "it has no other inputs"
        raise UsageError(f"inputs: {spec.task} has no input {unknown[0]!r}; {has}.")
    named = {name: _named(columns) for name, columns in (inputs or {}).items()}
    joined = as_columns(spec.text) if text is None else as_columns(_named(text))
    if spec.template is not None and len(joined) > 1 and set(joined) != set(as_columns(spec.text)):
        raise UsageError(
            f"text: the model's texts are made by the template {spec.template!r}. Use a table with these columns, or "
            "one column of texts in this form."
        )
    return replace(
        spec,
        text=spec.text if text is None else _named(text),
        text_pair=spec.text_pair if text_pair is None else _named(text_pair),
        inputs={**spec.inputs, **named},
    )


def _named(columns: str | Sequence[str]) -> Columns:
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    return names[0] if len(names) == 1 else names


def refuse_endpoint(given: Mapping[str, Any]) -> None:
    """Raise UsageError for options of the runtime `http`, which has no model folder."""
    named = sorted(name for name in given if name in EndpointArguments.__annotations__ and given[name])
    if named:
        raise UsageError(f"{', '.join(named)}: for the runtime 'http', which has no model folder.")


def check_options(given: Mapping[str, Any]) -> None:
    """Raise UsageError for a value of the wrong type or out of range."""
    check_arguments(given, PredictOptions.__annotations__)
    check_values(given, counts=("batch_tokens", "gpus_per_process"))


def refuse_for_frames(given: Mapping[str, Any], native: str | None) -> None:
    """Raise UsageError for options of an output, or of a job that starts processes: a frame has neither.

    A frame in memory is checked for its share of failed rows; a lazy one of an engine (`native`) is not counted.
    """
    taken = {"max_error_rate", *ReadArguments.__annotations__} - ({"max_error_rate"} if native else set())
    refused = [name for name in JobArguments.__annotations__ if given.get(name) and name not in taken]
    if refused:
        raise UsageError(f"{', '.join(refused)}: for a stored table and its output; a frame comes back as a frame.")


def check_devices(settings: ScoringSettings, *, has_gpus: bool) -> None:
    """Raise UsageError if ranks on CPUs cannot share the model; on GPUs there is another way."""
    folder, number = Path(settings.model), settings.gpus_per_process
    elsewhere = has_own_python(settings.runtime)  # it says so itself
    reason = None if has_gpus or elsewhere else tensor_parallel_refusal(load_config(folder), number)
    if reason is not None:
        raise UsageError(
            f"gpus_per_process={number}: {folder}: {reason}, and layers are placed over GPUs only. Remove the "
            "setting, or use a number that divides the heads of a model that has a plan."
        )


def _shared_runtime(runtime: Runtime | None, devices: int) -> str:
    """Return the runtime of a model over several devices. Raises UsageError for another one."""
    if runtime not in (None, REFERENCE):
        raise UsageError(
            f"gpus_per_process={devices} needs the runtime {REFERENCE!r}, the model as transformers places it over "
            f"devices; {runtime_name(runtime)!r} computes on one device."
        )
    return REFERENCE


def _check_generation(folder: Path, options: GenerationOptions | None, all_probabilities: bool) -> None:
    """Raise UsageError for options that the model does not support."""
    if options is None:
        return
    if all_probabilities:
        raise UsageError("all_probabilities: a text generation model has no classes.")
    check_settings(folder, options)
    size = embeddings(folder) if options.stop_token_ids else None
    if size is not None and max(options.stop_token_ids) >= size:
        raise UsageError(f"stop_token_ids: {max(options.stop_token_ids)}: {folder} has the tokens 0 to {size - 1}.")
    left = max_prompt_tokens(folder, options)
    if left is not None and left < 1:
        raise UsageError(
            f"max_new_tokens={options.max_new_tokens} leaves no tokens for a prompt: {folder} has "
            f"{left + options.max_new_tokens} positions."
        )


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
    """Return the settings and the task with the columns of conversations and tools that a table has."""
    task, generation = plugins.load("tasks", spec.task), settings.generation
    if generation is None:
        return settings, spec
    if not task.packs or settings.prompts.prompt is not None:
        columns = {**spec.inputs, **_options_column(settings, schema)}
        return replace(settings, inputs=columns), replace(spec, inputs=columns)
    if spec.text == TEXT and TEXT not in schema.names and COLUMN in schema.names:
        spec = replace(spec, text=COLUMN)
    found = task.find_columns(schema, spec, None if generation.chat else first)
    chat = replace(generation, chat=generation.chat or found.rows.chat)
    columns = {**found.inputs, **settings.inputs, **_options_column(settings, schema)}
    if settings.prompts.tools and "tools" not in settings.inputs:
        columns.pop("tools", None)
    read = replace(settings, text=found.text, inputs=columns, generation=chat)
    return read, replace(found, rows=spec.rows, inputs=columns)


def _options_column(settings: ScoringSettings, schema: pa.Schema) -> dict[str, str]:
    """Return {} or the column of the options of rows. Raises UsageError."""
    named = settings.inputs.get(OPTIONS)
    column = find_options(schema, None if named is None else str(named))
    return {} if column is None else {OPTIONS: column}


def with_export(settings: ScoringSettings, engine: Engine) -> ScoringSettings:
    """Return the settings with the export of a runtime that needs one.

    The model is exported in a separate process, unless that was done before.
    """
    folder, runtime = Path(settings.model), settings.runtime
    module = lacks_export(folder, runtime, settings.spec.task)
    if module is not None:
        _export(settings, engine, module)
    return replace(settings, export=exports.identity(folder, runtime) if isinstance(runtime, str) else None)


def has_own_python(runtime: Runtime | None) -> bool:
    """Return whether a runtime needs its own interpreter."""
    return isinstance(runtime, str) and hasattr(plugins.load("runtimes", runtime), "PYTHON")


def with_versions(settings: ScoringSettings, engine: Engine) -> ScoringSettings:
    """Return the settings with the versions of the runtime's own interpreter, if it has one.

    On a cluster a worker finds them. Raises UsageError.
    """
    runtime = settings.runtime
    if not isinstance(runtime, str) or not has_own_python(runtime):
        foreign_python(settings)
        return settings
    reason = (
        None if settings.generation is None else plugins.load("runtimes", runtime).cannot_write(settings.generation)
    )
    if reason is not None:
        raise UsageError(f"The runtime {runtime!r}: {reason}.")
    worker = partial(make_versions_worker, settings)
    if isinstance(engine, Local):
        (versions,) = worker()(iter([runtime]))
    else:
        (versions,) = engine.run_chunks(worker, [runtime], resources=Resources(processes=1))
    return replace(settings, versions=versions)


def _export(settings: ScoringSettings, engine: Engine, module: Any) -> None:
    folder, runtime = Path(settings.model), settings.runtime
    if module.CALIBRATED:
        raise UsageError(
            f"The runtime {runtime!r} needs calibration on your rows first: torchlake optimize {folder} "
            f"--sample TABLE --runtimes {runtime}"
        )
    log.info("%s: exporting the model for the runtime %r; this is done once", folder, runtime)
    make_worker = plugins.carried(settings.spec.task, partial(make_preparing_worker, settings))
    list(engine.run_chunks(make_worker, [runtime], resources=Resources(processes=1)))


def products_of(settings: ScoringSettings, earlier: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the libraries of the job's fp32 products: those that the output began with, else those of this CPU's
    class; None if the runtime has its own, and for outputs of versions that did not record them.

    `earlier` is the output's fingerprint.
    """
    runtime, here = runtime_name(settings.runtime), cpu_class()
    if runtime not in (REFERENCE, *FAST_DEFAULTS):
        return None
    if (earlier.get("model"), earlier.get("runtime")) != (settings.model_hash, runtime):
        return here.products
    began: Mapping[str, str] | None = earlier.get("products")
    if began not in (None, here.products):
        own = f"the CPU's class ({here.name}) has products {in_words(here.products)}"
        log.warning("The output began with matrix products %s; it keeps them here, where %s", in_words(began), own)
    return began


def say_if_optimizing_pays(choice: RuntimeChoice, settings: ScoringSettings, rows: int) -> None:
    """Log once, at the start of a large job by the default runtime, that another exact one is faster on this CPU.

    Also how long texts take, if `optimize` has measured it.
    """
    if settings.generation is not None and choice.rows_per_s:
        minutes = rows / choice.rows_per_s / 60
        needed = f"{minutes:,.0f} minutes" if minutes < 60 else f"{minutes / 60:,.1f} hours"
        log.info("%s rows take about %s here, by the speed that optimize measured", f"{rows:,}", needed)
    here, folder = cpu_class(), Path(settings.model)
    gain, best = max((here.rates.get(name, 0.0), name) for name in EXACT_EXPORTS)
    if rows < LARGE_ROWS or gain < WORTH_IT or (choice.why, choice.runtime) != ("default", RATED):
        return
    module, task = plugins.load("runtimes", best), settings.spec.task
    if task in module.tasks and refusal(best, folder, pairs=settings.text_pair is not None) is None:
        found = f"on CPUs of this class ({here.name}) {best!r} is {gain:.1f} times as fast as {RATED!r}, and as exact"
        log.warning("%s rows: %s. To choose it: torchlake optimize %s --sample TABLE", f"{rows:,}", found, folder)


def added_columns(settings: ScoringSettings, spec: TaskSpec, schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that predictions add to a frame."""
    return [column for column in output_schema(settings, spec, schema) if column.name != "row_id"]


def chunk_rows_of(settings: ScoringSettings, spec: TaskSpec) -> int | RowCost | None:
    """Return the default size of chunks: of a task that writes by the cost of its tokens, from the model's size."""
    if settings.generation is None:
        rows: int | RowCost | None = plugins.load("tasks", spec.task).chunk_rows
        return rows
    token_s = folders.weight_bytes(settings.model) / WEIGHT_BYTES_PER_S
    answers = settings.samples * settings.generation.num_beams
    return RowCost(row_s=settings.generation.max_new_tokens * token_s * answers, byte_s=token_s / BYTES_PER_TOKEN)


def fingerprint_of(settings: ScoringSettings, spec: TaskSpec) -> dict[str, Any]:
    """Return all settings that, with the rows, determine the bytes of the output."""
    return {
        "format": 1,
        "model": settings.model_hash,
        "task": spec.task,
        "runtime": runtime_name(settings.runtime),
        **({} if settings.export is None else {"export": settings.export}),
        **({} if not settings.versions else {"versions": dict(settings.versions)}),
        "text": settings.text if isinstance(settings.text, str) else list(settings.text),
        **({} if settings.text_pair is None else {"text_pair": settings.text_pair}),
        **({} if not settings.inputs else {"inputs": dict(settings.inputs)}),
        **({} if not settings.task_options else {"task_options": dict(settings.task_options)}),
        "key": settings.key,
        "columns": list(settings.keep),
        "prefix": settings.prefix,
        "all_probabilities": settings.all_probabilities,
        **({"token_counts": True} if settings.token_counts else {}),
        **({} if settings.embedding == "float32" else {"embedding": settings.embedding}),
        **({} if settings.products is None else {"products": dict(settings.products)}),
        **({} if not settings.ranges else {"ranges": [list(each) for each in settings.ranges]}),
        "null": settings.null,
        "batch_tokens": settings.batch_tokens,
        **({} if settings.max_length is None else {"max_length": settings.max_length}),
        **({} if settings.generation is None else {"generation": _generation(settings.generation)}),
        **({} if not settings.prompts.given() else {"prompts": settings.prompts.given()}),
        **({} if not settings.explode else {"samples": settings.samples}),
    }


def _generation(options: GenerationOptions) -> dict[str, Any]:
    """Return the options; those that versions before did not have if they are not as by default."""
    plain = asdict(GenerationOptions())
    return {
        "columns": "prompt_tokens",
        **{name: value for name, value in asdict(options).items() if name in FIRST_OPTIONS or value != plain[name]},
    }


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
            "Give the predictions another name, for example prefix='predicted_' (--prefix predicted_)."
        )
