"""Log a run to MLflow, Weights & Biases and TensorBoard: the job as parameters, metrics as curves, the model's hash.

Each follows metrics.jsonl (`runs/follow.py`) in a thread of the launching process. A store that fails or is slow leads
to a warning, never to a failed training. A continued run, even a finished one, adds only the missing points; at the end
follow tables and a picture of the validation rows (`sent.py`).
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.job import Job, flat
from torchlake.config.sections.track import TrackConfig
from torchlake.errors import Interrupted, MissingExtra, UsageError, pip_install
from torchlake.models import folders
from torchlake.redaction import redacted
from torchlake.reporting.sent import Evaluated, summaries
from torchlake.runs import metrics_log
from torchlake.runs.follow import follow_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "torchlake"
STATE = "tracking.json"
EVENTS = "tensorboard"
LINES_AT_ONCE = 50
"Lines per MLflow request, which may have 1,000 values."
PARAMETERS_AT_ONCE = 100
LONGEST_PARAMETER = 6000
WRITING = threading.Lock()
"Held while a tracker's thread changes the file STATE."


def check(track: TrackConfig) -> None:
    """Raise MissingExtra with the pip command if a library that `track` needs is not installed, and UsageError if wandb
    would ask for a key.
    """
    for wanted, library in ((track.mlflow, "mlflow"), (track.wandb, "wandb"), (track.tensorboard, "tensorboard")):
        if wanted and find_spec(library) is None:
            raise MissingExtra(
                f"track.{library} needs the library {library!r}, which is not installed: "
                f"{pip_install(f'torchlake[{library}]')}"
            )
    if track.wandb is not None and os.environ.get("WANDB_MODE", "online") == "online":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if not wandb.api.api_key:
            raise UsageError(
                "track.wandb: wandb has no API key. Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to "
                "keep the run in its folder (`wandb sync` sends it later)."
            )


@contextmanager
def tracked(job: Job, folder: Path) -> Iterator[None]:
    """Log the metrics of `job` to the stores of `job.track` while the block trains it; afterwards, log the model."""
    status = "FAILED"
    metrics = folder / metrics_log.METRICS
    with ExitStack() as stack:
        if job.track.tensorboard:
            stack.enter_context(
                follow_metrics(metrics, partial(_to_tensorboard, folder / EVENTS, lambda: status), "tensorboard")
            )
        if job.track.mlflow is not None:
            watch = partial(_to_mlflow, job, folder, lambda: status)
            stack.enter_context(follow_metrics(metrics, watch, "mlflow"))
        if job.track.wandb is not None:
            watch = partial(_to_wandb, job, folder, lambda: status)
            stack.enter_context(follow_metrics(metrics, watch, "wandb"))
        try:
            yield
            status = "FINISHED"
        except (KeyboardInterrupt, Interrupted):
            status = "KILLED"
            raise


def _to_tensorboard(folder: Path, status: Callable[[], str], batches: Iterator[list[metrics_log.Line]]) -> None:
    """Write event files. Those of earlier attempts are replaced, because `batches` starts with the first line."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    atomic_io.remove([folder])
    writer = EventFileWriter(str(folder))
    try:
        for lines in batches:
            now = time.time()
            for line in lines:
                values = [Summary.Value(tag=name, simple_value=value) for name, value in _numbers(line)]
                writer.add_event(Event(wall_time=now, step=line["step"], summary=Summary(value=values)))
            writer.flush()
        if status() == "FINISHED":
            for value in summaries(Evaluated.of(folder.parent)):
                writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
    finally:
        writer.close()


def _to_mlflow(job: Job, folder: Path, status: Callable[[], str], batches: Iterator[list[metrics_log.Line]]) -> None:
    """Log to an MLflow store; a continued training continues its MLflow run."""
    # Read at import: no telemetry, and allow a folder as store.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    assert job.track.mlflow is not None
    client = MlflowClient(tracking_uri=_uri(job.track.mlflow))
    run_id = _run_id(client, job.track.mlflow, folder)
    logged = client.get_run(run_id).data
    parameters = [
        Param(name, str(value)[:LONGEST_PARAMETER])
        for name, value in redacted(flat(job.model_dump(mode="json"))).items()
        if name not in logged.params
    ]
    for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
        client.log_batch(run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])
    newest = {name: max(point.step for point in client.get_metric_history(run_id, name)) for name in logged.metrics}
    for lines in batches:
        now = int(time.time() * 1000)
        for first in range(0, len(lines), LINES_AT_ONCE):
            points = [
                Metric(name, value, now, line["step"])
                for line in lines[first : first + LINES_AT_ONCE]
                for name, value in _numbers(line)
                if line["step"] > newest.get(name, 0)
            ]
            client.log_batch(run_id, metrics=points)
    if status() == "FINISHED":
        client.set_tag(run_id, "torchlake.model", str((folder / "model").resolve()))
        client.set_tag(run_id, "torchlake.model_sha256", folders.model_hash(folder / "model"))
        _send_evaluation(client, job.track.mlflow, run_id, Evaluated.of(folder))
    client.set_terminated(run_id, status())


