"""Serialize what processes exchange: functions by cloudpickle, failures as plain text.

A function of a module that the other process can import is sent by name; one of a script, a notebook or a module loaded
from elsewhere is sent by value. Exceptions are never sent as objects, because unpickling runs their class, which the
parent may not have: they are sent as a `Failure`, and TorchlakeErrors are rebuilt from it by name.
"""

import functools
import os
import pickle
import reprlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle

from torchlake import errors
from torchlake.errors import RankFailed, TorchlakeError, UsageError

_LAUNCHING = tuple(f"torchlake.launching.{name}" for name in ("groups", "scripts", "by_name"))
_OURS = ("torchlake.processes.child", *_LAUNCHING, "runpy")
LOST = -1000
"Exit code of a process whose machine or executor was lost."
_registering = threading.Lock()  # cloudpickle's list of modules to pickle by value is one per process


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as plain values. `when` is the time.time() of its machine when it was caught."""

    kind: str
    message: str
    traceback: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    when: float = field(default_factory=time.time)


def pack(*values: Any) -> bytes:
    """Return the tuple `values` as bytes for `pickle.loads`. Raises UsageError if one cannot be pickled."""
    foreign = [module for module in _modules(values) if not _importable(module)]
    with _registering:
        for module in foreign:
            cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(values))
        except Exception as error:
            users = next((one for one in values if getattr(one, "__module__", None) not in _OURS), values[0])
            name = getattr(users, "__qualname__", reprlib.repr(users))
            raise UsageError(
                f"{name} cannot be sent to another process: {error}. "
                "Pass plain values and file names, and open sessions, files and locks inside the function."
            ) from error
        finally:
            for module in foreign:
                cloudpickle.unregister_pickle_by_value(module)


def unpack(message: bytes) -> Any:
    """Return a value packed by a child. Raises RankFailed if this process cannot import its class."""
    try:
        return pickle.loads(message)
    except Exception as error:
        raise RankFailed(
            f"the result of a process cannot be read here: {type(error).__name__}: {error}. Return plain values, or "
            "make its class importable on the machine that starts the job.",
            rank=0,
        ) from error


def _modules(values: Iterable[Any]) -> Iterator[ModuleType]:
    """Return the modules that define `values`, including parts of partial functions and owners of methods."""
    seen: dict[str, ModuleType] = {}
    queue = list(values)
    while queue:
        value = queue.pop()
        if isinstance(value, functools.partial):
            queue += [value.func, *value.args, *value.keywords.values()]
        elif hasattr(value, "__self__") and not isinstance(value.__self__, ModuleType):
            queue.append(value.__self__)
        name = getattr(value, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not None and name not in ("__main__", "builtins"):
            seen[module.__name__] = module
    return iter(seen.values())


def _importable(module: ModuleType) -> bool:
    """Return whether another process with this sys.path would import the same file."""
    spec = find_spec(module.__name__)
    file = getattr(module, "__file__", None)
    if spec is None or file is None or spec.origin is None or not spec.has_location:  # built in or frozen
        return spec is not None
    return bool(os.path.realpath(file) == os.path.realpath(spec.origin))


def find_spec(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Return the spec that `import name` would find on `path` (default: sys.path), without importing the module."""
    parts = name.split(".")
    spec: ModuleSpec | None = None
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        found = (finder.find_spec(part, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is None or (end < len(parts) and spec.submodule_search_locations is None):
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return spec


def to_failure(error: BaseException) -> Failure:
    """Return `error` as a Failure, with a traceback that starts at the user's first frame."""
    known = next((cls.__name__ for cls in type(error).__mro__ if _known(cls.__name__) is cls), type(error).__name__)
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_globals.get("__name__") in _OURS:
        inner = inner.tb_next
    plain = {key: value for key, value in vars(error).items() if isinstance(value, str | int | float | None)}
    try:
        message = str(error)
    except Exception:
        message = "(the message cannot be shown)"
    return Failure(
        kind=known,
        message=message,
        traceback="".join(traceback.format_exception(type(error), error, inner)),
        fields=plain,
    )


def to_exception(failure: Failure, *, rank: int, who: str) -> TorchlakeError:
    """Return the exception to raise for `failure`: the TorchlakeError itself, or RankFailed for anything else."""
    cls = _known(failure.kind)
    if cls is not None:
        error = cls.__new__(cls, failure.message)
        error.args = (failure.message,)
        vars(error).update(failure.fields)
        return error
    if failure.kind == "SystemExit":
        message = f"{who} {rank} called sys.exit({failure.message})"
    else:
        message = f"{who} {rank} failed with {failure.kind}: {failure.message}\n\n{failure.traceback}".rstrip()
    return RankFailed(message, rank=rank, traceback=failure.traceback)


def _known(name: str) -> type[TorchlakeError] | None:
    cls = getattr(errors, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, TorchlakeError) else None


def signal_of(code: int) -> int | None:
    """Return the signal behind an exit code."""
    return -code if LOST < code < 0 else None


def describe_exit(code: int) -> str:
    """Describe an exit code: "was killed by SIGKILL (...)" or "ended with exit code 3"."""
    if code == LOST:
        return "was lost with the process that had started it (an executor or actor was killed, or its machine failed)"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {
        signal.SIGKILL: " (out of memory? see the kernel log)",
        signal.SIGSEGV: " (a crash in native code; its stack is on stderr)",
        signal.SIGABRT: " (native code gave up; its reason is on stderr)",
        signal.SIGBUS: " (a crash in native code, or /dev/shm is full)",
    }
    return f"was killed by {name}{hints.get(-code, '')}"  # type: ignore[call-overload]
