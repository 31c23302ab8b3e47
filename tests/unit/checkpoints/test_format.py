import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlake.checkpoints import format, retention, shards, store
from torchlake.checkpoints.store import FolderStore
from torchlake.errors import DataError, StorageError

MODEL, OPTIMIZER = f"{format.MODEL}.safetensors", f"{format.OPTIMIZER}.safetensors"


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 4), float(step)), "bias": torch.arange(3.0)}


def save(root: Path, step: int, *, keep: int = 2, best: int | None = None, **more: Any) -> Path:
    folder = FolderStore(root)
    state = {"step": step, "best": None if best is None else {"step": best}, **more}
    draft = format.step_draft(folder, step, attempt="test")
    try:
        format.write_shard(draft, {"model": shards.whole(tensors(step)), "optimizer": {}})
        format.publish(draft, state=state)
    except StorageError:
        format.abandon(draft)
        raise
    retention.prune(folder, keep, "test")
    return draft.path


def save_best(folder: Path, step: int) -> None:
    draft = format.best_draft(FolderStore(folder), step, attempt="test")
    format.write_shard(draft, {"model": shards.whole(tensors(step))})
    format.publish(draft)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != store.BEST)


def test_the_newest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = save(tmp_path, 20, note="é")
    found, problems = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert problems == []
    assert found.path == path
    assert found.state == {"step": 20, "best": None, "note": "é"}
    loaded = format.load_model(path, tensors(20))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(20).items())


def test_nothing_was_ever_saved(tmp_path: Path) -> None:
    assert format.newest(FolderStore(tmp_path / "absent"), "test") == (None, [])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 100):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_00000010", "step_00000100"]
    save(tmp_path, 101, keep=1)
    assert names(tmp_path) == ["step_00000101"]


def test_the_best_model_stays_while_a_kept_checkpoint_names_it(tmp_path: Path) -> None:
    save_best(tmp_path, 1)
    save(tmp_path, 2, best=1)
    save_best(tmp_path, 3)
    save(tmp_path, 4, best=3)
    assert names(tmp_path / store.BEST) == ["step_00000001", "step_00000003"]
    save(tmp_path, 5, best=3)
    assert names(tmp_path / store.BEST) == ["step_00000003"]
    assert format.load_model(format.best_path(FolderStore(tmp_path), 3), tensors(3))["weight"][0, 0] == 3


def test_a_step_saved_twice_is_the_second_one(tmp_path: Path) -> None:
    save(tmp_path, 1, turn=1)
    save(tmp_path, 1, turn=2)
    found, _ = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert found.state["turn"] == 2
    assert names(tmp_path) == ["step_00000001"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def unlink(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, unlink])
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, store.STATE, format.atomic_io.MANIFEST])
def test_damage_is_found_named_and_set_aside(tmp_path: Path, damage: Any, file: str) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    found, (problem,) = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert found.state["step"] == 1
    assert str(tmp_path / "step_00000002" / file) in problem
    assert names(tmp_path) == ["step_00000001", "step_00000002.torn"]


def test_no_flipped_bit_in_a_manifest_breaks_the_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / format.atomic_io.MANIFEST
    content = manifest.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 2
        manifest.write_bytes(damaged)
        found, _ = format.newest(FolderStore(tmp_path), "test")
        assert found is not None
        if found.state["step"] == 1:
            (tmp_path / "step_00000002.torn").rename(manifest.parent)


