"""What each route answers: the values of `predict`, in the forms of MLflow, TEI and OpenAI, and refusals in words."""

import base64
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BertForSequenceClassification, ViTForImageClassification

import tiny
import torchlake as tl
from scoring_runs import near
from serving_runs import Running, running
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet
from torchlake.serving.asgi import routes
from torchlake.serving.exchange import Refused
from torchlake.serving.protocols.rows import _from_parquet, _others, without_data
from training_runs import Inline

TEXTS = ["good film", "a bore", "", "good " * 200, "\ud800", "good film"]
SECRET = "unrepeatable"
FIELDS = ["inputs", "instances", "dataframe_split", "columns", "data", "text", "texts", "query", "input", "parameters"]


@pytest.fixture(scope="module")
def classes(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, name="reviews", max_rows=40, max_body="64KB") as server:
        yield server


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny.build_embedder(tmp_path_factory.mktemp("models") / "embedder")
    prompts = {"prompts": {"query": "good "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with running(folder) as server:
        yield server


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Iterator[Running]:
    spec = replace(tiny.SPEC, problem="regression", labels=(), text="query", text_pair="passage")
    folder = tiny.build_model(tmp_path_factory.mktemp("models") / "pairs", encoder=tiny_bert, spec=spec)
    with running(folder) as server:
        yield server


def predicted(server: Running, columns: dict[str, list[Any]], **options: Any) -> list[dict[str, Any]]:
    """The rows of predict."""
    table = pa.table(columns)
    return tl.predict(server.service.source, table, **options).drop_columns(table.column_names).to_pylist()


def test_rows_are_those_of_predict_in_every_form(classes: Running) -> None:
    expected = predicted(classes, {"text": ["" if text == "\ud800" else text for text in TEXTS]})
    expected[4]["error"] = "bad_utf8"
    records = [{"text": text, "n": at} for at, text in enumerate(TEXTS)]
    forms = [
        {"instances": TEXTS},
        {"instances": records},
        {"inputs": TEXTS},
        {"inputs": {"text": TEXTS, "n": list(range(6))}},
        {"dataframe_records": records},
        {"dataframe_split": {"columns": ["n", "text"], "data": [[at, text] for at, text in enumerate(TEXTS)]}},
    ]
    for form in forms:
        response = classes.client.post(
            "/invocations", content=json.dumps(form), headers={"content-type": "application/json"}
        )
        assert response.status_code == 200, response.text
        assert near(response.json(), {"predictions": expected}), form.keys()
    plain = [text for text in TEXTS if text != "\ud800"]
    expected.pop(4)
    content = "text,n\n" + "".join(f'"{text}",1\n' for text in plain)
    response = classes.client.post("/invocations", content=content, headers={"content-type": "text/csv; charset=utf-8"})
    assert near(response.json(), {"predictions": expected})
    pq.write_table(pa.table({"n": range(5), "text": plain}), buffer := io.BytesIO())
    headers = {"content-type": "application/vnd.apache.parquet"}
    response = classes.client.post("/invocations", content=buffer.getvalue(), headers=headers)
    assert near(response.json(), {"predictions": expected})
    assert classes.post("/invocations", {"instances": []}).json() == {"predictions": []}


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        ("text\ngood\n\nbad\n", [None, "null_input", None]),
        ("\r\ntext\r\ngood\r\n", [None]),
        ("\ufefftext\n\n", ["null_input"]),
        ("n,text\n1,good\n\n2,\n", [None, "null_input"]),
        ("n,text\n1,good\n2,caf\udce9\n3,bad\n", [None, "bad_utf8", None]),
        ("n,text\n\udce9,good\n", [None]),
    ],
)
def test_lines_of_csv_are_rows_as_in_predict(
    classes: Running, tmp_path: Path, content: str, errors: list[str | None]
) -> None:
    body = content.encode("utf-8", "surrogateescape")
    response = classes.client.post("/invocations", content=body, headers={"content-type": "text/csv"})
    assert [row["error"] for row in response.json()["predictions"]] == errors
    (tmp_path / "in.csv").write_bytes(body)
    options: dict[str, Any] = {"engine": Inline(), "max_error_rate": 1.0}
    tl.predict(classes.service.source, str(tmp_path / "in.csv"), tmp_path / "out", **options)
    assert pq.read_table(tmp_path / "out")["error"].to_pylist() == errors


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of"),
        ({"instances": ["a"], "inputs": ["b"]}, "it has instances, inputs"),
        ({"instances": ["a"], SECRET: 1}, "it has instances"),
        ({"instances": ["a"], "params": {"x": 1}}, "params: not supported"),
        ({"instances": ["a", 7]}, "row 1, column 'text': expected a string, got a number"),
        ({"instances": ["a", {"text": SECRET}]}, "instances, row 1: an object"),
        ({"instances": [{"body": SECRET}]}, "there is no column 'text'"),
        (
            {"dataframe_split": {"columns": ["text"], "data": [["a"], [SECRET, SECRET]]}},
            "row 1: expected a list of 1 values",
        ),
        ({"dataframe_split": {"columns": ["text", "text"], "data": [["a", SECRET]]}}, "a list of different names"),
        ({"dataframe_split": {"columns": ["text"], "data": [["a"]], SECRET: 1}}, "dataframe_split: expected columns"),
        ({"dataframe_split": {"columns": ["text"], "data": [["a"]], "index": [1, 2]}}, "as many values in index"),
        ({"inputs": {"text": SECRET}}, "expected a list of values for each column"),
        ([SECRET], "must be a JSON object"),
    ],
    ids=str,
)
def test_invalid_rows_are_refused_without_their_content(classes: Running, body: Any, words: str) -> None:
    response = classes.post("/invocations", body)
    assert response.status_code == 400
    assert response.json()["error_code"] == "BAD_REQUEST"
    assert words in response.json()["message"]
    assert SECRET not in response.text


