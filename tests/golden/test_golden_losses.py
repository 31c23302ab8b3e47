"""The first 20 losses of one job: a change that is not meant to change a result changes no digit."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import training_runs as runs
from golden_losses import BETWEEN_STRATEGIES, check
from sweeps import sweep
from torchlake import plugins

STEPS = 20


def table(problem: str) -> pa.Table:
    reviews = tiny.reviews(200, seed=3)
    if problem == "next_token":
        return reviews.select(["text"])
    if problem == "single_label":
        return reviews
    words = [text.split() for text in reviews["text"].to_pylist()]
    if problem == "regression":
        labels: list[object] = [len(each) / 10 for each in words]
    else:
        labels = [[word for word in ("movie", "plot") if word in each] for each in words]
    return reviews.set_column(2, "label", pa.array(labels))


def losses(folder: Path, base: Path, problem: str, *, strategy: str = "auto", ranks: int = 1) -> list[float]:
    folder.mkdir(exist_ok=True)
    pq.write_table(table(problem), folder / "reviews.parquet")
    sections = runs.job(folder, base, batch_size=16, max_steps=STEPS, micro_batch_tokens=256, strategy=strategy)
    if problem == "next_token":
        sections["model"] |= {"task": "text_generation", "max_length": 32}
        sections["train"]["epochs"] = 4  # 6 steps each
    runs.succeed(folder / "run", sections, ranks=ranks)
    return runs.losses(folder / "run")


@pytest.mark.parametrize(
    "problem", sweep(["single_label", "multi_label", "regression"], quick={"single_label", "regression"})
)
def test_a_classifier_gives_the_losses_of_the_golden_file(tmp_path: Path, tiny_bert: Path, problem: str) -> None:
    check(f"text_classification_{problem}", losses(tmp_path, tiny_bert, problem))


def test_a_language_model_gives_the_losses_of_the_golden_file(tmp_path: Path, tiny_gpt2: Path) -> None:
    check("text_generation", losses(tmp_path, tiny_gpt2, "next_token"))


@pytest.mark.parametrize(
    "strategy", sweep((name for name in plugins.names("strategies") if name != "single"), quick=())
)
def test_two_ranks_give_the_losses_of_one(tmp_path: Path, tiny_bert: Path, strategy: str) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    one = losses(tmp_path / "one", tiny_bert, "single_label")
    two = losses(tmp_path / "two", tiny_bert, "single_label", strategy=strategy, ranks=2)
    assert two == pytest.approx(one, abs=BETWEEN_STRATEGIES)