def _send_evaluation(client: "MlflowClient", store: str, run_id: str, found: Evaluated) -> None:
    """Send the tables in the form of `log_table`, which would need pandas, and the picture.

    A database without a server has no place for files: MLflow would put them into the current folder.
    """
    if store.startswith("sqlite:") and "://" not in client.get_run(run_id).info.artifact_uri.removeprefix("file://"):
        return
    logged = []
    for name, (columns, rows) in found.tables.items():
        client.log_dict(run_id, {"columns": columns, "data": rows}, f"evaluation/{name}.json")
        logged.append({"path": f"evaluation/{name}.json", "type": "table"})
    if logged:
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(logged))
    if found.confusion is not None:
        with TemporaryDirectory() as scratch:
            picture = Path(scratch, "confusion.png")
            picture.write_bytes(found.confusion)
            client.log_artifact(run_id, str(picture), "evaluation")


def _to_wandb(job: Job, folder: Path, status: Callable[[], str], batches: Iterator[list[metrics_log.Line]]) -> None:
    """Log to Weights & Biases; a continued training continues its run there, which accepts each step once."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    assert job.track.wandb is not None
    entity, _, project = job.track.wandb.rpartition("/")
    key = f"wandb:{job.track.wandb}"
    state = _tracking_state(folder)
    sent = state.get(key) or {"id": secrets.token_hex(4), "step": 0, "validation": 0}
    run = wandb.init(
        entity=entity or None,
        project=project,
        id=sent["id"],
        resume="allow",
        name=folder.resolve().name,
        dir=str(folder),
        config=redacted(flat(job.model_dump(mode="json"))),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True),
    )
    try:
        for lines in batches:
            for line in lines:
                kind = "validation" if metrics_log.is_validation(line) else "step"
                if line["step"] > sent[kind]:
                    sent[kind] = line["step"]
                    run.log(dict(_numbers(line)), step=line["step"])
            with WRITING:
                atomic_io.write_json(folder / STATE, {**_tracking_state(folder), key: sent}, site="tracking")
        if status() == "FINISHED":
            run.summary["torchlake.model_sha256"] = folders.model_hash(folder / "model")
            found = Evaluated.of(folder)
            tables = {
                name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in found.tables.items()
            }
            picture = {} if found.confusion is None else {"confusion": wandb.Image(_stored(folder, found.confusion))}
            if tables or picture:
                run.log({f"evaluation/{name}": value for name, value in {**tables, **picture}.items()})
    finally:
        run.finish(exit_code=0 if status() == "FINISHED" else 1)


def _stored(folder: Path, picture: bytes) -> str:
    """Return the path of a picture for wandb, which copies the file when the run is sent."""
    file = folder / "wandb" / "confusion.png"
    atomic_io.write_bytes(file, picture, site="tracking.picture")
    return str(file)


def _tracking_state(folder: Path) -> dict[str, Any]:
    """Return what trackers stored in the run folder."""
    return atomic_io.read_json(folder / STATE) if (folder / STATE).exists() else {}


def _run_id(client: "MlflowClient", store: str, folder: Path) -> str:
    """Return the ID of this run folder's MLflow run in the store; create the run if there is none."""
    state = _tracking_state(folder)
    shown = str(redacted(store))
    if shown in state:
        run_id: str = state[shown]
        _drop_empty(store, run_id)
        client.update_run(run_id, status="RUNNING")
        return run_id
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
    tags = {"torchlake.run": str(folder.resolve())}
    run_id = client.create_run(experiment, tags=tags, run_name=folder.resolve().name).info.run_id
    with WRITING:
        atomic_io.write_json(folder / STATE, {**_tracking_state(folder), shown: run_id}, site="tracking")
    return run_id


def _drop_empty(store: str, run_id: str) -> None:
    """Remove empty files that a killed process left in a folder store: MLflow cannot read a run that has one."""
    if "://" not in store:
        for file in Path(store).glob(f"*/{run_id}/*/*"):
            if file.is_file() and file.stat().st_size == 0:
                file.unlink()


def _uri(store: str) -> str:
    """Return the URI of a store: a file URL for a folder. Creates the folder of a SQLite database."""
    if "://" not in store:
        return Path(store).absolute().as_uri()
    if store.startswith("sqlite:///"):
        Path(store.removeprefix("sqlite:///")).absolute().parent.mkdir(parents=True, exist_ok=True)
    return store


def _numbers(line: metrics_log.Line) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in line.items() if name != "step"]
