"""precision: bf16_weights: layers compute in bf16, what is trained, added up and stored is fp32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import families
import training_runs as runs
from sweeps import sweep
from torchlake import plugins
from torchlake.config.sections.train import TrainConfig
from torchlake.optim.precision import ComputeWeights, Precision, find_precision
from torchlake.strategies import _native
from torchlake.training.model import kernels, setup, traits

BESIDE_FP32 = 0.06
"A loss of these tiny models, as with autocast."
BETWEEN_RANKS = 0.01
"bf16 rounds the sums of other micro-batches differently: 1/256 of a loss of 0.7, and some."
MASTERS = sweep([("single", 1), ("ddp", 2), ("fsdp", 2), ("deepspeed", 2)], quick=[("single", 1)])


@pytest.mark.parametrize(("strategy", "ranks"), MASTERS)
def test_the_losses_are_those_of_fp32_and_of_autocast(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int
) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    sections = runs.job(tmp_path, tiny_bert, rows=64, epochs=1, strategy="single")
    runs.succeed(tmp_path / "fp32", sections)
    runs.succeed(tmp_path / "autocast", sections, overrides=("train.precision=bf16",))
    if strategy != "single":
        runs.succeed(tmp_path / "one", sections, overrides=("train.precision=bf16_weights",))
    sections["train"] |= {"strategy": strategy, "precision": "bf16_weights"}
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    found = runs.losses(tmp_path / "run")
    assert found not in (runs.losses(tmp_path / "fp32"), runs.losses(tmp_path / "autocast"))
    assert found == pytest.approx(runs.losses(tmp_path / "fp32"), abs=BESIDE_FP32)
    assert found == pytest.approx(runs.losses(tmp_path / "autocast"), abs=BESIDE_FP32)
    if strategy != "single":
        assert found == pytest.approx(runs.losses(tmp_path / "one"), abs=BETWEEN_RANKS)
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    rounded = {name for name, each in weights.items() if torch.equal(each, each.to(torch.bfloat16).float())}
    assert len(rounded) < len(weights) / 2, "checkpoints store the fp32 weights"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, tiny_bert: Path, strategy: str) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=64, epochs=1, strategy=strategy, precision="bf16_weights")
    ranks = 1 if strategy == "single" else 2
    stopped = runs.attempt(
        tmp_path / "run", sections, ranks=ranks, failpoint="rank0.step:5:raise", overrides=("train.max_restarts=0",)
    )
    assert stopped.exit_code == 70
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    runs.succeed(tmp_path / "whole", sections, ranks=ranks)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")


@pytest.mark.slow
def test_activations_that_are_computed_again_use_the_same_weights(tmp_path: Path, tiny_llama: Path) -> None:
    sections = runs.job(tmp_path, tiny_llama, rows=40, epochs=1, precision="bf16_weights")
    sections["model"] |= {"task": "text_generation", "max_length": 32}
    runs.succeed(tmp_path / "kept", sections)
    runs.succeed(tmp_path / "again", sections, overrides=("train.activation_checkpointing=true",))
    assert runs.losses(tmp_path / "again") == runs.losses(tmp_path / "kept")


def note_dtypes() -> None:
    """Write the dtypes of frozen and trained parameters into a file beside the run."""
    make = setup.make_train_state

    def noting(settings: object, group: object, training: object) -> object:
        made = make(settings, group, training)  # type: ignore[arg-type]
        parameters = list(made[0].model.parameters())
        frozen = {str(each.dtype) for each in parameters if not each.requires_grad}
        trained = {str(each.dtype) for each in parameters if each.requires_grad}
        Path(settings.run, "dtypes").write_text(f"{frozen} {trained}")  # type: ignore[attr-defined]
        return made

    from torchlake.training import loop

    loop.make_train_state = noting  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), sweep([("single", 1), ("ddp", 2), ("fsdp", 2)], quick=[("fsdp", 2)]))
def test_a_frozen_base_is_held_in_bf16_only(tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, strategy="single")
    sections["model"]["lora"] = {"rank": 4}
    runs.succeed(tmp_path / "fp32", sections)
    sections["train"] |= {"strategy": strategy, "precision": "bf16_weights"}
    runs.succeed(tmp_path / "run", sections, ranks=ranks, stub=note_dtypes)
    assert (tmp_path / "run" / "dtypes").read_text() == "{'torch.bfloat16'} {'torch.float32'}"
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "fp32"), abs=BESIDE_FP32)
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sweep(["fsdp", "deepspeed"], quick=["fsdp"]))
def test_a_run_continues_under_another_strategy(tmp_path: Path, tiny_bert: Path, strategy: str) -> None:
    if plugins.load("strategies", strategy).refusal(TrainConfig()) is not None:
        pytest.skip(f"{strategy} cannot run here")
    sections = runs.job(tmp_path, tiny_bert, precision="bf16_weights", strategy="single")
    runs.succeed(tmp_path / "single", sections)
    stopped = runs.attempt(
        tmp_path / "run", sections, failpoint="rank0.step:8:raise", overrides=("train.max_restarts=0",)
    )
    assert stopped.exit_code == 70
    sections["train"]["strategy"] = strategy
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=BETWEEN_RANKS)


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    """256 gradients of 1/256 beside one of 1: in bf16 each would be rounded away."""
    model = torch.nn.Linear(1, 1, bias=False)
    module = ComputeWeights(model, torch.bfloat16)
    single = plugins.load("strategies", "single")
    for value in [1.0, *[2.0**-8] * 256]:
        single.backward(module, module(torch.tensor([[value]], dtype=torch.bfloat16)).sum())
    assert model.weight.dtype is torch.float32
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 2.0


def test_the_weights_are_back_after_a_failure_and_without_gradients() -> None:
    model = torch.nn.Linear(2, 2)
    module = ComputeWeights(model, torch.bfloat16)
    with torch.no_grad():
        assert module(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert isinstance(model.weight, torch.nn.Parameter)
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3, dtype=torch.bfloat16))
    assert isinstance(model.weight, torch.nn.Parameter)


@pytest.mark.slow
def test_a_model_that_cannot_compute_in_bf16_is_refused_or_takes_autocast(
    tmp_path: Path,
) -> None:
    """FNet's Fourier transforms are not there in bf16."""
    base = families.build(tmp_path / "base", "fnet", kind="classifier", dropout=False)
    sections = runs.job(tmp_path, base, epochs=1, precision="bf16_weights")
    refused = runs.attempt(tmp_path / "run", sections)
    assert "FNetForSequenceClassification cannot compute with weights in bf16" in refused.error
    assert "train.precision=bf16" in refused.error
    runs.succeed(tmp_path / "run", {**sections, "train": {**sections["train"], "precision": "auto"}}, stub=pick_weights)
    runs.succeed(tmp_path / "bf16", sections, overrides=("train.precision=bf16",))
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "bf16")


def pick_weights() -> None:
    """Let auto take bf16_weights here too."""
    for module in (kernels, setup, traits, _native):
        module.find_precision = _weights_for_auto  # type: ignore[attr-defined]


def _weights_for_auto(name: str, device: torch.device) -> Precision:
    return find_precision("bf16_weights" if name == "auto" else name, device)


def test_auto_takes_it_on_gpus_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert find_precision("auto", torch.device("cuda")) == find_precision("bf16_weights", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert find_precision("auto", torch.device("cuda")) == find_precision("fp32", torch.device("cuda"))
    assert not find_precision("auto", torch.device("cpu")).weights
