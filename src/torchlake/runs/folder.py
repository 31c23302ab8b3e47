"""The run folder: which job it belongs to, and whether it is finished.

    job.yaml  sources.json  base.json  task.json  data.json  input/  prepared/  cache/  checkpoints/  metrics.jsonl
    logs/  model/  report.html  result.json

One trainer at a time holds its lease, which the ranks check before they write. Before anything was trained, a folder
accepts a changed job (for example after wrong data was corrected); afterwards another job is refused, because it would
mix the steps of two jobs.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.checkpoints import continuing, location
from torchlake.config.job import Job, flat, job_file, job_to_yaml, load_job
from torchlake.config.task_spec import TASK_FILE, TaskSpec, spec_to_json
from torchlake.errors import DataError, FingerprintError
from torchlake.outputs.find import folder_output
from torchlake.redaction import redacted
from torchlake.runs import metrics_log
from torchlake.runs.tables import stored_tables
from torchlake.tables.record import local_output

log = logging.getLogger(__name__)

JOB_FILE = "job.yaml"
WRITTEN = "written"
"The folder with the texts that each validation wrote."
RESULT = "result.json"
FOLDS = "folds.json"
"The file of a cross-validation's folder with its job and the number of folds."
BASE = "base.json"
"The hash of the job's base model; missing if it has none."
AUTO = "auto"
"Given as the run folder: use the default one, or the first of its numbered successors that is new or holds the job."
STOP = "stop"
"A file with this name stops a training as SIGTERM does, on any machine; the next attempt removes it."
MORE_ROOM = "more_room"
"A file with this name stops the ranks so that more of them can start; its writer removes it."
INTERRUPTED = "interrupted"
"A file with this name stops the ranks when their launcher stops; for engines whose tasks get no signals."
HALF_WRITTEN = re.compile(r"\.[\w.]+\.[0-9a-f]+\.tmp")
# Another machine may find the same tables and checkpoints under other paths.
LOCATION_FIELDS = ("data.train", "data.validation", "train.checkpoint_folder")


def find(job: str | Path | Job | None, run: str | Path | None) -> Path:
    """Return `run`, by default runs/ and the job file's name. Raises UsageError for a URL."""
    if run is not None:
        return local_output(run)
    return Path("runs") / ("job" if job is None or isinstance(job, Job) else job_file(job).stem)


def candidates(job: str | Path | Job | None, run: str | Path | None) -> Iterator[Path]:
    """Yield the folders to try for a run: the one of `find`, or with run="auto" the default one, NAME-2, NAME-3,
    ..."""
    if run != AUTO:
        yield find(job, run)
        return
    first = find(job, None)
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def accepts(folder: Path, job: Job) -> bool:
    """Return whether `job` can be trained, or continued, in the folder."""
    return not folder.exists() or _conflict(folder, job) is None


def claim(folder: Path, job: Job) -> None:
    """Store the job in the run folder. Raises FingerprintError if it holds the training of another job, or other
    files.
    """
    conflict = _conflict(folder, job)
    if conflict is not None:
        raise FingerprintError(conflict)
    path = folder / JOB_FILE
    before = load_job(path) if path.exists() else job
    if is_trained(folder, before):
        if longer := _differences(before, job):
            log.info("%s: the run continues, because the job is longer now:\n%s", folder, "\n".join(longer))
            atomic_io.remove([folder / RESULT])  # before the job is stored: a crash between them loses nothing
    elif _differences(before, job):
        atomic_io.remove([folder / name for name in (TASK_FILE, metrics_log.METRICS, "prepared", "cache")])
    remove_half_written(folder)
    atomic_io.remove([folder / STOP])
    atomic_io.write_bytes(path, job_to_yaml(job).encode(), site="run.job")


def remove_half_written(folder: Path) -> None:
    """Remove what killed writers left; they held the lease that this process holds."""
    left = [*folder.glob(".*.tmp"), *(folder / "cache").glob(".*.tmp")]
    atomic_io.remove(entry for entry in left if HALF_WRITTEN.fullmatch(entry.name))


