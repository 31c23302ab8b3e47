"""Checkpoints below an URL, on a real S3 protocol: cases 39 and 45 to 47 once more, and whose a storage is.

The oracle is that of the checkpoints on a disk: an interrupted run ends with the weights of one that was not. Nothing
but the run folder and the bucket outlives a process here, and some tests take the run folder away too. Several ranks
are processes of the local engine: the client of a bucket has threads, which a fork of the launcher would not have.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
import training_runs as runs
from recovery_times import Watch
from s3_server import BUCKET, S3Server, serving

LAST_STEP = 18
BESIDE = "train.checkpoint_in_background=true"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture
def kept(tmp_path: Path, s3: S3Server) -> dict[str, Any]:
    """Options of an attempt that keeps its checkpoints in the bucket, below the test's own name."""
    return {"overrides": (f"train.checkpoint_folder=s3://{BUCKET}/{tmp_path.name}",), **s3.environment}


def steps(s3: S3Server, tmp_path: Path) -> list[str]:
    """The visible checkpoints in the bucket."""
    if "run.json" not in s3.keys(tmp_path.name):
        return []
    listed = json.loads(s3.get(f"{tmp_path.name}/run.json"))["checkpoints"]
    assert {*listed.values()} <= {*s3.keys(tmp_path.name)}
    return sorted(name for name in listed if name.startswith("step_"))


def assert_same_weights(run: Path, expected: Path) -> None:
    assert runs.weights_sha256(run) == runs.weights_sha256(expected)
    assert list(run.rglob("*.safetensors")) == [run / "model" / "model.safetensors"]
    assert not list(run.rglob("*.tmp"))


@pytest.mark.slow
def test_the_same_weights_and_only_the_newest_and_the_best_are_kept(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any], whole: Path
) -> None:
    kept["overrides"] += (BESIDE,)
    runs.succeed(tmp_path / "run", sections, **kept)
    assert_same_weights(tmp_path / "run", whole)
    assert runs.losses(tmp_path / "run") == runs.losses(whole)
    assert not (tmp_path / "run" / "checkpoints").exists()
    keys = s3.keys(tmp_path.name)
    assert steps(s3, tmp_path) == ["step_00000018"]
    assert len({key.split("/")[1] for key in keys if key.startswith("best/")}) == 1
    names = [key.rpartition("/")[2] for key in keys if key.startswith("step_00000018")]
    assert sorted(names) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [one["step"] for one in report["checkpoints"]] == [18]


@pytest.mark.parametrize(
    "hit",
    [
        "checkpoint.upload:8",
        *(
            pytest.param(hit, marks=pytest.mark.slow)
            for hit in ("checkpoint.upload:2", "checkpoint.rename:2", "best.upload:1")
        ),
    ],
)
def test_a_kill_in_an_upload_is_resumed_from_an_empty_run_folder(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any], whole: Path, hit: str
) -> None:
    """What was uploaded and is not visible is removed; another machine goes on, with the same weights."""
    killed = runs.attempt(tmp_path / "run", sections, failpoint=f"{hit}:kill9", **kept)
    assert killed.exit_code == -signal.SIGKILL
    visible = steps(s3, tmp_path)
    done = runs.succeed(tmp_path / "elsewhere", sections, **kept)
    assert done.steps == LAST_STEP - (int(visible[-1][-8:]) if visible else 0)
    assert_same_weights(tmp_path / "elsewhere", whole)
    keys = s3.keys(tmp_path.name)
    assert len([key for key in keys if key.endswith("model.safetensors")]) == sum("manifest" in key for key in keys)


@pytest.mark.slow
def test_two_ranks_write_and_one_goes_on(tmp_path: Path, s3: S3Server, kept: dict[str, Any], tiny_bert: Path) -> None:
    """Without dropout, whose masks belong to ranks; the losses of another number of ranks agree to rounding."""
    sections = runs.job(tmp_path, tiny_bert)
    runs.succeed(tmp_path / "whole", sections)
    options = {**kept, "overrides": (*kept["overrides"], BESIDE, "train.max_restarts=0")}
    stopped = runs.attempt(tmp_path / "run", sections, ranks=2, local=True, on_step=ask_to_stop, **options)
    assert stopped.exit_code == 143, stopped.error
    newest = steps(s3, tmp_path)[-1]
    shards = [key for key in s3.keys(tmp_path.name) if newest in key and "-of-00002" in key]
    assert len(shards) == 4
    assert int(newest[-8:]) in (8, 9)
    assert runs.succeed(tmp_path / "run", sections, **kept).steps == LAST_STEP - int(newest[-8:])
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "whole"), abs=1e-5)


