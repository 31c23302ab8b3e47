"""The strategy deepspeed beyond tests/conformance/test_strategies.py: its stages, 16 bits, and the user's own JSON."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import training_runs as runs
from torchlake import plugins
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError, DataError
from torchlake.strategies import _deepspeed_config as config

TOLERANCE = 1e-5
BF16 = 2e-3
"A loss in bf16, whose numbers have 8 bits."
SLOW = pytest.mark.slow
needs_library = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def three_classes(folder: Path) -> None:
    """A table with a class more: the head's bias has three numbers, which two ranks cannot halve."""
    table = tiny.reviews(90)
    labels = [label if index % 3 else "mixed" for index, label in enumerate(table["label"].to_pylist())]
    pq.write_table(table.set_column(2, "label", pa.array(labels)), folder / "reviews.parquet")


def job(folder: Path, encoder: Path, stage: int, **train: Any) -> dict[str, Any]:
    """Steps of several micro-batches, gradients that are clipped."""
    folder.mkdir(exist_ok=True)
    three_classes(folder)
    recipe = {"batch_size": 17, "micro_batch_tokens": 64, "clip_norm": 0.5, "epochs": 2, **train}
    return runs.job(folder, encoder, strategy="deepspeed", deepspeed={"stage": stage}, **recipe)


def as_single(sections: dict[str, Any]) -> dict[str, Any]:
    return {**sections, "train": {**sections["train"], "strategy": "single"}}


@needs_library
@pytest.mark.parametrize("stage", [1, 3])
@SLOW
def test_a_stage_trains_like_single_and_takes_over_from_it(tmp_path: Path, tiny_bert: Path, stage: int) -> None:
    """Also from a checkpoint that `single` wrote; stage 2 is what the conformance tests run."""
    sections = job(tmp_path, tiny_bert, stage)
    runs.succeed(tmp_path / "single", as_single(sections))
    stopped = runs.attempt(
        tmp_path / "run", as_single(sections), failpoint="rank0.step:5:raise", overrides=("train.max_restarts=0",)
    )
    assert stopped.exit_code == 70
    again = runs.attempt(
        tmp_path / "run",
        sections,
        ranks=2,
        failpoint="rank0.step:4:raise",
        overrides=("train.max_restarts=0",),
        TORCHLAKE_FAILPOINT_ONCE=str(tmp_path / "again.once"),
    )
    assert again.exit_code == 70, again.error
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


@needs_library
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=SLOW) for stage in (1, 2, 3)])
def test_in_bf16_a_run_goes_on_exactly_where_it_stopped(tmp_path: Path, tiny_bert: Path, stage: int) -> None:
    """The weights that learn are kept in fp32; made anew from those in bf16 they would differ."""
    sections = job(tmp_path, tiny_bert, stage, precision="bf16")
    runs.succeed(tmp_path / "whole", sections, ranks=2)
    stopped = runs.attempt(
        tmp_path / "run", sections, ranks=2, failpoint="rank0.step:5:raise", overrides=("train.max_restarts=0",)
    )
    assert stopped.exit_code == 70, stopped.error
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")
    runs.succeed(tmp_path / "single", as_single(sections))
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=BF16)


@needs_library
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=SLOW) for stage in (1, 2, 3)])
def test_a_small_adapter_learns_beside_frozen_weights(tmp_path: Path, tiny_bert: Path, stage: int) -> None:
    pytest.importorskip("peft")
    sections = job(tmp_path, tiny_bert, stage, activation_checkpointing=True)
    sections["model"]["lora"] = {"rank": 4}
    runs.succeed(tmp_path / "single", as_single(sections))
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


