"""The records of a target's commits: what was written, from which input, by which model; and each commit's plan.

    _torchlake/commits/<id>.json   _torchlake/commits/<id>.plan.json

They are written before the commit, which names them by its id; a record without a commit has no meaning.
"""

import json
from collections.abc import Mapping
from typing import Any

from torchlake.errors import DataError
from torchlake.tables.sinks._interface import STATE, Target
from torchlake.tables.storage.folders import folder_at

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
