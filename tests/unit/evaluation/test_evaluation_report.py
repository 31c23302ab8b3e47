"""`evaluate(report=)`: the folder that it writes, with a model; once, whole, and for one model and table."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import training_runs as runs
from torchlake.errors import DataError, FingerprintError, OutputError, UsageError
from torchlake.evaluation.compare import compare
from torchlake.evaluation.evaluate import Evaluation, evaluate
from torchlake.training.train import train

FILES = ["eval.html", "eval.json", "rows.parquet"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    rows = tiny.reviews(60)
    rows = rows.append_column("score", pa.array([f"s{row % 3}" for row in range(60)]))
    pq.write_table(rows, path)
    return path


@pytest.fixture(scope="module")
def written(tiny_model: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    folder = tmp_path_factory.mktemp("report") / "eval"
    return evaluate(tiny_model, table, report=folder, key="id", slices=["score"], engine=tiny.Here()), folder


def test_the_report_has_the_rows_and_the_metrics_of_evaluate(
    written: tuple[Evaluation, Path], tiny_model: Path, table: Path
) -> None:
    found, folder = written
    assert sorted(path.name for path in folder.iterdir()) == FILES
    facts = json.loads((folder / "eval.json").read_text())
    assert facts["metrics"]["accuracy"]["value"] == found.metrics["accuracy"].value
    assert found.report == folder
    rows = pq.read_table(folder / "rows.parquet")
    assert rows["id"].to_pylist() == list(range(60))
    assert np.mean(rows["right"].to_pylist()) == pytest.approx(found.metrics["accuracy"].value)
    assert np.mean(rows["loss"].to_pylist()) == pytest.approx(found.metrics["log_loss"].value)
    assert rows["tokens"].to_pylist()[0] > 4
    assert rows["input_score"].to_pylist()[:3] == ["s0", "s1", "s2"]
    assert {one["slice"] for one in facts["sections"]["slices"]["slices"]} == {"input_score", "length"}
    assert facts["made"]["table"] == str(table)
    assert facts["made"]["model_sha256"]
    assert "Per class" in (folder / "eval.html").read_text()


def test_a_frame_gives_the_same_rows(
    written: tuple[Evaluation, Path], tiny_model: Path, table: Path, tmp_path: Path
) -> None:
    evaluate(tiny_model, pq.read_table(table), report=tmp_path / "eval", key="id", slices=["score"], engine=tiny.Here())
    one, other = (pq.read_table(folder / "rows.parquet") for folder in (written[1], tmp_path / "eval"))
    assert one.drop_columns(["loss", "score", "probability"]) == other.drop_columns(["loss", "score", "probability"])
    assert one["loss"].to_numpy() == pytest.approx(other["loss"].to_numpy(), abs=1e-5)


def test_the_folder_belongs_to_one_model_and_table(
    written: tuple[Evaluation, Path], tiny_model: Path, table: Path, tmp_path: Path
) -> None:
    folder = written[1]
    copy = tmp_path / "other.parquet"
    copy.write_bytes(table.read_bytes())
    with pytest.raises(FingerprintError, match=r"evaluation of another table.*--overwrite"):
        evaluate(tiny_model, copy, report=folder)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "mine.txt").touch()
    with pytest.raises(OutputError, match=r"has other files, such as mine\.txt"):
        evaluate(tiny_model, copy, report=foreign)
    pq.write_table(pa.table({"text": ["a"], "label": ["ugly"]}), tmp_path / "ugly.parquet")
    with pytest.raises(DataError, match="'ugly'"):
        evaluate(tiny_model, tmp_path / "ugly.parquet", report=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(UsageError, match="slices: for a report; name its folder"):
        evaluate(tiny_model, copy, slices=["score"])


def test_training_writes_the_page_of_its_validation_rows(tmp_path: Path, tiny_bert: Path) -> None:
    job = runs.job(tmp_path, tiny_bert)
    run = train(run=tmp_path / "run", engine=runs.Inline(), **job)
    facts = json.loads((run.path / "eval" / "eval.json").read_text())
    for name in ("accuracy", "macro_f1", "log_loss"):
        assert facts["metrics"][name]["value"] == run.metrics[name]
    rows = pq.read_table(run.path / "eval" / "rows.parquet")
    assert np.mean(rows["right"].to_pylist()) == pytest.approx(run.metrics["accuracy"])
    source = {row["text"]: row["label"] for row in pq.read_table(job["data"]["train"]).to_pylist()}
    assert all(source[row["text"]] == row["label"] for row in rows.to_pylist())
    assert 'href="eval/eval.html"' in (run.path / "report.html").read_text()
    found = compare(run.path, run.path, report=tmp_path / "compared")
    assert found.about["settings"] == {}
    assert len(found.about["seconds"]) == 2


def test_pairs_of_vectors_are_ranked_by_the_rank_of_their_second_text(tmp_path: Path) -> None:
    model = tiny.build_embedder(tmp_path / "model")
    texts = tiny.reviews(20)["text"].to_pylist()
    seconds = list(texts)
    seconds[3], seconds[4] = seconds[4], seconds[3]
    pq.write_table(pa.table({"id": range(20), "a": texts, "b": seconds}), tmp_path / "pairs.parquet")
    folder = tmp_path / "eval"
    arguments = {"text": "a", "text_pair": "b", "key": "id", "engine": tiny.Here()}
    found = evaluate(model, tmp_path / "pairs.parquet", report=folder, **arguments)
    rows = pq.read_table(folder / "rows.parquet")
    assert np.mean(rows["right"].to_pylist()) == pytest.approx(found.metrics["recall_at_1"].value)
    assert [row["id"] for row in rows.to_pylist() if row["rank"] > 1] == [3, 4]
    assert rows["prediction"].to_pylist()[3] == texts[3] == rows["b"].to_pylist()[4]
    facts = json.loads((folder / "eval.json").read_text())
    assert set(facts["sections"]["worst"][:2]) == {3, 4}
    assert facts["sections"]["retrieval"][0]["recall"] == 0.9
    assert sorted(path.name for path in folder.iterdir()) == FILES
