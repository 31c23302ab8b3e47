"""What counts as the same function, in other processes too."""

import functools
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from torchlake.errors import UsageError
from torchlake.jobs.code_identity import code_identity, function_name


def code_of(text: str, name: str = "make") -> str:
    """The identity of the function `name` in a module with this text."""
    namespace: dict[str, Any] = {"__name__": "own_module"}
    exec(textwrap.dedent(text), namespace)
    return code_identity(namespace[name], None)["code"]


BASE = """
    import re
    LIMIT = 3
    WORDS = {"a", "b", "c"}
    PATTERN = re.compile("x+")
    def helper(x, by=1):
        return x + by
    class Model:
        SIZE = 4
        @property
        def size(self):
            return self.SIZE
        @staticmethod
        def twice(x):
            return helper(2 * x)
        def __call__(self, x):
            return self.twice(x) + LIMIT
    def make():
        model = Model()
        return lambda batch: [model(x) for x in batch if x in WORDS and x in {"d", "e", "f"} and PATTERN.match(x)]
"""
CHANGES = {
    "a constant": ("LIMIT = 3", "LIMIT = 4"),
    "a set": ('"a", "b", "c"', '"a", "b"'),
    "a set in the code": ('"d", "e", "f"', '"d", "e"'),
    "a helper": ("x + by", "x - by"),
    "a default": ("by=1", "by=2"),
    "a method": ("helper(2 * x)", "helper(3 * x)"),
    "a class attribute": ("SIZE = 4", "SIZE = 5"),
    "a property": ("return self.SIZE", "return 2 * self.SIZE"),
    "a pattern": ('"x+"', '"y+"'),
    "the inner function": ("model(x) for", "model(x) + 1 for"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_it_computes_with_is_another_function(change: str) -> None:
    before, after = CHANGES[change]
    assert BASE.count(before) == 1
    assert code_of(BASE.replace(before, after)) != code_of(BASE)


def test_comments_blank_lines_and_code_that_it_does_not_reach_do_not_count() -> None:
    commented = BASE.replace("    LIMIT = 3", "\n\n    # how many\n    LIMIT = 3\n    OTHER = 1")
    assert code_of(commented) == code_of(BASE)


def test_it_is_the_same_in_processes_with_other_hash_seeds(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(BASE)
        + "from torchlake.jobs.code_identity import code_identity\nprint(code_identity(make, None))\n"
    )
    variables = {"PYTHONPATH": ":".join(sys.path)}
    found = {
        subprocess.run(
            [sys.executable, path], env={**variables, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_modules_of_ones_own_count_and_installed_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    codes = set()
    for text in ("def clean(x):\n    return x.strip()\n", "def clean(x):\n    return x.lower()\n"):
        (tmp_path / "cleaning_of_text.py").write_text(text)
        monkeypatch.delitem(sys.modules, "cleaning_of_text", raising=False)
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            codes.add(code_of("import cleaning_of_text\ndef make():\n    return lambda b: cleaning_of_text.clean(b)"))
            codes.add(code_of("from cleaning_of_text import clean\ndef make():\n    return lambda b: clean(b)"))
        finally:
            sys.dont_write_bytecode = before
    assert len(codes) == 4
    monkeypatch.setattr(pa, "table", len)
    assert code_of("import pyarrow as pa\ndef make():\n    return pa.table") == code_of(
        "import pyarrow as pa\ndef make():\n    return pa.table"
    )


def closed_over(value: Any) -> Callable[[], Any]:
    return lambda: value


class Config:
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, True),
        (1.0, 1),
        ("1", b"1"),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(3) + 1),
        (pa.schema({"a": pa.int8()}), pa.schema({"a": pa.int16()})),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (Config(1), Config(2)),
        (Path("a"), Path("b")),
        (len, max),
        (functools.partial(closed_over, 1), functools.partial(closed_over, 2)),
    ],
)
def test_what_a_function_closes_over_counts(one: Any, other: Any) -> None:
    assert code_identity(closed_over(one), None) == code_identity(closed_over(one), None)
    assert code_identity(closed_over(one), None) != code_identity(closed_over(other), None)


def test_values_that_cannot_be_compared_need_a_version() -> None:
    with pytest.raises(UsageError, match=r"reads a _thread\.lock.*version='1'"):
        code_identity(closed_over(threading.Lock()), None)
    found = code_identity(closed_over(threading.Lock()), "7")
    assert found == {"function": f"{__name__}:closed_over.<locals>.<lambda>", "version": "7"}


def test_cycles_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        code_identity(closed_over(loop), None)
    text = "def a(x):\n    return b(x)\ndef b(x):\n    return a(x)\ndef make():\n    return a"
    assert code_of(text) == code_of(text)


def test_the_name_of_a_partial_or_an_object_is_that_of_its_code() -> None:
    assert function_name(functools.partial(closed_over, 1)) == f"{__name__}:closed_over"
    assert function_name(Config) == f"{__name__}:Config"
