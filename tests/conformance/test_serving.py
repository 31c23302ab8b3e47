"""Every task that is served, on every runtime, answers 64 clients at once as `predict` does.

Lengths of 1 to 512 tokens and beyond, pairs, nulls, empty texts, invalid Unicode and duplicates, in any company.
"""

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
import torchlake as tl
from serving_runs import Running, running
from sweeps import examples, sweep
from torchlake import plugins
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet

CLIENTS = 64
LONGEST = 512
LENGTHS = (1, 2, 3, 9, 16, 31, 33, 64, 127, 200, 256, 300, 400, 509, 510, 511, 512, 600, 3000)
ODD = [
    "",
    " \n",
    "\ud800",
    "good \udfff film",
    "\0",
    "\u202egood\u200b film",
    "caf\u00e9 \U0001f44d\U0001f3fd",
    "a" * 700,
]
HEADS = {
    "token_classification": ("BertForTokenClassification", ["O", "B-PER", "I-PER"]),
    "question_answering": ("BertForQuestionAnswering", []),
    "zero_shot_classification": ("BertForSequenceClassification", ["contradiction", "neutral", "entailment"]),
}
SPEC = replace(tiny.SPEC, max_length=LONGEST)
SPECS = {
    "text_classification": SPEC,
    "multi_label": replace(SPEC, problem="multi_label", labels=("x", "y", "z")),
    "regression": replace(SPEC, problem="regression", labels=(), text="query", text_pair="passage"),
}
OPTIONS = {"zero_shot_classification": {"candidate_labels": ["good", "bad film"]}}
KINDS = (*SPECS, *HEADS, "feature_extraction", "image_classification")
QUICK = ("text_classification", "varlen")
"Of the others a start of a server, and for some an export, takes seconds."


def texts() -> list[str | None]:
    """Texts of all lengths, odd ones, and some of them again."""
    drawn, words = np.random.default_rng(0), [*tiny.GOOD, *tiny.BAD, *tiny.OTHER]
    found: list[str | None] = [" ".join(drawn.choice(words, length).tolist()) for length in LENGTHS]
    return [*found, *ODD, None, found[5], found[12]]


def rows_of(kind: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Rows of a kind of model: of pairs each text stands with itself, and with one that is far from it."""
    if kind == "image_classification":
        files = [each["bytes"] for each in tiny.digits(12)["image"].to_pylist()]
        return [(file,) for file in [*files, None, b"no image", b"", tiny.huge_png(), files[3][:90], files[2]]]
    firsts = texts()
    if len(columns) == 1:
        return [(text,) for text in firsts]
    return [(text, other) for at, text in enumerate(firsts) for other in (text, firsts[at - 11])]


def build(kind: str, folder: Path) -> Path:
    """A model folder of a kind."""
    if kind == "image_classification":
        tiny.build_vision(folder)
        with quiet():
            transformers.ViTForImageClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
        return folder
    if kind == "feature_extraction":
        return tiny.build_embedder(folder, max_length=LONGEST, positions=LONGEST)
    encoder = tiny.build_encoder(folder.with_name(f"{kind}-encoder"), positions=LONGEST)
    if kind in SPECS:
        return tiny.build_model(folder, encoder=encoder, spec=SPECS[kind])
    name, labels = HEADS[kind]
    options: dict[str, Any] = {"id2label": dict(enumerate(labels))} if labels else {}
    with quiet():
        getattr(transformers, name).from_pretrained(encoder, **options).save_pretrained(folder)
    for file in encoder.glob("token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("served")
    return cache(lambda kind: build(kind, parent / kind))


@pytest.fixture
def server(folder_of: Callable[[str], Path], kind: str, runtime: str) -> Iterator[Running]:
    folder, found = folder_of(kind), plugins.load("runtimes", runtime)
    reason = found.refusal(folder)
    if reason is not None:
        pytest.skip(f"{runtime}: {reason}")
    if getattr(found, "CALIBRATED", False):
        numbers = [np.full((4, length), 9 + at, np.int64) for at, length in enumerate((3, 40, 300, LONGEST))]
        found.prepare(folder, load_spec(folder), [(ids, np.ones_like(ids)) for ids in numbers])
    load: dict[str, Any] = {"runtime": runtime, "task_options": OPTIONS.get(kind)}
    with running(folder, load=load if kind not in HEADS else {**load, "task": kind}) as made:
        yield made


def cases() -> list[tuple[str, str]]:
    """Every kind of model with every runtime that computes its task."""
    found = []
    for kind in KINDS:
        task = "text_classification" if kind in SPECS else kind
        for name in plugins.names("runtimes"):
            runtime = plugins.load("runtimes", name)
            if (runtime.tasks is None or task in runtime.tasks) and task not in runtime.never:
                found.append((kind, name))
    return found


def predicted(server: Running, rows: list[tuple[Any, ...]], runtime: str) -> list[dict[str, Any]]:
    """The answers of predict. Arrow makes no string of what is not Unicode, but takes the bytes for one."""
    spec, columns = server.service.model.spec, {}
    for name, values in zip(spec.input_columns, zip(*rows, strict=True), strict=True):
        files = [each.encode(errors="surrogatepass") if isinstance(each, str) else each for each in values]
        column = pa.array(files, pa.binary())
        columns[name] = column.view(pa.string()) if any(isinstance(each, str) for each in values) else column
    options = {"task": spec.task, "task_options": dict(spec.options) or None, "runtime": runtime}
    table = pa.table(columns)
    answers = tl.predict(server.service.source, table, max_error_rate=1.0, **options)
    found: list[dict[str, Any]] = answers.drop_columns(table.column_names).to_pylist()
    return found


def same(found: Any, expected: Any, tolerance: float) -> bool:
    """The company of a row changes the rounding of its numbers only."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name], tolerance) for name in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*each, tolerance) for each in zip(found, expected, strict=True))
    return found == (pytest.approx(expected, abs=tolerance) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(("kind", "runtime"), sweep(cases(), quick=[QUICK]))
def test_any_company_of_64_clients_has_the_answers_of_predict(server: Running, kind: str, runtime: str) -> None:
    columns = server.service.model.spec.input_columns
    rows = rows_of(kind, columns)
    expected = predicted(server, rows, runtime)
    assert {None} < {each["error"] for each in expected}
    plain = [[base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in row] for row in rows]
    tolerance = max(1e-5, plugins.load("runtimes", runtime).TOLERANCE / 10)
    request = st.lists(st.integers(0, len(rows) - 1), max_size=8)

    async def ask(client: httpx.AsyncClient, chosen: list[int]) -> Any:
        body = {"dataframe_split": {"columns": columns, "data": [plain[at] for at in chosen]}}
        response = await client.post("/invocations", content=json.dumps(body))
        assert response.status_code == 200, response.text
        return response.json()["predictions"]

    async def together(requests: list[list[int]]) -> list[Any]:
        limits = httpx.Limits(max_connections=CLIENTS)
        options: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 200, "limits": limits}
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, **options) as client:
            return await asyncio.gather(*(ask(client, chosen) for chosen in requests))

    @settings(max_examples=examples(30, quick=2), suppress_health_check=list(HealthCheck))
    @given(st.lists(request, min_size=CLIENTS, max_size=CLIENTS))
    def check(requests: list[list[int]]) -> None:
        answers = asyncio.run(together(requests))
        for chosen, found in zip(requests, answers, strict=True):
            assert same(found, [expected[at] for at in chosen], tolerance), chosen

    check()
    assert same(asyncio.run(together([[at] for at in range(len(rows))])), [[each] for each in expected], tolerance)