def ask_to_stop(line: dict[str, Any]) -> None:
    if line.get("step") == 8:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_rank_killed_in_its_upload_is_started_again(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any], recovery: Watch
) -> None:
    """The next launch has another name, and the bytes of two ranks that nobody disturbed."""
    recovery(tmp_path / "run", 45)
    runs.succeed(tmp_path / "whole", sections, ranks=2)
    kept["overrides"] += (BESIDE,)
    runs.succeed(tmp_path / "run", sections, ranks=2, local=True, failpoint="checkpoint.upload:5:kill9", **kept)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_used(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any], whole: Path
) -> None:
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:8:kill9", **kept)
    (key,) = [key for key in s3.keys(tmp_path.name) if key.endswith("optimizer.safetensors") and "00000006" in key]
    content = bytearray(s3.get(f"{tmp_path.name}/{key}"))
    content[-7] ^= 1
    s3.put(f"{tmp_path.name}/{key}", bytes(content))
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:1:kill9", **kept)
    assert steps(s3, tmp_path) == ["step_00000003"]
    (_, aside) = json.loads(s3.get(f"{tmp_path.name}/run.json"))["corrupt"].popitem()
    assert aside in s3.keys(tmp_path.name)
    assert runs.succeed(tmp_path / "run", sections, **kept).steps == LAST_STEP - 3
    assert_same_weights(tmp_path / "run", whole)


@pytest.mark.slow
def test_another_job_and_another_table_are_refused(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Nothing in the bucket is touched by either; a table elsewhere with the same rows is the same table."""
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:5:kill9", **kept)
    before = s3.keys(tmp_path.name)
    other = {**kept, "overrides": (*kept["overrides"], "train.learning_rate=0.5")}
    refused = runs.attempt(tmp_path / "other", sections, **other)
    assert refused.exit_code == 65
    assert f"FingerprintError: s3://{BUCKET}/{tmp_path.name}" in refused.error
    assert "train.learning_rate: 0.001 -> 0.5" in refused.error
    table = tmp_path / "elsewhere" / "reviews.parquet"
    table.parent.mkdir()
    for rows, exit_code in ((95, 65), (96, 0)):
        pq.write_table(tiny.reviews(rows), table)
        moved = {**sections, "data": {**sections["data"], "train": str(table)}}
        done = runs.attempt(tmp_path / str(rows), moved, **kept)
        assert done.exit_code == exit_code, done.error
        assert exit_code == 0 or "data.train: '96 rows in 1 file" in done.error
        assert exit_code == 0 or s3.keys(tmp_path.name) == before


def test_who_was_taken_over_makes_nothing_visible(
    tmp_path: Path, s3: S3Server, kept: dict[str, Any], sections: dict[str, Any]
) -> None:
    """P9 without a common run folder: a launch that began later stands in the bucket."""
    refused = runs.attempt(tmp_path / "run", sections, stub=another_begins, **kept)
    assert refused.exit_code == 76
    assert "taken this run over" in refused.error
    assert steps(s3, tmp_path) == ["step_00000003"]


def another_begins() -> None:
    """At the fifth step, another launch claims what the checkpoints are kept in."""
    from torchlake.checkpoints import location
    from torchlake.training import loop, saving

    original, saved = loop.train_step, saving.save
    stores: list[location.CheckpointStore] = []

    def save(settings: Any, *rest: Any) -> None:
        stores.append(saving.checkpoints(settings))
        saved(settings, *rest)

    def train_step(state: Any, epoch: Any, rows: Any, progress: Any, *rest: Any) -> Any:
        if progress.step == 4:
            owner = stores[-1].read_owner()
            assert owner is not None
            location.claim(stores[-1], dict(owner.belongs or {}), "another's")
        return original(state, epoch, rows, progress, *rest)

    loop.train_step, saving.save = train_step, save
