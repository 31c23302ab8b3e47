"""A function of a module in every rank, by its name; its arguments are strings."""

import importlib
import os
import sys
from difflib import get_close_matches
from typing import Any

from torchlake.errors import UsageError
from torchlake.processes.serialization import find_spec


def check_module(name: str) -> None:
    if find_spec(name, [os.getcwd(), *sys.path]) is None:
        raise UsageError(
            f"{name}: no such module in {os.getcwd()} nor among the installed packages. Run from the folder that holds "
            "it, or install it."
        )


def call_by_name(module: str, function: str, folder: str, *args: str) -> Any:
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
