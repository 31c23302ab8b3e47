"""The runtime of a job: the one that was requested, else the one that `optimize` chose for this model, else a default.

    <model>/runtime.json    the choice of `optimize`, its weights and device, and all measurements

A choice is valid for the weights and the device that it was measured with, and only if its runtime can run. Otherwise
the default is used, with a warning that gives the reason: that costs speed, not answers. Cost: reading the file, and
the export's sha256.
"""

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torchlake import atomic_io, plugins
from torchlake.config.messages import expected
from torchlake.errors import DataError, TorchlakeError, UsageError
from torchlake.models import folders
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import WRITERS, uses_token_types
from torchlake.runtimes import ForeignPython, _exports
from torchlake.scoring.rows import ScoringSettings, runtime_name

log = logging.getLogger(__name__)

FILE = "runtime.json"
REFERENCE = "eager"
FAST_DEFAULTS = ("varlen", "fused")
"The defaults for texts and images that they can run: on a CPU they differ from `eager` by rounding only."
WORKER_BYTES = 600 << 20
"Memory of a worker before it loads a model: Python, torch, transformers."
LIBRARIES = ("torchlake", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class RuntimeChoice:
    """The runtime of a job, and where it comes from."""

    runtime: Any
    "A name, or a function like a runtime's `load`."
    batch_tokens: int | None = None
    "Maximum padded tokens of a batch; None: the default for the device."
    threads: int | None = None
    "Threads of each process; None: the engine decides."
    rows_per_s: float | None = None
    "The rows per second of all processes that `optimize` has measured; None: not measured."
    tokens_per_s: float | None = None
    "The tokens per second that it wrote, if the task writes."
    why: Literal["requested", "runtime.json", "default"]


def requested(
    folder: Path, task: str, runtime: Any, *, pairs: bool = False, options: GenerationOptions | None = None
) -> RuntimeChoice:
    """Return the requested runtime. Raises UsageError if it cannot run this task, or this model on this machine.

    `pairs`: whether its texts are pairs; `options`: how it writes, if it does; here and below.
    """
    refuse_unable(runtime, task)
    reason = refusal(runtime, folder, task, pairs=pairs, options=options)
    if reason is not None:
        raise UsageError(f"The runtime {runtime!r} cannot run {folder}: {reason}")
    return RuntimeChoice(runtime=runtime, why="requested")


def refuse_unable(runtime: Any, task: str) -> None:
    """Raise UsageError if the runtime does not support the task, or is neither a name nor a function."""
    if not (runtime is None or isinstance(runtime, str) or callable(runtime)):
        raise UsageError(f"runtime: {expected('a name or a function', runtime)}")
    reason = _unable(plugins.load("runtimes", runtime), task) if isinstance(runtime, str) else None
    if reason is not None:
        raise UsageError(f"The runtime {runtime!r} cannot run {task}: {reason}.")


def _unable(module: Any, task: str) -> str | None:
    if module.tasks is None or task in module.tasks:
        return None
    return str(module.never.get(task, f"it computes {', '.join(module.tasks)} only; {REFERENCE!r} computes every task"))


def refusal(
    runtime: Any, folder: Path, task: str, *, pairs: bool = False, options: GenerationOptions | None = None
) -> str | None:
    """Return why the runtime cannot run the model with the installed libraries, or not write so, or None."""
    if not isinstance(runtime, str) or runtime == REFERENCE:
        return None
    module = plugins.load("runtimes", runtime)
    if not module.TOKEN_TYPES and uses_token_types(folder, pairs=pairs):
        return "it has no input for token types, which this model needs to separate the texts of a pair"
    own = getattr(module, "writer_refusal", module.refusal) if task in WRITERS else module.refusal
    reason: str | None = own(folder)
    if reason is None and options is not None and hasattr(module, "cannot_write"):
        reason = module.cannot_write(options)
    return reason


def foreign_python(settings: ScoringSettings) -> ForeignPython | None:
    """Return where the job's runtime runs if it needs an interpreter of its own. Raises UsageError if none is named."""
    name = settings.runtime
    variable = getattr(plugins.load("runtimes", name), "PYTHON", None) if isinstance(name, str) else None
    if variable is None:
        if settings.runtime_python is not None:
            raise UsageError(f"runtime_python: the runtime {runtime_name(name)!r} runs in torchlake's own interpreter.")
        return None
    path = settings.runtime_python or os.environ.get(variable)
    if not path:
        raise UsageError(
            f"The runtime {name!r} needs an interpreter of its own: name it by runtime_python (--runtime-python PATH), "
            f"or by the environment variable {variable} of each machine. How to make one: torchlake runtime-env {name}."
        )
    return ForeignPython(
        path=path, devices=settings.gpus_per_process, silent_s=settings.row_timeout_s, versions=settings.versions
    )


def default_runtime(folder: Path, task: str, device: Callable[[], str]) -> RuntimeChoice:
    """Return the one of FAST_DEFAULTS that can run the model and computes in fp32 on this device, else `eager`."""
    for name in FAST_DEFAULTS:
        module = plugins.load("runtimes", name)
        if _unable(module, task) is None and module.refusal(folder) is None and device() == "cpu":
            return RuntimeChoice(runtime=name, why="default")
    return RuntimeChoice(runtime=REFERENCE, why="default")


def chosen(
    folder: Path,
    task: str,
    device: Callable[[], str],
    *,
    pairs: bool = False,
    options: GenerationOptions | None = None,
) -> RuntimeChoice:
    """Return the choice of `optimize`; the default if there is none or, with a warning, if it is not valid here.

    `device()` returns "cpu" or "cuda", the device of this job.
    """
    path = folder / FILE
    if not path.exists():
        return default_runtime(folder, task, device)
    try:
        value = _read(path)
        reason = _why_not(folder, task, value, device, pairs=pairs, options=options)
    except DataError as error:
        reason = str(error)
    if reason is None:
        return RuntimeChoice(
            runtime=value["runtime"],
            batch_tokens=value["batch_tokens"],
            threads=value["threads"],
            rows_per_s=_measured(value, "rows_per_s"),
            tokens_per_s=_measured(value, "tokens_per_s"),
            why="runtime.json",
        )
    instead = default_runtime(folder, task, device)
    log.warning(
        "The choice in %s is not used: %s. %s scores instead. To choose again: torchlake optimize %s --sample TABLE",
        path,
        reason.rstrip("."),
        instead.runtime,
        folder,
    )
    return instead


def lacks_export(folder: Path, runtime: Any, task: str) -> ModuleType | None:
    """Return the runtime's module if it has to `prepare` this model first, else None."""
    module: ModuleType | None = plugins.load("runtimes", runtime) if isinstance(runtime, str) else None
    if module is None or not hasattr(module, "prepare") or _exports.current(folder, runtime, task) is not None:
        return None
    return module


def write_choice(
    folder: Path,
    *,
    task: str,
    runtime: str,
    batch_tokens: int,
    threads: int,
    device: str,
    sample_rows: int,
    measured: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
) -> None:
    """Write the model's runtime.json. Raises StorageError if the folder cannot be written."""
    value = {
        "format": 1,
        "weights": folders.model_hash(folder),
        "task": task,
        "runtime": runtime,
        "batch_tokens": batch_tokens,
        "threads": threads,
        "device": device,
        "sample_rows": sample_rows,
        "measured": list(measured),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "machine": dict(machine),
    }
    atomic_io.write_json(folder / FILE, value, site="runtime.choice")


def _read(path: Path) -> dict[str, Any]:
    """Read and check the file. Raises DataError."""
    value = atomic_io.read_json(path)
    if not isinstance(value, dict) or value.get("format") != 1:
        raise DataError("its format is unknown; this version reads format 1")
    for name in ("runtime", "weights", "device"):
        if not isinstance(value.get(name), str):
            raise DataError(f"{name} is not a string; the file is damaged")
    for name in ("batch_tokens", "threads"):
        if type(value.get(name)) is not int or value[name] < 1:
            raise DataError(f"{name} is not an integer of 1 or more; the file is damaged")
    return value


def _measured(value: Mapping[str, Any], name: str) -> float | None:
    """Return a speed of the chosen candidate, if the file has it."""
    measured = value.get("measured")
    candidates = measured if isinstance(measured, list) else []
    chosen = next((one for one in candidates if isinstance(one, dict) and one.get("verdict") == "chosen"), {})
    rate = chosen.get(name)
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _why_not(
    folder: Path,
    task: str,
    value: Mapping[str, Any],
    device: Callable[[], str],
    *,
    pairs: bool,
    options: GenerationOptions | None,
) -> str | None:
    """Return why the recorded choice is not valid now, or None."""
    runtime = value["runtime"]
    if value["weights"] != folders.model_hash(folder):
        return "it was made for other weights: the model has changed since"
    if value.get("task", task) != task:
        return f"it was measured for the task {value['task']!r}"
    try:
        refuse_unable(runtime, task)
    except TorchlakeError as error:
        return str(error)
    reason = refusal(runtime, folder, task, pairs=pairs, options=options)
    if reason is not None:
        return f"the runtime {runtime!r} cannot run here: {reason}"
    if lacks_export(folder, runtime, task) is not None:
        return f"the export of the runtime {runtime!r} is missing, damaged or made from other weights"
    here = device()
    if value["device"] != here:
        return f"it was measured on {value['device']}, but this machine scores on {here}"
    return None


def worker_memory(model: str, devices: int = 1) -> int:
    """Return the memory that one process, with one rank for each of its devices, needs to score a model, in bytes."""
    return devices * WORKER_BYTES + 2 * folders.weight_bytes(Path(model))


def device() -> str:
    """Return "cuda" if torch finds a GPU, else "cpu"."""
    with plugins.without_collections():
        import torch
    return "cuda" if torch.cuda.is_available() else "cpu"
