"""A script in every rank, as `python script.py` would run it; the driver's file is the one that runs everywhere."""

import linecache
import os
import runpy
import secrets
import sys
import tempfile
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType

from torchlake.errors import UsageError


def check_script(target: str) -> str:
    if not Path(target).is_file():
        hint = "it is a folder" if Path(target).is_dir() else f"there is no such file in {os.getcwd()}"
        raise UsageError(
            f"{target}: {hint}. Name a script (train.py) or a function of a module (package.module:function)."
        )
    return target


def run_script(path: str, source: bytes, *args: str) -> None:
    """Run `path` in a rank as `python path *args` would, but without exiting.

    `source` is what runs on every rank, even if another machine has a different file at that path.
    """
    folder = os.path.dirname(os.path.realpath(path))
    sys.argv = [path, *args]
    sys.path.insert(0, folder)
    if os.path.isfile(path) and Path(path).read_bytes() == source:
        runpy.run_path(path, run_name="__main__")
        return
    with tempfile.TemporaryDirectory(prefix="torchlake-launch-") as copies:
        name = f"launched_{secrets.token_hex(4)}"
        copy = Path(copies, f"{name}.py")
        copy.write_bytes(source)
        main = ModuleType("__main__")
        main.__file__ = path if os.path.isdir(folder) else str(copy)
        # Processes that the script spawns import it again by this name.
        main.__spec__ = spec_from_file_location(name, copy)
        main.__package__ = ""
        sys.path.append(copies)
        # For tracebacks and `inspect`; without an mtime linecache does not read the path again.
        linecache.cache[path] = (len(source), None, decode_source(source).splitlines(keepends=True), path)
        before = sys.modules["__main__"]
        sys.modules["__main__"] = main
        try:
            exec(compile(source, path, "exec", dont_inherit=True), vars(main))
        finally:
            sys.modules["__main__"] = before