def test_a_row_of_parquet_that_is_not_unicode_is_an_error_of_its_row(classes: Running) -> None:
    texts = pa.array([b"caf\xe9", b"good film", None], pa.binary()).view(pa.string())
    headers = {"content-type": "application/vnd.apache.parquet"}
    response = classes.client.post("/invocations", content=parquet(texts), headers=headers)
    assert [row["error"] for row in response.json()["predictions"]] == ["bad_utf8", None, "null_input"]


def test_errors_of_rows_do_not_repeat_the_row() -> None:
    spec = replace(tiny.SPEC, inputs={"numbers": ("it's", "age")})
    for error, words in {
        f'bad_number: "it\'s" is {SECRET!r}': 'bad_number: "it\'s"',
        f"bad_number: 'age' is {SECRET!r}": "bad_number: 'age'",
        'bad_number: "it\'s" is ": \'age\' is y"': 'bad_number: "it\'s"',
        f"ValueError: {SECRET}": "ValueError",
        "too_long: 70 tokens": "too_long: 70 tokens",
    }.items():
        assert without_data(error, spec) == words
    with pytest.raises(Refused, match="^row 1, column 'age': expected a number, got an object$"):
        _others("age", [1, {SECRET: 1}], {}, number=True)


def parquet(*columns: pa.Array) -> bytes:
    table = pa.Table.from_arrays(columns, ["text"] * len(columns))
    pq.write_table(table, buffer := io.BytesIO(), compression="zstd", dictionary_pagesize_limit=1 << 23)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_parquet_files_that_would_grow_are_refused(classes: Running, kind: pa.DataType) -> None:
    once = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array(["a" * 3_000_000], kind))
    for values in (once, once.cast(kind)):
        body, headers = parquet(values), {"content-type": "application/vnd.apache.parquet"}
        assert len(body) < 10_000
        response = classes.client.post("/invocations", content=body, headers=headers)
        assert (response.status_code, "much larger than the body" in response.text) == (413, True)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/csv", b"text,text\na,b\n"),
        ("text/csv", b"text,\xff\na,b\n"),
        ("text/csv", b"text,\na,b\n"),
        ("text/csv", b"text,n\na\n"),
        ("text/csv", b""),
        ("text/csv", b'text\ngood\n"bad\nfine\n'),  # to predict a bad row: its quotes are not closed
        ("text/csv", b'text\n"a" b\n'),
        ("application/x-parquet", b"PAR1"),
        ("application/x-parquet", parquet(pa.array(["a"]), pa.array(["b"]))),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_tables_that_cannot_be_read_are_mistakes_of_the_client(classes: Running, kind: str, body: bytes) -> None:
    response = classes.client.post("/invocations", content=body, headers={"content-type": kind})
    assert (response.status_code, response.json()["error_code"]) == (400, "BAD_REQUEST")


