"""What a scoring job needs besides its settings: exports, versions, the size of chunks, and its fingerprint."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.models import folders
from torchlake.models.generation import GenerationOptions
from torchlake.processes.hardware import cpu_class, in_words
from torchlake.runtimes import _exports
from torchlake.scoring.rows import Runtime, ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import (
    FAST_DEFAULTS,
    REFERENCE,
    RuntimeChoice,
    foreign_python,
    lacks_export,
    refusal,
)
from torchlake.scoring.workers.tables import make_preparing_worker, make_versions_worker
from torchlake.tables.chunks import RowCost
from torchlake.tasks._rendering import time_of_job

log = logging.getLogger(__name__)

FIRST_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "chat")
RATED = "varlen"
"The runtime that the rates of a class of CPUs are relative to."
EXACT_EXPORTS = ("openvino", "onnx")
LARGE_ROWS, WORTH_IT = 100_000, 1.2
"From which number of rows, and how many times as fast, another runtime is worth the minutes of `optimize`."
WEIGHT_BYTES_PER_S = 16e9
"""Bytes of fp32 weights times tokens that a core multiplies per second: a Llama of 160 million parameters writes 28
tokens. Faster machines get chunks that end sooner."""
BYTES_PER_TOKEN = 4


def with_export(settings: ScoringSettings, engine: Engine) -> ScoringSettings:
    """Return the settings with the export of a runtime that needs one.

    The model is exported in a separate process, unless that was done before.
    """
    folder, runtime = Path(settings.model), settings.runtime
    module = lacks_export(folder, runtime, settings.spec.task)
    if module is not None:
        _export(settings, engine, module)
    return replace(settings, export=_exports.identity(folder, runtime) if isinstance(runtime, str) else None)


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
    if task in module.tasks and refusal(best, folder, task, pairs=settings.text_pair is not None) is None:
        found = f"on CPUs of this class ({here.name}) {best!r} is {gain:.1f} times as fast as {RATED!r}, and as exact"
        log.warning("%s rows: %s. To choose it: torchlake optimize %s --sample TABLE", f"{rows:,}", found, folder)


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


def with_time(
    settings: ScoringSettings, spec: TaskSpec, earlier: Mapping[str, Any]
) -> tuple[ScoringSettings, dict[str, Any]]:
    """Return the settings with the time that chat templates get, and the job's fingerprint, which has it.

    `earlier` is the output's fingerprint.
    """
    template, made = None, fingerprint_of(settings, spec)
    if settings.generation is not None:
        template = settings.prompts.chat_template or folders.chat_template(Path(settings.model))
    planned = time_of_job(template, made, earlier)
    return replace(settings, time=planned.get("time")), {**made, **planned}


def _generation(options: GenerationOptions) -> dict[str, Any]:
    """Return the options; those that versions before did not have if they are not as by default."""
    plain = asdict(GenerationOptions())
    return {
        "columns": "prompt_tokens",
        **{name: value for name, value in asdict(options).items() if name in FIRST_OPTIONS or value != plain[name]},
    }
