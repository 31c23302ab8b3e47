"""`runtime-env`: the requirements of an environment for a runtime with an interpreter of its own. Installs nothing."""

import os
import shlex
from pathlib import Path

from torchlake import atomic_io, plugins
from torchlake.cli.display import Outcome
from torchlake.errors import UsageError


def runtime_env(runtime: str, path: str) -> Outcome:
    """Write a requirements file with the versions that were tested with a runtime, and return how to install it.

    Raises UsageError for a runtime without an interpreter of its own, and for a file that exists with other lines.
    """
    module = plugins.load("runtimes", runtime)
    if not hasattr(module, "REQUIREMENTS"):
        own = [name for name in plugins.names("runtimes") if hasattr(plugins.load("runtimes", name), "REQUIREMENTS")]
        raise UsageError(
            f"The runtime {runtime!r} runs in torchlake's interpreter; with one of their own: {', '.join(own)}."
        )
    file, lines = Path(path), "".join(f"{one}\n" for one in module.REQUIREMENTS)
    if file.exists() and file.read_text(encoding="utf-8") != lines:
        raise UsageError(f"{file}: there is a file with other lines. Name a new one.")
    atomic_io.write_bytes(file, lines.encode(), site="requirements")
    folder = f"/opt/{runtime}"
    commands = [
        f"python3 -m venv {folder}",
        f"{folder}/bin/pip install -r {shlex.quote(os.fspath(file))}",
        f"torchlake doctor --runtime {runtime} --runtime-python {folder}/bin/python",
    ]
    shown = [
        f"{file}: {', '.join(module.REQUIREMENTS)}",
        "To install it, for example:",
        *(f"  {one}" for one in commands),
    ]
    return Outcome(values={"file": file, "requirements": module.REQUIREMENTS, "commands": commands}, lines=shown)


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
        raise UsageError(
            f"--runtime {runtime}: it runs in torchlake's interpreter, whose versions are shown without it."
        )
    path = python or os.environ.get(variable)
    if not path:
        raise UsageError(f"--runtime {runtime}: name its interpreter by --runtime-python PATH or {variable}.")
    return {"python": path, **module.versions(path, imported=True)}
