"""Every result of a public function prints as one line or a short table, and as harmless HTML in a notebook.

The classes are found from the annotations of the public functions, so a new result is tested without being named here.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
import torchlake as tl
from sweeps import examples
from torchlake.display import LINES
from torchlake.scoring.in_process import Model

WIDEST = 120
LONG = 5_000
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'&amp;&#60;",
    "two\nlines\r\nand\ttabs\u2028",
    "\x1b[31mred\x00\x7f",
    "\u202eright to left",
    "\ud800",
    "",
    "x" * LONG,
    "<" * LONG,
    "\n" * LONG,
]
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=20)


class _Modules(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Foreign(metaclass=_Modules):
    """Stands for a class of another library that is imported for type checkers only, and for its module."""


class _Names(dict[str, Any]):
    """The names in a module's annotations; what is imported for type checkers only is looked up among public names."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(importlib.import_module(module)))

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest looks for its own names in the frames of an error
            raise KeyError(name)
        return getattr(tl, name) if name in tl.__all__ else vars(typing).get(name, Foreign)


def hints(value: Any) -> dict[str, Any]:
    """The annotations of a function or a class, resolved."""
    return typing.get_type_hints(value, localns=_Names(value.__module__))


def own_classes(hint: Any) -> Iterator[type]:
    """The classes of torchlake in an annotation."""
    if isinstance(hint, type) and hint.__module__.startswith("torchlake"):
        yield hint
    for inner in typing.get_args(hint):
        yield from own_classes(inner)


def elements(cls: type) -> Iterator[type]:
    """The classes of torchlake that people find in the lists of a result."""
    if dataclasses.is_dataclass(cls):
        for hint in hints(cls).values():
            for inner in typing.get_args(hint):
                yield from own_classes(inner)


def results() -> dict[str, type]:
    """Whatever public functions return, what is in their lists, and the public classes of values."""
    public = [getattr(tl, name) for name in tl.__all__ if name not in ("errors", "__version__")]
    functions = [each for each in public if inspect.isfunction(each)]
    returned = [hints(one)["return"] for each in functions for one in (each, *typing.get_overloads(each))]
    todo = [cls for hint in returned for cls in own_classes(hint)]
    todo += [each for each in public if isinstance(each, type) and (dataclasses.is_dataclass(each) or each is tl.Job)]
    found: dict[str, type] = {}
    while todo:
        cls = todo.pop()
        if cls.__name__ not in found:
            found[cls.__name__] = cls
            todo += elements(cls)
    return found


RESULTS = results()


@functools.cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation; texts and paths are hostile."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXTS,
        Any: TEXTS,
        Path: TEXTS.map(Path),
        bool: st.booleans(),
        int: st.integers(-1, 10**18),
        float: st.floats(),
        types.NoneType: st.none(),
        tl.Job: jobs(),
    }
    if hint in simple:
        return simple[hint]
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=LINES + 5)
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(values_of, inner))
    if origin in (list, tuple):
        many = st.lists(values_of(inner[0]), max_size=3) | st.builds(
            lambda value: [value] * (LINES + 5), values_of(inner[0])
        )
        return many if origin is list else many.map(tuple)
    assert dataclasses.is_dataclass(hint), hint
    built = st.builds(hint, **{name: values_of(each) for name, each in hints(hint).items()})
    return built.map(square) if hint is tl.Evaluation else built


def square(value: tl.Evaluation) -> tl.Evaluation:
    """The evaluation with a matrix of as many rows and columns as it has labels."""
    matrix = [[10**number for number, _ in enumerate(value.labels)] for _ in value.labels]
    return dataclasses.replace(value, confusion=None if value.confusion is None else matrix)


@functools.cache
def jobs() -> st.SearchStrategy[tl.Job]:
    names = TEXTS.filter(lambda text: text.strip() and text.isprintable()) | st.just("<script>" * 500)
    return st.builds(
        lambda text, label: tl.Job(
            data={"train": "https://user:secret@host/<b>.csv", "text": text, "label": label},
            model={"base": "tiny"},
        ),
        names,
        names.map(lambda name: f"label {name}"),
    )


