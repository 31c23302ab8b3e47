"""Find the store of a run's checkpoints, and check which run an external store belongs to.

The run folder has a lease; an external store may be found by other machines with other run folders. So its `run.json`
states its run's identity: the job's settings that must not change, the task, and the content of the tables. Once there
are checkpoints, another job, or the same job over other rows, is refused; the same job may continue from a new, empty
run folder. The last launch that started is the writer: `run.json` has its name. A checkpoint becomes visible only while
it has: in a folder under a lock, in an object store by a conditional change of `run.json`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlake.checkpoints.continuing import refused_changes
from torchlake.checkpoints.object_store import ObjectStore
from torchlake.checkpoints.store import RUN, FolderStore
from torchlake.errors import FingerprintError
from torchlake.storage.urls import is_url

FOLDER = "checkpoints"
SCRATCH = ".checkpoints"

CheckpointStore = FolderStore | ObjectStore


def find_store(folder: str | None, run: Path) -> CheckpointStore:
    """Return the store of the run folder `run`; `folder` is the job's train.checkpoint_folder.

    Raises UsageError or MissingExtra for a URL that cannot be opened.
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
    """Record in an external store that the launch `attempt` is its writer.

    `identity` are plain values that must be equal for two runs to be the same. Raises FingerprintError listing what
    differs, or when the store has files of something else.
    """
    if not store.external:
        return
    while True:
        before = store.read_owner()
        _check_identity(store, None if before is None else before.belongs, identity, is_new=before is None)
        # The last launch wins. An earlier one that still runs finds the other name, and stops before its next
        # checkpoint becomes visible. Of two launches that start at the same time, one has to look again.
        if store.write_owner(before, identity, attempt):
            return


def _check_identity(
    store: CheckpointStore, before: Mapping[str, Any] | None, identity: Mapping[str, Any], *, is_new: bool
) -> None:
    """Raise FingerprintError unless a store is of the run `identity`, or without checkpoints."""
    used = store.is_used()
    # Without run.json the files may be of another run, or of the user. To continue them would train on from foreign
    # weights, and pruning would delete them.
    if is_new and used:
        raise FingerprintError(
            f"{store}: is not empty, but has no {RUN} that identifies its run. Give another train.checkpoint_folder."
        )
    if is_new:
        return
    if not isinstance(before, dict):
        raise FingerprintError(f"{store}/{RUN}: is damaged. Give another train.checkpoint_folder, or delete this one.")
    differing = [
        f"  {name}: {before.get(name)!r} -> {identity.get(name)!r}"
        for name in dict.fromkeys([*before, *identity])
        if before.get(name) != identity.get(name)
    ]
    differing = refused_changes(differing, before, identity)
    # A store without checkpoints may change its run: a first launch that failed early must not block the corrected job.
    if used and differing:
        raise FingerprintError(
            f"{store}: holds the checkpoints of another run. It differs in\n"
            + "\n".join(differing)
            + "\nGive another train.checkpoint_folder, or delete this one to start again."
        )
