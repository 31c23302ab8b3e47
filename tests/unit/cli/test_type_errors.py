"""A value of the wrong type is refused in the same words on the command line, in a job file and in Python."""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

import torchlake as tl
from torchlake.cli.app import program
from torchlake.cli.main import main
from torchlake.config.arguments import check_arguments, plain_numbers
from torchlake.config.job import SECTIONS, load_job
from torchlake.config.measuring import EvaluateOptions
from torchlake.config.messages import _settings
from torchlake.config.options import PredictOptions
from torchlake.errors import ConfigError, TableError, TorchlakeError, UsageError

FOREIGN = re.compile(
    r"[Ii]nput (should|tag)|Value error|unable to parse|type=|valid (integer|number|string|boolean|list|dict)|"
    r"validation error|Field required|not supported between|NoneType|<class|_tag|another value"
)
"Words of pydantic, typer and Python."
VALUES = ("many", 3.5, -1, True, [1, {}], {"a": {"b": 1}}, None, [], {}, "x" * 300, 10**30)
COMMANDS: dict[str, Any] = program.commands  # type: ignore[attr-defined]


def wrong_options() -> Iterator[tuple[list[str], str]]:
    """Words of a command with an option of the wrong type, and that option."""
    for name, command in COMMANDS.items():
        required = [param for param in command.params if param.required]
        words = [name]
        for param in required:
            value = "onnx" if param.name == "format" else "2"
            words += [value] if param.param_type_name == "argument" else [param.opts[0], value]
        for param in command.params:
            if param.param_type_name != "option" or getattr(param, "is_flag", False):
                continue
            kind = inspect.signature(command.callback).parameters[param.name].annotation
            kinds = set(get_args(get_args(kind)[0] if get_args(kind) else kind)) or {kind}
            is_text = str in {get_args(kind)[0], *kinds} or list[str] in kinds
            if not is_text:
                yield [*words, param.opts[0], "many"], param.opts[0]


def test_no_option_shows_the_words_of_a_library(capfd: pytest.CaptureFixture[str]) -> None:
    found = 0
    for words, option in wrong_options():
        assert main(words) == 64, words
        shown = capfd.readouterr().err
        assert re.match(rf"error: {option}: expected .*, got 'many'", shown), (words, shown)
        assert not FOREIGN.search(shown), shown
        found += 1
    assert found > 50


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_setting_shows_the_words_of_a_library(value: Any) -> None:
    refused = 0
    for name in [name for section, model in SECTIONS.items() for name in _settings(model, section)]:
        sections: dict[str, Any] = {"data": {"train": "t"}, "model": {"base": "b"}}
        inner, *keys = [sections, *name.split(".")]
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        message = ""
        try:
            load_job(None, **sections)
        except ConfigError as error:
            message = str(error)
        refused += bool(message)
        assert not FOREIGN.search(message.partition(" got ")[0]), message
    assert refused > 20


def test_command_line_file_and_python_use_the_same_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "expected a whole number, got 'many'"
    file = tmp_path / "job.yaml"
    file.write_text("data: {train: t}\nmodel: {base: b}\ntrain:\n  epochs: many\n")
    for arguments, shown in {
        ("train", str(file)): f"error: {file}:4: train.epochs: {words}\n",
        ("train", "--set", "data.train=t", "--set", "model.base=b", "--set", "train.epochs=many"): (
            f"error: --set train.epochs=many: train.epochs: {words}\n"
        ),
        ("tune", str(file), "--space", "s.yaml", "--trials", "many"): f"error: --trials: {words}\n",
    }.items():
        assert main(arguments) in (64, 65)
        assert capfd.readouterr().err == shown
    with pytest.raises(ConfigError, match=f"^argument train: train.epochs: {words}$"):
        tl.train(data={"train": "t"}, model={"base": "b"}, train={"epochs": "many"})  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match=f"^chunk_rows: {words}$"):
        tl.predict("m", "t", "o", chunk_rows="many")  # type: ignore[call-overload]


def wrong_arguments() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], str]]:
    """The public functions with each argument that is a number, a switch, a text or one of some words."""
    from torchlake.config.measuring import OptimizeOptions
    from torchlake.config.options import GenerationArguments, PredictOptions, ReadArguments
    from torchlake.jobs.map import MapOptions

    options: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
        tl.predict: (("m", "t", "o"), get_type_hints(PredictOptions)),
        tl.map: ((lambda: None, "t", "o"), get_type_hints(MapOptions)),
        tl.evaluate: (("m", "t"), get_type_hints(ReadArguments)),
        tl.load: (("m",), get_type_hints(GenerationArguments)),
        tl.optimize: (("m", "t"), get_type_hints(OptimizeOptions)),
        tl.plan: ((), {}),
    }
    for function, (given, more) in options.items():
        for name, kind in {**function.__annotations__, **more}.items():
            kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
            if kinds and all(one in (bool, int, float) for one in kinds) and name != "return":
                yield function.__name__, function, given, name


