"""A step waits for the device once at most, and what it is waited for comes a step late without changing a run."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.checkpoints import async_writer
from torchlake.distributed import Group, Reading
from torchlake.strategies import single
from torchlake.training import loop, step

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
"Operators that give a value of the device, or a shape that depends on one, to the host."
ALONE = Group(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


class Counting(TorchDispatchMode):
    """Count the operators that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.waits[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", sweep(["classifier", "language model"], quick={"language model"}))
@pytest.mark.parametrize("precision", sweep(["fp32", "bf16_weights"], quick=["bf16_weights"]))
def test_a_step_waits_once(
    tmp_path: Path, tiny_bert: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str
) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=64, epochs=1, micro_batch_tokens=96, precision=precision)
    if kind == "language model":
        sections["model"] = {"base": str(tiny_llama), "task": "text_generation", "max_length": 32}
        sections["train"]["epochs"] = 2
    events: list[tuple[str, int]] = []
    train_step, wait = step.train_step, Reading.wait

    def counted(*arguments: Any) -> Any:
        with Counting() as counting:
            launched = train_step(*arguments)
        assert not counting.waits, counting.waits
        events.append(("launched", launched.line["step"]))
        return launched

    def waited(self: Reading) -> list[float]:
        events.append(("waited", 0))
        return wait(self)

    monkeypatch.setattr(loop, "train_step", counted)
    monkeypatch.setattr(Reading, "wait", waited)
    sections["train"]["checkpoint_every"] = "4steps"
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    steps = [number for what, number in events if what == "launched"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 5
    kinds = [what for what, _ in events]
    assert kinds.count("waited") == len(steps)
    # Launched, launched, waited for the first, ...: but before a checkpoint everything is read.
    assert kinds[:7] == ["launched", "launched", "waited", "launched", "waited", "launched", "waited"]
    assert kinds[7] == "waited", "step 4 is read before the checkpoint"
    assert [line["step"] for line in runs.metrics(tmp_path / "run") if "loss" in line] == steps


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def run(factor: float, *, finite: bool) -> None:
        single.backward(model, (model(torch.ones(1, 3)) ** 2).sum() * factor)
        norm = single.clip_norm(model, 1.0, 1.0)
        assert math.isfinite(norm) is finite
        single.step(model, optimizer, norm.isfinite())
        assert all(parameter.grad is None for parameter in model.parameters())

    def everything() -> list[torch.Tensor]:
        moments = [tensor for fields in optimizer.state.values() for tensor in fields.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]

    run(1.0, finite=True)
    before = everything()
    assert len(before) == 8
    run(math.nan, finite=False)
    run(math.inf, finite=False)
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    run(1.0, finite=True)
    assert not any(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    assert {float(fields["step"]) for fields in optimizer.state.values()} == {2.0}


def spoil_the_loss_from_step(first: int) -> None:
    """The gradients of this and all later steps are not finite."""
    clip_norm, calls = single.clip_norm, []

    def spoiled(module: torch.nn.Module, max_norm: float, scale: float) -> torch.Tensor:
        calls.append(1)
        if len(calls) >= first:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
        return clip_norm(module, max_norm, scale)

    single.clip_norm = spoiled


def spoil_from_step_5() -> None:
    spoil_the_loss_from_step(5)


def test_a_run_that_diverges_ends_a_step_later_at_most(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=3, checkpoint_every="100steps")
    ended = runs.attempt(tmp_path / "run", sections, stub=spoil_from_step_5)
    assert ended.exit_code == 5
    assert "step 7: the loss or its gradient was not finite in 3 steps in a row" in ended.error
    lines = [line for line in runs.metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["grad_norm"] for line in lines[4:]] == ["nan"] * 3


def test_a_checkpoint_that_was_reported_twice_is_committed_once(tmp_path: Path) -> None:
    """A step's flags are read after the next step has reported the same checkpoint again."""
    from contextlib import nullcontext

    from torchlake.checkpoints import format, shards
    from torchlake.checkpoints.store import FolderStore

    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        for number in (1, 2):
            writer.begin(
                format.step_draft(FolderStore(tmp_path), number, attempt="test"),
                {format.MODEL: shards.whole({"weight": torch.ones(3)}), format.OPTIMIZER: {}},
                background=True,
                keep=2,
                state={"step": number, "best": None},
            )
        first = writer.oldest()
        writer.commit(first)
        second = writer.oldest()
        assert second is not None
        assert second is not first
        writer.commit(first)
        assert writer.oldest() is second
        writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_fp16_reads_each_step_before_the_next(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss scale depends on the outcome: a run that was resumed anywhere has to scale alike."""
    events: list[str] = []
    train_step, read_step = step.train_step, step.read_step

    def launched(*arguments: Any) -> Any:
        events.append("launched")
        return train_step(*arguments)

    def read(launched: step.LaunchedStep, *rest: Any) -> Any:
        events.append("read")
        return read_step(launched, *rest)

    monkeypatch.setattr(loop, "train_step", launched)
    monkeypatch.setattr(loop, "read_step", read)
    sections = runs.job(tmp_path, tiny_bert, rows=64, epochs=1, precision="fp16")
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    assert events == ["launched", "read"] * (len(events) // 2)
    assert len(events) > 8


def test_a_checkpoint_is_copied_before_the_next_update(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    update, hold_updates = single.step, async_writer.CheckpointWriter.hold_updates

    def held(self: async_writer.CheckpointWriter) -> None:
        events.append("held")
        hold_updates(self)

    def updated(*arguments: Any) -> None:
        events.append("updated")
        update(*arguments)

    monkeypatch.setattr(async_writer.CheckpointWriter, "hold_updates", held)
    monkeypatch.setattr(single, "step", updated)
    sections = runs.job(tmp_path, tiny_bert, rows=48, epochs=1, checkpoint_in_background=True)
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    assert events == ["held", "updated"] * 5
