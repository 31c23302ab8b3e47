"""Training on this machine's device: the losses of the CPU, resumed runs, every strategy, a batch that does not fit."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake import plugins
from torchlake.checkpoints import async_writer, format, shards
from torchlake.checkpoints.store import FolderStore
from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.errors import RankFailed, UsageError
from torchlake.training import loop
from torchlake.training import step as steps

PRECISIONS = ("fp32", "bf16_weights", "bf16", "fp16")
TOLERANCE = {"fp32": 1e-3, "bf16_weights": 0.05, "bf16": 0.05, "fp16": 0.05}
"Of a loss, beside fp32 on the CPU."
LITTLE_MEMORY = 512 * 2**20
"More than a Hopper's workspaces for matrix products, less than the batch below."


def losses(folder: Path, sections: dict[str, Any], *, processes: int = 1, **train: Any) -> list[float]:
    """Train in `folder` on this machine's device; the loss of every step."""
    job = {**sections, "train": {**sections["train"], **train}}
    tl.train(run=folder, engine=tl.Local(processes=processes), **job)
    return runs.losses(folder)


@pytest.fixture
def sections(tmp_path: Path, tiny_bert: Path) -> dict[str, Any]:
    return runs.job(tmp_path, tiny_bert, rows=64, epochs=1, batch_size=8)


@pytest.fixture
def expected(tmp_path: Path, sections: dict[str, Any]) -> list[float]:
    """The losses in fp32 on the CPU."""
    runs.succeed(tmp_path / "cpu", sections)
    return runs.losses(tmp_path / "cpu")


@pytest.mark.parametrize("precision", sweep(PRECISIONS, quick=()))
def test_the_losses_are_those_of_the_cpu(
    precision: str, tmp_path: Path, sections: dict[str, Any], expected: list[float], device: str
) -> None:
    if precision == "fp16" and device == "cpu":
        pytest.skip("fp16 is trained on GPUs")
    found = losses(tmp_path / "here", sections, precision=precision)
    assert found == pytest.approx(expected, abs=TOLERANCE[precision])