def one_loss_is_infinite_its_gradient_not() -> None:
    """And all losses are scaled up, as in fp16, which CPUs do not have here."""
    from torchlake.tasks.text_classification import task

    calls = 0
    right = task.loss_sum

    def loss_sum(logits: Any, targets: Any, spec: Any, objective: Any) -> Any:
        nonlocal calls
        calls += logits.requires_grad  # not in validations
        loss = right(logits, targets, spec, objective)
        return loss + float("inf") if logits.requires_grad and calls in (3, 4) else loss

    task.loss_sum = loss_sum
    for name in ("single", "deepspeed"):
        strategy: Any = plugins.load("strategies", name)
        backward, clip_norm = strategy.backward, strategy.clip_norm
        strategy.backward = lambda module, loss, call=backward: call(module, loss * 8)
        strategy.clip_norm = lambda module, most, scale, call=clip_norm: call(module, most, scale * 8)


@needs_library
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=SLOW) for stage in (1, 2, 3)])
def test_a_step_that_is_not_applied_leaves_nothing_behind(tmp_path: Path, tiny_bert: Path, stage: int) -> None:
    """With a loss scale, by which gradients are divided before they are clipped."""
    # One micro-batch a step on each rank, so that both count the same calls.
    sections = job(tmp_path, tiny_bert, stage, micro_batch_tokens=16384)
    stub = one_loss_is_infinite_its_gradient_not
    runs.succeed(tmp_path / "single", as_single(sections), stub=stub)
    runs.succeed(tmp_path / "run", sections, ranks=2, stub=stub)
    one, two = ([line for line in runs.metrics(tmp_path / name) if "loss" in line] for name in ("single", "run"))
    assert [line["step"] for line in two if line["loss"] == "inf"] == [3, 4]
    for field, tolerance in (("loss", TOLERANCE), ("grad_norm", 1e-4)):
        assert [line[field] for line in two if line["loss"] != "inf"] == pytest.approx(
            [line[field] for line in one if line["loss"] != "inf"], abs=tolerance
        )


