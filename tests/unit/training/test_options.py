"""What may be asked of a training besides its recipe: precision, memory, LoRA, how it is stored and shared out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.config.job import load_job
from torchlake.data import batching
from torchlake.errors import UsageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.tasks._pretrained import base_model
from torchlake.training import state
from torchlake.training.model import kernels
from torchlake.training.model.strategy import check_strategy

TOLERANCE = 1e-5
SLOW = pytest.mark.slow
EVERY = [("single", 1), ("ddp", 2), ("fsdp", 2)]
STRATEGIES = sweep(EVERY, quick=[("single", 1)])
RANKS = sweep(EVERY, quick=[("fsdp", 2)])


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
@pytest.mark.slow  # test_bf16_weights.py has the losses of bf16
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_learn_like_thirty_two(
    tmp_path: Path, tiny_bert: Path, precision: str, strategy: str, ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=3, strategy="single")
    runs.succeed(tmp_path / "fp32", sections)
    sections["train"] |= {"precision": precision, "strategy": strategy}
    runs.succeed(tmp_path / precision, sections, ranks=ranks)
    expected, found = runs.losses(tmp_path / "fp32"), runs.losses(tmp_path / precision)
    assert found != expected
    assert found == pytest.approx(expected, abs=0.06)
    weights = load_file(tmp_path / precision / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def overflow_at_first() -> None:
    """A loss scale under which the first gradients of any model are infinite in fp16."""
    state.TrainProgress.__init__.__kwdefaults__["loss_scale"] = 2.0**40


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), RANKS)
def test_a_loss_scale_that_is_too_large_is_halved_on_all_ranks(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=4, precision="fp16", strategy=strategy, checkpoint_every="epoch")
    runs.succeed(tmp_path / "run", sections, ranks=ranks, stub=overflow_at_first)
    norms = [line["grad_norm"] for line in runs.metrics(tmp_path / "run") if "loss" in line]
    finite = [isinstance(norm, float) for norm in norms]  # JSON has no infinity
    assert not any(finite[:3])
    assert all(finite[-5:])


@pytest.mark.slow  # the test below has the losses of one rank
@pytest.mark.parametrize(("strategy", "ranks"), EVERY)
@pytest.mark.parametrize("which", [True, "selective"])
def test_activations_computed_again_change_nothing(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int, which: bool | str
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, strategy=strategy)
    runs.succeed(tmp_path / "kept", sections, ranks=ranks)
    sections["train"]["activation_checkpointing"] = which
    runs.succeed(tmp_path / "again", sections, ranks=ranks)
    assert runs.losses(tmp_path / "again") == pytest.approx(runs.losses(tmp_path / "kept"), abs=TOLERANCE)


def products_in_a_step(folder: Path, base: Path, which: bool | str) -> tuple[list[float], int]:
    """The losses of a short run, and the matrix products of its steps."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from torchlake.training import loop
    from torchlake.training import step as steps

    products = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            products += func in kernels.KEPT
            return func(*args, **(kwargs or {}))

    def counted(*arguments: Any) -> Any:
        with Counting():
            return train_step(*arguments)

    train_step = steps.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", counted)
        sections = runs.job(folder, base, rows=24, epochs=1, activation_checkpointing=which)
        tl.train(run=folder / str(which), engine=runs.Inline(1), **sections)
    return runs.losses(folder / str(which)), products


def test_selective_checkpointing_computes_no_product_again(tmp_path: Path) -> None:
    """With dropout: what is computed again draws the same numbers."""
    base = tiny.build_encoder(tmp_path / "base", dropout=0.1)
    (plain, few), (whole, more), (kept, same) = (
        products_in_a_step(tmp_path, base, which) for which in (False, True, "selective")
    )
    assert plain == whole == kept
    assert few == same < more


