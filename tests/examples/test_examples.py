"""The examples: scripts written for torchrun train on every engine as they stand, and leave a model that learned."""

import operator
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import scoring_runs
import tiny
import torchlake
from task_cases import searches
from torchlake.engines import make_engine
from torchlake.launching.launch import launch_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
FOR_TORCHRUN = ["accelerate_loop", "deepspeed_loop", "hf_trainer", "lightning_classifier"]
RECIPE = ["--epochs", "8", "--learning-rate", "5e-3"]

pytestmark = pytest.mark.timeout(600)  # every process imports several large libraries first


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 reviews."""
    path = tmp_path_factory.mktemp("table") / "reviews.parquet"
    pq.write_table(tiny.reviews(256), path)
    return path


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert scripts == sorted(
        [*FOR_TORCHRUN, "endpoint", "own_task", "ray_generation", "ray_pipeline", "torch_distributor", "vector_search"]
    )
    for name in scripts:
        assert index.count(f"examples/{name}.py") == 1


@pytest.mark.slow  # 15 to 30 s each: what they import
@pytest.mark.parametrize(
    ("example", "engine"),
    [("hf_trainer", "local"), *((example, engine) for engine in ("spark", "ray") for example in FOR_TORCHRUN)],
)
def test_a_script_for_torchrun_trains_on_two_ranks(
    example: str,
    engine: str,
    table: Path,
    tiny_bert: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if engine != "local":
        request.getfixturevalue(engine)
    script, output = EXAMPLES / f"{example}.py", tmp_path / "model"
    arguments = [str(tiny_bert), str(table), str(output), *RECIPE]
    launch_script(str(script), arguments, engine=make_engine(engine, None), processes=2)
    assert "2 ranks" in capfd.readouterr().out
    assert _accuracy(output) > 0.75


@pytest.mark.slow  # TorchDistributor alone takes 10 s and more
def test_training_runs_under_a_torch_distributor(
    spark: "SparkSession", table: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import torch_distributor

    monkeypatch.setattr(
        sys, "argv", ["torch_distributor.py", str(tiny_bert), str(table), str(tmp_path / "run"), *RECIPE]
    )
    torch_distributor.main()
    assert _accuracy(tmp_path / "run" / "model") > 0.75
    assert all((tmp_path / "run" / "logs" / f"rank_{rank}.jsonl").exists() for rank in range(2))


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_pipeline_of_ones_own_scores_every_row(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviews = (
        tiny.reviews(50).append_column("price", [[float(n) for n in range(50)]]).append_column("stars", [[3] * 50])
    )
    pq.write_table(reviews, tmp_path / "in.parquet")
    run_example(
        "ray_pipeline",
        monkeypatch,
        tiny_model,
        tmp_path / "in.parquet",
        tmp_path / "out",
        "--numbers",
        "price",
        "stars",
        "--prefix",
        "predicted_",
    )
    rows = pq.read_table(tmp_path / "out").sort_by("id")
    expected = torchlake.predict(tiny_model, reviews, prefix="predicted_", engine=tiny.Here()).sort_by("id")
    assert rows["predicted_label"].to_pylist() == expected["predicted_label"].to_pylist()
    assert rows["label"].to_pylist() == expected["label"].to_pylist()
    assert rows.num_rows == 50
    features = rows["features"].to_pylist()
    assert sum(first for first, _ in features) == pytest.approx(0, abs=1e-9)
    assert {second for _, second in features} == {0.0}
    assert set(rows.column_names) == ({*expected.column_names} - {"price", "stars"}) | {"features"}


@pytest.mark.slow  # two jobs on Ray, and DeepSpeed's import in every rank
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("columns", ["text", "prompt completion", "messages"])
def test_a_language_model_learns_under_zero_3_and_completes_prompts(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, texts = tiny.build_language_model(tmp_path / "model"), tiny.reviews(200)["text"].to_pylist()
    name, *completion = columns.split()
    chats = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": text}] for text in texts]
    table = {"text": texts, "prompt": texts, "completion": [f" {text}" for text in texts], "messages": chats}
    pq.write_table(pa.table({column: table[column] for column in columns.split()}), tmp_path / "lines.parquet")
    words = ["--prompts", "a good", "the bad film", "--epochs", "3", "--batch-size", "8"]
    words += ["--block", "64" if name == "messages" else "32"]  # a conversation and its question fit
    words += ["--text", name, *(["--completion", *completion] if completion else [])]
    for _ in range(2):  # the second time there is nothing left to train
        run_example("ray_generation", monkeypatch, model, tmp_path / "lines.parquet", tmp_path / "out", *words)
        out = capsys.readouterr().out
    assert "perplexity" in out
    written = pq.read_table(tmp_path / "out" / "completed").to_pylist()
    asked = ["a good", "the bad film"]
    assert [row[name] for row in written] == (
        [[{"role": "user", "content": text}] for text in asked] if name == "messages" else asked
    )
    assert all(row["error"] is None and row["generated_text"] in out for row in written)
    (newest, *_) = sorted((tmp_path / "out" / "run" / "checkpoints").iterdir(), reverse=True)
    assert len(list(newest.glob("*.safetensors"))) >= 2, "every rank wrote its own part"


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """The example as `python examples/NAME.py WORDS` runs it, in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def _accuracy(folder: Path) -> float:
    """The share of 200 other reviews that the model folder classifies as they are labeled."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = tiny.reviews(200, seed=1)
    with torch.inference_mode():
        logits = model(**tokenizer(table["text"].to_pylist(), padding=True, return_tensors="pt")).logits
    said = [model.config.id2label[number] for number in logits.argmax(1).tolist()]
    return sum(map(operator.eq, said, table["label"].to_pylist())) / len(said)


@pytest.mark.slow
def test_a_task_of_ones_own_survives_kills_and_beats_the_text_alone(tmp_path: Path, tiny_bert: Path) -> None:
    """A rank is killed in the first training, the whole example in the second; the same command goes on."""
    command = [sys.executable, str(EXAMPLES / "own_task.py"), str(tiny_bert), str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHLAKE_PROGRESS": "0"}
    killing = {"TORCHLAKE_FAILPOINT": "rank1.step:30:kill9", "TORCHLAKE_FAILPOINT_ONCE": str(tmp_path / "rank")}
    with subprocess.Popen(command, env={**environment, **killing}, stdout=subprocess.DEVNULL) as first:
        steps = tmp_path / "runs" / "both" / "metrics.jsonl"
        scoring_runs.wait_for(lambda: steps.exists() and steps.read_text().count("\n") > 10, deadline_s=400)
        first.kill()
    assert (tmp_path / "rank").exists(), "a rank was killed, and the training went on"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    error = dict(line.split() for line in done.stdout.splitlines())
    assert float(error["both"]) < 0.7 * float(error["text"])
    scored = pq.read_table(tmp_path / "runs" / "scored")
    assert (len(scored), scored["error"].null_count) == (300, 300)


@pytest.mark.slow
@pytest.mark.slow
def test_an_endpoint_labels_a_table_in_two_goes(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["endpoint", str(table), str(tmp_path / "labeled"), "--rows", "100"])
    runpy.run_path(str(EXAMPLES / "endpoint.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "stopped: max_tokens_total=1,200 is reached" in printed
    assert "100 rows, 0 failed" in printed


@pytest.mark.slow
def test_a_vector_index_finds_what_comparing_all_vectors_finds(tmp_path: Path) -> None:
    """A table too small for an approximate index: both find the same passages."""
    model = tiny.build_embedder(tmp_path / "model")
    pq.write_table(searches(60), tmp_path / "in.parquet")
    command = [
        sys.executable,
        str(EXAMPLES / "vector_search.py"),
        str(model),
        str(tmp_path / "in.parquet"),
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("60 passages; recall at 10: 0.")
    assert float(first.split()[-1]) == pytest.approx(float(second.split()[-1]), abs=0.02)
    assert float(first.split()[-1]) > 10 / 60


@pytest.mark.slow
def test_an_approximate_index_finds_nearly_what_comparing_all_vectors_finds(tmp_path: Path) -> None:
    pytest.importorskip("lancedb")
    example = runpy.run_path(str(EXAMPLES / "vector_search.py"), run_name="example")
    chance = np.random.default_rng(0)
    centers, number = chance.standard_normal((50, 32)), example["INDEXED"]
    vectors = (chance.standard_normal((number, 32)) + 3 * centers[chance.integers(0, 50, number)]).astype(np.float32)
    index = example["fill"](tmp_path, pa.array(range(number)), vectors)
    assert [one.index_type for one in index.list_indices()] == ["IvfHnswSq"]
    lengths = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    shared = 0
    for query in range(0, number, number // 100):
        found = index.search(vectors[query], vector_column_name="vector").distance_type("cosine").limit(10).to_arrow()
        nearest = np.argpartition(-(lengths @ lengths[query]), 10)[:10]
        shared += len({*found["id"].to_pylist()} & {*nearest.tolist()})
    assert shared > 900, "of 1,000"