def test_no_argument_of_a_function_shows_the_words_of_python() -> None:
    found = 0
    for function, call, given, name in wrong_arguments():
        required = {"schema": {"n": "int64"}} if function == "map" else {}
        with pytest.raises(TorchlakeError) as error:
            call(*given, **required, **{name: "many"})
        assert re.match(rf"{name}: expected (a whole number|a number|true or false), got 'many'$", str(error.value)), (
            function,
            name,
            str(error.value),
        )
        found += 1
    assert found > 30


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    from torchlake.config.arguments import check_arguments

    kinds = {"rows": int, "share": float, "limit": int | None}
    check_arguments({"rows": np.int64(3), "share": np.float32(0.5), "limit": None}, kinds)
    check_arguments({"share": 1}, kinds)
    for name, value in {"rows": True, "share": True, "limit": 2.0}.items():
        with pytest.raises(UsageError, match=f"^{name}: expected a"):
            check_arguments({name: value}, kinds)


def test_numbers_of_numpy_are_written_as_those_of_python(tiny_model: Path, tmp_path: Path) -> None:
    import numpy as np

    pq.write_table(pa.table({"text": ["a good film", "bad", "dull"]}), tmp_path / "t.parquet")
    options: dict[str, Any] = {
        "limit": 2,
        "sample": 1.0,
        "seed": 3,
        "batch_tokens": 500,
        "max_length": 20,
        "chunk_rows": 1,
    }
    given = {name: np.float64(value) if name == "sample" else np.int64(value) for name, value in options.items()}
    done = tl.predict(tiny_model, tmp_path / "t.parquet", tmp_path / "out", **given)
    again = tl.predict(tiny_model, tmp_path / "t.parquet", tmp_path / "out", **options)
    assert (done.rows_out, again.record) == (2, done.record)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": ""}, "key: expected the name of a column, got ''"),
        ({"key": ["id"]}, "key: expected the name of a column, got ['id']"),
        ({"columns": None}, "columns: expected names of columns, got null"),
        ({"columns": ["id", 1]}, "columns: expected names of columns, got ['id', 1]"),
        ({"text": 1}, "text: expected names of columns, got 1"),
        ({"text": []}, "text: names no column; leave it out, or name one."),
        ({"csv": ["delimiter=;"]}, "csv: expected a mapping, got ['delimiter=;']"),
        ({"task_options": [1]}, "task_options: expected a mapping, got [1]"),
    ],
)
def test_columns_and_mappings_of_another_type_are_named(given: dict[str, Any], words: str, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(words)}$"):
        tl.predict(tiny_model, "t.csv", "o", **given)


@pytest.mark.parametrize("given", [{"text": 1}, {"text": []}, {"label": ["label"]}])
def test_columns_of_evaluate_are_names(given: dict[str, Any], tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(given))}: (expected|names no column)"):
        tl.evaluate(tiny_model, "t.csv", **given)


@pytest.mark.parametrize("given", [{"columns": None}, {"key": ["id"]}, {"key": ""}, {"text": 1}, {"text": []}])
def test_columns_of_a_job_of_an_endpoint_are_names(given: dict[str, Any]) -> None:
    named: dict[str, Any] = {"runtime": "http", "endpoint": "https://a.example/v1", "model_name": "m", **given}
    with pytest.raises(UsageError, match=f"^{next(iter(given))}: (expected|names no column)"):
        tl.predict(None, "t.csv", "out", **named)


def test_options_may_be_left_out_as_none() -> None:
    left_out = dict.fromkeys(("text_pair", "partition_by", "inputs", "report", "slices"))
    check_arguments(left_out, {**PredictOptions.__annotations__, **EvaluateOptions.__annotations__})


