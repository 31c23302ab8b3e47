"""Checkpoints below an URL, on fsspec's file system in memory; faults/test_checkpoints_on_s3.py has a real protocol."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from torchlake.checkpoints import format, location, object_store, shards
from torchlake.checkpoints.location import CheckpointStore
from torchlake.checkpoints.object_store import ObjectStore
from torchlake.checkpoints.store import Draft, FolderStore
from torchlake.errors import FingerprintError, LeaseLost, StorageError, UsageError

NUMBER = itertools.count()
BELONGS = {"train.seed": 0, "data.train": "96 rows"}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty place below an URL, claimed by the launch "first"."""
    found = location.find_store(f"memory://bucket/{next(NUMBER)}", tmp_path)
    location.claim(found, BELONGS, "first")
    return found


def stored(store: CheckpointStore) -> dict[str, int]:
    assert isinstance(store, ObjectStore)
    return store._sizes()


def write(store: CheckpointStore, step: int, attempt: str = "first", *, ranks: int = 1) -> Draft:
    """The shares of all ranks; the draft of rank 0."""
    drafts = [format.step_draft(store, step, attempt=attempt, rank=rank, world_size=ranks) for rank in range(ranks)]
    for draft in drafts:
        tensors = shards.whole({f"weight{draft.rank}": torch.full((3,), float(step))})
        format.write_shard(draft, {format.MODEL: tensors, format.OPTIMIZER: {}})
    return drafts[0]


def save(store: CheckpointStore, step: int, attempt: str = "first", *, ranks: int = 1) -> None:
    format.publish(write(store, step, attempt, ranks=ranks), state={"step": step, "best": None})


def test_every_rank_writes_its_own_and_the_newest_comes_back(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 3)
    save(store, 20, ranks=2)
    format.prune(store, 1)
    assert store.list_complete() == ["step_00000020"]
    assert sorted(stored(store)) == [
        "run.json",
        *(f"step_00000020/first/model-0000{rank}-of-00002.safetensors" for rank in (0, 1)),
        *(f"step_00000020/first/optimizer-0000{rank}-of-00002.safetensors" for rank in (0, 1)),
        "step_00000020/first/state.json",
        "step_00000020/manifest.json",
    ]
    found, problems = format.newest(store)
    assert found is not None
    assert problems == []
    assert found.state["step"] == 20
    loaded = format.load_model(found.path, {f"weight{rank}": torch.zeros(3) for rank in (0, 1)})
    assert [tensor.tolist() for tensor in loaded.values()] == [[20.0] * 3] * 2
    store.delete_fetched()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_has_no_manifest_is_not_there_and_is_removed(store: CheckpointStore) -> None:
    save(store, 3)
    before = stored(store)
    write(store, 6)
    assert store.list_complete() == ["step_00000003"]
    found, _ = format.newest(store)
    assert found is not None
    assert found.state["step"] == 3
    assert stored(store) == before


def test_two_launches_at_one_step_do_not_mix(store: CheckpointStore) -> None:
    late = write(store, 3)
    location.claim(store, BELONGS, "second")
    save(store, 3, "second")
    with pytest.raises(LeaseLost, match="taken this run over"):
        format.publish(late, state={"step": 3, "best": None})
    found, problems = format.newest(store)
    assert found is not None
    assert problems == []
    assert found.path.name == "second"


@pytest.mark.parametrize("file", ["first/model.safetensors", "first/state.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", None])
def test_damage_is_found_named_and_set_aside(store: CheckpointStore, file: str, content: bytes | None) -> None:
    save(store, 3)
    save(store, 6)
    assert isinstance(store, ObjectStore)
    filesystem, root = fsspec.core.url_to_fs(store.url)
    if content is None and file != "manifest.json":
        filesystem.rm_file(f"{root}/step_00000006/{file}")
    else:
        filesystem.pipe_file(f"{root}/step_00000006/{file}", b"{}")
    found, (problem,) = format.newest(store)
    assert found is not None
    assert found.state["step"] == 3
    assert f"{store}/step_00000006/{file}" in problem
    assert "set aside as step_00000006/manifest.json.torn" in problem
    save(store, 6)
    assert [name for name in stored(store) if "torn" in name] == []


def test_what_is_cut_short_on_its_way_is_not_made_visible(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write(store, 3)
    sizes = ObjectStore._sizes
    monkeypatch.setattr(ObjectStore, "_sizes", lambda self: {name: size - 1 for name, size in sizes(self).items()})
    with pytest.raises(StorageError, match="right after .* bytes were written"):
        format.publish(draft, state={"step": 3, "best": None})
    monkeypatch.undo()
    assert store.list_complete() == []


def test_another_run_is_refused_once_there_are_checkpoints(store: CheckpointStore) -> None:
    location.claim(store, {**BELONGS, "train.seed": 1}, "second")
    save(store, 3, "second")
    with pytest.raises(FingerprintError, match=r"train.seed: 1 -> 0"):
        location.claim(store, BELONGS, "third")
    location.check_owner(store, "second")


@pytest.mark.parametrize(
    "make", [lambda path: FolderStore(path, external=True), lambda path: ObjectStore("memory://other", path)]
)
def test_a_place_that_holds_something_else_is_refused(tmp_path: Path, make: Callable[[Path], CheckpointStore]) -> None:
    store = make(tmp_path)
    store.write_json("thesis.json", "precious", site="test")
    with pytest.raises(FingerprintError, match=r"not empty, but has no run\.json"):
        location.claim(store, BELONGS, "first")
    assert store.read_json("thesis.json") == "precious"


def test_errors_that_pass_are_tried_again_and_others_told_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = "hdfs://reader:hush%21@host/lake"
    calls = 0

    def filesystem_of(given: str) -> tuple[Any, str]:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise ConnectionError(f"{given} does not answer reader:hush%21")
        filesystem, _ = fsspec.core.url_to_fs("memory://")
        return filesystem, "/bucket/ftp"

    monkeypatch.setattr(object_store, "filesystem_of", filesystem_of)
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))
    store = location.find_store(url, tmp_path)
    location.claim(store, BELONGS, "first")
    monkeypatch.setattr(object_store, "PAUSES_S", ())
    with pytest.raises(StorageError, match=r"hdfs://\[redacted\]@host/lake/run.json: .* does not answer") as told:
        store.read_json("run.json")
    assert "run the same command again" in str(told.value)
    for said in (str(told.value), caplog.text, str(store), repr(store)):
        assert "hush" not in said


def test_a_url_that_no_storage_serves_is_refused_at_once(tmp_path: Path) -> None:
    for url in ("s4://user:secret@x/y", "https://user:secret@x/y", "simplecache::s3://user:secret@x/y"):
        with pytest.raises(UsageError, match=r"train.checkpoint_folder: .*://\[redacted\]@x/y: .* is refused"):
            location.find_store(url, tmp_path)