def as_json(strings: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.json_(strings.type), strings)


@pytest.mark.parametrize(
    "values",
    [
        lambda: pa.array(["a" * 1_700_000] * 40, pa.string_view()),
        lambda: pa.array([["a" * 1_700_000]] * 40),
        lambda: pa.array([{"bytes": b"a" * 1_700_000, "path": None}] * 40),
        lambda: pa.array([["a"] * 2_000_000]),
        lambda: as_json(pa.array(["a" * 1_700_000] * 40)),
        lambda: pa.ListArray.from_arrays(pa.array(range(41), pa.int32()), as_json(pa.array(["a" * 1_700_000] * 40))),
        lambda: pa.array([[("a", "a" * 1_700_000)]] * 40, pa.map_(pa.string(), pa.string())),
    ],
    ids=["view", "list", "struct", "many", "json", "list of json", "map"],
)
def test_parquet_files_that_would_grow_in_other_types_are_refused(
    classes: Running, values: Callable[[], pa.Array]
) -> None:
    body, headers = parquet(values()), {"content-type": "application/vnd.apache.parquet"}
    assert len(body) < 10_000
    response = classes.client.post("/invocations", content=body, headers=headers)
    assert (response.status_code, "more than 64" in response.text or "much larger" in response.text) == (413, True)


def test_only_the_columns_that_are_read_count(classes: Running) -> None:
    """Also beside one whose name begins with theirs."""
    rows = pa.table({"text": ["good"] * 40, "text2": [[0] * 30_000] * 40})
    body = io.BytesIO()
    pq.write_table(rows, body)
    headers = {"content-type": "application/x-parquet"}
    response = classes.client.post("/invocations", content=body.getvalue(), headers=headers)
    assert (response.status_code, len(response.json()["predictions"])) == (200, 40)


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.int64())], ids=str)
def test_maps_are_read(kind: pa.DataType, tiny_model: Path) -> None:
    value = ("k", "v") if pa.types.is_string(kind.item_type) else ("k", 1)
    body = parquet(pa.array([[value], []], kind))
    assert _from_parquet(body, load_spec(tiny_model, "text_classification"), 10) == {"text": [[value], []]}


def test_words_that_are_not_unicode_are_errors_of_their_rows() -> None:
    errors: dict[int, str] = {}
    assert _others("words", [["a"], ["\ud800", "b"], None], errors, number=False).to_pylist() == [["a"], None, None]
    assert errors == {1: "bad_utf8"}
    assert _others("words", [["\ud800"]], errors, number=False).to_pylist() == [None]


def test_numbers_above_those_of_int64_are_numbers() -> None:
    """As in `predict`, which reads a column of uint64."""
    assert _others("n", [(1 << 64) - 1, None, 7], {}, number=True).cast(pa.float64()).to_pylist() == [
        2.0**64,
        None,
        7.0,
    ]
    assert _others("n", [0.5, (1 << 53) + 1], {}, number=True).to_pylist() == [0.5, 2.0**53]
    assert _others("n", [-(1 << 70)], {}, number=True).to_pylist() == [-(2.0**70)]


