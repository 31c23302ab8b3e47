"""The JSON Schema of a job file: it describes every setting, and accepts what the loader accepts."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from sweeps import examples
from torchlake.cli.main import main
from torchlake.config.job import SECTIONS, Job, load_job
from torchlake.config.schema import job_schema
from torchlake.config.yaml import read_yaml
from torchlake.errors import TorchlakeError

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {"data": {"train": "reviews.parquet"}, "model": {"base": "encoder"}}
SCHEMA = job_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def models(model: type[BaseModel] = Job) -> Iterator[type[BaseModel]]:
    """A job and every model below it."""
    yield model
    for field in model.model_fields.values():
        pending: list[Any] = [field.annotation]
        while pending:
            one = pending.pop()
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from models(one)
            pending += get_args(one)


def places(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The dotted name of every setting, and of the mappings around them."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for nested in (field.annotation, *get_args(field.annotation)):
            if isinstance(nested, type) and issubclass(nested, BaseModel):
                yield from places(nested, (*prefix, name))


PLACES = sorted(set(places(Job)) - {("data",), ("model",)})


def problems(value: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in VALIDATOR.iter_errors(value)]


def with_value(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    job = inner = {name: dict(section) for name, section in GOOD.items()}
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    return job


def test_it_is_a_schema_and_the_command_prints_it(capfd: pytest.CaptureFixture[str]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert main(["schema"]) == 0
    assert json.loads(capfd.readouterr().out) == SCHEMA
    assert main(["schema", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == SCHEMA


@pytest.mark.parametrize("model", dict.fromkeys(models()), ids=lambda model: model.__name__)
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    for name, field in model.model_fields.items():
        assert field.description is not None
        assert field.description.endswith((".", ":")), name


def test_the_descriptions_are_in_the_schema() -> None:
    described = SCHEMA["$defs"]["TrainConfig"]["properties"]["activation_checkpointing"]["description"]
    assert described.startswith("Recompute each layer's activations")
    assert "\n" not in described
    assert SCHEMA["$defs"]["ModelConfig"]["properties"]["max_length"]["anyOf"][0]["minimum"] == 2


def job_texts() -> Iterator[tuple[str, str]]:
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]):
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            value = yaml.safe_load(block)
            if isinstance(value, dict) and value.keys() & SECTIONS.keys():
                yield f"{page.relative_to(ROOT)}:{number}", block
    jobs = [path for path in ROOT.glob("examples/**/*.yaml") if path.parent.name != "serve"]  # it has Kubernetes' files
    for path in sorted([*jobs, *ROOT.glob("tests/**/*.yaml")]):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in job_texts()])
def test_the_jobs_of_the_documents_are_valid(text: str, tmp_path: Path) -> None:
    value = {**GOOD, **yaml.safe_load(text)}  # a document may show some sections of a job
    assert problems(value) == []
    load_job(None, **value)


def test_the_documents_have_jobs() -> None:
    assert len(list(job_texts())) >= 3


VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        -1,
        0.5,
        1e-4,
        600,
        2**70,
        "",
        "a",
        "1e-4",
        "5",
        " 5 ",
        "+.5",
        "5.0",
        "1_0",
        "yes",
    ),
    *(
        "10min",
        "0.5 h",
        " 1 H ",
        "30SEC",
        "200steps",
        "1 Step",
        "epoch",
        " EPOCH",
        "0s",
        "auto",
        "local",
        "ddp",
        "balanced",
    ),
    *([], [1], [2, 8], [8, 2], [1, 2, 3], ["a"], ["a", ""], {}, {"fraction": 0.1}, {"fraction": "1e-1"}, {"a": 2}),
    *({"fraction": 2}, {"a": "2"}, {"rank": 4}, {"unknown": 1}, "single_label", "constant", "fp16", "drop", "PACK"),
    *("all", "barrier", "placement_group", "text_classification", "adamw", "dpo", "gaussian", "exact_match"),
]


@settings(max_examples=examples(300, quick=50))
@given(
    st.sampled_from(PLACES),
    st.one_of(
        st.sampled_from(VALUES),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text("0123456789.eE+-_ minhstep", max_size=8),
        st.lists(st.integers(0, 9), max_size=3),
    ),
)
@example(("train",), None)
@example(("train", "learning_rate"), "1e-4")
@example(("train", "collective_timeout"), 600)
def test_what_the_loader_accepts_the_schema_accepts(place: tuple[str, ...], value: Any) -> None:
    job = with_value(place, value)
    text = yaml.safe_dump(job)
    read, _ = read_yaml(text, "job.yaml")
    try:
        load_job(None, **{name: section for name, section in read.items() if section is not None})
    except TorchlakeError:
        return
    assert problems(read) == [], text


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_setting_accepts_some_of_the_values_and_refuses_others(place: tuple[str, ...]) -> None:
    """The schema is no wildcard: it refuses most of what the loader refuses."""
    loaded = {index for index, value in enumerate(VALUES) if loads(with_value(place, value))}
    valid = {index for index, value in enumerate(VALUES) if VALIDATOR.is_valid(with_value(place, value))}
    assert loaded <= valid, [VALUES[index] for index in loaded - valid]
    assert loaded
    assert len(valid) < len(VALUES) * 0.8


def loads(job: Mapping[str, Any]) -> bool:
    try:
        load_job(None, **{name: section for name, section in job.items() if section is not None})
    except TorchlakeError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learnin_rate: 1}", "'learnin_rate' was unexpected"),
        ("train: {epochs: many}", "does not match"),
        ("train: {checkpoint_every: 5}", "is not of type 'string'"),
        ("train: {precision: fp8}", "is not one of"),
        ("train: {compile: 'yes'}", "is not of type 'boolean'"),
        ("train: {strategy: dpp}", "is not one of"),
        ("data: {text: a}", "'train' is a required property"),
    ],
)
def test_mistakes_are_found(text: str, message: str) -> None:
    errors = [detail for error in VALIDATOR.iter_errors({**GOOD, **yaml.safe_load(text)}) for detail in deep(error)]
    assert any(message in detail for detail in errors), errors


def deep(error: Any) -> Iterator[str]:
    yield error.message
    for inner in error.context:
        yield from deep(inner)


@pytest.mark.parametrize("compile_", ["true", "false"])
def test_a_text_is_no_boolean(compile_: str) -> None:
    assert load_job(None, [f"train.compile={compile_}"], **GOOD).train.compile is (compile_ == "true")
    with pytest.raises(TorchlakeError, match=r"train\.compile: expected true or false, got 'true'"):
        load_job(None, ['train.compile="true"'], **GOOD)