def _conflict(folder: Path, job: Job) -> str | None:
    """Return why the folder cannot hold the job: another job that has begun training, or foreign files; None if it
    can."""
    path = folder / JOB_FILE
    if path.exists():
        before = load_job(path)
        differing = _differences(before, job)
        if not differing or not is_trained(folder, before):
            return None
        old, now = (flat(each.model_dump(mode="json")) for each in (before, job))
        differing = continuing.refused_changes(differing, old, now)
        if not differing:
            result = atomic_io.read_json(folder / RESULT) if (folder / RESULT).exists() else {}
            return continuing.why_ended(str(folder), result, job.train)
        return (
            f"{folder}: holds the run of another job. It differs in\n" + "\n".join(differing) + "\n"
            "To train the changed job, name another run folder (--run FOLDER), or let one be chosen (--run auto). "
            "To start again in this one, delete it. "
            f"A run may continue with more {' or '.join(continuing.LENGTHS)}, and with other values of: "
            f"{', '.join(continuing.MAY_CHANGE)}."
        )
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not foreign:
        return None
    return (
        f"{folder}: the folder is not a run folder ({JOB_FILE} is missing), and it is not empty (it holds "
        f"{foreign[0]!r}). Name a new folder (--run FOLDER)."
    )


def _differences(before: Job, now: Job) -> list[str]:
    return differences(*(job.model_dump(mode="json") for job in (before, now)))


ADDED: dict[str, Any] = {
    "train.batch_norm": "shared",
    "model.lora.rslora": False,
    "model.lora.dora": False,
    "model.lora.init": "default",
    "model.lora.learning_rate_ratio": 1.0,
    "model.lora.merge": True,
}
"Settings that checkpoints of earlier versions do not name, with the values that they had."


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that may not change and differ between two jobs, given as plain values: one line each."""
    # "all" was the name of the default of data.learn.
    one, other = (
        {**each, "data.learn": None} if each.get("data.learn") == "all" else each for each in map(flat, (before, now))
    )
    return [
        f"  {name}: {redacted(one.get(name), name)!r} -> {redacted(other.get(name), name)!r}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name) and not continuing.may_change(name)
    ]


def run_identity(job: Job, spec: TaskSpec, folder: Path) -> dict[str, Any]:
    """Return what two run folders must share to use the same checkpoints, as plain values by dotted names: the job's
    settings that may not change, the task, and, in place of the tables' paths, the content prepared in `folder`.
    """
    values = redacted(flat(job.model_dump(mode="json")))
    settings = {
        name: value for name, value in values.items() if not continuing.may_change(name) and name not in LOCATION_FIELDS
    }
    settings = {name: value for name, value in settings.items() if name not in ADDED or value != ADDED[name]}
    settings["data.learn"] = settings["data.learn"] or "all"
    task = {
        f"task.{name}": list(value) if isinstance(value, tuple) else value for name, value in spec_to_json(spec).items()
    }
    tables = {f"data.{name}": _describe_content(folder / "prepared" / name) for name in stored_tables(job)}
    return {**settings, **task, **tables}


def check_base(folder: Path, base: Path | None, base_hash: str, *, begun: bool) -> None:
    """Record the hash of the base model when a run begins. Raises FingerprintError if it is another one by now.

    Checkpoints have only what is trained: with frozen layers or adapters the rest comes from the base model.
    """
    path = folder / BASE
    if base is None:
        return
    if begun and path.exists():
        if not began_with(folder, base_hash):
            raise FingerprintError(
                f"{folder}: the run began with another base model than the one that is in {base} now. Put the first "
                "one back, or train in a new run folder (--run FOLDER)."
            )
    elif not begun:
        atomic_io.write_json(path, {"model": base_hash}, site="run.base")


def began_with(folder: Path, base_hash: str) -> bool:
    """Return whether the run began with the base model that has this hash, as it recorded."""
    return bool(atomic_io.read_json(folder / BASE) == {"model": base_hash})


def is_trained(folder: Path, job: Job) -> bool:
    """Return whether the run has begun to train: the folder has a result or a checkpoint of `job`, corrupt or not."""
    return (folder / RESULT).exists() or location.find_store(job.train.checkpoint_folder, folder).is_used()


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None while work is left, for example because the model folder is damaged."""
    if not (folder / RESULT).exists():
        return None
    try:
        atomic_io.check_manifest(folder / "model")
    except DataError as error:
        log.warning("%s. The model is written again from the checkpoints.", error)
        return None
    result: dict[str, Any] = atomic_io.read_json(folder / RESULT)
    return result


def _describe_content(prepared: Path) -> str:
    """Return the rows and the hash of a table when it was prepared."""
    files = folder_output(prepared).earlier().inputs
    rows = sum(one.rows for one in files)
    content = atomic_io.digest(sorted([one.name, one.content] for one in files))
    return f"{rows} rows in {len(files)} file{'s' * (len(files) != 1)}, sha256 {content}"