def test_no_address_is_that_of_the_header_host(classes: Running) -> None:
    for path in ("/health/", "/invocations/"):
        response = classes.client.get(path, headers={"host": "evil.example"})
        assert (response.status_code, "location" in response.headers) == (404, False)


def test_texts_times_labels_are_limited(tmp_path: Path, tiny_bert: Path) -> None:
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    numbers = {name: at for at, name in labels.items()}
    with quiet():
        model = BertForSequenceClassification.from_pretrained(tiny_bert, id2label=labels, label2id=numbers)
        model.save_pretrained(tmp_path)
    for file in tiny_bert.glob("token*"):
        shutil.copy(file, tmp_path)
    load = {"task": "zero_shot_classification", "task_options": {"candidate_labels": ["x", "y"]}}
    with running(tmp_path, load=load, max_rows=6) as server:
        for texts, names, status in ((["a"] * 2, "abc", 200), (["a"] * 3, "abc", 422), ("a", "abcdefg", 422)):
            body = {"inputs": texts, "parameters": {"candidate_labels": list(names)}}
            response = server.post("/", body)
            assert response.status_code == status, response.text
            assert status == 200 or "texts times labels; the limit is 6" in response.json()["error"]
        odd = json.dumps({"candidate_labels": ["a", "\ud800"]}), json.dumps({"hypothesis_template": "\ud800 {}"})
        for given in odd:
            content, headers = f'{{"inputs": "a", "parameters": {given}}}', {"content-type": "application/json"}
            refused = server.client.post("/", content=content, headers=headers)
            assert (refused.status_code, "should be a valid string" in refused.json()["error"]) == (422, True)
        raw = server.post("/predict", {"inputs": "a", "raw_scores": True})
        assert (raw.status_code, "raw_scores" in raw.json()["error"]) == (422, True)


def test_classes_are_those_of_predict_best_first(classes: Running) -> None:
    rows = predicted(classes, {"text": ["good film", "a bore"]}, all_probabilities=True)
    expected = [
        sorted(
            ({"label": name, "score": row[f"prob_{name}"]} for name in ("bad", "good")), key=lambda one: -one["score"]
        )
        for row in rows
    ]
    texts = ["good film", "a bore"]
    assert near(classes.post("/predict", {"inputs": texts[0]}).json(), expected[0])
    assert near(classes.post("/predict", {"inputs": texts}).json(), expected)
    assert near(classes.post("/predict", {"inputs": [[text] for text in texts]}).json(), expected)
    assert near(classes.post("/", {"inputs": texts[0]}).json(), expected[:1])  # nested: the client takes element 0
    top = classes.post("/", {"inputs": texts[0], "parameters": {"top_k": 1, "function_to_apply": "softmax"}}).json()
    assert near(top, [expected[0][:1]])
    raw = {
        one["label"]: one["score"] for one in classes.post("/predict", {"inputs": texts[0], "raw_scores": True}).json()
    }
    powers = {name: np.exp(score) for name, score in raw.items()}
    assert near(rows[0]["prob_good"], float(powers["good"] / sum(powers.values())))