def test_numbers_of_numpy_may_be_in_lists_and_mappings() -> None:
    import numpy as np

    found = plain_numbers({"stop_token_ids": [np.int64(5)], "request_options": {"a": (np.float32(0.5), "b")}})
    assert json.dumps(found) == '{"stop_token_ids": [5], "request_options": {"a": [0.5, "b"]}}'


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (tl.predict, {"runtime": ["eager"]}, "runtime: expected a name or a function, got ['eager']"),
        (tl.predict, {"stop": 5}, "stop: expected a string, or several, got 5"),
        (tl.predict, {"stop": ["a", 5]}, "stop: expected a string, or several, got ['a', 5]"),
        (tl.predict, {"choices": 5}, "choices: expected a string, or several, got 5"),
        (tl.predict, {"grammar": 5}, "grammar: expected a string or a path, got 5"),
        (tl.predict, {"stop_token_ids": ["a"]}, "stop_token_ids: expected a whole number, or several, got ['a']"),
        (tl.evaluate, {"runtime": 5}, "runtime: expected a name or a function, got 5"),
        (tl.evaluate, {"inputs": ["text"]}, "inputs: expected a mapping, got ['text']"),
        (tl.evaluate, {"text": 5}, "text: expected names of columns, got 5"),
        (tl.evaluate, {"label": ["a"]}, "label: expected a string, got ['a']"),
        (tl.evaluate, {"report": True}, "report: expected a string or a path, got true"),
        (tl.optimize, {"text": 5}, "text: expected names of columns, got 5"),
        (tl.load, {"task_options": 5}, "task_options: expected a mapping, got 5"),
    ],
)
def test_lists_functions_and_paths_of_another_type_are_named(
    function: Callable[..., Any], given: dict[str, Any], words: str, tiny_model: Path
) -> None:
    table = {tl.predict: ("t.csv", "o"), tl.load: ()}.get(function, ("t.csv",))
    with pytest.raises(UsageError, match=f"^{re.escape(words)}$"):
        function(tiny_model, *table, **given)


@pytest.mark.parametrize("table", [None, 5, [None], b"t.csv", dataset.dataset(pa.table({"text": ["a"]}))])
def test_what_is_no_table_is_named(table: Any, tiny_model: Path, tmp_path: Path) -> None:
    kind = type(table[0] if isinstance(table, list) else table).__name__
    with pytest.raises(TableError, match=f"^{kind}: is not a table"):
        tl.predict(tiny_model, table, tmp_path / "out")


def test_columns_of_map_are_names(tmp_path: Path) -> None:
    for given in ({"key": ""}, {"key": ["id"]}, {"columns": [None]}):
        with pytest.raises(UsageError, match=r"^(key|columns): expected names of columns"):
            tl.map(dict, "t.csv", tmp_path / "out", schema={"n": pa.int64()}, **given)  # type: ignore[arg-type]


def worker() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: batch


@pytest.mark.parametrize("value", [3, [1], {"a": 1}, b"x", 1.5], ids=repr)
def test_a_value_of_another_type_as_a_place_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    one = pa.table({"text": ["a"]})
    calls: list[Callable[[], Any]] = [
        lambda: tl.train(value),
        lambda: tl.train(run=value, data={"train": "x"}, model={"base": "x"}),
        lambda: tl.train(load_job(None, data={"train": "x"}, model={"base": "x"}), data=3),
        lambda: tl.plan(value),
        lambda: tl.tune(value, space={}, trials=1),
        lambda: tl.load(value),
        lambda: tl.serve(value),
        lambda: tl.serving.app(value),
        lambda: tl.optimize(value, one),
        lambda: tl.export(value, tmp_path, format="onnx"),
        lambda: tl.predict(value, one, tmp_path / "out"),
        lambda: tl.predict(tmp_path, one, value),
        lambda: tl.map(worker, one, value, schema={"a": pa.int64()}),
        lambda: tl.map(worker, one, tmp_path / "out", schema=3),  # type: ignore[arg-type]
        lambda: tl.evaluate(value, one),
        lambda: tl.compare(value, value),
        lambda: tl.compare(value, value, table=one),
        lambda: tl.verify(value),
        lambda: tl.open(value),
        lambda: tl.report(value),
    ]
    for call in calls:
        with pytest.raises((ConfigError, UsageError), match=r"expected .*, got "):
            call()


def test_a_space_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("data: {train: x}\nmodel: {base: x}\n")
    with pytest.raises(ConfigError, match="a search space is a mapping of settings"):
        tl.tune(job, space=[1], trials=1, run=tmp_path / "run")  # type: ignore[arg-type]


def test_compared_folders_may_be_urls_of_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="~no_such_user/run: has no "):
        tl.compare("~no_such_user/run", tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}: has no ")):
        tl.compare(tmp_path.as_uri(), tmp_path.as_uri())