@pytest.mark.slow  # a minute of compiling
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_compiled_model_learns_the_same(tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, strategy=strategy)
    runs.succeed(tmp_path / "eager", sections, ranks=ranks)
    sections["train"]["compile"] = True
    runs.succeed(tmp_path / "compiled", sections, ranks=ranks)
    assert runs.losses(tmp_path / "compiled") == pytest.approx(runs.losses(tmp_path / "eager"), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("options", sweep([{"reshard": False}, {"shard_ranks": 2}], quick=[{"shard_ranks": 2}]))
def test_fsdp_shares_out_in_other_ways_too(tmp_path: Path, tiny_bert: Path, options: dict[str, object]) -> None:
    """Weights kept until the backward pass; and, on four ranks, two copies of two halves, which a checkpoint joins."""
    ranks = 4 if "shard_ranks" in options else 2
    sections = runs.job(tmp_path, tiny_bert, epochs=1, batch_size=16, strategy="single")
    runs.succeed(tmp_path / "single", sections)
    sections["train"] |= {"strategy": "fsdp", "fsdp": options}
    runs.succeed(tmp_path / "fsdp", sections, ranks=ranks)
    assert runs.losses(tmp_path / "fsdp") == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


def test_what_cannot_be_shared_out_is_said(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, strategy="fsdp", fsdp={"shard_ranks": 2}, max_restarts=0)
    refused = runs.attempt(tmp_path / "run", sections, ranks=3)
    assert refused.exit_code == 64
    assert "3 ranks cannot be split" in refused.error
    sections["train"]["fsdp"] = {"cpu_offload": True}
    refused = runs.attempt(tmp_path / "offloaded", sections, ranks=2)
    assert refused.exit_code == 64
    assert "no GPU here" in refused.error


@pytest.mark.parametrize(
    ("strategy", "unused"),
    [("auto", ["fsdp", "deepspeed"]), ("ddp", ["fsdp", "deepspeed"]), ("fsdp", ["ddp", "deepspeed"])],
)
def test_options_of_other_strategies_are_named(
    strategy: str, unused: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"ddp": {"bucket_mib": 1}, "fsdp": {"reshard": False}, "deepspeed": {"stage": 3}}
    job = load_job(None, data={"train": "t"}, model={"base": "b"}, train={"strategy": strategy, **options})
    check_strategy(job, 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"train.{name}.{key} has no effect: it is of train.strategy={name}, not {strategy}"
        for name in unused
        for key in options[name]
    ]


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({}, 3, "3 ranks cannot be divided into groups"),
        ({}, (2, 4), "needs a fixed number of ranks"),
        ({"strategy": "ddp"}, 2, "is an option of train.strategy=fsdp; the strategy is 'ddp'"),
        ({"fsdp": {"tensor_parallel": 3}}, 3, "its 4 attention heads cannot be divided among 3 ranks"),
        ({"compile": True}, 2, "cannot be combined with train.compile"),
        ({"lora": {"rank": 4}}, 2, "cannot be combined with model.lora"),
        ({"bert": True}, 2, "no plan for tensor parallelism of models of type 'bert'"),
    ],
)
def test_layers_that_cannot_be_split_are_refused_before_anything_starts(
    options: dict[str, Any], ranks: Any, message: str, tmp_path: Path, tiny_bert: Path, tiny_llama: Path
) -> None:
    train = {key: value for key, value in options.items() if key not in ("lora", "bert")}
    base = tiny_bert if "bert" in options else tiny_llama
    job = runs.job(tmp_path, base, **{"strategy": "fsdp", "fsdp": {"tensor_parallel": 2}, **train})
    if "lora" in options:
        job["model"]["lora"] = options["lora"]
    with pytest.raises(UsageError, match=message):
        tl.train(run=tmp_path / "run", engine=tl.Local(processes=ranks), **job)
    assert not (tmp_path / "run" / "prepared").exists()


def test_what_needs_nccl_is_said(tmp_path: Path, tiny_bert: Path) -> None:
    refused = runs.attempt(
        tmp_path / "run", runs.job(tmp_path, tiny_bert, strategy="ddp", ddp={"compress": "bf16"}), ranks=2
    )
    assert refused.exit_code == 64
    assert "train.ddp.compress=fp16" in refused.error