@pytest.mark.slow
@needs_library
def test_the_users_file_is_laid_under_the_job(tmp_path: Path, tiny_bert: Path) -> None:
    """As the Hugging Face Trainer's documentation has it, with buckets so small that there are many."""
    sections = job(tmp_path, tiny_bert, 3)
    given = {
        "zero_optimization": {
            "stage": "auto",
            "overlap_comm": True,
            "reduce_bucket_size": 1000,
            "sub_group_size": 4000,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "train_batch_size": 17,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    runs.succeed(tmp_path / "single", as_single(sections))
    sections["train"]["deepspeed"] = {"stage": 3, "config": str(path)}
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


@needs_library
def test_a_key_that_deepspeed_does_not_know_ends_the_run(tmp_path: Path, tiny_bert: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"reduce_bucket_sice": 5}}')
    sections = job(tmp_path, tiny_bert, 2)
    sections["train"]["deepspeed"]["config"] = str(path)
    refused = runs.attempt(tmp_path / "run", sections, ranks=2)
    assert refused.exit_code == 65
    assert f"{path}: DeepSpeed does not accept it" in refused.error
    assert "reduce_bucket_sice" in refused.error


def train_config(path: Path, given: Any, **fields: Any) -> TrainConfig:
    path.write_text(json.dumps(given))
    options = fields.pop("deepspeed", {})
    return TrainConfig.model_validate({**fields, "deepspeed": {**options, "config": str(path)}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_batch_size": 32}, "train_batch_size=32: the job has train.batch_size=64"),
        ({"train_micro_batch_size_per_gpu": 4}, "train.micro_batch_tokens=16384"),
        ({"gradient_accumulation_steps": 1}, "train.micro_batch_tokens=16384"),
        ({"gradient_clipping": 5}, "gradient_clipping=5: the job has train.clip_norm=1.0"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type='Lamb': the job has train.optimizer=adamw"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, "optimizer.params.lr=1e-05: the job has train.learning_rate=0.0001"),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            "optimizer.params.betas=[0.9, 0.95]: the job has train.betas=[0.9, 0.999]",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type='OneCycle': the job has train.schedule=linear"),
        ({"scheduler": {"params": {"warmup_num_steps": 9}}}, "scheduler.params.warmup_num_steps=9"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=True: the job has train.precision=auto"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True: the job has train.precision=auto"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3: the job has train.deepspeed.stage=2"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device='cpu': the job has train.deepspeed.offload_optimizer=false",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "main memory (cpu) is the only place"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "the norm decides whether a step is applied"),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow: is a different optimizer",
        ),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio=0.5: the job has 1.0"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum': the job has 'mean', always"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states=True"),
        ({"amp": {"enabled": True}}, "amp: cannot be used here, the precision is set by train.precision"),
        ({"zero_optimization": [1]}, "zero_optimization: must be a JSON object"),
    ],
)
def test_what_contradicts_the_job_is_told_with_its_field(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    path = tmp_path / "zero.json"
    with pytest.raises(ConfigError) as refused:
        config.check(train_config(path, given))
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    given = {"train_batch_size": 32, "gradient_clipping": 5}
    with pytest.raises(ConfigError) as refused:
        config.check(train_config(tmp_path / "zero.json", given))
    assert len(str(refused.value).splitlines()) == 2


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    with pytest.raises(ConfigError, match="must be a JSON object, not a list"):
        config.check(train_config(path, [1]))
    path.write_text("{")
    options = TrainConfig.model_validate({"deepspeed": {"config": str(path)}})
    with pytest.raises(DataError, match="not valid JSON"):
        config.check(options)
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        config.check(options)


def test_fp16_and_stage_1_have_words_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    with pytest.raises(ConfigError, match="the loss scale is adjusted dynamically"):
        config.check(train_config(path, {"fp16": {"enabled": True, "loss_scale": 128}}, precision="fp16"))
    with pytest.raises(ConfigError, match="at stage 1 gradients of bf16 add up in bf16"):
        given = {"data_types": {"grad_accum_dtype": "fp32"}}
        config.check(train_config(path, given, precision="bf16", deepspeed={"stage": 1}))


def test_what_deepspeed_is_told(tmp_path: Path) -> None:
    given = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}},
        "comms_logger": {"enabled": True},
        "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": "auto",
    }
    options = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    train = train_config(tmp_path / "zero.json", given, precision="bf16", clip_norm=None, deepspeed=options)
    told = config.build(train, ranks=4, dtype="bf16", hidden=32)
    assert told["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1024,
        "offload_optimizer": {"pin_memory": True, "device": "cpu"},
        "offload_param": {"pin_memory": True, "device": "cpu"},
    }
    assert (told["train_batch_size"], told["gradient_accumulation_steps"]) == (4, 1)
    assert told["gradient_clipping"] == 0.0
    assert told["comms_logger"] == {"enabled": True}
    assert told["bf16"] == {"enabled": True}
    assert told["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "wall_clock_breakdown" not in told


def test_it_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    strategy: Any = plugins.load("strategies", "deepspeed")
    monkeypatch.setattr(strategy, "find_spec", lambda library: None)
    assert "pip install 'torchlake[deepspeed]'" in strategy.refusal(TrainConfig())
    monkeypatch.setattr(strategy, "find_spec", lambda library: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    offloaded = TrainConfig.model_validate({"deepspeed": {"offload_optimizer": True}})
    assert "train.deepspeed.offload_optimizer" in strategy.refusal(offloaded)
    assert "train.precision=bf16" in strategy.refusal(TrainConfig(precision="fp16"))
    compiled = TrainConfig.model_validate({"compile": True, "deepspeed": {"stage": 3}})
    assert "cannot be combined" in strategy.refusal(compiled)
    assert strategy.refusal(TrainConfig()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert strategy.refusal(offloaded) is None
    with pytest.raises(ConfigError):
        strategy.refusal(train_config(tmp_path / "zero.json", {"train_batch_size": 32}))
