"""What `train` promises its caller; what it does when it is broken is in tests/faults."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import tiny
import training_runs as runs
from sweeps import sweep
from torchlake.config import job as config
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError, UsageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.optim.optimizers import make_optimizer, trainable_names
from torchlake.optim.precision import step_seed
from torchlake.optim.schedule import learning_rate
from torchlake.preparation.checks import choose_metric
from torchlake.training.model.strategy import choose_strategy


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> tuple[Path, dict[str, Any]]:
    """A run of 18 steps with a checkpoint every 3, and its job."""
    folder = tmp_path_factory.mktemp("finished")
    sections = runs.job(folder, tiny_bert)
    assert runs.succeed(folder / "run", sections).steps == 18
    return folder / "run", sections


def test_the_run_folder_holds_the_whole_story(finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    assert config.load_job(run / "job.yaml") == config.load_job(None, **sections)
    steps = [line for line in runs.metrics(run) if "loss" in line]
    assert [(line["step"], line["epoch"]) for line in steps] == [(step, 1 + (step - 1) // 9) for step in range(1, 19)]
    assert sum(line["rows"] for line in steps) == 2 * 72
    assert all(line["tokens"] > 0 and line["grad_norm"] > 0 and line["seconds"] > 0 for line in steps)
    assert [line["step"] for line in runs.metrics(run) if "validation_loss" in line] == [9, 18]
    assert runs.checkpoints(run) == ["step_00000018"]
    assert (run / "report.html").is_file()
    assert json.loads((run / "logs" / "rank_0.jsonl").read_text().splitlines()[0])["rank"] == 0


def test_the_model_folder_is_the_best_model_and_loads(finished: tuple[Path, dict[str, Any]]) -> None:
    run, _ = finished
    spec = load_spec(run / "model")
    assert spec.labels == ("bad", "good")
    model = load.load_model(run / "model", spec, auto_class="AutoModelForSequenceClassification")
    validations = {line["step"]: line for line in runs.metrics(run) if "validation_loss" in line}
    best = max(validations, key=lambda step: (validations[step]["validation_macro_f1"], -step))
    from safetensors.torch import load_file

    kept = load_file(run / "checkpoints" / "best" / f"step_{best:08d}" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in kept.items())


def test_a_finished_run_says_so_and_trains_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    before = runs.weights_sha256(run)
    again = runs.succeed(run, sections)
    assert again.complete
    assert again.steps == 0
    assert again.metrics == json.loads((run / "result.json").read_text())["metrics"]
    assert runs.weights_sha256(run) == before


def test_what_changes_no_result_may_change(finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    overrides = ("train.keep_checkpoints=5", "engine.processes=1", "train.micro_batch_tokens=99")
    assert runs.succeed(run, sections, overrides=overrides).complete


def test_another_job_in_the_same_folder_is_refused(finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    other = runs.attempt(run, sections, overrides=("train.learning_rate=0.5", "data.key=id"))
    assert other.exit_code == 65
    assert "train.learning_rate: 0.001 -> 0.5" in other.error
    assert "data.key: None -> 'id'" in other.error
    assert "FingerprintError" in other.error


def test_a_lost_model_folder_is_written_again_from_the_checkpoints(
    tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    import shutil

    run, sections = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "model" / "model.safetensors").write_bytes(b"damaged")
    again = runs.succeed(copy, sections)
    assert not again.complete
    assert again.steps == 0
    assert runs.weights_sha256(copy) == runs.weights_sha256(run)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    refused = runs.attempt(tmp_path / "home", runs.job(tmp_path, tiny_bert))
    assert refused.exit_code == 65
    assert "letter.txt" in refused.error
    assert not (tmp_path / "home" / "job.yaml").exists()


def test_a_changed_input_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    stopped = runs.attempt(tmp_path / "run", sections, sigterm_at="rank0.step:2")
    assert stopped.exit_code == 143
    pq.write_table(tiny.reviews(97), tmp_path / "reviews.parquet")
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "reviews.parquet" in refused.error
    assert "new run folder" in refused.error


def test_a_run_that_failed_before_its_first_step_is_mended_in_place(tmp_path: Path, tiny_bert: Path) -> None:
    """Bad rows are told; the remedy that the error names works in the same folder, and so does a mended table."""
    sections = runs.job(tmp_path, tiny_bert)
    table = tiny.reviews(96)
    labels = [None, *table["label"].to_pylist()[1:]]
    pq.write_table(table.set_column(2, "label", pa.array(labels)), tmp_path / "reviews.parquet")
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "row 0: null_label" in refused.error
    assert "data.bad_rows=drop" in refused.error
    mended = {**sections, "data": {**sections["data"], "bad_rows": "drop"}}
    assert runs.succeed(tmp_path / "run", mended).steps > 0


def test_labels_of_a_failed_attempt_are_forgotten(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    table = tiny.reviews(96)
    labels = [None, "typo", *table["label"].to_pylist()[2:]]
    pq.write_table(table.set_column(2, "label", pa.array(labels)), tmp_path / "reviews.parquet")
    assert runs.attempt(tmp_path / "run", sections).exit_code == 65
    pq.write_table(table, tmp_path / "reviews.parquet")
    runs.succeed(tmp_path / "run", sections)
    assert load_spec(tmp_path / "run" / "model").labels == ("bad", "good")


def test_a_finished_run_is_not_taken_for_one_of_other_rows(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    runs.succeed(tmp_path / "run", sections)
    pq.write_table(tiny.reviews(97), tmp_path / "reviews.parquet")
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "its train table has changed since then" in refused.error
    (tmp_path / "reviews.parquet").unlink()
    assert runs.succeed(tmp_path / "run", sections).complete


def test_a_key_is_checked(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"]["key"] = "label"
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "not unique" in refused.error


@pytest.mark.parametrize("kind", sweep(["arrow", "pandas", "polars"], quick={"pandas"}))
def test_frames_train_like_the_file_they_came_from(
    tmp_path: Path, tiny_bert: Path, finished: tuple[Path, dict[str, Any]], kind: str
) -> None:
    table = tiny.reviews(96)
    frame = {"arrow": table, "pandas": table.to_pandas(), "polars": pl.from_arrow(table)}[kind]
    assert kind != "pandas" or isinstance(frame, pd.DataFrame)
    run, sections = finished
    given = {**sections, "data": {**sections["data"], "train": frame}}
    for _ in range(2):
        done = runs.succeed(tmp_path / "run", given)
    assert done.complete
    assert runs.losses(tmp_path / "run") == runs.losses(run)


def test_no_validation_keeps_the_last_model(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, max_steps=5)
    sections["data"]["validation"] = None
    done = runs.succeed(tmp_path / "run", sections)
    assert done.metrics == {"loss": runs.losses(tmp_path / "run")[-1]}
    assert len(runs.losses(tmp_path / "run")) == 5


def test_a_validation_table_of_its_own(tmp_path: Path, tiny_bert: Path) -> None:
    pq.write_table(tiny.reviews(40, seed=5), tmp_path / "held_out.parquet")
    sections = runs.job(tmp_path, tiny_bert, epochs=1, validate_every="5steps", metric="loss")
    sections["data"]["validation"] = str(tmp_path / "held_out.parquet")
    done = runs.succeed(tmp_path / "run", sections)
    lines = [line for line in runs.metrics(tmp_path / "run") if "validation_loss" in line]
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert done.metrics is not None
    assert done.metrics["loss"] == min(line["validation_loss"] for line in lines)


def test_patience_ends_a_run_that_gets_no_better(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(
        tmp_path, tiny_bert, learning_rate=1e-12, validate_every="2steps", patience=3, metric="accuracy"
    )
    done = runs.succeed(tmp_path / "run", sections)
    assert done.steps == 8, "the first validation is the best, three equal ones follow"
    assert json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())["files"]
    assert runs.succeed(tmp_path / "run", sections).complete


def test_micro_batches_change_no_result(tmp_path: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    runs.succeed(tmp_path / "run", sections, overrides=("train.micro_batch_tokens=40",))
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(run), abs=1e-5)


@pytest.mark.slow  # beside fp16, in test_options.py
def test_bf16_learns_about_the_same(tmp_path: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    run, sections = finished
    runs.succeed(tmp_path / "run", sections, overrides=("train.precision=bf16",))
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(run), abs=0.05)
    assert runs.losses(tmp_path / "run") != runs.losses(run)


@pytest.mark.slow
def test_training_learns(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=256, epochs=8, batch_size=16, learning_rate=3e-3)
    done = runs.succeed(tmp_path / "run", sections)
    assert done.metrics is not None
    assert done.metrics["accuracy"] > 0.85


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.metric=acuracy",), "choose from loss, log_loss, "),
        (("data.validation=null", "train.patience=2"), "data.validation is null"),
        (("train.strategy=single", "engine.processes=2"), "runs on 1 process, and 2 were requested"),
        (("train.strategy=dpp",), "Did you mean 'ddp'"),
        (("data.text=txt",), "Did you mean 'text'"),
        (("data.train=nowhere.parquet",), "nowhere.parquet"),
        (("model.base=nowhere",), "nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    tmp_path: Path, tiny_bert: Path, overrides: tuple[str, ...], message: str
) -> None:
    refused = runs.attempt(tmp_path / "run", runs.job(tmp_path, tiny_bert), overrides=overrides)
    assert message in refused.error
    assert refused.exit_code in (64, 65)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def job(**train: Any) -> config.Job:
    return config.load_job(None, data={"train": "x"}, model={"base": "y"}, train=train)


def test_the_strategy_follows_the_number_of_ranks() -> None:
    assert choose_strategy(job(), 1) == "single"
    assert choose_strategy(job(), 2) == "ddp"
    assert choose_strategy(job(strategy="single"), 1) == "single"
    assert choose_strategy(job(strategy="fsdp"), 1) == "fsdp"
    with pytest.raises(UsageError):
        choose_strategy(job(strategy="single"), 2)


def test_every_problem_has_a_metric() -> None:
    for problem, labels in (("single_label", ("a", "b")), ("multi_label", ("a", "b")), ("regression", ())):
        spec = tiny.spec_for(problem, labels)
        default = choose_metric(job(), spec)
        assert choose_metric(job(metric=default), spec) == default
        assert choose_metric(job(metric="loss"), spec) == "loss"
        with pytest.raises(ConfigError, match=default):
            choose_metric(job(metric="nonsense"), replace(spec))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_rises_to_its_peak_and_falls(schedule: str) -> None:
    train = TrainConfig(learning_rate=1.0, warmup=0.1, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(step, 100, train) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates) > 0
    assert rates[-1] == 1.0 if schedule == "constant" else rates[-1] < 0.02
    assert rates[55] == pytest.approx({"linear": 0.5, "cosine": 0.5, "constant": 1.0}[schedule])


def test_one_step_is_a_schedule_too() -> None:
    for warmup in (0.0, 0.9):
        assert learning_rate(0, 1, TrainConfig(warmup=warmup, learning_rate=2.0)) == 2.0


def test_only_matrices_decay_and_frozen_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    optimizer, names = make_optimizer(model, TrainConfig(weight_decay=0.3)), trainable_names(model, TrainConfig())
    decaying, others = optimizer.param_groups
    assert names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [len(decaying["params"]), len(others["params"])] == [2, 3]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_steps_and_ranks_have_seeds_of_their_own() -> None:
    seeds = {step_seed(seed, step, rank) for seed in (0, 2**62) for step in range(50) for rank in range(4)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
