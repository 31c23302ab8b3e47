"""Find and load plug-ins. A plug-in is a file in the folder of its kind; the file is the registration.

    engines/    where Python runs                   strategies/   how ranks share a model
    tasks/      what a model predicts               runtimes/     what executes a forward pass when scoring
    tables/sources/   kinds of tables that are read     outputs/targets/   kinds of outputs

Files whose names begin with an underscore are helpers, not plug-ins. A task may also be an entry point of an installed
package (group `torchlake.tasks`), or be given in Python: then this process and those that it starts find it by name.
"""

import gc
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Literal

from torchlake.errors import MissingExtra, UsageError, pip_install

Kind = Literal["engines", "strategies", "tasks", "runtimes", "sources", "targets"]
GROUP = "torchlake.tasks"
"The entry point group of tasks."

_given: dict[str, Any] = {}
"Tasks given in Python, by name."


@contextmanager
def without_collections() -> Iterator[None]:
    """Import in the block without collecting garbage: libraries allocate so much that it takes a seventh of time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Return the sorted names of the plug-ins of one kind that come with torchlake, without importing them."""
    package = find_spec(_package(kind))
    assert package is not None
    found = (module.name for module in pkgutil.iter_modules(package.submodule_search_locations))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def explain_unknown(kind: Kind, name: str, *, besides: Collection[str] = ()) -> str | None:
    """Return a message for a name that no plug-in has, with the nearest name and all choices; None for a known name.

    `besides` are other allowed names.
    """
    known = [*besides, *names(kind)]
    if kind == "tasks" and name not in known:
        known = sorted({*known, *_given, *_installed()})
    if name in known:
        return None
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    own = " Give your own task in Python (task=), or install the package that has it." if kind == "tasks" else ""
    return f"there is no {_one(kind)} {name!r}.{hint}{own} {kind.capitalize()}: {', '.join(known)}."


def load(kind: Kind, name: str) -> Any:
    """Return the module of a plug-in, or the object of a task.

    Raises UsageError with the choices for an unknown name, MissingExtra with the pip command for a missing library.
    """
    problem = explain_unknown(kind, name)
    if problem is not None:
        raise UsageError(problem[0].upper() + problem[1:])
    if kind == "tasks" and name not in names(kind):
        return _given[name] if name in _given else _from_entry_point(name)
    try:
        module = importlib.import_module(f"{_package(kind)}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchlake"):
            raise
        raise MissingExtra(
            f"The {_one(kind)} {name!r} needs the library {error.name!r}, which is not installed: "
            f"{pip_install(f'torchlake[{name}]')}"
        ) from error
    return module.task if kind == "tasks" else module


def give(task: Any) -> str:
    """Register a task in this process, and return its name. A later one of the same name replaces it.

    Raises UsageError for an object that is not a task, and for the name of an installed task.
    """
    name = getattr(task, "name", None)
    if isinstance(task, type) or not isinstance(name, str) or not hasattr(task, "loss_sum"):
        hint = f"; give an instance: {task.__name__}()" if isinstance(task, type) else ""
        raise UsageError(f"task={task!r} is not an instance of a subclass of torchlake.Task{hint}.")
    if task is _given.get(name):
        return name
    if name in names("tasks") or (name in _installed() and type(_from_entry_point(name)) is not type(task)):
        raise UsageError(
            f"There is already a task {name!r}. Give yours another name (the attribute `name` of its class)."
        )
    _given[name] = task
    return name


def carried(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that another process that runs it has the task of that name, if it was given in Python."""
    return partial(_knowing, _given[name], function) if name in _given else function


def _knowing(task: Any, function: Callable[..., Any], *args: Any) -> Any:
    _given[task.name] = task
    return function(*args)


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of tasks of installed packages, by name; this imports none of them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def _from_entry_point(name: str) -> Any:
    """Return the task of an entry point: an instance, or a class that is called without arguments."""
    entry = _installed()[name]
    value = entry.load()
    task = value() if isinstance(value, type) else value
    if getattr(task, "name", None) != name:
        raise UsageError(
            f"The entry point {name!r} of {GROUP} ({entry.value}) has the name {getattr(task, 'name', None)!r}; both "
            "must be equal, because model folders store the name."
        )
    return task


def _one(kind: Kind) -> str:
    return "strategy" if kind == "strategies" else kind.removesuffix("s")


def _package(kind: Kind) -> str:
    return {"sources": "torchlake.tables.sources", "targets": "torchlake.outputs.targets"}.get(
        kind, f"torchlake.{kind}"
    )
