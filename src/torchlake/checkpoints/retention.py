"""How many checkpoints a run keeps, unless `train.keep_checkpoints` says so, and which are deleted."""

from torchlake import atomic_io
from torchlake.checkpoints.location import CheckpointStore
from torchlake.checkpoints.store import BEST, step_name
from torchlake.failpoints import failpoint

KEPT_WHILE_TRAINING = 2
"Where the newest is damaged, the one before it is used."
KEPT_AT_THE_END = 1
"A longer run continues from it."


def prune(store: CheckpointStore, keep: int, attempt: str) -> None:
    """Delete all but the newest `keep` checkpoints, and best models that none of them names.

    Raises StorageError, LeaseLost when the launch `attempt` is no longer the writer.
    """
    # Best models go after the checkpoints that name them. After a crash in between, a best model without a name is
    # removed by the next call; the other way round a checkpoint would name a model that is missing.
    try:
        complete = store.list_complete()
        old, kept = complete[:-keep], complete[-keep:]
        bests = [best for name in kept if (best := store.read_state(name)["best"]) is not None]
        named = {f"{BEST}/{step_name(best['step'])}" for best in bests}
        for name in [*old, *(best for best in store.list_complete(BEST) if best not in named)]:
            failpoint("checkpoint.prune")
            store.delete(name, attempt)
    except OSError as error:
        raise atomic_io.storage_error(error, store.path("")) from error