@pytest.mark.slow
def test_a_run_that_failed_continues(tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(tmp_path / "whole", sections)
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "rank0.step:5:raise")
    with pytest.raises(RankFailed):
        losses(tmp_path / "parts", sections, max_restarts=0)
    monkeypatch.delenv("TORCHLAKE_FAILPOINT")
    continued = losses(tmp_path / "parts", sections, max_restarts=0)
    assert continued == pytest.approx(whole, abs=1e-5)
    assert (tmp_path / "parts" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_language_model_trains_on_packed_blocks(tmp_path: Path, tiny_llama: Path, device: str) -> None:
    sections = runs.job(tmp_path, tiny_llama, rows=40, epochs=1, batch_size=4)
    sections["model"] |= {"task": "text_generation", "max_length": 32}
    runs.succeed(tmp_path / "cpu", sections)
    assert losses(tmp_path / "here", sections) == pytest.approx(runs.losses(tmp_path / "cpu"), abs=TOLERANCE["fp32"])
    adapted = {**sections, "model": {**sections["model"], "lora": {"rank": 4}}}
    runs.succeed(tmp_path / "cpu-lora", adapted)
    found = losses(tmp_path / "lora", adapted, precision="bf16")
    assert found == pytest.approx(runs.losses(tmp_path / "cpu-lora"), abs=TOLERANCE["bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in plugins.names("strategies") if name != "single"])
def test_a_strategy_trains_like_single(
    name: str, tmp_path: Path, sections: dict[str, Any], expected: list[float], device: str
) -> None:
    """On GPUs over nccl with a rank per GPU, on the CPU over gloo with two ranks."""
    strategy = plugins.load("strategies", name)
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    reason = strategy.refusal(TrainConfig())
    if reason is not None:
        pytest.skip(reason)
    found = losses(tmp_path / name, sections, processes=ranks, strategy=name)
    assert found == pytest.approx(expected, abs=TOLERANCE["fp32"])


@pytest.mark.slow
def test_two_ranks_split_the_layers(tmp_path: Path, tiny_llama: Path, device: str) -> None:
    """Tensor parallelism, on two GPUs over nccl or on the CPU over gloo."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sections = runs.job(tmp_path, tiny_llama, rows=64, epochs=1, batch_size=8)
    runs.succeed(tmp_path / "cpu", sections)
    split = {"strategy": "fsdp", "fsdp": {"tensor_parallel": 2}}
    found = losses(tmp_path / "split", sections, processes=2, **split)
    assert found == pytest.approx(runs.losses(tmp_path / "cpu"), abs=TOLERANCE["fp32"])


class LittleMemory(tl.Local):
    """Local processes whose GPU refuses to allocate more than some MiB."""

    def launch(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return super().launch(partial(_with_little_memory, fn), *args, **options)


def _with_little_memory(fn: Callable[..., Any], *args: Any) -> Any:
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LITTLE_MEMORY / whole)
    return fn(*args)


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
def test_weights_in_main_memory_train_alike(tmp_path: Path, sections: dict[str, Any], expected: list[float]) -> None:
    """Their gradients are clipped in main memory, over gloo."""
    ranks, offload = torch.cuda.device_count(), {"cpu_offload": True}
    found = losses(tmp_path / "run", sections, processes=ranks, strategy="fsdp", fsdp=offload, precision="fp32")
    assert found == pytest.approx(expected, abs=TOLERANCE["fp32"])


@pytest.mark.usefixtures("cuda")
def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=8192, epochs=1, batch_size=6144, micro_batch_tokens=2**20)
    sections["train"]["max_steps"] = 1
    whole = losses(tmp_path / "whole", sections)
    tl.train(run=tmp_path / "little", engine=LittleMemory(processes=1), **sections)
    assert runs.losses(tmp_path / "little") == pytest.approx(whole, abs=TOLERANCE["fp32"])
    logs = "".join(path.read_text() for path in (tmp_path / "little" / "logs").iterdir())
    assert "out of memory" in logs


@pytest.mark.slow
def test_as_many_ranks_as_gpus_meet(tmp_path: Path, device: str) -> None:
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    answer = tl.launch(_sum_of_ranks, processes=ranks, engine=tl.Local(processes=ranks))
    assert answer == [sum(range(ranks)), device]


@pytest.mark.usefixtures("cuda")
def test_more_ranks_than_gpus_are_refused(tmp_path: Path, sections: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="each rank needs its own"):
        losses(tmp_path / "many", sections, processes=torch.cuda.device_count() + 1)


def _sum_of_ranks() -> list[Any]:
    import torch.distributed as dist

    from torchlake.distributed import all_sum, process_group

    with process_group(60.0) as group:
        total = all_sum(group, [float(group.rank)], "adding")[0]
        if group.world_size > 1:
            assert dist.get_backend() == ("nccl" if group.device.type == "cuda" else "gloo")
        return [total, group.device.type]


@pytest.mark.slow
def test_metrics_are_written_for_every_step(tmp_path: Path, sections: dict[str, Any]) -> None:
    losses(tmp_path / "here", sections)
    lines = [json.loads(line) for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(line["seconds"] > 0 and line["tokens"] > 0 for line in steps)


@pytest.mark.usefixtures("cuda")
def test_a_checkpoint_has_the_values_of_its_step_while_training_continues(tmp_path: Path) -> None:
    group = Group(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))
    weight, busy = torch.zeros(2**26, device="cuda"), torch.randn(4096, 4096, device="cuda")
    with async_writer.checkpoint_writer(group, nullcontext) as writer:
        for step in (1, 2, 3):
            for _ in range(50):  # the copies begin behind work that takes long
                busy = (busy @ busy).clamp(-1, 1)
            weight.fill_(step)
            writer.begin(
                format.step_draft(FolderStore(tmp_path), step, attempt="test"),
                {format.MODEL: shards.whole({"weight": weight})},
                background=True,
                state={"step": step, "best": None},
            )
            writer.hold_updates()
            weight.fill_(-1)
        writer.finish()
    for step in (1, 2, 3):
        stored = format.load_model(format.step_path(FolderStore(tmp_path), step), {"weight": weight})["weight"]
        assert stored.min() == stored.max() == step


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["bf16_weights", "bf16"])
def test_a_step_does_not_wait_for_the_gpu(
    precision: str, tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA itself refuses what would wait while a step is launched; the ranks run in this process."""
    train_step = steps.train_step

    def strict(*arguments: Any) -> Any:
        if arguments[3].step < 2:  # libraries allocate and choose kernels at first
            return train_step(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train_step(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop, "train_step", strict)
    sections["train"]["precision"] = precision
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    assert len(runs.losses(tmp_path / "run")) > 4


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "flash", "flex"])
def test_attention_gives_the_losses_of_the_cpu_with_packed_rows(attention: str, tmp_path: Path, device: str) -> None:
    """Packed blocks of one size; flash attention in bf16. Flex attention needs heads of 16 numbers."""
    if attention != "sdpa" and device == "cpu":
        pytest.skip("it has no backward pass on CPUs")
    if attention == "flash":
        pytest.importorskip("flash_attn")
    base = tiny.build_language_model(tmp_path / "base", kind="llama", hidden_size=64)
    sections = runs.job(tmp_path, base, rows=64, epochs=1)
    sections["model"] |= {"task": "text_generation", "max_length": 64}
    runs.succeed(tmp_path / "cpu", sections)
    sections["model"]["attention"] = attention
    found = losses(tmp_path / "here", sections, precision="bf16" if attention == "flash" else "fp32")
    assert found == pytest.approx(runs.losses(tmp_path / "cpu"), abs=0.05 if attention == "flash" else 1e-3)
