"""The commit record of a finished output, `_torchlake/commit.json`: it alone determines which files are part of it."""

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import atomic_io
from torchlake.errors import TableError, Unavailable, UnsafeError, UsageError
from torchlake.redaction import redacted
from torchlake.storage.access import open_binary
from torchlake.storage.errors import unavailable
from torchlake.storage.urls import READ_ONLY, check_url, is_url
from torchlake.tables.sources.files import local_path

FOLDER = "_torchlake"
COMMIT = f"{FOLDER}/commit.json"
PARTS = f"{FOLDER}/parts"
"The folder of the parts, for an output in an object store."
PLAN = f"{FOLDER}/plan.json"
SEAL = "record_sha256"
"The field with the hash of the others; records of earlier versions do not have it."
URL_AS_PATH = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
"A URL after conversion to a `Path`, which removes one slash."


def output_path(output: str | Path) -> Path:
    """Return the absolute path of an output, with links resolved. Raises UsageError for URLs."""
    return Path(os.path.realpath(local_output(output)))


def local_output(output: str | Path) -> Path:
    """Return an output as a path; `file://` URLs are paths. Raises UsageError for other URLs."""
    text = URL_AS_PATH.sub(r"\1://", local_path(output))
    if is_url(text):
        raise UsageError(
            f"{redacted(text)}: has to be a local path, because it is published by one rename. Give a local path, "
            "and upload the folder afterwards."
        )
    if not text:
        raise UsageError("the name of a folder is empty. Give a path, or '.' for the current folder.")
    return Path(os.path.expanduser(text))


def read_commit(output: str | Path) -> dict[str, Any]:
    """Return the commit record of a finished output. Raises TableError when there is none, or it is damaged."""
    folder = output_path(output)
    if not (folder / COMMIT).is_file():
        raise TableError(f"{output}: not a finished torchlake output ({COMMIT} is missing).")
    record: dict[str, Any] = atomic_io.read_json(folder / COMMIT)
    if not is_record(record):
        raise TableError(f"{folder / COMMIT}: not a commit record of this version")
    return record


def recorded_schema(record: Mapping[str, Any]) -> pa.Schema:
    """Return the schema of every part."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["arrow_schema"])))


def committed_files(output: str | Path) -> list[Path]:
    """Return the Parquet files of a finished output, in row order. Raises UnsafeError for names that lead out of it."""
    folder = output_path(output)
    return [atomic_io.safe_join(folder, part["name"]) for part in read_commit(folder)["parts"]]


def output_parts(place: str) -> list[tuple[str, str]] | None:
    """Return the names and files of an output's parts, in row order; None if the path or URL has no output.

    Raises UnsafeError for names that lead out of it.
    """
    if is_url(place):
        return _stored_parts(place)
    folder = Path(os.path.abspath(os.path.expanduser(place)))
    try:
        is_output = (folder / COMMIT).is_file()
    except OSError as error:
        raise unavailable(place, error) from error
    return [(path.name, str(path)) for path in committed_files(folder)] if is_output else None


def _stored_parts(url: str) -> list[tuple[str, str]] | None:
    """Return `output_parts` in an object store. Cost: one request."""
    root = url.rstrip("/")
    if check_url(url) in READ_ONLY and ("*" in url or "?" in url or os.path.splitext(root)[1]):
        return None
    try:
        with open_binary(f"{root}/{COMMIT}") as source:
            content = source.read()
    except Unavailable:
        return None
    try:
        record = json.loads(content)
    except ValueError:
        if check_url(url) in READ_ONLY:  # a web server may answer with a page
            return None
        record = None
    if not is_record(record):
        raise TableError(f"{redacted(root)}/{COMMIT}: not a commit record of this version")
    names = [part["name"] for part in record["parts"]]
    for name in names:
        if any(not step or step.startswith(".") for step in name.split("/")):
            raise UnsafeError(f"{redacted(root)}: the name {name!r} leads out of the folder; refused")
    return [(name, f"{root}/{PARTS}/{name}") for name in names]


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the hash of its other fields."""
    fields = {name: value for name, value in record.items() if name != SEAL}
    return {**fields, SEAL: atomic_io.digest(fields)}


def is_record(value: Any) -> bool:
    """Return whether a value has the fields of a commit record."""
    fields = {"plan", "fingerprint", "rows", "failed", "parts", "schema", "arrow_schema"}
    part_fields = {"name": str, "chunk": int, "rows": int, "failed": int, "sha256": str, "bytes": int}
    return (
        isinstance(value, dict)
        and value.get("format") == 1
        and value.keys() >= fields
        and isinstance(value["parts"], list)
        and all(isinstance(part, dict) for part in value["parts"])
        and all(isinstance(part.get(name), kind) for part in value["parts"] for name, kind in part_fields.items())
    )
