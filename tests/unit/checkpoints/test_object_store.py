"""Checkpoints below a URL: on obstore's store in memory, which has conditional writes, and on fsspec's, which has none.

faults/test_checkpoints_on_s3.py has a real protocol.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from torchlake.checkpoints import format, location, retention, shards
from torchlake.checkpoints.location import CheckpointStore
from torchlake.checkpoints.object_store import ObjectStore
from torchlake.checkpoints.store import BEST, RUN, Draft, FolderStore, check_owner
from torchlake.errors import FingerprintError, LeaseLost, StorageError, UsageError
from torchlake.storage import folders, objects

NUMBER = itertools.count()
BELONGS = {"train.seed": 0, "data.train": "96 rows"}
BEFORE = Path(__file__).parents[2] / "fixtures" / "checkpoints_in_bucket"


@pytest.fixture(params=["s3", "memory"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An empty place below a URL, claimed by the launch "first"."""
    memory = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(objects, "_store", lambda url: memory)
    found = location.find_store(f"{request.param}://bucket/{next(NUMBER)}", tmp_path)
    assert isinstance(found, ObjectStore)
    location.claim(found, BELONGS, "first")
    return found


def stored(store: ObjectStore) -> dict[str, int]:
    return store.objects.sizes()


def put(store: ObjectStore, name: str, content: bytes) -> None:
    store.objects.write(name, content, site="test")


def write(store: ObjectStore, step: int, attempt: str = "first", *, ranks: int = 1) -> Draft:
    """The shares of all ranks; the draft of rank 0."""
    drafts = [format.step_draft(store, step, attempt=attempt, rank=rank, world_size=ranks) for rank in range(ranks)]
    for draft in drafts:
        tensors = shards.whole({f"weight{draft.rank}": torch.full((3,), float(step))})
        format.write_shard(draft, {format.MODEL: tensors, format.OPTIMIZER: {}})
    return drafts[0]


def save(store: ObjectStore, step: int, attempt: str = "first", *, ranks: int = 1) -> None:
    format.publish(write(store, step, attempt, ranks=ranks), state={"step": step, "best": None})


def test_every_rank_writes_its_own_and_the_newest_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    save(store, 3)
    save(store, 20, ranks=2)
    retention.prune(store, 1, "first")
    assert store.list_complete() == ["step_00000020"]
    assert sorted(stored(store)) == [
        "run.json",
        "step_00000020/first/manifest.json",
        *(f"step_00000020/first/model-0000{rank}-of-00002.safetensors" for rank in (0, 1)),
        *(f"step_00000020/first/optimizer-0000{rank}-of-00002.safetensors" for rank in (0, 1)),
        "step_00000020/first/state.json",
    ]
    found, problems = format.newest(store, "first")
    assert found is not None
    assert problems == []
    assert found.state["step"] == 20
    loaded = format.load_model(found.path, {f"weight{rank}": torch.zeros(3) for rank in (0, 1)})
    assert [tensor.tolist() for tensor in loaded.values()] == [[20.0] * 3] * 2
    store.delete_fetched()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_has_no_manifest_is_not_there_and_is_removed(store: ObjectStore) -> None:
    save(store, 3)
    before = stored(store)
    write(store, 6)
    assert store.list_complete() == ["step_00000003"]
    found, _ = format.newest(store, "first")
    assert found is not None
    assert found.state["step"] == 3
    assert stored(store) == before


def test_two_launches_at_one_step_do_not_mix(store: ObjectStore) -> None:
    late = write(store, 3)
    location.claim(store, BELONGS, "second")
    save(store, 3, "second")
    with pytest.raises(LeaseLost, match="taken this run over"):
        format.publish(late, state={"step": 3, "best": None})
    found, problems = format.newest(store, "second")
    assert found is not None
    assert problems == []
    assert found.path.name == "second"


