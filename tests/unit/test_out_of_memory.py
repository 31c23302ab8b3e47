"""Memory that runs out anywhere in a step: it is known by any library's words, and smaller micro-batches are taken."""

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake import atomic_io
from torchlake.distributed import Group, explain_lost_peers
from torchlake.errors import ran_out_of_memory
from torchlake.strategies import single
from torchlake.training.model import setup
from torchlake.training.rows import Rows
from torchlake.training.state import TrainState

TOLERANCE = 1e-5
STRATEGIES = sweep([("single", 1), ("ddp", 2), ("fsdp", 2)], quick=[("single", 1)])


def memory_for_100_tokens() -> None:
    """Forward passes over more than 100 tokens find no memory, as on a small GPU."""
    forward = TrainState.forward

    def limited(self: TrainState, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = rows.lengths[positions]
        if len(lengths) * int(lengths.max(initial=0)) > 100:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return forward(self, rows, positions)

    TrainState.forward = limited  # type: ignore[method-assign]


def memory_for_3_tokens() -> None:
    def limited(self: TrainState, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    TrainState.forward = limited  # type: ignore[method-assign]


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_memory_that_runs_out_halves_the_micro_batches(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, batch_size=36, strategy=strategy, max_restarts=0)
    runs.succeed(tmp_path / "roomy", sections, ranks=ranks)
    runs.succeed(tmp_path / "tight", sections, ranks=ranks, stub=memory_for_100_tokens)
    assert runs.losses(tmp_path / "tight") == pytest.approx(runs.losses(tmp_path / "roomy"), abs=TOLERANCE)
    noted = atomic_io.read_json(tmp_path / "tight" / setup.MICRO_BATCH)
    assert noted["tokens"] <= 100
    assert noted["asked"] == 16384


def once(module: Any, name: str) -> None:
    """Let the first call of a function find no memory, in the words of torch's allocator on CPUs."""
    function, calls = getattr(module, name), []

    def limited(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return function(*arguments, **options)

    setattr(module, name, limited)


def no_memory_for_the_norm() -> None:
    once(single, "clip_norm")


def no_memory_for_the_moments() -> None:
    once(single, "step")


def no_memory_for_validation() -> None:
    """A rank's first forward passes of a validation over more than 60 tokens."""
    forward = TrainState.forward

    def limited(self: TrainState, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.module.training and rows.lengths[positions].sum() > 60:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return forward(self, rows, positions)

    TrainState.forward = limited  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stub", "ranks"),
    [
        (no_memory_for_the_norm, 1),
        (no_memory_for_the_moments, 1),
        (no_memory_for_validation, 1),
        (no_memory_for_validation, 2),
    ],
)
def test_memory_that_runs_out_elsewhere_in_a_step_does_too(
    tmp_path: Path, tiny_bert: Path, stub: Callable[[], None], ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, batch_size=36, max_restarts=0)
    runs.succeed(tmp_path / "roomy", sections, ranks=ranks)
    tight = runs.succeed(tmp_path / "tight", sections, ranks=ranks, stub=stub)
    assert runs.losses(tmp_path / "tight") == pytest.approx(runs.losses(tmp_path / "roomy"), abs=TOLERANCE)
    assert tight.metrics is not None
    assert 0 < atomic_io.read_json(tmp_path / "tight" / setup.MICRO_BATCH)["tokens"] < 16384


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np.exceptions.AxisError("Unable to allocate 3 GiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 100 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL Error 1: unhandled cuda error. Last error: Cuda failure 'out of memory'"),
        RuntimeError("NCCL WARN Failed to CUDA malloc 4194304 bytes"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
    ids=repr,
)
def test_memory_that_ran_out_is_known_by_any_librarys_words(error: Exception) -> None:
    assert ran_out_of_memory(error)
    group = Group(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(type(error)) as raised, explain_lost_peers(group, "working"):  # and is not taken for a lost peer
        raise error
    assert raised.value is error
    wrapped = RuntimeError("elsewhere")
    wrapped.__cause__ = error
    assert ran_out_of_memory(wrapped)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), RuntimeError("NCCL timed out"), KeyError("memory")])
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not ran_out_of_memory(error)


def test_logits_are_gone_before_the_next_forward_pass(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, kept = TrainState.forward, list[bool]()
    before: list[weakref.ref[torch.Tensor]] = []

    def watched(self: TrainState, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        kept.append(any(logits() is not None for logits in before))
        found = forward(self, rows, positions)
        before[:] = [weakref.ref(found[0])]
        return found

    monkeypatch.setattr(TrainState, "forward", watched)
    sections = runs.job(tmp_path, tiny_llama, rows=60, epochs=1, batch_size=16, micro_batch_tokens=64)
    sections["model"] |= {"task": "text_generation", "max_length": 32}
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    assert len(kept) > 10
    assert not any(kept)


def test_a_row_that_never_fits_ends_the_run_with_the_remedies(tmp_path: Path, tiny_bert: Path) -> None:
    failed = runs.attempt(tmp_path / "run", runs.job(tmp_path, tiny_bert), stub=memory_for_3_tokens)
    assert failed.exit_code == 64
    assert "ran out while computing gradients with a single row at a time" in failed.error
    assert "train.activation_checkpointing=true" in failed.error