def test_the_side_that_is_truncated_and_no_truncation(classes: Running) -> None:
    text = "good " + "a " * 100 + "bore"
    ends = [
        classes.post("/predict", {"inputs": text, "truncation_direction": side}).json() for side in ("Left", "Right")
    ]
    kept = [classes.post("/predict", {"inputs": part}).json() for part in ("a " * 58 + "bore", "good " + "a " * 61)]
    assert near(ends, kept)
    refused = classes.post("/predict", {"inputs": ["a", text], "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert "inputs[1]: too_long: 43 tokens more than the 64" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("/predict", {"inputs": [["a", SECRET]]}, 422, "Validation", "inputs[0]: this model reads one text"),
        ("/predict", {"inputs": ["a", 7]}, 422, "Validation", "inputs[1]"),
        ("/predict", {"inputs": [[7]]}, 422, "Validation", "inputs[0]: expected a string, got a number"),
        ("/predict", {"inputs": ["a", " "]}, 400, "Empty", "inputs[1]: it has no text"),
        ("/predict", {"inputs": []}, 400, "Empty", "inputs: is empty"),
        ("/predict", {"inputs": "a", "top_k": 1}, 422, "Validation", "'top_k' is not supported"),
        (
            "/predict",
            {"inputs": "a", "raw_scores": SECRET},
            422,
            "Validation",
            "raw_scores: input should be a valid boolean",
        ),
        ("/predict", {}, 422, "Validation", "inputs: field required"),
        ("/predict", {"inputs": None}, 422, "Validation", "inputs: input should be a valid string or a valid list"),
        ("/predict", [SECRET], 422, "Validation", "the body: input should be an object"),
        ("/tokenize", {"inputs": []}, 400, "Empty", "inputs: is empty"),
        ("/predict", {"inputs": ["a"] * 41}, 422, "Validation", "41 rows; the limit is 40"),
        ("/", {"inputs": "a", "parameters": {"padding": True}}, 422, "Validation", "'padding' is not supported"),
        ("/", {"inputs": "a", "parameters": {"top_k": 0}}, 422, "Validation", "parameters.top_k: input should be"),
        ("/", {"inputs": "a", "parameters": {"top_k": True}}, 422, "Validation", "parameters.top_k: input should be"),
        ("/", {"inputs": "a", "parameters": {"function_to_apply": SECRET}}, 422, "Validation", "function_to_apply"),
        ("/embed", {"inputs": "a"}, 424, "Backend", "not an embedding model"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend", "not a re-ranker: it reads single texts"),
        ("/nothing", {}, 404, "Validation", "no such route"),
        ("/health", {}, 405, "Validation", "another method"),
    ],
    ids=str,
)
def test_teis_refusals(classes: Running, path: str, body: Any, status: int, kind: str, words: str) -> None:
    response = classes.post(path, body)
    assert (response.status_code, response.json()["error_type"]) == (status, kind)
    assert words in response.json()["error"]
    assert SECRET not in response.text


def test_pairs_are_pairs(pairs: Running) -> None:
    expected = predicted(pairs, {"query": ["good", "good", "a"], "passage": ["film", "bore", "b"]})
    scores = [row["prediction"] for row in expected]
    one = pairs.post("/predict", {"inputs": ["good", "film"]}).json()
    assert near(one, [{"label": "LABEL_0", "score": scores[0]}])
    batch = pairs.post("/predict", {"inputs": [["good", "film"], ["good", "bore"], ["a", "b"]]}).json()
    assert near([row[0]["score"] for row in batch], scores)
    ranked = pairs.post(
        "/rerank", {"query": "good", "texts": ["film", "bore"], "return_text": True, "raw_scores": True}
    )
    order = [0, 1] if scores[0] >= scores[1] else [1, 0]
    assert near(ranked.json(), [{"index": at, "score": scores[at], "text": ["film", "bore"][at]} for at in order])
    assert pairs.post("/predict", {"inputs": "good"}).status_code == 422
    assert pairs.post("/rerank", {"query": " ", "texts": ["film"]}).json()["error"] == "query: it has no text"
    content, headers = b'{"query": "\\ud800", "texts": ["film"]}', {"content-type": "application/json"}
    odd = pairs.client.post("/rerank", content=content, headers=headers)
    assert (odd.status_code, odd.json()) == (422, {"error": "query: bad_utf8", "error_type": "Tokenizer"})
    records = [{"query": "good", "passage": "film"}, {"query": "a"}]
    answers = pairs.post("/invocations", {"dataframe_records": records}).json()["predictions"]
    assert near(answers[0], expected[0])
    assert answers[1]["error"] == "null_input"


def test_vectors_are_those_of_predict(vectors: Running) -> None:
    texts = ["good film", "a bore"]
    expected = np.array([row["embedding"] for row in predicted(vectors, {"text": texts})], dtype=np.float32)

    def found(body: Any, path: str = "/embed") -> np.ndarray:
        response = vectors.post(path, body)
        assert response.status_code == 200, response.text
        return np.array(response.json(), dtype=np.float32)

    assert np.allclose(found({"inputs": texts}), expected, atol=1e-6)
    assert np.allclose(found({"inputs": texts[0]}), expected[:1], atol=1e-6)
    for parameters in ({}, {"parameters": {}}, {"parameters": None}):
        assert np.allclose(found({"inputs": texts, **parameters}, "/"), expected, atol=1e-6)
    assert (
        vectors.post("/", {"inputs": texts, "parameters": {"top_k": 1}})
        .json()["error"]
        .startswith("parameters: 'top_k'")
    )
    assert vectors.post("/", {"inputs": 7}).json()["error"].startswith("inputs: ")
    short = found({"inputs": texts, "dimensions": 4})
    assert np.allclose(short, expected[:, :4] / np.linalg.norm(expected[:, :4], axis=1, keepdims=True), atol=1e-6)
    prompted = found({"inputs": ["film"], "prompt_name": "query"})
    assert np.allclose(prompted, expected[:1], atol=1e-6)
    cosines = found({"inputs": {"source_sentence": texts[0], "sentences": texts}}, "/similarity")
    assert np.allclose(cosines, expected @ expected[0], atol=1e-6)
    for parameters, status in (({"prompt_name": "query"}, 200), ({"dimensions": 4}, 422), ({"inputs": "a"}, 422)):
        body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": parameters}
        assert vectors.post("/similarity", body).status_code == status
    for source, sentences, place in (("a", ["b", ""], "sentences[1]"), (" ", ["b"], "source_sentence")):
        body = {"inputs": {"source_sentence": source, "sentences": sentences}}
        assert vectors.post("/similarity", body).json()["error"] == f"inputs.{place}: it has no text"
    assert vectors.post("/embed", {"inputs": "a", "prompt_name": "no"}).json()["error"].endswith("the prompts query")
    for form in ("float", "base64", None):
        body = {"input": texts, "model": "embedder", "encoding_format": form, "dimensions": 16}
        answer = vectors.post("/v1/embeddings", body).json()
        values = [one["embedding"] for one in answer["data"]]
        if form == "base64":
            values = [np.frombuffer(base64.b64decode(value), "<f4") for value in values]
        assert np.allclose(np.array(values, dtype=np.float32), expected, atol=1e-6)
        assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"input": [[101, 102]], "model": "embedder"}, 422, "in LangChain set check_embedding_ctx_length=False"),
        ({"input": [101, 102], "model": "embedder"}, 422, "send texts"),
        ({"input": "a", "model": "other"}, 404, "this server has 'embedder'"),
        ({"input": "a", "dimensions": 99}, 422, "dimensions: expected 1 to 16"),
        ({"input": ["a", ""]}, 400, "input[1]: it has no text"),
        ({"input": "a", "encoding_format": "int8"}, 422, "encoding_format"),
    ],
    ids=str,
)
def test_openais_refusals(vectors: Running, body: Any, status: int, words: str) -> None:
    for path in ("/v1/embeddings", "/embeddings"):
        response = vectors.post(path, body)
        assert response.status_code == status
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert words in error["message"]