class Tags(HTMLParser):
    """Checks that a page has the tags of a table only, and that they are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "b", "table", "tr", "th", "td")
        assert attributes in ([], [("style", "text-align:left")], [("style", "text-align:right")])
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def check(value: Any) -> None:
    name, text = type(value).__name__, repr(value)
    assert str(value) == text
    lines = text.split("\n")
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDEST
    assert all(line.isprintable() for line in lines)
    assert re.match(rf"{name}\(.*\)$", lines[0])
    text.encode()
    page = value._repr_html_()
    assert page.startswith(f"<div><b>{name}</b> ")
    assert len(page.encode()) < 50_000
    Tags(page)


def test_the_results_are_found() -> None:
    assert RESULTS.keys() >= {
        *("Candidate", "Diagnosis", "Evaluation", "Folds", "Job", "Mapped", "Metric", "Model", "Optimized", "Plan"),
        *("Run", "Scored", "StrategyPlan", "Trial", "Tuning", "Verification"),
    }


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_every_result_is_shown(name: str) -> None:
    assert hasattr(RESULTS[name], "_repr_html_"), f"{name}: decorate it with torchlake.display.shown"


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - {"Model"}))
@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow], max_examples=examples(25, quick=8))
@given(data=st.data())
def test_whatever_it_holds_is_short_and_escaped(name: str, data: st.DataObject) -> None:
    check(data.draw(values_of(RESULTS[name])))


def test_a_job_shows_no_secret() -> None:
    job = tl.Job(data={"train": "https://user:secret@host/t.csv", "text": "t", "label": "l"}, model={"base": "tiny"})
    assert "secret" not in repr(job) + job._repr_html_()  # type: ignore[attr-defined]
    assert "data.train  https://[redacted]@host/t.csv" in repr(job)


def test_a_loaded_model_is_shown(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tiny.build_model(tmp_path / '<b>"long"' / ("x" * 200), encoder=tiny_bert)
    model = tl.load(folder)
    check(model)
    assert repr(model).startswith("Model(text_classification, 2 classes, ")
    model.close()
    check(model)
    assert ", closed -> " in repr(model)
    assert isinstance(model, Model)


def test_results_read_well() -> None:
    scored = tl.Scored(
        path=Path("scored"),
        rows_in=1400,
        rows_out=1400,
        rows_failed=3,
        seconds=2.0,
        rows_per_s=700.0,
        record={"schema": "QUFB" * 500},
        errors={"null_input": 2, "timeout": 1},
        profile={},
        example=None,
    )
    assert repr(scored).splitlines() == [
        "Scored(1,400 rows, 3 failed -> scored)",
        "error       rows",
        "null_input     2",
        "timeout        1",
    ]
    clean = dataclasses.replace(scored, rows_failed=0, errors={}, quarantined=(("a.parquet", "bad"),))
    assert repr(clean) == "Scored(1,400 rows, 0 failed, 1 file skipped -> scored)"
    measured = tl.Evaluation(
        rows=400,
        failed=3,
        errors={"null_label": 3},
        metrics={
            "accuracy": tl.Metric(value=0.95, low=0.9, high=1.0),
            "loss": tl.Metric(value=math.nan, low=0, high=1),
        },
        confusion=[[200, 17], [3, 177]],
        labels=("bad", "good"),
        resamples=1000,
    )
    assert repr(measured).splitlines() == [
        "Evaluation(400 rows, 3 left out (null_label 3))",
        "metric     value  95 % interval",
        "accuracy  0.9500  0.9000 to 1.0000",
        "loss         nan  0.0000 to 1.0000",
        "",
        "label \\ predicted  bad  good",
        "bad                200    17",
        "good                 3   177",
    ]
    assert repr(tl.Metric(value=0.95, low=0.9, high=1.0)) == "Metric(0.9500, 0.9000 to 1.0000)"


@pytest.mark.parametrize("name", [name for name in tl.__all__ if isinstance(getattr(tl, name), type)])
def test_no_public_class_prints_an_address(name: str) -> None:
    cls = getattr(tl, name)
    assert issubclass(cls, Exception) or cls.__repr__ is not object.__repr__


def test_engines_and_tasks_print_their_names() -> None:
    assert repr(tl.Local(2)) == "Local(processes=2)"
    assert repr(tl.Task()) == "Task()"