def test_when_all_are_corrupt_the_run_does_not_start_afresh(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(save(tmp_path, step) / MODEL)
    for _ in range(2):  # the second time they are set aside already
        with pytest.raises(DataError, match="no checkpoint of this run is usable"):
            format.newest(FolderStore(tmp_path), "test")
    assert names(tmp_path) == ["step_00000001.torn", "step_00000002.torn"]


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".step_00000002.77.tmp", "best/.step_00000002.77.tmp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / MODEL).write_bytes(b"half")
    found, problems = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert problems == []
    assert not list(tmp_path.rglob("*.tmp"))


SITES = [
    "checkpoint.model.write",
    "checkpoint.model.done",
    "checkpoint.optimizer.write",
    "checkpoint.note.write",
    "checkpoint.state.write",
    "checkpoint.state.rename",
    "checkpoint.manifest.write",
    "checkpoint.rename",
    "checkpoint.verify",
    "checkpoint.prune",
]


@pytest.mark.parametrize("site", SITES)
def test_a_full_disk_at_any_place_costs_no_older_checkpoint(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_ONCE", str(tmp_path / "once"))
    hits = format.failpoint.__globals__["_hits"]
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", f"{site}:{hits.get(site, 0) + 1}:enospc")
    with pytest.raises(StorageError, match="finished work is kept"):
        save(tmp_path, 2, keep=1)
    (tmp_path / "once").unlink()
    monkeypatch.delenv("TORCHLAKE_FAILPOINT")
    found, problems = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert problems == []
    # Once it is in place the new one counts, although the older one could not be deleted.
    assert found.state["step"] == (2 if site in ("checkpoint.verify", "checkpoint.prune") else 1)
    assert not list(tmp_path.glob(".*"))
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_00000002"]


def test_a_disk_that_reads_back_other_bytes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failpoint(site: str) -> None:
        if site == "checkpoint.verify":
            flip(tmp_path / "step_00000002" / MODEL)

    save(tmp_path, 1, keep=1)
    monkeypatch.setattr(store, "failpoint", failpoint)
    with pytest.raises(StorageError, match="differs when read back"):
        save(tmp_path, 2, keep=1)
    found, _ = format.newest(FolderStore(tmp_path), "test")
    assert found is not None
    assert found.state["step"] == 1


def test_disk_full_is_no_bare_os_error() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert StorageError.exit_code == 74
    assert "No space left" in str(format.atomic_io.storage_error(error, Path("/tmp/x")))


def test_a_tensor_of_another_model_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(DataError, match=r"'weight' has the shape \(3, 4\), but \(5, 4\) in the model"):
        format.load_model(path, {**tensors(1), "weight": torch.zeros(5, 4)})
    with pytest.raises(DataError, match="'extra' has the shape None"):
        format.load_model(path, {**tensors(1), "extra": torch.zeros(1)})


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    shared = torch.ones(4, 2)
    kept = format.untied({"embedding": shared, "bias": torch.zeros(2), "head": shared, "view": shared[:2]})
    assert list(kept) == ["embedding", "bias", "view"]


def test_the_optimizer_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias], "weight_decay": 0.0}]
        return layer, torch.optim.AdamW(groups, lr=0.1, fused=True)

    def step(layer: torch.nn.Linear, optimizer: torch.optim.AdamW, number: int) -> None:
        layer(torch.full((1, 3), float(number))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    layer, optimizer = make()
    for number in range(5):
        step(layer, optimizer, number)
        if number == 2:
            weights = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            stored = format.optimizer_tensors(optimizer, ["weight", "bias"])
            draft = format.step_draft(FolderStore(tmp_path), number, attempt="test")
            format.write_shard(draft, {"optimizer": shards.whole(stored)})
            format.publish(draft)
            path = draft.path
    assert set(stored) == {
        f"{name}|{field}" for name in ("weight", "bias") for field in ("step", "exp_avg", "exp_avg_sq")
    }
    again, other = make()
    again.load_state_dict(weights)
    with format.open_tensors(path, format.OPTIMIZER) as tensors_of_then:
        format.restore_optimizer(other, ["weight", "bias"], tensors_of_then)
    for number in (3, 4):
        step(again, other, number)
    assert torch.equal(layer.weight, again.weight)
    assert torch.equal(layer.bias, again.bias)
    with (
        pytest.raises(DataError, match="no parameter 'weight'"),
        format.open_tensors(path, format.OPTIMIZER) as tensors_of_then,
    ):
        format.restore_optimizer(other, ["other", "bias"], tensors_of_then)


def test_a_checkpoint_is_data_not_code(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert sorted(entry.suffix for entry in path.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]
    assert json.loads((path / store.STATE).read_text())["step"] == 1
