"""Tracking: every line of metrics.jsonl is in the stores once, also when the run or the store fails."""

import json
import logging
import math
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import torchlake as tl
import training_runs as runs
from torchlake.cli import main
from torchlake.config.job import load_job
from torchlake.config.sections.track import TrackConfig
from torchlake.errors import MissingExtra, UsageError
from torchlake.models.folders import model_hash
from torchlake.reporting import tracking
from torchlake.runs import follow, metrics_log

HERE = runs.Inline()
SCALARS = ("loss", "learning_rate", "validation_loss", "validation_macro_f1")


@pytest.fixture(autouse=True)
def _a_folder_is_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the test's own look at the store; `torchlake` sets it where it opens one."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def sections(tmp_path: Path, tiny_bert: Path) -> dict[str, Any]:
    return {**runs.job(tmp_path, tiny_bert), "track": {"mlflow": str(tmp_path / "mlruns"), "tensorboard": True}}


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in metrics_log.read_metrics(run / "metrics.jsonl") if name in line]


def tensorboard_curve(run: Path, name: str) -> list[tuple[int, float]]:
    return [
        (event.step, value.tensor.float_val[0])
        for file in sorted((run / "tensorboard").iterdir())
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == name
    ]


def client_and_run(run: Path, store: str) -> tuple[Any, Any]:
    """The client of the run's MLflow store, and the one MLflow run in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=tracking._uri(store))
    experiment = client.get_experiment_by_name("torchlake")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def assert_logged(run: Path, store: str) -> None:
    """Every line of the run stands in both, once and in order."""
    client, found = client_and_run(run, store)
    for name in SCALARS:
        assert tensorboard_curve(run, name) == [(step, pytest.approx(value)) for step, value in curve(run, name)]
        history = client.get_metric_history(found.info.run_id, name)
        assert [(point.step, point.value) for point in history] == curve(run, name)


@pytest.mark.usefixtures("page_libraries")
def test_parameters_curves_and_the_models_hash_are_logged(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = tl.train(run=tmp_path / "run", engine=HERE, **sections).path
    store = sections["track"]["mlflow"]
    assert len(curve(run, "loss")) == 18
    assert_logged(run, store)
    client, found = client_and_run(run, store)
    artifacts = {one.path for one in client.list_artifacts(found.info.run_id, "evaluation")}
    assert artifacts == {f"evaluation/{name}" for name in ("confusion.png", "per_class.json", "worst_rows.json")}
    assert {one["path"] for one in json.loads(found.data.tags["mlflow.loggedArtifacts"])} < artifacts
    tags = {
        value.tag
        for file in (run / "tensorboard").iterdir()
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert {"evaluation/confusion", "evaluation/per_class", "evaluation/worst_rows"} <= tags
    _, found = client_and_run(run, store)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["train.learning_rate"] == "0.001"
    assert found.data.params["data.validation.fraction"] == "0.25"
    assert found.data.tags["torchlake.model"] == str(run / "model")
    assert found.data.tags["torchlake.model_sha256"] == model_hash(run / "model")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.slow
def test_a_continued_run_adds_only_missing_points(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Killed, stopped, resumed and asked for again when it was finished."""
    run, store = tmp_path / "run", sections["track"]["mlflow"]
    killed = runs.attempt(run, sections, failpoint="rank0.step:8:kill9")
    assert killed.exit_code == -signal.SIGKILL
    assert runs.attempt(run, sections, sigterm_at="rank0.step:6").exit_code == 143
    first = (run / "tracking.json").read_bytes()
    assert client_and_run(run, store)[1].info.status == "KILLED"
    for _ in range(2):
        runs.succeed(run, sections)
        assert_logged(run, store)
        assert client_and_run(run, store)[1].info.status == "FINISHED"
    assert (run / "tracking.json").read_bytes() == first


@pytest.mark.slow
def test_an_empty_file_of_a_killed_run_is_removed(tmp_path: Path, sections: dict[str, Any]) -> None:
    run, store = tmp_path / "run", sections["track"]["mlflow"]
    assert runs.attempt(run, sections, sigterm_at="rank0.step:8").exit_code == 143
    _, found = client_and_run(run, store)
    for name in ("metrics/loss", "params/train.seed"):
        (tmp_path / "mlruns" / found.info.experiment_id / found.info.run_id / name).write_bytes(b"")
    with pytest.raises(ValueError, match="malformed"):
        client_and_run(run, store)
    runs.succeed(run, sections)
    assert_logged(run, store)
    assert client_and_run(run, store)[1].data.params["train.seed"] == "0"


# MLflow 3.17 asks SQLAlchemy 2.1 for a way of loading that this one will drop.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_a_finished_run_is_logged_to_a_database(tmp_path: Path, sections: dict[str, Any]) -> None:
    untracked = {name: section for name, section in sections.items() if name != "track"}
    run = tl.train(run=tmp_path / "run", engine=HERE, **untracked).path
    assert not (run / "tensorboard").exists()
    store = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    again = tl.train(run=run, engine=HERE, **untracked, track={"mlflow": store, "tensorboard": True})
    assert again.complete
    assert_logged(run, store)
    assert not Path("mlruns").exists(), "nothing is left in the current folder"


