"""Before the first step: the largest micro-batch is tried, and torch's switches are set."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
import training_runs as runs
from torchlake.config.sections.train import TrainConfig
from torchlake.data import batching
from torchlake.data.loading import TokenTable
from torchlake.distributed import Group
from torchlake.optim.precision import arithmetic
from torchlake.training import loop, step
from torchlake.training.rows import Rows
from torchlake.training.state import TrainState

TOLERANCE = 1e-5
GPU = torch.device("cuda")


def try_on_cpus() -> None:
    loop.TRIED_ON.add("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_trying_the_largest_micro_batch_changes_no_bit(tmp_path: Path, strategy: str, ranks: int) -> None:
    base = tiny.build_encoder(tmp_path / "base", dropout=0.1)
    sections = runs.job(tmp_path, base, rows=64, epochs=1, strategy=strategy, micro_batch_tokens=80)
    runs.succeed(tmp_path / "plain", sections, ranks=ranks)
    runs.succeed(tmp_path / "tried", sections, ranks=ranks, stub=try_on_cpus)
    assert runs.losses(tmp_path / "tried") == runs.losses(tmp_path / "plain")
    assert runs.weights_sha256(tmp_path / "tried") == runs.weights_sha256(tmp_path / "plain")


def note_modes() -> None:
    """Each rank notes whether every module of its model is in training mode."""
    train_step = step.train_step

    def noted(*arguments: Any) -> Any:
        state = next(one for one in arguments if isinstance(one, TrainState))
        with Path(os.environ[runs.RUN], f"mode_{state.group.rank}").open("a") as file:
            file.write(f"{all(module.training for module in state.module.modules())}\n")
        return train_step(*arguments)

    loop.train_step = noted


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_trains_with_dropout(tmp_path: Path, strategy: str) -> None:
    sections = runs.job(tmp_path, tiny.build_encoder(tmp_path / "base", dropout=0.1), strategy=strategy, max_steps=2)
    runs.succeed(tmp_path / "run", sections, ranks=2, stub=note_modes)
    for rank in range(2):
        assert (tmp_path / "run" / f"mode_{rank}").read_text().split() == ["True", "True"]


def little_memory_and_a_try() -> None:
    """Forward passes over more than 100 tokens find no memory; the first step is noted."""
    try_on_cpus()
    forward, train_step = TrainState.forward, step.train_step

    def limited(self: TrainState, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = rows.lengths[positions]
        if len(lengths) * int(lengths.max(initial=0)) > 100:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return forward(self, rows, positions)

    def noted(*arguments: Any) -> Any:
        with Path(os.environ[runs.RUN], "starts").open("a") as file:
            file.write(f"{arguments[3].step}\n")
        return train_step(*arguments)

    TrainState.forward = limited  # type: ignore[method-assign]
    loop.train_step = noted


def test_memory_that_is_too_little_is_known_before_the_first_step(tmp_path: Path, tiny_bert: Path) -> None:
    """Two ranks: with a failure in the middle they would begin some step a second time."""
    sections = runs.job(tmp_path, tiny_bert, epochs=1, batch_size=36, strategy="ddp", max_restarts=0)
    sections["train"]["checkpoint_every"] = "100steps"
    runs.succeed(tmp_path / "roomy", sections)
    runs.succeed(tmp_path / "tight", sections, ranks=2, stub=little_memory_and_a_try)
    assert runs.losses(tmp_path / "tight") == pytest.approx(runs.losses(tmp_path / "roomy"), abs=TOLERANCE)
    starts = sorted(int(line) for line in (tmp_path / "tight" / "starts").read_text().splitlines())
    assert starts == [0, 0, 1, 1], "each step once on each of two ranks"


@pytest.mark.parametrize(
    ("lengths", "tokens", "batch", "ranks", "expected"),
    [
        ([5, 5, 5, 5, 9], 10, 4, 1, [5, 5, 5, 5]),  # two of 5 are more tokens than one of 9; two micro-batches
        ([5, 5, 5, 5, 9], 9, 4, 1, [5, 9]),
        ([5, 6, 7, 8], 100, 2, 1, [7, 8]),
        ([5, 6, 7, 8], 100, 4, 2, [5, 6, 7, 8]),
        ([50], 9, 64, 2, [50]),
    ],
)
def test_the_largest_batch(lengths: list[int], tokens: int, batch: int, ranks: int, expected: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = TokenTable(batching.Ragged(np.zeros(offsets[-1], dtype=np.int32), offsets), None)
    group = Group(rank=0, local_rank=0, world_size=ranks, device=torch.device("cpu"))
    settings: Any = SimpleNamespace(spec=tiny.SPEC, job=SimpleNamespace(train=TrainConfig(batch_size=batch)))
    state: Any = SimpleNamespace(micro_batch_tokens=tokens, group=group)
    found = step.largest_batch(Rows(table, np.arange(len(lengths))), state, settings)
    assert sorted(found.lengths.tolist()) == expected


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp32", "highest"), ("tf32", "high"), ("bf16_weights", "high"), ("auto", "high")]
)
def test_products_of_gpus_take_tf32_unless_fp32_was_asked_for(precision: Any, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    with arithmetic(TrainConfig(precision=precision), GPU):
        assert torch.get_float32_matmul_precision() == expected
        assert torch.backends.cudnn.allow_tf32 is (expected == "high")
    assert torch.get_float32_matmul_precision() == before
    with arithmetic(TrainConfig(precision=precision), torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before


def test_deterministic_kernels_are_asked_for_before_cuda_starts(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: list[tuple[str | None, bool]] = []

    @contextmanager
    def watched(train: TrainConfig, device: torch.device) -> Iterator[None]:
        with arithmetic(train, device):
            seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()))
            yield

    monkeypatch.setattr(loop, "arithmetic", watched)
    sections = runs.job(tmp_path, tiny_bert, rows=24, epochs=1, deterministic=True)
    import torchlake as tl

    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    assert seen == [(":4096:8", True)]
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
