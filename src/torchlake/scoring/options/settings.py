"""The settings of a scoring job: options of `predict`, completed from the model folder, as plain values for workers.

Stored tables, frames and SQL functions share them. Nothing here reads a row.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchlake import plugins
from torchlake.config.arguments import check_arguments, column_names
from torchlake.config.messages import expected
from torchlake.config.task_spec import TASK_FILE, Columns, TaskSpec, as_columns
from torchlake.errors import UsageError
from torchlake.models import folders
from torchlake.models.config import load_config, positions, tensor_parallel_refusal
from torchlake.models.generation import GenerationOptions, check_settings, generation_options
from torchlake.models.load import embeddings
from torchlake.models.spec import EMBEDS, load_spec
from torchlake.processes.hardware import gpus
from torchlake.scoring.options.job import has_own_python
from torchlake.scoring.rows import Runtime, ScoringSettings, max_prompt_tokens, runtime_name
from torchlake.scoring.runtime_choice import REFERENCE, RuntimeChoice, chosen, device, requested
from torchlake.tasks import PROMPT
from torchlake.tasks._inputs import PAIR
from torchlake.tasks._prompts import with_prompts


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
    keep = kept_columns(key, columns)
    if isinstance(runtime, str):
        plugins.load("runtimes", runtime)  # refuse an unknown name before downloading a model
    folder = folders.model_folder(model).absolute()  # workers may run in another folder
    known = known_spec(folder, task, settings.pop("task_options", None))
    prompts = settings.pop("prompts", {})
    if prompts.get("prompt") is not None and text is not None:
        raise UsageError("text and prompt: prompt has the columns of the text; leave one of them out.")
    spec = with_columns(known, folder, text=text, text_pair=text_pair, inputs=inputs)
    work = plugins.load("tasks", spec.task)
    asked, spec = with_prompts(prompts, work, spec, folder, chat=bool(generation.get("chat")))
    spec = _with_length(folder, spec, settings.get("max_length"))
    if work.packs:  # the prompt alone; tools if the table or the caller names a column
        named = {*(inputs or {}), *({"tools"} if isinstance(prompts.get("tools"), str) else ())}
        spec = replace(spec, inputs={name: spec.inputs[name] for name in spec.inputs if name in named})
    options = generation_options(spec.task, writes=work.generates, **generation)
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
        keep=keep,
        key=key,
        batch_tokens=batch_tokens or choice.batch_tokens,
        all_probabilities=all_probabilities,
        generation=options,
        prompts=asked,
        **settings,
    )
    if options is not None and options.structure is not None:
        work.output_schema(spec, made.column_options)  # or it refuses what has no column
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
    check_arguments({"inputs": inputs}, with_columns.__annotations__)
    if text is not None and not spec.text:
        raise UsageError(f"text: {spec.task} reads no text; its inputs are {', '.join(spec.inputs)} (inputs=).")
    task, learns_pairs = plugins.load("tasks", spec.task), spec.task == EMBEDS  # and embeds single texts
    if text_pair is not None and spec.text_pair is None:
        if PAIR not in task.inputs or learns_pairs:
            raise UsageError(f"text_pair: {spec.task} reads no pairs of texts.")
        if (folder / TASK_FILE).exists():
            raise UsageError("text_pair (rank: document): the model was trained on single texts.")
    unknown = sorted((inputs or {}).keys() - spec.inputs.keys() - set(() if learns_pairs else task.optional))
    if unknown:
        has = f"its other inputs are {', '.join(spec.inputs)}" if spec.inputs else "it has no other inputs"
        raise UsageError(f"inputs: {spec.task} has no input {unknown[0]!r}; {has}.")
    texts = spec.text if text is None else named_columns("text", text)
    named = {name: named_columns(f"inputs: {name}", columns) for name, columns in (inputs or {}).items()}
    joined = as_columns(texts)
    if spec.template is not None and len(joined) > 1 and set(joined) != set(as_columns(spec.text)):
        raise UsageError(
            f"text: the model's texts are made by the template {spec.template!r}. Use a table with these columns, or "
            "one column of texts in this form."
        )
    return replace(
        spec,
        text=texts,
        text_pair=spec.text_pair if text_pair is None else named_columns("text_pair", text_pair),
        inputs={**spec.inputs, **named},
    )


def named_columns(option: str, columns: str | Sequence[str]) -> Columns:
    """Return the columns that an option names, one or several. Raises UsageError for what is not a name."""
    names = column_names(option, columns)
    if not names:
        raise UsageError(f"{option}: names no column; leave it out, or name one.")
    return names[0] if len(names) == 1 else names


def kept_columns(key: str | None, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the table that an output keeps. Raises UsageError for what is not a name."""
    if key is not None and not (isinstance(key, str) and key):
        raise UsageError(f"key: {expected('the name of a column', key)}")
    return tuple(dict.fromkeys([*(() if key is None else (key,)), *column_names("columns", columns)]))


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
