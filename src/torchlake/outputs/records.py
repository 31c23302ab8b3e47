"""The records of a target's commits: what was written, from which input, by which model; and each commit's plan.

    _torchlake/commits/<id>.json   _torchlake/commits/<id>.plan.json

They are written before the commit, which names them by its id; a record without a commit has no meaning. Below are what
a record contains and the checks before every commit, the same for folders and tables.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from torchlake.errors import DataError
from torchlake.outputs.compatibility import JobSpec
from torchlake.outputs.parts import Part
from torchlake.outputs.target import STATE, Target
from torchlake.storage.folders import folder_at
from torchlake.storage.spread import each_file
from torchlake.storage.urls import is_url
from torchlake.storage.versions import ContentChecker
from torchlake.tables.plan import InputFile, Plan

FOLDER = f"{STATE}/commits"


def write_record(target: Target, commit: str, record: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Store the record and the plan of a commit that is about to be made."""
    folder = folder_at(target.root)
    folder.write(f"{FOLDER}/{commit}.plan.json", json.dumps(plan).encode(), site="commit.plan")
    folder.write(f"{FOLDER}/{commit}.json", json.dumps(record, indent=1).encode(), site="commit.record")


def read_record(target: Target, commit: str, *, plan: bool = False) -> dict[str, Any] | None:
    """Return the record of a commit, or its plan; None if it is missing. Raises DataError when it is damaged."""
    name = f"{FOLDER}/{commit}{'.plan' if plan else ''}.json"
    content = folder_at(target.root).content(name)
    if content is None:
        return None
    try:
        value: dict[str, Any] = json.loads(content)
    except ValueError as error:
        raise DataError(f"{target.root}/{name}: not valid JSON ({error})") from None
    return value


def stored_commits(root: str) -> list[str]:
    """Return the ids of all records at a target, including records without a commit."""
    names = (name.rpartition("/")[2] for name in folder_at(root).sizes(FOLDER))
    return sorted(name.partition(".")[0] for name in names if name.endswith(".plan.json"))


def commit_record(
    job: JobSpec,
    parts: Sequence[Part],
    schema: pa.Schema,
    provenance: Mapping[str, Any],
    *,
    quarantined: Sequence[tuple[str, str]] = (),
    removed: int = 0,
) -> dict[str, Any]:
    """Return the record of a commit of `parts`, whose columns are `schema`."""
    schema, plan = schema.remove_metadata(), job.plan
    return {
        "format": 1,
        "plan": plan.id,
        "fingerprint": job.fingerprint,
        "rows": sum(part.rows for part in parts),
        "failed": sum(part.failed for part in parts),
        "parts": [part.entry() for part in parts],
        "schema": {column.name: str(column.type) for column in schema},
        "arrow_schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
        "environments": list(job.environments),
        "quarantined": [list(one) for one in quarantined],
        "removed": removed,
        **({"sources": [dict(one) for one in plan.sources]} if plan.sources else {}),
        **({"selection": dict(plan.selection)} if plan.selection else {}),
        "provenance": dict(provenance),
        "committed": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_parts(plan: Plan, parts: Sequence[Part]) -> None:
    """Assert that every chunk's rows are in one part; `parts` are sorted by chunk."""
    rows = {chunk.index: chunk.rows for chunk in plan.chunks}
    assert sorted(chunk for part in parts for chunk in part.all_chunks) == sorted(rows), "every chunk has one part"
    assert all(part.rows == sum(rows[chunk] for chunk in part.all_chunks) for part in parts), "with all of its rows"


def check_inputs(plan: Plan) -> None:
    """Raise FingerprintError when an input file has changed since it was planned."""
    remote = any(is_url(one.path) for one in plan.inputs)
    for _ in each_file(_check_input, plan.inputs, remote=remote):
        pass


def _check_input(one: InputFile) -> None:
    # The rows were read from the planned version, so the file may have been removed by now.
    ContentChecker().check(one.path, one.version, one.sha256, may_be_gone=True)
