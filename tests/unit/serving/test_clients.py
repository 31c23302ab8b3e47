"""Real clients: OpenAI's, Hugging Face's, MLflow's server with the same bodies, and curl."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import transformers
from starlette.responses import HTMLResponse

import tiny
import torchlake as tl
from serving_runs import Running, running
from torchlake.models.write import quiet

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")]
HEADS = {
    "token_classification": ("BertForTokenClassification", {0: "O", 1: "B-PER", 2: "I-PER"}),
    "question_answering": ("BertForQuestionAnswering", {}),
    "zero_shot_classification": ("BertForSequenceClassification", {0: "contradiction", 1: "neutral", 2: "entailment"}),
}
CONTEXT = "the film was great fun and we did like the acting of it"
ASKED = """
import json, sys
from huggingface_hub import InferenceClient

client = InferenceClient(model=sys.argv[1])
found = eval(sys.argv[2], {"client": client})
print(json.dumps(found.tolist() if hasattr(found, "tolist") else found))
"""


def hub_model(folder: Path, encoder: Path, task: str) -> Path:
    """A folder of transformers with a head for the task, as on the Hub."""
    name, labels = HEADS[task]
    options: dict[str, Any] = (
        {"id2label": labels, "label2id": {name: at for at, name in labels.items()}} if labels else {}
    )
    with quiet():
        getattr(transformers, name).from_pretrained(encoder, **options).save_pretrained(folder)
    for file in encoder.glob("token*"):
        shutil.copy(file, folder)
    return folder


def ask(server: Running, call: str) -> Any:
    """What Hugging Face's client returns; it sends nothing while HF_HUB_OFFLINE is set."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", ASKED, server.url, call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny.build_embedder(tmp_path_factory.mktemp("models") / "embedder"), api_key="secret") as server:
        yield server


def test_openai(embedder: Running) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="secret", max_retries=0)
    expected = tl.load(embedder.service.source).embed(["good film", "a bore"])
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="embedder", input=["good film", "a bore"], **form)  # type: ignore[call-overload]
        values = [one.embedding for one in answer.data]
        if form.get("encoding_format") == "base64":
            continue  # given explicitly, the client returns the string
        assert np.allclose(np.array(values), expected, atol=1e-5)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="other").embeddings.create(model="embedder", input="a")
    with pytest.raises(openai.NotFoundError, match="this server has 'embedder'"):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(openai.UnprocessableEntityError, match="send texts"):
        client.embeddings.create(model="embedder", input=[[1, 2]])
    batcher = embedder.service.model.batcher
    batcher.queued_tokens += 1_000_000
    with pytest.raises(openai.RateLimitError):
        client.embeddings.create(model="embedder", input="a")
    batcher.queued_tokens -= 1_000_000