@pytest.mark.slow
def test_ddp_sends_gradients_in_sixteen_bits(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=2, strategy="ddp")
    runs.succeed(tmp_path / "plain", sections, ranks=2)
    sections["train"]["ddp"] = {"compress": "fp16", "bucket_mib": 0.01}
    runs.succeed(tmp_path / "fp16", sections, ranks=2)
    plain, found = runs.losses(tmp_path / "plain"), runs.losses(tmp_path / "fp16")
    assert found != plain
    assert found == pytest.approx(plain, abs=0.05)


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_lora_trains_little_and_exports_a_whole_model(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, strategy="single")
    sections["model"]["lora"] = {"rank": 4}
    runs.succeed(tmp_path / "single", sections)
    run = tmp_path / strategy
    if strategy != "single":
        sections["train"]["strategy"] = strategy
        runs.succeed(run, sections, ranks=ranks)
        assert runs.losses(run) == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)
    merged = load_file(run / "model" / "model.safetensors")
    base = load_file(tiny_bert / "model.safetensors")
    plain = {name.removeprefix("bert."): tensor for name, tensor in merged.items()}
    changed = {name for name in base if not torch.equal(base[name], plain[name])}
    assert changed
    assert all(name.startswith(("encoder.layer.", "pooler")) for name in changed)
    load.check_folder(run / "model")
    with safe_open(run / "model" / "adapter" / "adapter_model.safetensors", framework="pt") as adapter:
        assert any("lora_A" in name for name in adapter.keys())  # noqa: SIM118
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    stored = sum(path.stat().st_size for path in newest.glob("model*.safetensors"))
    assert stored < (run / "model" / "model.safetensors").stat().st_size


@pytest.mark.slow
# peft asks transformers for a property under its older name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_an_adapter_gives_the_answers_of_the_merged_model(tmp_path: Path, tiny_bert: Path) -> None:
    peft = pytest.importorskip("peft")
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    sections["model"]["lora"] = {"rank": 4, "targets": ["query", "value"]}
    runs.succeed(tmp_path / "run", sections)
    folder = tmp_path / "run" / "model"
    spec = load_spec(folder)
    merged = load.load_model(folder, auto_class="AutoModelForSequenceClassification")
    torch.manual_seed(0)
    base = base_model(tiny_bert, spec, "AutoModelForSequenceClassification")
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    rows = batching.Ragged(np.arange(5, 20, dtype=np.int32), np.array([0, 6, 15]))
    ids, mask = (torch.from_numpy(array) for array in batching.pad(rows, np.arange(2), 0))
    with torch.inference_mode():
        one, other = (model(input_ids=ids, attention_mask=mask).logits for model in (merged, adapted))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_layers_that_lora_does_not_find_are_told_with_those_there_are(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    sections["model"]["lora"] = {"targets": ["q_proj"]}
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "no linear layer of this model is called q_proj" in refused.error
    assert "query" in refused.error


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [pytest.param("rank0.step:4", marks=SLOW), "rank0.step:7"])
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_lora_and_fp16_go_on_where_they_stopped(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int, stop_at: str
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "precision": "fp16", "checkpoint_in_background": True}
    sections = runs.job(tmp_path, tiny_bert, epochs=1, **options)
    sections["model"]["lora"] = {"rank": 4}
    runs.succeed(tmp_path / "whole", sections, ranks=ranks)
    stopped = runs.attempt(tmp_path / "run", sections, ranks=ranks, failpoint=f"{stop_at}:kill9")
    assert stopped.exit_code in (0, -9)
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [("fsdp", 2, "single", 1), ("single", 1, "fsdp", 2), ("fsdp", 2, "fsdp", 3), ("fsdp", 3, "ddp", 2)],
)
def test_a_run_goes_on_on_other_ranks(
    tmp_path: Path, tiny_bert: Path, before: str, ranks_before: int, after: str, ranks_after: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, batch_size=16, epochs=3, strategy="single")
    runs.succeed(tmp_path / "whole", sections)
    sections["train"] |= {"strategy": before, "max_restarts": 0}
    stopped = runs.attempt(tmp_path / "run", sections, ranks=ranks_before, failpoint="rank0.step:8:raise")
    assert stopped.exit_code == 70
    sections["train"]["strategy"] = after
    runs.succeed(tmp_path / "run", sections, ranks=ranks_after)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "whole"), abs=TOLERANCE)
