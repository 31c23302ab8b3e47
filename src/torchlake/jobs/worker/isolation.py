"""Keep a failing row from affecting others: a batch that raises is halved until the failing row is alone.

`poison_rows.py` finds the rows that do not raise, but kill or hang their process. Cost: a batch with one failing row
takes about as long as two.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np

from torchlake.errors import Interrupted, RowErrors, StorageError, ran_out_of_memory
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.jobs.worker.shared_batches import Attempts

NOTHING = np.zeros(0, dtype=np.int64)


def run_isolated(
    rows: np.ndarray,
    run: Callable[[np.ndarray], None],
    errors: dict[int, str],
    attempt: Attempt | Attempts | None = None,
    *,
    beside: np.ndarray = NOTHING,
    passed_on: tuple[type[Exception], ...] = (),
    out_of_memory: Callable[[np.ndarray], None] | None = None,
) -> None:
    """Call `run` with all `rows` (B,) int64 of a batch; if it raises, with halves of them, down to single rows.

    The reason of a single row that raises is put in `errors`, and so are the reasons of rows that a RowErrors names;
    the other rows run again. `beside` (M,) int64 are rows that other threads process meanwhile, which may also kill or
    hang the process. `out_of_memory(rows)` is called when a batch of several rows did not fit. Raises `passed_on`
    exceptions, Interrupted and StorageError as they are.
    """
    not_of_a_row: tuple[type[Exception], ...] = (Interrupted, StorageError, *passed_on)
    pending = [rows]
    while pending:
        batch = pending.pop()
        try:
            with nullcontext() if attempt is None else attempt.running("score", [*batch.tolist(), *beside.tolist()]):
                run(batch)
        except not_of_a_row:
            raise
        except RowErrors as named:
            errors |= {int(batch[position]): _storable(reason) for position, reason in named.reasons.items()}
            if len(named.reasons) < len(batch):
                pending.append(np.delete(batch, list(named.reasons)))
        except Exception as error:
            if device_is_lost(error):
                if attempt is not None:
                    os._exit(1)  # no later call would work; the next process finds the row in the attempt log
                raise
            if len(batch) == 1:
                errors[int(batch[0])] = "out_of_memory" if ran_out_of_memory(error) else describe(error)
                continue
            # Halves cost about one more pass over the batch to find a single failing row; rows one by one would cost a
            # pass of batch size 1 for all of them. The first half is last, because `pop` takes from the end.
            pending += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
            if out_of_memory is not None and ran_out_of_memory(error):
                out_of_memory(batch)


def describe(error: Exception) -> str:
    """Return an exception as the error of a row."""
    return _storable(f"{type(error).__name__}: {error}"[:500])


def _storable(reason: str) -> str:
    """Return a reason that can be written as UTF-8: a file name in a message may have unpaired surrogates."""
    return reason.encode("utf-8", "backslashreplace").decode("utf-8")


def device_is_lost(error: Exception) -> bool:
    """Return whether every later call on the device will fail too, for any row."""
    return type(error).__name__ == "AcceleratorError" and not ran_out_of_memory(error)
