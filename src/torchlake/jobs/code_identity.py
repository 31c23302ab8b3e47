"""The identity of a user's function: the same code continues a job, and other code is refused.

The sha256 is over everything that the function computes with, not over its text or its pickle, which differ between
processes:

    own function       its bytecode and constants, defaults, closure, and the globals that it reads
    own class          its bases, methods and attributes
    installed code     its name; the versions of libraries are in the commit record
    other values       what pickle stores for them

Own code is all code outside the standard library and site-packages. Comments, formatting and line numbers do not count.
Bytecode belongs to one minor version of Python, so that version is part of the identity. Cost: one walk over the
functions that are reached, milliseconds for a script.
"""

import copyreg
import dis
import functools
import hashlib
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torchlake.errors import UsageError

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
INSTALLED = {"site-packages", "dist-packages"}
ADVICE = (
    "Make it inside the function, or give the function a version (version='1') that you change with every change of "
    "the function."
)
NO_CODE = (GetSetDescriptorType, MemberDescriptorType)

Seen = dict[int, tuple[int, Any]]
"The number of each visited function, class and object, by id, and the object itself, so that its id is not reused."


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's module and name, such as "jobs:make_worker"; for a partial or object, those of its code."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def code_identity(function: Callable[..., Any], version: str | None) -> dict[str, str]:
    """Return what identifies a function in a fingerprint: its name with `version`, or with the sha256 of its code.

    Without a version, raises UsageError if the function reads a value that cannot be compared.
    """
    name = {"function": function_name(function)}
    if version is not None:
        return {**name, "version": version}
    try:
        text = _canonical(function, {})
    except RecursionError:
        raise UsageError(
            f"{name['function']} reads a list or mapping that contains itself, or is nested too deeply to be compared. "
            f"{ADVICE}"
        ) from None
    minor = ".".join(platform.python_version_tuple()[:2])
    return {**name, "code": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), "python": minor}


def _canonical(value: Any, seen: Seen) -> str:
    """Return a string that is equal for equal values in any process."""
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(_canonical(item, seen) for item in value)})"
    if type(value) is dict:
        return f"dict({', '.join(f'{_canonical(key, seen)}: {_canonical(item, seen)}' for key, item in value.items())})"
    if type(value) in (set, frozenset):
        return f"set({', '.join(sorted(_canonical(item, dict(seen)) for item in value))})"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, NO_CODE):
        return "descriptor"
    if id(value) in seen:
        return f"seen {seen[id(value)][0]}"
    seen[id(value)] = len(seen), value
    if isinstance(value, CodeType):
        return _canonical(_parts_of_code(value), seen)
    if isinstance(value, FunctionType | type):
        name = f"{value.__module__}.{value.__qualname__}"
        if not _is_own(value.__module__):
            return name
        parts = _parts_of_class(value) if isinstance(value, type) else _parts_of_function(value)
        return f"{name} {_canonical(parts, seen)}"
    return f"{type(value).__qualname__} {_canonical(_parts_of_object(value), seen)}"


def _is_own(module: str | None) -> bool:
    """Return whether a module is the user's code rather than installed."""
    top = (module or "__main__").partition(".")[0]
    if top in sys.stdlib_module_names or top == "torchlake":
        return top == "__main__"
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not INSTALLED & set(Path(file).parts)


def _parts_of_code(code: CodeType) -> list[Any]:
    arguments = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return [code.co_code, code.co_exceptiontable, list(code.co_consts), arguments, names]


def _parts_of_function(function: FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # the cell is not assigned yet
            cells.append(...)
    read = {name: function.__globals__[name] for name in _read_globals(function) if name in function.__globals__}
    attributes = _attributes(function.__code__)
    for name, value in list(read.items()):
        if isinstance(value, ModuleType) and _is_own(value.__name__):
            read |= {f"{name}.{one}": vars(value)[one] for one in sorted(attributes & vars(value).keys())}
    return [function.__code__, function.__defaults__, function.__kwdefaults__, cells, read]


def _parts_of_class(cls: type) -> list[Any]:
    kept = {
        name: value
        for name, value in sorted(vars(cls).items())
        if isinstance(value, FunctionType | staticmethod | classmethod) or not name.startswith(("__", "_abc"))
    }
    return [list(cls.__bases__), kept]


def _parts_of_object(value: Any) -> list[Any]:
    """Return what pickle would store; for objects around functions, these functions."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, BuiltinFunctionType):
        return [value.__qualname__, value.__self__]
    if hasattr(value, "__wrapped__"):  # of functools.lru_cache
        return [value.__wrapped__]
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        raise UsageError(
            f"The function reads a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared "
            f"between runs ({error}). {ADVICE}"
        ) from error
    if isinstance(reduced, str):
        return [type(value).__module__, reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _read_globals(function: FunctionType) -> list[str]:
    """Return the names of the globals that a function or one inside it reads, sorted."""
    steps = (step for code in _codes(function.__code__) for step in dis.get_instructions(code))
    return sorted({step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def _attributes(code: CodeType) -> set[str]:
    """Return the names of the attributes that a function or one inside it reads."""
    return {name for one in _codes(code) for name in one.co_names}


def check_takes_nothing(make_worker: Any, what: str, example: str) -> None:
    """Raise UsageError unless `make_worker` can be called without arguments."""
    problem = None
    if not callable(make_worker):
        problem = f"is a {type(make_worker).__name__}"
    else:
        try:
            inspect.signature(make_worker).bind()
        except TypeError as error:
            problem = f"cannot be called without arguments ({error})"
        except ValueError:  # a function in C without a signature
            return
    if problem is not None:
        raise UsageError(f"{what} {problem}. It is called once in each process and returns the function: {example}.")
