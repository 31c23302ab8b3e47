"""What a finished output says of itself: `_torchlake/commit.json`, and nothing else, decides which files are rows."""

import os
from pathlib import Path
from typing import Any

from torchlake import durable
from torchlake.errors import TableError, UsageError
from torchlake.tables.files import is_url

FOLDER = "_torchlake"
COMMIT = f"{FOLDER}/commit.json"
PLAN = f"{FOLDER}/plan.json"


def output_path(output: str | Path) -> Path:
    """The absolute path of an output, symbolic links followed. Raises UsageError for URLs."""
    text = os.fspath(output)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if is_url(text):
        raise UsageError(
            f"{text}: an output is a local folder, because it is published by one rename; upload it after."
        )
    return Path(os.path.realpath(os.path.expanduser(text)))


def read_commit(output: str | Path) -> dict[str, Any]:
    """The commit record of a finished output. Raises TableError when there is none, or it is damaged."""
    folder = output_path(output)
    if not (folder / COMMIT).is_file():
        raise TableError(f"{output}: not a finished torchlake output ({COMMIT} is missing).")
    record: dict[str, Any] = durable.read_json(folder / COMMIT)
    if not _is_record(record):
        raise TableError(f"{folder / COMMIT}: not a commit record of this version")
    return record


def committed_files(output: str | Path) -> list[Path]:
    """The Parquet files of a finished output, in row order; names that lead out of it are refused (UnsafeError)."""
    folder = output_path(output)
    return [durable.inside(folder, part["name"]) for part in read_commit(folder)["parts"]]


def _is_record(value: Any) -> bool:
    fields = {"plan", "fingerprint", "rows", "failed", "parts", "schema"}
    part_fields = {"name", "chunk", "rows", "failed", "sha256", "bytes"}
    return (
        isinstance(value, dict)
        and value.get("format") == 1
        and value.keys() >= fields
        and isinstance(value["parts"], list)
        and all(isinstance(part, dict) and part.keys() >= part_fields for part in value["parts"])
    )
