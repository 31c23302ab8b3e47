"""Which place keeps a run's checkpoints, and whose a place is that lies outside of the run folder.

The run folder has a lease; a place outside of it may be found from other machines, with other run folders. So it says
in its `run.json` what it belongs to: the job but for what may change, the task, and the tables by their content.
Another job, or the same one over other rows, is refused once there are checkpoints. The same job may go on from a new
and empty run folder. Who starts last writes: `run.json` holds the name of its launch, which whoever makes a checkpoint
visible looks for first.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlake.checkpoints.object_store import ObjectStore
from torchlake.checkpoints.store import RUN, CheckpointStore, FolderStore
from torchlake.errors import FingerprintError, LeaseLost
from torchlake.tables.sources.urls import is_url

FOLDER = "checkpoints"
SCRATCH = ".checkpoints"


def find_store(folder: str | None, run: Path) -> CheckpointStore:
    """Where the checkpoints of the run folder `run` are; `folder` is the job's train.checkpoint_folder.

    Raises UsageError or MissingExtra for an URL that nothing here can open.
    """
    if folder is None:
        return FolderStore(run / FOLDER)
    folder = folder.removeprefix("file://")
    if not is_url(folder):
        return FolderStore(Path(folder).expanduser(), external=True)
    remote = ObjectStore(folder.rstrip("/"), run / SCRATCH)
    remote.check()
    return remote


def claim(store: CheckpointStore, identity: Mapping[str, Any], attempt: str) -> None:
    """Note in a place outside of the run folder that the launch `attempt` writes there now, and for what.

    `belongs` are the plain values that two runs must have in common to be one. Raises FingerprintError listing what
    differs, or when the place holds something else.
    """
    if not store.external:
        return
    found, used = store.read_json(RUN), store.is_used()
    if found is None and used:
        raise FingerprintError(
            f"{store}: is not empty, and holds no {RUN} that would say whose checkpoints are there. "
            "Give another train.checkpoint_folder."
        )
    before = found.get("belongs") if isinstance(found, dict) else None
    if found is not None and not isinstance(before, dict):
        raise FingerprintError(f"{store}/{RUN}: is damaged. Give another train.checkpoint_folder, or delete this one.")
    if used and before is not None and before != identity:
        differing = [
            f"  {name}: {before.get(name)!r} -> {identity.get(name)!r}"
            for name in dict.fromkeys([*before, *identity])
            if before.get(name) != identity.get(name)
        ]
        raise FingerprintError(
            f"{store}: holds the checkpoints of another run. It differs in\n"
            + "\n".join(differing)
            + "\nGive another train.checkpoint_folder, or delete this one to start again."
        )
    store.write_json(RUN, {"format": 1, "belongs": dict(identity), "attempt": attempt}, site="checkpoint.claim")


def check_owner(store: CheckpointStore, attempt: str) -> None:
    """Raise LeaseLost unless `attempt` is the launch that a place outside of the run folder belongs to."""
    if not store.external:
        return
    found = store.read_json(RUN)
    if not isinstance(found, dict) or found.get("attempt") != attempt:
        raise LeaseLost(
            f"{store}: another process has taken this run over and goes on with it, or {RUN} was deleted there"
        )