def test_langchain(embedder: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options = {"model": "embedder", "base_url": f"{embedder.url}/v1", "api_key": "secret"}
    texts = ["good film", "a bore"]
    vectors = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(texts)
    assert np.allclose(vectors, tl.load(embedder.service.source).embed(texts), atol=1e-5)
    # By default it sends token ids of OpenAI's models, for which it needs their tokenizer.
    response = embedder.post(
        "/v1/embeddings", {"input": [[15139, 4632]], "model": "embedder"}, headers={"authorization": "Bearer secret"}
    )
    assert "in LangChain set check_embedding_ctx_length=False" in response.json()["error"]["message"]


def test_hugging_faces_client(tiny_model: Path, tiny_bert: Path, tmp_path: Path) -> None:
    with running(tiny_model) as server:
        found = ask(server, 'client.text_classification("good film")')
        assert [one["label"] for one in found] == ["bad", "good"]
        assert len(ask(server, 'client.text_classification("good film", top_k=1)')) == 1
    folder = tiny.build_embedder(tmp_path / "embedder")
    with running(folder) as server:
        vectors = ask(server, 'client.feature_extraction("good film", normalize=True)')
        assert np.allclose(vectors, tl.load(folder).embed(["good film"]), atol=1e-5)
        cosines = ask(server, 'client.sentence_similarity("good film", other_sentences=["good film", "a bore"])')
        assert cosines[0] == pytest.approx(1, abs=1e-5)
    folder = hub_model(tmp_path / "tags", tiny_bert, "token_classification")
    with running(folder) as server:
        spans = ask(server, f"client.token_classification({CONTEXT!r})")
        (row,) = tl.load(folder)([CONTEXT])
        assert [(one["start"], one["end"], one["entity_group"], one["word"]) for one in spans] == [
            (span["start"], span["end"], span["label"], span["text"]) for span in row["spans"]
        ]
        refused = server.post("/", {"inputs": CONTEXT, "parameters": {"aggregation_strategy": "max"}})
        assert (refused.status_code, "aggregation_strategy" in refused.json()["error"]) == (422, True)
        for stride in (-1, 10_000):  # more than two windows can share
            refused = server.post("/", {"inputs": CONTEXT, "parameters": {"stride": stride}})
            assert (refused.status_code, "parameters.stride: " in refused.json()["error"]) == (422, True)
    folder = hub_model(tmp_path / "answers", tiny_bert, "question_answering")
    with running(folder) as server:
        answer = ask(server, f'client.question_answering(question="what was fun ?", context={CONTEXT!r})')
        (row,) = tl.load(folder)([{"question": "what was fun ?", "context": CONTEXT}])
        assert (answer["answer"], answer["start"], answer["end"]) == (row["answer"], row["start"], row["end"])
        inputs = {"question": "what was fun ?", "context": CONTEXT}
        for name, value in (("doc_stride", -1), ("doc_stride", 10_000), ("max_answer_len", 0)):
            refused = server.post("/", {"inputs": inputs, "parameters": {name: value}})
            assert (refused.status_code, f"parameters.{name}: " in refused.json()["error"]) == (422, True)


def test_hugging_faces_client_names_classes(tiny_bert: Path, tmp_path: Path) -> None:
    folder = hub_model(tmp_path / "nli", tiny_bert, "zero_shot_classification")
    load = {"task": "zero_shot_classification", "task_options": {"candidate_labels": ["x", "y"]}}
    with running(folder, load=load) as server:
        for several in (False, True):
            call = f'client.zero_shot_classification({CONTEXT!r}, ["fun", "a bore", "sad"], multi_label={several}, '
            found = ask(server, call + 'hypothesis_template="it is {}.")')
            names = ["fun", "a bore", "sad"]
            options = {
                "candidate_labels": names,
                "multi_label": several,
                "hypothesis_template": "it is {}.",
            }
            model = tl.load(folder, task="zero_shot_classification", task_options=options, all_probabilities=True)
            (row,) = model([CONTEXT])
            assert {one["label"]: one["score"] for one in found} == pytest.approx(
                {name: row[f"prob_{name}"] for name in names},
                abs=1e-5,
            )
            assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
        refused = server.post("/", {"inputs": "a", "parameters": {"candidate_labels": ["x", "x"]}})
        assert refused.status_code == 422


def test_mlflows_server_gives_the_same_answers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from starlette.testclient import TestClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/store.db")
    mlflow.create_experiment("serving", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("serving")
    logged = tl.log_model(tiny_model)
    from mlflow.pyfunc import load_model, scoring_server  # after log_model, which silences what the import warns of

    theirs = TestClient(scoring_server.init(load_model(logged.model_uri)))
    texts = ["good film", "a bore", "", "good " * 200]
    bodies = [
        {"dataframe_split": {"columns": ["text"], "data": [[text] for text in texts]}},
        {"dataframe_records": [{"text": text} for text in texts]},
        {"inputs": {"text": texts}},
    ]
    with running(tiny_model) as server:
        for body in bodies:
            other, own = theirs.post("/invocations", json=body), server.post("/invocations", body)
            assert (other.status_code, own.status_code) == (200, 200), other.text
            assert own.json().keys() == other.json().keys() == {"predictions"}
            for one, frame in zip(own.json()["predictions"], other.json()["predictions"], strict=True):
                two = {name: None if value != value else value for name, value in frame.items()}  # pandas' NaN
                assert one["score"] == pytest.approx(two["score"], abs=1e-5)
                assert {**one, "score": None} == {**two, "score": None}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_shows_an_answer_and_text_as_text(tiny_model: Path, tmp_path: Path) -> None:
    inside = (
        '<!doctype html><iframe width="375" height="800" src="/?text=%3Cscript%3Ealert(1)%3C/script%3E good"></iframe>'
    )
    inside += "<script>setTimeout(() => { const {documentElement: page} = frames[0].document;"
    inside += "document.body.append(page.outerHTML, ` ${page.scrollWidth} wide`) }, 5000)</script>"
    with running(tiny_model, page=True) as server:
        application: Any = server.server.config.app
        application.add_api_route("/phone", lambda: HTMLResponse(inside), response_class=HTMLResponse)
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command += ["--virtual-time-budget=8000", "--dump-dom", "--enable-logging=stderr"]
        done = subprocess.run(
            [*command, f"{server.url}/phone"], capture_output=True, text=True, timeout=120, check=True
        )
    shown = html.unescape(done.stdout)
    assert "<th>label</th>" in shown
    assert '<div class="bar"' in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt; good" in shown
    assert "<script>alert(1)" not in shown
    assert "375 wide" in shown
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line and "/phone" not in line] == []
    text = (Path(tl.__file__).parent / "serving" / "page.html").read_text()
    assert re.findall(r"https?://|//cdn|@import", text) == []


def test_curl_sends_a_table(tiny_model: Path, tmp_path: Path) -> None:
    pa.csv.write_csv(pa.table({"text": ["good film", "a, bore"]}), tmp_path / "in.csv")
    with running(tiny_model) as server:
        command = ["curl", "-s", "-H", "content-type: text/csv", "--data-binary", f"@{tmp_path}/in.csv"]
        done = subprocess.run(
            [*command, f"{server.url}/invocations"], capture_output=True, text=True, check=True, timeout=60
        )
    assert [row["error"] for row in json.loads(done.stdout)["predictions"]] == [None, None]