@pytest.mark.parametrize(
    "store", ["sqlite:////proc/nowhere/mlflow.db", pytest.param("what://is.this", marks=pytest.mark.slow)]
)
def test_a_broken_store_is_a_warning(
    tmp_path: Path, sections: dict[str, Any], store: str, caplog: pytest.LogCaptureFixture
) -> None:
    sections["track"] = {"mlflow": store}
    with caplog.at_level(logging.WARNING, "torchlake"):
        done = tl.train(run=tmp_path / "run", engine=HERE, **sections)
    assert done.steps == 18
    (warning,) = (message for message in caplog.messages if message.startswith("mlflow: "))
    assert warning.endswith("the run continues without it")


@pytest.mark.parametrize("library", ["mlflow", "tensorboard"])
def test_a_missing_library_is_an_error_before_any_work(
    tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    sections["track"] = {library: "store" if library == "mlflow" else True}
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'torchlake\[{library}\]'"):
        tl.train(run=tmp_path / "run", engine=HERE, **sections)
    assert not (tmp_path / "run").exists()


def test_the_flags_of_the_command_lay_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(job: str, *, overrides: list[str], **options: Any) -> Any:
        seen.append(load_job(None, overrides, data={"train": "t"}, model={"base": "b"}).track)
        raise UsageError("enough")

    seen: list[Any] = []
    monkeypatch.setattr("torchlake.training.train.train", train)
    assert main.main(["train", "job.yaml", "--mlflow", "sqlite:///a b: #c.db", "--tensorboard"]) == 64
    assert seen == [TrackConfig(mlflow="sqlite:///a b: #c.db", tensorboard=True)]


# following


def test_lines_are_logged_once_however_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_INTERVAL_S", 0.001)
    path, logged = tmp_path / "metrics.jsonl", []
    seen = threading.Event()

    def watch(batches: Any) -> None:
        for lines in batches:
            logged.extend(lines)
            seen.set()

    def line(step: int, name: str = "loss") -> str:
        return f'{{"step": {step}, "{name}": "nan"}}\n'

    with follow.follow_metrics(path, watch, "test"):
        path.write_text(line(1) + line(2) + line(2, "validation_loss") + '{"step": 3, "lo')
        assert seen.wait(30)
        metrics_log.truncate_metrics(path, step=1, validated=0)
        with open(path, "a") as file:
            file.write(line(2) + line(2, "validation_loss") + line(3))
    assert [one["step"] for one in logged if "loss" in one] == [1, 2, 3]
    assert [one["step"] for one in logged if "validation_loss" in one] == [2]
    assert all(math.isnan(value) for one in logged for name, value in one.items() if name != "step")


def test_what_a_watcher_raises_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def watch(batches: Any) -> None:
        raise OSError("no room")

    with follow.follow_metrics(tmp_path / "metrics.jsonl", watch, "test"):
        pass
    assert "test: OSError: no room; the run continues without it" in caplog.text


def test_a_watcher_that_hangs_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "JOIN_TIMEOUT_S", 0.01)
    released = threading.Event()
    with follow.follow_metrics(tmp_path / "metrics.jsonl", lambda batches: released.wait(60) and None, "test"):
        pass
    released.set()
    assert "test: still running" in caplog.text


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, without the header of 7 bytes that wandb puts before the first block of 32 KiB."""
    place, parts = 7, b""
    content = bytes(7) + content
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if kind == 0:
            return
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield parts
            parts = b""


def wandb_curve(run: Path, name: str) -> list[tuple[int, float]]:
    """A metric in the offline files of all attempts, as `wandb sync` would send them, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            items = record.history.item
            values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            if name in values:
                points.append((values["_step"], values[name]))
    return points


@pytest.mark.slow
def test_weights_and_biases_gets_every_point_once(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library, offline: killed, resumed, and asked for again when it was finished."""
    run = tmp_path / "run"
    sections = {**runs.job(tmp_path, tiny_bert), "track": {"wandb": "team/reviews"}}
    assert runs.attempt(run, sections, sigterm_at="rank0.step:6", WANDB_MODE="offline").exit_code == 143
    first = json.loads((run / "tracking.json").read_text())["wandb:team/reviews"]
    for _ in range(2):
        runs.succeed(run, sections, WANDB_MODE="offline")
        for name in SCALARS:
            assert wandb_curve(run, name) == [(step, pytest.approx(value)) for step, value in curve(run, name)]
    assert json.loads((run / "tracking.json").read_text())["wandb:team/reviews"]["id"] == first["id"]
    files = list((run / "wandb").glob("offline-run-*"))
    assert files
    assert all(file.name.endswith(first["id"]) for file in files)


def test_wandb_without_a_key_is_refused_before_any_work(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {**runs.job(tmp_path, tiny_bert), "track": {"wandb": "reviews"}}
    refused = runs.attempt(tmp_path / "run", sections, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert "UsageError: track.wandb: wandb has no API key" in refused.error
    assert not (tmp_path / "run").exists()
