"""The tables of a run: how a job reads them, which versions it reads, and frames that the run folder stores first."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.job import Job, load_job
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadOptions, dialect
from torchlake.tables.sources.frames import engine_of
from torchlake.tables.sources.streams import is_stored_first

log = logging.getLogger(__name__)

SOURCES = "sources.json"
"The job's tables, each with the version that the run reads; missing if none has versions."


def stored_tables(job: Job) -> dict[str, str | tuple[str, ...]]:
    """Return the job's stored tables, by purpose."""
    validation = job.data.validation
    return {"train": job.data.train} | ({"validation": validation} if isinstance(validation, str | tuple) else {})


def pinned_job(folder: Path, job: Job, *, begun: bool) -> Job:
    """Return the job with a version of each table that has versions: the recorded ones if `begun`, else the current
    ones.

    The current versions are recorded, so that a run that is resumed reads the same rows. Raises TableError if a table
    cannot be read.
    """
    path, tables = folder / SOURCES, stored_tables(job)
    if begun and path.exists():
        found: dict[str, Any] = atomic_io.read_json(path)
        for name, table in found.items():
            log.info("data.%s: %s, as when the run began", name, table)
    else:
        found = {name: pinned(table) for name, table in tables.items()}
        found = {name: one for name, one in found.items() if one != _as_list(tables[name])}
        atomic_io.remove([path])
        if found:
            atomic_io.write_json(path, found, site="run.sources")
    return load_job(job, data=found) if found else job


def _as_list(table: str | tuple[str, ...]) -> str | list[str]:
    return table if isinstance(table, str) else [*table]


def read_options_of(job: Job, name: str) -> ReadOptions:
    """Return how the job reads its table `name` of `stored_tables`: `sample` and `limit` are for the training table
    only."""
    data = job.data
    selection = Selection(where=data.where)
    if name == "train":
        selection = Selection(where=data.where, sample=data.sample, limit=data.limit, seed=job.train.seed)
    return ReadOptions(selection=selection, csv=dialect(data.csv.model_dump()))


def load_with_frames(
    job: str | Path | Job | None, overrides: Sequence[str], sections: Mapping[str, Any], folder: Path, **engine: Any
) -> tuple[dict[Path, Any], Job]:
    """Return the tables that are stored in the run folder first, by their paths there, and the job with these paths:
    frames and streams in the sections, and folders of images.
    """
    frames, stored = _frames_to_paths(sections, folder)
    wanted = load_job(job, overrides, **stored, **engine)
    images, stored = _frames_to_paths({"data": stored_tables(wanted)}, folder)
    return frames | images, load_job(wanted, **stored) if images else wanted


def _frames_to_paths(sections: Mapping[str, Any], folder: Path) -> tuple[dict[Path, Any], dict[str, Any]]:
    """Return the frames and streams in data.train and data.validation by the path where they will be stored, and the
    sections with these paths in their place.
    """
    data = sections.get("data")
    if not isinstance(data, Mapping):
        return {}, {**sections}
    frames: dict[Path, Any] = {}

    def stored(one: Any, name: str) -> Any:
        if not is_stored_first(one) and engine_of(one) is None:
            return one
        path = folder / "input" / f"{name}.parquet"
        frames[path] = one
        return str(path)

    tables = {}
    for name in ("train", "validation"):
        given = data.get(name)
        if isinstance(given, list | tuple):
            tables[name] = [stored(one, f"{name}-{number}") for number, one in enumerate(given)]
        elif name in data:
            tables[name] = stored(given, name)
    return frames, {**sections, "data": {**data, **tables}}