@pytest.mark.parametrize(
    ("store", "stop"),
    [("s3", "rank_manifests"), ("s3", "write"), ("s3", "replace"), ("memory", "rank_manifests"), ("memory", "write")],
    indirect=["store"],
)
def test_a_launch_that_is_suspended_anywhere_while_it_publishes_makes_nothing_visible(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """It wakes when its successor has trained the same step, and has published it or not."""
    kind = type(store.objects)
    for step, is_published in ((3, True), (6, False)):
        location.claim(store, BELONGS, f"first{step}")
        late, owner = write(store, step, f"first{step}"), ObjectStore if stop == "rank_manifests" else kind
        original, draft = getattr(owner, stop), None

        def successor(*arguments: Any, **options: Any) -> Any:
            nonlocal draft
            monkeypatch.setattr(owner, stop, original)  # noqa: B023  called in this iteration
            location.claim(store, BELONGS, f"second{step}")  # noqa: B023
            draft = write(store, step, f"second{step}")  # noqa: B023
            if is_published:  # noqa: B023
                format.publish(draft, state={"step": step, "best": None})  # noqa: B023
            return original(*arguments, **options)  # noqa: B023

        monkeypatch.setattr(owner, stop, successor)
        with pytest.raises(LeaseLost, match="taken this run over"):
            format.publish(late, state={"step": step, "best": None})
        assert draft is not None
        if not is_published:
            assert store.list_complete() == ["step_00000003"]
            format.publish(draft, state={"step": step, "best": None})
        found, problems = format.newest(store, f"second{step}")
        assert problems == []
        assert found is not None
        assert found.path.name == f"second{step}"


def test_a_launch_that_was_taken_over_deletes_nothing(store: ObjectStore) -> None:
    save(store, 3)
    save(store, 6)
    location.claim(store, BELONGS, "second")
    write(store, 9, "second")
    before = stored(store)
    for late in (
        lambda: retention.prune(store, 1, "first"),
        lambda: format.newest(store, "first"),
        lambda: store.set_aside("step_00000006", "first"),
        lambda: store.delete("step_00000006", "first"),
    ):
        with pytest.raises(LeaseLost, match="taken this run over"):
            late()
        assert stored(store) == before
    save(store, 9, "second")
    assert store.list_complete() == ["step_00000003", "step_00000006", "step_00000009"]


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_claim_keeps_what_is_published_while_it_is_made(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 3)
    original = objects.ObjectFolder.replace

    def publishes_first(*arguments: Any, **options: Any) -> bool:
        monkeypatch.setattr(objects.ObjectFolder, "replace", original)
        save(store, 6)
        return original(*arguments, **options)

    monkeypatch.setattr(objects.ObjectFolder, "replace", publishes_first)
    location.claim(store, BELONGS, "second")
    assert store.list_complete() == ["step_00000003", "step_00000006"]
    check_owner(store, "second")


def test_a_store_of_the_version_before_is_continued(store: ObjectStore) -> None:
    """It has two checkpoints and a best model, a third one that was set aside, and a fourth that was interrupted."""
    for path in BEFORE.rglob("*"):
        if path.is_file():
            put(store, path.relative_to(BEFORE).as_posix(), path.read_bytes())
    assert store.list_complete() == ["step_00000003", "step_00000006"], "also before it is claimed"
    assert store.is_used()
    with pytest.raises(FingerprintError, match=r"train.seed: 0 -> 1"):
        location.claim(store, {**BELONGS, "train.seed": 1}, "second")
    location.claim(store, BELONGS, "second")
    with pytest.raises(LeaseLost):
        check_owner(store, "5f0c93d1aa01")
    found, problems = format.newest(store, "second")
    assert found is not None
    assert (found.state["step"], problems) == (6, [])
    loaded = format.load_model(found.path, {f"weight{rank}": torch.zeros(3) for rank in (0, 1)})
    assert [tensor.tolist() for tensor in loaded.values()] == [[6.0] * 3] * 2
    assert format.best_path(store, 3).name == "5f0c93d1aa01"
    assert store.has_corrupt()
    assert not any("step_00000012" in name for name in stored(store))
    format.publish(write(store, 9, "second"), state={"step": 9, "best": {"step": 3}})
    assert not store.has_corrupt(), "the step that was set aside was trained again"
    retention.prune(store, 1, "second")
    assert {name.split("/")[-3] for name in stored(store) if name.endswith("model.safetensors")} == {
        "step_00000009",
        "step_00000003",
    }
    assert store.list_complete() == ["step_00000009"]
    assert store.list_complete(BEST) == ["best/step_00000003"]
    assert "belongs" not in json.loads(store.objects.read(RUN).content), "the version before would delete what it finds"


@pytest.mark.parametrize("file", ["first/model.safetensors", "first/state.json", "first/manifest.json"])
@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_damage_is_found_named_and_set_aside(store: ObjectStore, file: str, content: bytes | None) -> None:
    save(store, 3)
    save(store, 6)
    if content is None:
        store.objects.delete([f"step_00000006/{file}"])
    else:
        put(store, f"step_00000006/{file}", content)
    found, (problem,) = format.newest(store, "first")
    assert found is not None
    assert found.state["step"] == 3
    assert f"{store}/step_00000006/{file}" in problem
    assert "set aside as corrupt in run.json" in problem
    assert store.has_corrupt()
    save(store, 6)
    assert not store.has_corrupt()
    assert format.newest(store, "first")[1] == []


def test_what_is_cut_short_on_its_way_is_not_made_visible(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write(store, 3)
    kind = type(store.objects)
    sizes = kind.sizes
    with monkeypatch.context() as patch:
        patch.setattr(kind, "sizes", lambda self, below="": {one: size - 1 for one, size in sizes(self, below).items()})
        with pytest.raises(StorageError, match="right after .* bytes were written"):
            format.publish(draft, state={"step": 3, "best": None})
    assert store.list_complete() == []


def test_another_run_is_refused_once_there_are_checkpoints(store: ObjectStore) -> None:
    location.claim(store, {**BELONGS, "train.seed": 1}, "second")
    save(store, 3, "second")
    with pytest.raises(FingerprintError, match=r"train.seed: 1 -> 0"):
        location.claim(store, BELONGS, "third")
    check_owner(store, "second")


@pytest.mark.parametrize(
    "make", [lambda path: FolderStore(path, external=True), lambda path: ObjectStore("memory://other", path)]
)
def test_a_place_that_holds_something_else_is_refused(tmp_path: Path, make: Callable[[Path], CheckpointStore]) -> None:
    store = make(tmp_path)
    folder = store.objects if isinstance(store, ObjectStore) else folders.LocalFolder(tmp_path)
    folder.write("thesis.json", b"precious", site="test")
    with pytest.raises(FingerprintError, match=r"not empty, but has no run\.json"):
        location.claim(store, BELONGS, "first")
    assert [*folder.sizes()] == ["thesis.json"]


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

    monkeypatch.setattr(folders, "filesystem_of", filesystem_of)
    monkeypatch.setattr(folders, "PAUSES_S", (0.0, 0.0))
    store = location.find_store(url, tmp_path)
    location.claim(store, BELONGS, "first")
    monkeypatch.setattr(folders, "PAUSES_S", ())
    with pytest.raises(StorageError, match=r"hdfs://\[redacted\]@host/lake/run.json: .* does not answer") as told:
        store.read_owner()
    assert "un the same command again" in str(told.value)
    for said in (str(told.value), caplog.text, str(store), repr(store)):
        assert "hush" not in said


def test_a_url_that_no_storage_serves_is_refused_at_once(tmp_path: Path) -> None:
    for url in ("s4://user:secret@x/y", "https://user:secret@x/y", "simplecache::s3://user:secret@x/y"):
        with pytest.raises(UsageError, match=r"train.checkpoint_folder: .*://\[redacted\]@x/y: .* is refused"):
            location.find_store(url, tmp_path)
