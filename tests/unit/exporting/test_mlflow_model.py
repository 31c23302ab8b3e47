"""The MLflow model: loaded in a fresh process it predicts what `predict` predicts, and nothing in it is a pickle."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from transformers import BertForTokenClassification

import tiny
import torchlake as tl
from task_cases import pairs
from torchlake.errors import MissingExtra, UsageError
from torchlake.models.write import quiet

TEXTS = ["a good film", "the bad film is a bad film, bad and long", None, "", "the plot is thin but good"] * 9
COLUMNS = ["label", "score", "prob_bad", "prob_good", "truncated", "error"]
LOAD = """
import sys
import pandas as pd
import mlflow.pyfunc

loaded = mlflow.pyfunc.load_model(sys.argv[1])
assert "torchlake" in sys.modules
rows = pd.read_parquet(sys.argv[2])
loaded.predict(rows).to_pickle(sys.argv[3])
"""
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow store in a SQLite file, without telemetry."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    import mlflow

    mlflow.set_tracking_uri(uri)
    return uri


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_predictions_in_a_fresh_process_are_those_of_predict(tiny_model: Path, tmp_path: Path) -> None:
    import mlflow

    rows = pd.DataFrame({"text": TEXTS})
    rows.to_parquet(tmp_path / "rows.parquet")
    with mlflow.start_run() as run:
        logged = tl.log_model(tiny_model, all_probabilities=True, runtime="eager")
    assert logged.run_id == run.info.run_id
    arguments = [logged.model_uri, tmp_path / "rows.parquet", tmp_path / "answers.pickle"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", LOAD, *arguments], env=environment, check=True)
    found = pd.read_pickle(tmp_path / "answers.pickle")
    expected = tl.predict(tiny_model, rows, all_probabilities=True, runtime="eager", engine=tl.Local(processes=1))
    assert list(found.columns) == COLUMNS
    pd.testing.assert_frame_equal(found, expected[COLUMNS], check_exact=True)
    tl.predict(tiny_model, tmp_path / "rows.parquet", tmp_path / "scored", all_probabilities=True, runtime="eager")
    stored = pd.read_parquet(tmp_path / "scored", columns=COLUMNS)
    pd.testing.assert_frame_equal(found, stored, check_exact=True)


@pytest.mark.usefixtures("store")
def test_a_model_of_spans_gives_lists_of_objects(tiny_bert: Path, tmp_path: Path) -> None:
    import mlflow

    tags = {0: "O", 1: "B-PER", 2: "I-PER"}
    with quiet():
        model = BertForTokenClassification.from_pretrained(
            tiny_bert, id2label=tags, label2id={tag: at for at, tag in tags.items()}
        )
        model.save_pretrained(tmp_path / "tags")
    for file in tiny_bert.glob("token*"):
        shutil.copy(file, tmp_path / "tags")
    logged = tl.log_model(tmp_path / "tags")
    assert logged.signature is not None
    assert "start" in str(logged.signature.outputs)
    found = mlflow.pyfunc.load_model(logged.model_uri).predict(pd.DataFrame({"text": TEXTS[:2]}))
    assert [list(spans) for spans in found["spans"]] == [row["spans"] for row in tl.load(tmp_path / "tags")(TEXTS[:2])]


@pytest.mark.usefixtures("store")
def test_nothing_in_it_is_a_pickle_and_no_code_of_the_model(tiny_model: Path) -> None:
    import mlflow

    logged = tl.log_model(tiny_model, name="reviews")
    folder = Path(mlflow.artifacts.download_artifacts(logged.model_uri))
    flavor = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["python_function"]
    assert flavor["loader_module"] == "torchlake.exporting.mlflow_model"
    assert flavor.get("code") is None
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".py", ".bin", ".pt")]
    requirements = (folder / "requirements.txt").read_text().splitlines()
    assert [line.partition("=")[0] for line in requirements if line.startswith("torchlake")] == ["torchlake"]
    assert not any("+" in line for line in requirements)


@pytest.mark.usefixtures("store")
def test_it_takes_frames_lists_and_columns_and_keeps_the_index(tiny_model: Path) -> None:
    import mlflow

    logged = tl.log_model(tiny_model, text="review", prefix="p_")
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    frame = pd.DataFrame({"review": ["a good film", "bad"]}, index=[7, 3])
    answers = loaded.predict(frame)
    assert list(answers.index) == [7, 3]
    assert list(answers.columns) == ["p_label", "p_score", "truncated", "error"]
    inner = loaded.unwrap_python_model() if hasattr(loaded._model_impl, "python_model") else loaded._model_impl
    for given in (["a good film", "bad"], {"review": ["a good film", "bad"]}, frame["review"]):
        assert inner.predict(given)["p_score"].tolist() == answers["p_score"].tolist()
    assert inner.predict("bad")["p_label"].tolist() == answers["p_label"].tolist()[1:]
    with pytest.raises(UsageError, match="options of predict to log_model"):
        inner.predict(frame, params={"runtime": "eager"})


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_model_of_pairs_takes_frames_of_both_columns(tiny_bert: Path, tmp_path: Path) -> None:
    import mlflow

    spec = replace(tiny.SPEC, text="question", text_pair="answer", labels=("False", "True"))
    folder = tiny.build_model(tmp_path / "pairs", encoder=tiny_bert, spec=spec)
    logged = tl.log_model(folder, text="q")
    assert logged.signature is not None
    assert logged.signature.inputs.input_names() == ["q", "answer"]
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    frame = pairs(12).rename_columns({"question": "q"}).select(["answer", "q"]).to_pandas()
    expected = tl.predict(folder, frame, text="q", engine=tl.Local(processes=1))
    assert loaded.predict(frame)["label"].tolist() == expected["label"].tolist()
    with pytest.raises(UsageError, match="reads several columns: pass a frame with q, answer"):
        loaded._model_impl.predict(["a question"])


def test_mistakes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="null: expected 'error' or 'score'"):
        tl.log_model(tiny_model, null="skip")  # type: ignore[arg-type]
    monkeypatch.setattr("torchlake.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"torchlake\[mlflow\]"):
        tl.log_model(tiny_model)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_language_model_writes_its_texts(tiny_gpt2: Path) -> None:
    import mlflow

    logged = tl.log_model(tiny_gpt2)
    assert logged.signature is not None
    answers = mlflow.pyfunc.load_model(logged.model_uri).predict(pd.DataFrame({"text": ["a good", None]}))
    assert list(answers.columns) == logged.signature.outputs.input_names()
    assert answers["error"].tolist() == [None, "null_input"]
