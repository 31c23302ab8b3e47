"""Hold the process groups that launched code destroys until the code has ended.

A group's last holder waits for the group's threads. A DDP module does so while it holds the GIL, which one of these
threads may need to free a tensor (pytorch/pytorch#56297): with torch 2.13, about every second loop on CPUs that reduced
a number, destroyed its group and returned did not end. The group's own Python object lets go of the GIL.
"""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def call_holding_groups(target: Callable[..., Value], *args: Any) -> Value:
    """Return `target(*args)`, during which torch's `ProcessGroup.shutdown` is another one.

    Cost: the import of torch, which launched code nearly always needs, and the threads and sockets of destroyed groups.
    """
    from torch import distributed

    if not distributed.is_available():
        return target(*args)
    held: list[distributed.ProcessGroup] = []
    shutdown = distributed.ProcessGroup.shutdown

    def hold(group: distributed.ProcessGroup) -> None:
        held.append(group)
        shutdown(group)

    distributed.ProcessGroup.shutdown = hold  # type: ignore[assignment,method-assign]
    try:
        return target(*args)
    finally:
        distributed.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]
        gc.collect()  # modules in cycles, such as those of a script, go before their groups
