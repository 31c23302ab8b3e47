"""launch: the user's own torch code as N ranks, on any engine; the equivalent of torchrun.

    launch(train, 1e-3, processes=2)                          a function; returns rank 0's value
    launch_script("train.py", ["--lr", "0.1"], processes=2)   a script, run as `python train.py --lr 0.1` in every rank
    launch_script("package.module:function", ["0.1"])         a function by name, called with the arguments as strings

RANK, WORLD_SIZE, MASTER_ADDR and the others are set in each rank, so `torch.distributed.init_process_group()` needs no
arguments.
"""

import functools
import importlib
import linecache
import os
import runpy
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torchlake.engines import Engine, ProcessRange, as_engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.processes.serialization import find_spec

Value = TypeVar("Value")


def launch(
    target: Callable[..., Value],
    *args: Any,
    engine: Engine | str | None = None,
    processes: ProcessRange | None = None,
    gpus_per_process: int = 0,
) -> Value:
    """Run `target(*args)` as `processes` ranks at the same time and return rank 0's value.

    `engine` is an engine or its name ("spark"); by default local. `processes` may be a range (fewest, most): as many
    ranks start as there is capacity for.

    Raises, as `Engine.launch` documents: RankFailed with the first failing rank's traceback, a rank's own
    TorchlakeError, Interrupted, UsageError.
    """
    if not callable(target):
        raise UsageError(f"launch takes a function, not {target!r}; for a script or a name, use launch_script.")
    running = as_engine(engine) or Local()
    value: Value = running.launch(target, *args, processes=processes, gpus_per_process=gpus_per_process)
    return value


def launch_script(
    target: str,
    args: Sequence[str] = (),
    *,
    engine: Engine | None = None,
    processes: int | None = None,
    gpus_per_process: int = 0,
    stdout_to_stderr: bool = False,
) -> Any:
    """Run "script.py" or "package.module:function" as N ranks; return rank 0's value, None for scripts.

    `stdout_to_stderr` applies to the default engine only. A script that calls sys.exit(0) succeeds; another status is a
    RankFailed naming the rank. Raises UsageError if there is no such script, module or function, and the errors of
    `launch`.
    """
    module, colon, function = target.partition(":")
    if colon and module and function and not os.path.exists(target):
        _check_module(module)
        job = functools.partial(_call_by_name, module, function, os.getcwd())
    else:
        job = functools.partial(_run_script, _check_script(target), Path(target).read_bytes())
    engine = engine or Local(stdout_to_stderr=stdout_to_stderr)
    return launch(job, *map(str, args), engine=engine, processes=processes, gpus_per_process=gpus_per_process)


def _check_script(target: str) -> str:
    if not Path(target).is_file():
        hint = "it is a folder" if Path(target).is_dir() else f"there is no such file in {os.getcwd()}"
        raise UsageError(
            f"{target}: {hint}. Name a script (train.py) or a function of a module (package.module:function)."
        )
    return target


def _check_module(name: str) -> None:
    if find_spec(name, [os.getcwd(), *sys.path]) is None:
        raise UsageError(
            f"{name}: no such module in {os.getcwd()} nor among the installed packages. Run from the folder that holds "
            "it, or install it."
        )


def _run_script(path: str, source: bytes, *args: str) -> None:
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


def _call_by_name(module: str, function: str, folder: str, *args: str) -> Any:
    """Import the function in a rank, as `python -m` in `folder` would find it, and call it."""
    sys.argv = [f"{module}:{function}", *args]
    sys.path.insert(0, folder)
    value: Any = importlib.import_module(module)
    for name in function.split("."):
        if not hasattr(value, name):
            close = get_close_matches(name, dir(value), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{module}:{function}: the module has no {name!r}.{hint}")
        value = getattr(value, name)
    if not callable(value):
        raise UsageError(f"{module}:{function} is {value!r}, not a function.")
    return value(*args)