def test_tokens_facts_headers_and_metrics(classes: Running) -> None:
    tokens = classes.post("/tokenize", {"inputs": ["good film"], "add_special_tokens": False}).json()
    assert [(one["text"], one["start"], one["stop"], one["special"]) for one in tokens[0]] == [
        ("good", 0, 4, False),
        ("film", 5, 9, False),
    ]
    odd = classes.client.post(
        "/tokenize", content=b'{"inputs": ["a", "\\ud800"]}', headers={"content-type": "application/json"}
    )
    assert (odd.status_code, odd.json()["error"]) == (422, "inputs[1]: bad_utf8")
    info = classes.client.get("/info").json()
    assert info["model_type"] == {
        "classifier": {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    }
    assert (info["served_model_name"], info["max_client_batch_size"], info["max_input_length"]) == ("reviews", 40, 64)
    assert str(Path(classes.service.source).parent) not in json.dumps(info)
    response = classes.post("/predict", {"inputs": "good film"}, headers={"x-request-id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    assert response.headers["x-compute-tokens"] == "4"
    assert {"x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"} <= response.headers.keys()
    assert response.headers["x-model-sha"] == info["model_sha"]
    other = classes.post("/predict", {"inputs": ""}, headers={"x-request-id": "not valid"})
    assert len(other.headers["x-request-id"]) == 32
    metrics = classes.client.get("/metrics").text
    assert 'te_request_count{method="single"}' in metrics
    counts = [line.split() for line in metrics.splitlines() if line.startswith(("te_request_s", "te_request_d"))]
    answered = [float(number) for name, number in counts if "success" in name or name == "te_request_duration_count"]
    assert sum(answered[:-1]) == answered[-1]  # only answered requests have a duration
    classes.client.get("/health")
    assert f"te_request_duration_count {answered[-1]}" in classes.client.get("/metrics").text
    assert 'torchlake_row_errors{reason="null_input"}' in metrics
    assert "te_batch_next_tokens_bucket" in metrics
    assert "_total" not in metrics
    assert "_created" not in metrics
    described = classes.client.get("/openapi.json")
    assert "$ref" not in described.text
    paths = described.json()["paths"]
    assert "post" in paths["/invocations"]
    assert "requestBody" in paths["/predict"]["post"]


def image_classifier(folder: Path) -> Path:
    """A classifier of images with a head that was never trained."""
    tiny.build_vision(folder)
    with quiet():
        ViTForImageClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    return folder


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.none() | ANY_TEXT | st.sampled_from(TEXTS), max_size=12))
def test_any_texts_have_the_answers_of_a_call(classes: Running, texts: list[str | None]) -> None:
    body, headers = json.dumps({"inputs": texts}), {"content-type": "application/json"}
    response = classes.client.post("/invocations", content=body, headers=headers)
    assert near(response.json()["predictions"], classes.service.model(texts))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/invocations", "/predict", "/embed", "/rerank", "/tokenize", "/", "/v1/embeddings"]),
    body=JSON,
)
def test_any_json_is_answered_or_refused(classes: Running, path: str, body: Any) -> None:
    response = classes.post(path, body)
    assert response.status_code in (200, 400, 404, 413, 422, 424), response.text
    assert isinstance(response.json(), dict | list)


