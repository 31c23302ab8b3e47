"""The reference pages, and the types of Python arguments, are what `make reference` writes from the code."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import arguments  # noqa: E402
import reference  # noqa: E402


def test_the_pages_agree_with_the_code() -> None:
    written = {name: (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") for name in reference.PAGES}
    stale = [name for name, made in reference.PAGES.items() if written[name] != reference.page(name, made)]
    assert stale == [], "run `make reference`"


def test_the_types_of_python_arguments_are_those_of_the_models() -> None:
    assert arguments.FILE.read_text(encoding="utf-8") == arguments.text(), "run `make reference`"
    fields = {f"{model.__name__}.{name}" for model in arguments._models() for name in model.model_fields}
    assert fields >= arguments.GIVEN.keys()


def test_a_missing_meaning_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"without a meaning \['b'\], not in the code \['c'\]"):
        reference.described({"a", "b"}, {"a": "A.", "c": "C."}, "COLUMNS")


def test_error_reasons_are_found() -> None:
    assert {"null_input", "bad_csv", "killed_process", "timeout"} <= set(reference.error_reasons())
