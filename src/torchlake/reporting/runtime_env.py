"""Runtimes with an interpreter of their own: what it needs, and whether it is there. Installs nothing."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlake import atomic_io, plugins
from torchlake.errors import UsageError


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
    file, lines = Path(path), "".join(f"{one}\n" for one in requirements)
    if file.exists() and file.read_text(encoding="utf-8") != lines:
        raise UsageError(f"{file}: there is a file with other lines. Name a new one.")
    atomic_io.write_bytes(file, lines.encode(), site="requirements")
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
