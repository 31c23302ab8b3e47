"""`evaluate(report=)`: the folder that it writes, with a model; once, whole, and for one model and table."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.cli.app import program
from torchlake.config.arguments import types_of
from torchlake.config.job import load_job
from torchlake.config.measuring import EvaluateOptions
from torchlake.engines.local import Local
from torchlake.errors import DataError, FingerprintError, OutputError, TableError, UsageError
from torchlake.evaluation import held_out
from torchlake.evaluation.compare import compare
from torchlake.evaluation.evaluate import evaluate
from torchlake.evaluation.report import as_command
from torchlake.evaluation.result import Evaluation
from torchlake.models.spec import load_spec
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
    stored = pq.read_table(run.path / held_out.STORED)
    answers = [[np.nan, 0.0], *stored["answers"].to_pylist()[1:]]
    broken = stored.set_column(1, "answers", pa.array(answers, stored.schema.field("answers").type))
    pq.write_table(broken, run.path / held_out.STORED)
    result = json.loads((run.path / "result.json").read_text())
    held_out.write_page(run.path, load_job(run.path / "job.yaml"), load_spec(run.path / "model"), result, Local())
    facts = json.loads((run.path / "eval" / "eval.json").read_text())
    assert facts["errors"] == {"non_finite": 1}
    assert facts["metrics"]["accuracy"]["low"] is not None


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
    assert {one["slice"] for one in facts["sections"]["slices"]["slices"]} == {"length"}
    counted = tl.predict(model, pa.table({"text": texts}), token_counts=True, engine=tiny.Here())["tokens"].to_pylist()
    assert rows["tokens"].to_pylist() == [
        one + counted[texts.index(text)] for one, text in zip(counted, seconds, strict=True)
    ]
    assert sorted(path.name for path in folder.iterdir()) == FILES
    evaluate(model, tmp_path / "pairs.parquet", report=tmp_path / "plain", no_texts=True, **arguments)
    plain = pq.read_table(tmp_path / "plain" / "rows.parquet")
    assert plain["prediction"].to_pylist()[3:5] == [4, 3]  # the key of the nearest one, not its text
    stored = (tmp_path / "plain" / "rows.parquet").read_bytes() + (tmp_path / "plain" / "eval.html").read_bytes()
    assert {"a", "b"} & {*plain.column_names} == set()
    assert not any(text.encode() in stored for text in texts)


def test_a_report_without_rows_keeps_none_of_another_model(
    tiny_gpt2: Path, written: tuple[Evaluation, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "eval"
    shutil.copytree(written[1], folder)
    table = pa.table({"chosen": ["a good film", "so good"], "rejected": ["a bad film", "bad"]})
    pairs: Any = {"inputs": {"chosen": "chosen", "rejected": "rejected"}, "reference": tiny_gpt2}
    with pytest.raises(FingerprintError, match="another model"):
        evaluate(tiny_gpt2, table, report=folder, engine=Refusing(), **pairs)
    found = evaluate(tiny_gpt2, table, report=folder, overwrite=True, engine=tiny.Here(), **pairs)
    assert sorted(path.name for path in folder.iterdir()) == ["eval.html", "eval.json"]
    assert json.loads((folder / "eval.json").read_text())["files"] == {}
    assert found.metrics
    with pytest.raises(UsageError, match="key: preference is not measured row by row"):
        evaluate(tiny_gpt2, table, report=tmp_path / "other", key="id", engine=Refusing(), **pairs)
    assert not (tmp_path / "other").exists()


def test_written_texts_have_rows_the_worst_first_and_by_length(tiny_gpt2: Path, tmp_path: Path) -> None:
    titles = ["a film", "so bad", "a " * 9, None, "very " * 12, "dull"]
    table = pa.table({"id": range(6), "title": titles, "tags": [["x"], ["x", "y"], [], ["y"], ["y"], None]})
    options: dict[str, Any] = {"prompt": "{title}!", "max_new_tokens": 5, "engine": tiny.Here()}
    texts = tl.predict(tiny_gpt2, table.select(["title"]), max_error_rate=1.0, **options)["generated_text"].to_pylist()
    answers = [texts[0], "x", texts[2], "y", "z", ""]
    pq.write_table(table.append_column("answer", pa.array(answers)), tmp_path / "t.parquet")
    folder = tmp_path / "eval"
    more: dict[str, Any] = {"label": "answer", "report": folder, "key": "id", "slices": ["tags"], **options}
    found = tl.evaluate(tiny_gpt2, tmp_path / "t.parquet", **more)
    assert (found.rows, found.errors, found.report) == (6, {"null_input": 1}, folder)
    rows = pq.read_table(folder / "rows.parquet")
    measured = rows.filter(rows["loss"].is_valid())
    assert measured["id"].to_pylist() == [0, 1, 2, 4, 5]
    assert np.mean(measured["right"].to_pylist()) == found.metrics["exact_match"].value
    assert 1 - np.mean(measured["loss"].to_pylist()) == pytest.approx(found.metrics["token_f1"].value)
    assert rows["prediction"].to_pylist() == [text if row != 3 else None for row, text in enumerate(texts)]
    assert (rows["title"].to_pylist(), rows["tokens"].null_count) == (titles, 1)
    facts = json.loads((folder / "eval.json").read_text())
    assert facts["kind"] == "texts"
    assert not {0, 2} & set(facts["sections"]["worst"])
    assert {one["slice"] for one in facts["sections"]["slices"]["slices"]} == {"tags", "length"}
    assert "expected" in (folder / "eval.html").read_text()
    same = compare(folder, folder)
    assert {one.metric: one.difference for one in same.differences} == {"exact_match": 0, "token_f1": 0}
    with pytest.raises(UsageError, match="label_hints"):
        tl.evaluate(tiny_gpt2, tmp_path / "t.parquet", label_hints=True, **more)


def test_slices_are_refused_before_the_work(tiny_model: Path, table: Path, tmp_path: Path) -> None:
    rows = pq.read_table(table)
    pq.write_table(rows.append_column("s", pa.array([{"x": 1}] * len(rows))), tmp_path / "t.parquet")
    for name, error, words in (("s", UsageError, "holds struct<x"), ("lang", TableError, "no column 'lang'")):
        with pytest.raises(error, match=words):
            evaluate(tiny_model, tmp_path / "t.parquet", report=tmp_path / "eval", slices=[name], engine=Refusing())
        assert not (tmp_path / "eval").exists()


class Refusing(tiny.Here):
    """An engine that does not score."""

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("the work has begun")


VALUES: dict[str, Any] = {
    "text": ["a title", "body"],
    "text_pair": "b",
    "inputs": {"image": "photo", "both": ["x", "y"]},
    "label": "it's",
    "runtime": "eager",
    "reference": "base model",
    "csv": {"delimiter": ";"},
    "prompt": "One\nTwo: {a}\\",
    "system": "Be\tbrief",
    "stop": ["\n", "-END-"],
    "stop_token_ids": [3, 4],
    "template_options": {"thinking": False, "style": "true"},
    "examples": "shots.csv",
    "tools": "tools.json",
    "choices": ["good", "bad one"],
    "chat_template": "t.jinja",
    "where": "stars >= 3 and lang = 'en'",
    "slices": ["a b", "c"],
    "presence_penalty": -0.5,
}


def test_the_command_makes_the_report_again_with_every_option() -> None:
    command = program.commands["evaluate"]  # type: ignore[attr-defined]
    taken = {one.name for one in command.params} - {"model", "table", "json", "quiet", "verbose", "set"}
    assert EvaluateOptions.__annotations__.keys() <= taken
    hints = get_type_hints(EvaluateOptions)

    def value_of(name: str) -> Any:
        kinds = types_of(hints.get(name, str))
        return VALUES.get(
            name, True if bool in kinds else 2 if int in kinds else 0.5 if float in kinds else f"my {name}"
        )

    names = taken - {"input", "engine", "processes"}
    asked = {"model": "my model", "table": ["a b.parquet", "c.parquet"], **{name: value_of(name) for name in names}}
    words = shlex.split(as_command({**asked, "engine": Local(3)}) or "")
    assert words[:2] == ["torchlake", "evaluate"]
    with command.make_context("evaluate", words[2:]) as context:
        work = context.invoke(command.callback, **context.params).keywords
    given = work["given"]
    assert (work["model"], given.tables(work["table"])) == ("my model", ["a b.parquet", "c.parquet"])
    assert given.options == {name: asked[name] for name in names}
    assert (given["engine"], given["processes"]) == ("local", 3)


def test_what_has_no_form_on_the_command_line_has_no_command() -> None:
    asked = {"model": "m", "table": "t.parquet", "report": Path("eval")}
    assert as_command(asked) == "torchlake evaluate m t.parquet --report eval"
    for more in ({"table": pa.table({})}, {"choices": ["a, b"]}, {"json_schema": {}}, {"examples": [{"prompt": "a"}]}):
        assert as_command({**asked, **more}) is None
