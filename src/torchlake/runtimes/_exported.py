"""What the runtimes that export a model share: what they need, what they find, and the threads they may use."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from torchlake.errors import UsageError
from torchlake.models import exports, folders

MAX_WEIGHT_BYTES = 2_000_000_000
"An ONNX file is a protocol buffer, which holds 2 GiB."


def refusal(folder: Path, *, extra: str, libraries: tuple[str, ...]) -> str | None:
    """Why the model of `folder` cannot be exported with what is installed here; None when nothing speaks against it."""
    for library in libraries:
        if find_spec(library) is None:
            return f"the library {library!r} is not installed: pip install 'torchlake[{extra}]'"
    size = folders.weight_bytes(folder)
    if size > MAX_WEIGHT_BYTES:
        return f"its weights take {size / 1e9:.1f} GB, and an ONNX file holds 2 GB: take 'varlen', or 'eager'"
    return None


def export_folder(folder: Path, name: str, *, calibrated: bool) -> Path:
    """The folder of the runtime's export. Raises UsageError with the remedy when none was made of these weights."""
    export = exports.current(folder, name)
    if export is None:
        why = ", calibrated on rows like those to score" if calibrated else ""
        raise UsageError(
            f"{folder}: holds no export for the runtime {name!r} of these very weights. Make it{why}: "
            f"torchlake optimize {folder} --sample TABLE"
        )
    return export


def check_cpu(name: str, device: str) -> None:
    """Raise UsageError for a GPU."""
    if device != "cpu":
        raise UsageError(f"The runtime {name!r} runs on CPUs only; on a GPU take 'varlen' or 'compiled'.")


def versions(*libraries: str) -> dict[str, str]:
    """The versions of the libraries that make an export, torch and transformers among them."""
    return {library: version(library) for library in (*libraries, "torch", "transformers")}


def threads() -> int:
    """Threads of one process: OMP_NUM_THREADS, as in torch; without it every core that it may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
