"""Finding plug-ins: a plug-in is a file in its kind's folder, and the file is its registration.

    engines/    Engine subclasses          strategies/   how ranks share a model
    tasks/      what a model is asked      runtimes/     what executes a forward pass when scoring

Files that begin with an underscore are their neighbours' helpers, not plug-ins.
"""

import importlib
import pkgutil
from difflib import get_close_matches
from types import ModuleType
from typing import Literal

from torchlake.errors import MissingExtra, UsageError

Kind = Literal["engines", "strategies", "tasks", "runtimes"]


def names(kind: Kind) -> list[str]:
    """The plug-ins of one kind, sorted; none of them is imported."""
    package = importlib.import_module(f"torchlake.{kind}")
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(kind: Kind, name: str) -> ModuleType:
    """The module of one plug-in.

    Raises UsageError listing the choices for an unknown name, MissingExtra with the pip line when its library is
    absent.
    """
    known = names(kind)
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{kind}: there is no {name!r}.{hint} Choose from: {', '.join(known)}.")
    try:
        return importlib.import_module(f"torchlake.{kind}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchlake"):
            raise
        raise MissingExtra(
            f"{kind}/{name} needs the library {error.name!r}, which is not installed: pip install 'torchlake[{name}]'"
        ) from error
