"""Checkpoints beside the training: complete or invisible, in order, and their failures told in the loop."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlake.checkpoints import async_writer, format, shards, snapshot
from torchlake.checkpoints.async_writer import CheckpointWriter
from torchlake.checkpoints.store import FolderStore
from torchlake.distributed import Group
from torchlake.errors import LeaseLost, StorageError

ALONE = Group(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def begin(writer: CheckpointWriter, folder: Path, step: int, tensor: torch.Tensor, *, background: bool = True) -> None:
    writer.begin(
        format.step_draft(FolderStore(folder), step, attempt="test"),
        {format.MODEL: shards.whole({"weight": tensor}), format.OPTIMIZER: {}},
        background=background,
        keep=2,
        state={"step": step, "best": None},
    )


def exchange(writer: CheckpointWriter) -> bool:
    """What the loop does at each step."""
    shard_written = writer.shard_written()
    if shard_written:
        writer.commit(writer.oldest())
    return shard_written


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_stored_is_what_was_there_when_it_began(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        for step in range(1, 6):
            tensor.fill_(step)
            begin(writer, tmp_path, step, tensor)
            tensor.fill_(-1)
            exchange(writer)
        writer.finish()
    assert kept(tmp_path) == ["step_00000004", "step_00000005"]
    for step in (4, 5):
        path = format.step_path(FolderStore(tmp_path), step)
        assert format.load_model(path, {"weight": tensor})["weight"].tolist() == [step] * 3


def test_nothing_is_visible_before_all_ranks_have_written(tmp_path: Path) -> None:
    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        begin(writer, tmp_path, 1, torch.ones(3))
        writer._unfinished[0].shard_written.wait()
        assert kept(tmp_path) == [".step_00000001.test.tmp"]
        assert exchange(writer)
        assert not exchange(writer)
        writer.finish()
    assert kept(tmp_path) == ["step_00000001"]


def test_without_background_it_is_complete_at_once(tmp_path: Path) -> None:
    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        begin(writer, tmp_path, 1, torch.ones(3), background=False)
        assert kept(tmp_path) == ["step_00000001"]


def test_a_full_disk_is_told_at_the_next_step_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = format.failpoint.__globals__["_hits"]
    nth = hits.get("checkpoint.model.write", 0) + 1
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", f"checkpoint.model.write:{nth}:enospc")
    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        begin(writer, tmp_path, 1, torch.ones(3))
        writer._unfinished[0].shard_written.wait()
        with pytest.raises(StorageError, match="finished work is kept"):
            exchange(writer)
    assert kept(tmp_path) == []


def test_one_that_may_not_write_any_more_is_told(tmp_path: Path) -> None:
    @contextmanager
    def fenced() -> Iterator[None]:
        raise LeaseLost("another process goes on with it")
        yield

    with async_writer.checkpoint_writer(ALONE, fenced) as writer:
        begin(writer, tmp_path, 1, torch.ones(3))
        with pytest.raises(LeaseLost):
            writer.finish()
    assert kept(tmp_path) == []


def test_what_is_unfinished_when_the_loop_fails_is_abandoned(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="diverged"), async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        for step in (1, 2):
            begin(writer, tmp_path, step, torch.ones(3))
        raise RuntimeError("diverged")
    assert kept(tmp_path) == []
    assert threading.active_count() == threads


def test_updates_wait_for_copies_until_the_shard_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread waits for the copies before it writes."""
    events: list[str] = []
    monkeypatch.setattr(snapshot.StateCopy, "hold_updates", lambda self: events.append("held"))
    monkeypatch.setattr(snapshot.StateCopy, "wait", lambda self: events.append("copied"))
    write, may_write = format.write_shard, threading.Event()

    def written(*arguments: Any) -> None:
        may_write.wait()
        events.append("written")
        write(*arguments)

    monkeypatch.setattr(format, "write_shard", written)
    with async_writer.checkpoint_writer(ALONE, nullcontext) as writer:
        writer.hold_updates()
        assert events == [], "there is no checkpoint yet"
        begin(writer, tmp_path, 1, torch.ones(3))
        writer.hold_updates()
        may_write.set()
        writer.finish()
        writer.hold_updates()
    assert sorted(events) == ["copied", "held", "written"]
    assert events.index("copied") < events.index("written")
