"""Common parts of the exporting runtimes: requirements, the export's folder, and versions."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from torchlake.errors import UsageError, pip_install
from torchlake.models import exports, folders
from torchlake.processes import hardware
from torchlake.runtimes import first_reason

MAX_WEIGHT_BYTES = 2_000_000_000
"An ONNX file is a protocol buffer, which is limited to 2 GiB."


def refusal(folder: Path, *, extra: str, libraries: tuple[str, ...], quantized: bool = False) -> str | None:
    """Return why the model cannot be exported, or its export (`quantized`: in 8 bits) not run here, or None."""
    size = folders.weight_bytes(folder)
    missing = next((library for library in libraries if find_spec(library) is None), None)
    return first_reason(
        model=f"its weights take {size / 1e9:.1f} GB, but an ONNX file holds 2 GB: use 'varlen' or 'eager'"
        if size > MAX_WEIGHT_BYTES
        else None,
        machine=hardware.int8_refusal() if quantized else None,
        library=missing and f"the library {missing!r} is not installed: {pip_install(f'torchlake[{extra}]')}",
    )


def export_folder(folder: Path, name: str, *, calibrated: bool, task: str) -> Path:
    """Return the folder of the runtime's export. Raises UsageError if there is none for these weights."""
    export = exports.current(folder, name, task)
    if export is None:
        why = ", calibrated on rows like those to score" if calibrated else ""
        raise UsageError(
            f"{folder}: there is no export of these weights for the runtime {name!r}. Make one{why}: "
            f"torchlake optimize {folder} --sample TABLE"
        )
    return export


def versions(*libraries: str) -> dict[str, str]:
    """Return the versions of these libraries, torch and transformers."""
    return {library: version(library) for library in (*libraries, "torch", "transformers")}
