"""Make the model's inputs of batches, in threads ahead of the model if that takes long for the task."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from torchlake.processes import hardware
from torchlake.scoring.workers.output import NO_ROWS

MAX_COLLATING = 8
"Threads that collate the next batches; each of these is then in memory."


@dataclass(frozen=True)
class Prepared:
    """A batch of rows, and how to get the model's inputs for it."""

    rows: np.ndarray
    "(B,) int64, positions in the rows that can be scored."
    inputs: Callable[[], dict[str, np.ndarray]]
    beside: np.ndarray = field(default_factory=lambda: NO_ROWS)
    "(M,) int64, the rows that threads collate in the meantime."


def prepare(
    rows: np.ndarray,
    batches: Sequence[np.ndarray],
    collate: Callable[[np.ndarray], dict[str, np.ndarray]],
    *,
    ahead: bool,
) -> Iterator[Prepared]:
    """Yield each batch of places in `rows` (M,); if `ahead`, threads collate the next ones while the model computes."""
    if not ahead:
        yield from (Prepared(batch, partial(collate, batch)) for batch in batches)
        return
    threads = min(hardware.threads(), MAX_COLLATING)
    with ThreadPoolExecutor(threads, thread_name_prefix="collate") as pool:
        submitted: deque[Future[dict[str, np.ndarray]]] = deque()

        def inputs(number: int, stop: int) -> dict[str, np.ndarray]:
            # Submitted when the batch before is requested, not all at once: each waiting batch is held in memory.
            submitted.extend(pool.submit(collate, batch) for batch in batches[number + len(submitted) : stop])
            return submitted.popleft().result()

        for number, batch in enumerate(batches):
            stop = min(number + 1 + threads, len(batches))
            # Threads collate these rows while `batch` computes: if the process dies now, any of them may be the
            # cause.
            beside = [rows[each] for each in batches[number + 1 : stop]]
            yield Prepared(batch, partial(inputs, number, stop), np.concatenate([NO_ROWS, *beside]))
