"""train.ema: the average of the weights is the one computed by hand from every step's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.checkpoints import format
from torchlake.optim import averages

EMA = 0.6
RUNS = [("single", 1), ("ddp", 2), ("fsdp", 2)]


def tensors(run: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    with format.open_tensors(run / "checkpoints" / f"step_{step:08d}", kind) as stored:
        return {name: stored.read(name) for name in stored.shapes}


def by_hand(run: Path, last: int) -> dict[str, torch.Tensor]:
    """The average after step `last` from the weights that the checkpoints of every step hold."""
    average = {name: weight.double() for name, weight in tensors(run, 1, format.MODEL).items()}
    for step in range(2, last + 1):
        decay = min(EMA, (1 + step) / (10 + step))
        for name, weight in tensors(run, step, format.MODEL).items():
            average[name] = decay * average[name] + (1 - decay) * weight.double()
    return average


def check(run: Path, last: int) -> None:
    stored = tensors(run, last, format.OPTIMIZER)
    expected = by_hand(run, last)
    names = [name for name in expected if f"{name}|{averages.AVERAGE}" in stored]
    assert len(names) > 10
    for name in names:
        torch.testing.assert_close(stored[f"{name}|{averages.AVERAGE}"], expected[name].float(), rtol=1e-5, atol=1e-7)


def job(folder: Path, base: Path, **train: Any) -> dict[str, Any]:
    options = {"epochs": 1, "checkpoint_every": "1steps", "keep_checkpoints": 50, "ema": EMA, "max_restarts": 0}
    return runs.job(folder, base, rows=64, **{**options, **train})


@pytest.mark.parametrize(("strategy", "ranks"), sweep(RUNS, quick=[("fsdp", 2)]))
def test_the_average_is_that_of_all_steps(tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int) -> None:
    run, other = tmp_path / "run", "single" if ranks > 1 else "fsdp"
    sections = job(tmp_path, tiny_bert, strategy=strategy, validate_every="3steps", micro_batch_tokens=256)
    # Killed in the middle, and continued on another number of ranks.
    assert runs.attempt(run, sections, ranks=ranks, failpoint="rank0.step:5:raise").exit_code
    runs.succeed(run, sections, ranks=3 - ranks, overrides=(f"train.strategy={other}",))
    check(run, 4)
    check(run, 6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_validations_do_not_change_what_is_trained(tmp_path: Path, tiny_bert: Path, strategy: str) -> None:
    """Weights are exchanged for a validation and back; what FSDP has gathered is not used after it."""
    sections, ranks = job(tmp_path, tiny_bert, strategy=strategy), 1 if strategy == "single" else 2
    for fsdp in ({"reshard": True}, {"reshard": False}) if strategy == "fsdp" else ({},):
        sections["train"]["fsdp"] = fsdp
        often, never = (tmp_path / f"{name}{len(str(fsdp))}" for name in ("often", "never"))
        runs.succeed(often, sections, ranks=ranks, overrides=("train.validate_every=1steps",))
        runs.succeed(never, sections, ranks=ranks, overrides=("train.validate_every=100steps",))
        assert runs.losses(often) == runs.losses(never)
        plain = runs.succeed(tmp_path / f"plain{len(str(fsdp))}", sections, ranks=ranks, overrides=("train.ema=",))
        assert plain.exit_code == 0
        assert runs.losses(tmp_path / f"plain{len(str(fsdp))}") == runs.losses(often)


@pytest.mark.slow
def test_the_model_is_the_average(tmp_path: Path, tiny_bert: Path) -> None:
    sections = job(tmp_path, tiny_bert)
    whole = {**sections["data"], "validation": None}
    runs.succeed(tmp_path / "last", {**sections, "data": whole})
    model, expected = load_file(tmp_path / "last/model/model.safetensors"), by_hand(tmp_path / "last", 8)
    for name, tensor in model.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=1e-5, atol=1e-7)

    validated = {**sections["data"], "validation": sections["data"]["train"]}
    done = runs.succeed(tmp_path / "best", {**sections, "data": validated})
    assert done.metrics is not None
    found = tl.evaluate(tmp_path / "best/model", sections["data"]["train"])
    assert found.metrics["macro_f1"].value == pytest.approx(done.metrics["macro_f1"])
    best, expected = load_file(tmp_path / "best/model/model.safetensors"), by_hand(tmp_path / "best", 8)
    torch.testing.assert_close(best["classifier.weight"], expected["classifier.weight"].float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
def test_a_step_that_is_skipped_does_not_count(optimizer: str) -> None:
    from torchlake.config.sections.train import TrainConfig
    from torchlake.optim.optimizers import make_optimizer

    parameter = torch.nn.Linear(2, 2, bias=False)
    made = make_optimizer(parameter, TrainConfig.model_validate({"optimizer": optimizer, "learning_rate": 0.1}))
    averages.update(made, EMA, 1, torch.tensor(False))
    first = made.state[parameter.weight].get(averages.AVERAGE)
    assert first is None if optimizer == "lion" else torch.equal(first, parameter.weight)
    for step in (2, 3):
        parameter.weight.grad = torch.ones(2, 2)
        made.step()
        averages.update(made, EMA, step, torch.tensor(True))
    before = made.state[parameter.weight][averages.AVERAGE].clone()
    parameter.weight.data.add_(1)
    averages.update(made, EMA, 4, torch.tensor(False))
    assert torch.equal(made.state[parameter.weight][averages.AVERAGE], before)


def test_deepspeed_refuses_it(tmp_path: Path, tiny_bert: Path) -> None:
    pytest.importorskip("deepspeed")
    refused = runs.attempt(tmp_path / "run", job(tmp_path, tiny_bert, strategy="deepspeed"))
    assert "train.strategy 'deepspeed' cannot run here: train.ema" in refused.error
    assert not (tmp_path / "run").exists()
