"""Find and load plug-ins. A plug-in is a file in the folder of its kind; the file is the registration.

    engines/    where Python runs                   strategies/   how ranks share a model
    tasks/      what a model predicts               runtimes/     what executes a forward pass when scoring
    tables/sources/   kinds of tables that are read     tables/sinks/   kinds of outputs

Files whose names begin with an underscore are helpers, not plug-ins.
"""

import importlib
import pkgutil
from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

from torchlake.errors import MissingExtra, UsageError

Kind = Literal["engines", "strategies", "tasks", "runtimes", "sources", "sinks"]
ONE: dict[Kind, str] = {
    "engines": "engine",
    "strategies": "strategy",
    "tasks": "task",
    "runtimes": "runtime",
    "sources": "source",
    "sinks": "sink",
}


def names(kind: Kind) -> list[str]:
    """The names of one kind's plug-ins, sorted. Imports neither the plug-ins nor their package."""
    package = find_spec(_package(kind))
    assert package is not None
    found = (module.name for module in pkgutil.iter_modules(package.submodule_search_locations))
    return sorted(name for name in found if not name.startswith("_"))


def explain_unknown(kind: Kind, name: str, *, besides: Collection[str] = ()) -> str | None:
    """A message for a name that no plug-in has, with the nearest name and all choices; None for a known name.

    besides: other allowed names.
    """
    known = [*besides, *names(kind)]
    if name in known:
        return None
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"there is no {ONE[kind]} {name!r}.{hint} {kind.capitalize()}: {', '.join(known)}."


def load(kind: Kind, name: str) -> ModuleType:
    """The module of a plug-in.

    Raises UsageError with the choices for an unknown name, MissingExtra with the pip command for a missing library.
    """
    problem = explain_unknown(kind, name)
    if problem is not None:
        raise UsageError(problem[0].upper() + problem[1:])
    try:
        return importlib.import_module(f"{_package(kind)}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchlake"):
            raise
        raise MissingExtra(
            f"The {ONE[kind]} {name!r} needs the library {error.name!r}, which is not installed: "
            f"pip install 'torchlake[{name}]'"
        ) from error


def _package(kind: Kind) -> str:
    return f"torchlake.tables.{kind}" if kind in ("sources", "sinks") else f"torchlake.{kind}"