def test_images_are_base64_and_no_paths(tmp_path: Path) -> None:
    folder = image_classifier(tmp_path / "vision")
    image = tiny.digits(2)
    content = image["image"][0].as_py()
    content = content["bytes"] if isinstance(content, dict) else content
    (tmp_path / "photo.png").write_bytes(content)
    with running(folder) as server:
        expected = predicted(server, {"image": [content]})
        rows = [
            base64.encodebytes(content).decode(),  # with line breaks, as `base64` writes it
            str(tmp_path / "photo.png"),
            {"path": str(tmp_path / "photo.png")},
            None,
        ]
        answers = server.post("/invocations", {"dataframe_records": [{"image": row} for row in rows]}).json()[
            "predictions"
        ]
        assert near(answers[0], expected[0])
        for path in ("/predict", "/"):  # which read texts
            refused = server.post(path, {"inputs": str(tmp_path / "photo.png")})
            assert (refused.status_code, "reads images; use /invocations" in refused.text) == (424, True)
        assert [row["error"] for row in answers[1:]] == ["corrupt_image: it is not base64", "null_input", "null_input"]


def test_what_the_server_refuses_before_a_route(tiny_model: Path) -> None:
    options: dict[str, Any] = {"allow_origin": ("https://a.example",), "max_queued_tokens": 1, "page": True}
    with running(tiny_model, api_key="secret", **options) as server:
        key = {"authorization": "Bearer secret"}
        assert server.client.get("/health").status_code == 200
        head = server.client.head("/health")
        assert (head.status_code, head.headers["content-length"], head.text) == (200, "1", "")
        for path in ("/metrics", "/info", "/openapi.json", "/"):
            assert server.client.head(path).status_code == 401
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers={"authorization": "Bearer other"}).status_code == 401
            assert server.client.get(path, headers=key).status_code == 200
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = server.client.options("/predict", headers=preflight)
        assert allowed.status_code == 200  # a browser asks without the token
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert {"x-request-id", "x-model-sha"} <= allowed.headers.keys()
        refused = server.post("/predict", {"inputs": "a"}, headers={"origin": "https://a.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        preflight["origin"] = "https://b.example"
        assert "access-control-allow-origin" not in server.client.options("/predict", headers=preflight).headers
        service = server.service
        service.draining = True
        assert server.client.options("/predict", headers=preflight).headers["connection"] == "close"
        service.draining = False
        server.service.model.batcher.queued_tokens = 1
        full = server.post("/predict", {"inputs": "a"}, headers=key)
        assert (full.status_code, full.json()["error_type"], full.headers["retry-after"]) == (429, "Overloaded", "1")
        server.service.model.batcher.queued_tokens = 0


@pytest.mark.parametrize("route", ["/predict", "/v1/endpoints/123/deployedModels/456:predict"])
def test_routes_of_vertex_ai(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    """Its errors are MLflow's, also in place of another protocol's route."""
    monkeypatch.setenv("AIP_PREDICT_ROUTE", route)
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/alive")
    monkeypatch.setenv("TORCHLAKE_API_KEY", "secret")
    with running(tiny_model) as server:
        assert server.client.get("/alive").status_code == 200
        assert server.post("/alive", {}).status_code == 401
        assert server.post(route, {"instances": ["good"]}).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert server.post(route, {"instances": ["good"]}, headers=key).json()["predictions"][0]["error"] is None
        refused = server.post(route, {"instances": 7}, headers=key)
        assert (refused.status_code, refused.json()["error_code"]) == (400, "BAD_REQUEST")
        assert 'te_request_failure{err="validation"}' in server.client.get("/metrics", headers=key).text


@pytest.mark.parametrize("name", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
def test_routes_of_vertex_ai_that_are_no_paths_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "predict")
    with pytest.raises(tl.errors.UsageError, match=f"{name}: expected a path that begins with /, got 'predict'"):
        routes(page=False)
    monkeypatch.setenv(name, "")
    assert routes(page=False)


def test_models_that_write_are_refused(tiny_gpt2: Path) -> None:
    with pytest.raises(
        tl.errors.UsageError, match="writes texts, which serve does not. Use `transformers serve` or vLLM"
    ):
        tl.serving.app(tiny_gpt2)


def test_an_app_is_mounted_in_another_one(tiny_model: Path) -> None:
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    parent = FastAPI()
    parent.mount("/model", tl.serving.app(tiny_model))
    client = TestClient(parent)
    assert client.get("/model/health").status_code == 200
    missing: httpx.Response = client.get("/model/v1/nothing")  # type: ignore[assignment]
    assert missing.json()["error"]["code"] == "not_found"
    answer: httpx.Response = client.post("/model/invocations", json={"instances": ["good film"]})  # type: ignore[assignment]
    assert answer.json()["predictions"][0]["error"] is None
