"""A checkpoint folder outside the run folder: whichever launch claimed it last is the only one that changes it."""

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlake import atomic_io
from torchlake.checkpoints import format, location, retention, shards
from torchlake.checkpoints import store as stores
from torchlake.checkpoints.store import Draft, FolderStore
from torchlake.errors import FingerprintError, LeaseLost, Locked
from torchlake.storage import lease

BELONGS = {"train.seed": 0, "data.train": "96 rows"}


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """An empty folder, claimed by the launch "first"."""
    found = location.find_store(str(tmp_path / "kept"), tmp_path)
    assert isinstance(found, FolderStore)
    location.claim(found, BELONGS, "first")
    return found


def write(store: FolderStore, step: int, attempt: str) -> Draft:
    draft = format.step_draft(store, step, attempt=attempt)
    format.write_shard(draft, {format.MODEL: shards.whole({"weight": torch.full((3,), float(step))})})
    return draft


def publish(draft: Draft) -> None:
    format.publish(draft, state={"step": int(draft.name[-8:]), "best": None, "by": draft.attempt})


def newest(store: FolderStore, attempt: str) -> Any:
    found, problems = format.newest(store, attempt)
    assert problems == []
    assert found is not None
    return found.state


def run_before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[[], None], site: str = ""
) -> None:
    """Run `what` before the next call of a function (whose first argument is `site`)."""
    original = getattr(owner, name)

    def stopped(*arguments: Any, **options: Any) -> Any:
        if not site or site in arguments:
            monkeypatch.setattr(owner, name, original)
            what()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, stopped)


@pytest.mark.parametrize(
    ("owner", "name", "site"),
    [
        (FolderStore, "rank_manifests", ""),
        (atomic_io, "failpoint", "checkpoint.state.write"),
        (atomic_io, "failpoint", "checkpoint.manifest.write"),
        (atomic_io, "failpoint", "checkpoint.manifest.done"),
        (stores, "failpoint", "checkpoint.rename"),
        (stores, "lock_in_time", ""),
    ],
)
def test_a_launch_that_is_suspended_anywhere_while_it_publishes_makes_nothing_visible(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, site: str
) -> None:
    """It wakes when its successor has trained the same step, and has published it or not."""
    for step, is_published in ((3, True), (6, False)):
        location.claim(store, BELONGS, f"first{step}")
        late, drafts = write(store, step, f"first{step}"), []

        def successor() -> None:
            location.claim(store, BELONGS, f"second{step}")  # noqa: B023  called in this iteration
            format.newest(store, f"second{step}")  # noqa: B023  removes what others have begun
            drafts.append(write(store, step, f"second{step}"))  # noqa: B023
            if is_published:  # noqa: B023
                publish(drafts[0])  # noqa: B023

        run_before(monkeypatch, owner, name, successor, site)
        with pytest.raises(LeaseLost, match="taken this run over"):
            publish(late)
        if not is_published:
            assert store.list_complete() == ["step_00000003"]
            publish(drafts[0])
        assert newest(store, f"second{step}")["by"] == f"second{step}"


def test_a_launch_that_was_taken_over_deletes_nothing(store: FolderStore) -> None:
    for step in (3, 6):
        publish(write(store, step, "first"))
    location.claim(store, BELONGS, "second")
    draft = write(store, 9, "second")
    before = sorted(store.root.rglob("*"))
    for late in (
        lambda: retention.prune(store, 1, "first"),
        lambda: format.newest(store, "first"),
        lambda: store.set_aside("step_00000006", "first"),
    ):
        with pytest.raises(LeaseLost, match="taken this run over"):
            late()
        assert sorted(store.root.rglob("*")) == before
    publish(draft)
    retention.prune(store, 1, "second")
    assert store.list_complete() == ["step_00000009"]


def test_who_is_stopped_between_the_check_and_the_rename_is_not_taken_over(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOCK_WAIT_S", 0.1)

    def successor() -> None:
        with pytest.raises(Locked, match=r"kept: locked for 0 s by another process, .* end it, then run the same"):
            location.claim(store, BELONGS, "second")

    draft = write(store, 3, "first")
    run_before(monkeypatch, stores.os, "rename", successor)
    publish(draft)
    location.claim(store, BELONGS, "second")
    assert newest(store, "second")["by"] == "first"


def test_a_folder_that_is_used_meanwhile_is_not_claimed_for_another_run(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write(store, 3, "first")
    format.abandon(draft)
    run_before(monkeypatch, FolderStore, "write_owner", lambda: publish(write(store, 3, "first")))
    with pytest.raises(FingerprintError, match=r"train.seed: 0 -> 1"):
        location.claim(store, {**BELONGS, "train.seed": 1}, "second")
    assert newest(store, "first")["by"] == "first"


def test_a_file_system_without_locks_is_checked_right_before_each_change(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    publish(write(store, 3, "first"))
    late = write(store, 6, "first")
    location.claim(store, BELONGS, "second")
    with pytest.raises(LeaseLost):
        publish(late)
    assert newest(store, "second")["step"] == 3


def test_a_folder_of_the_version_before_has_no_lock_and_is_continued(store: FolderStore) -> None:
    publish(write(store, 3, "first"))
    (store.root / stores.LOCK).unlink()
    location.claim(store, BELONGS, "second")
    assert newest(store, "second")["by"] == "first"
    assert not any(".lock" in name for name in store.list_complete())
