"""The contents of a commit record, and the checks before every commit; the same for folders and tables."""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from torchlake.tables.output.compatibility import JobSpec
from torchlake.tables.output.parts import Part
from torchlake.tables.plan import InputFile, Plan
from torchlake.tables.storage.spread import each_file
from torchlake.tables.storage.urls import is_url
from torchlake.tables.storage.versions import ContentChecker


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
