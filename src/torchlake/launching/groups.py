"""What launched code destroys with `destroy_process_group` is held until the code has ended.

A group's last holder waits for the group's threads. A DDP module does so while it holds the GIL, which one of these
threads may need to free a tensor (pytorch/pytorch#56297): with torch 2.13, every second run of a loop on CPUs that
reduced a number, destroyed its group and returned did not end. A Python object, such as the list here, lets go of
the GIL.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def call_holding_groups(target: Callable[..., Value], *args: Any) -> Value:
    """Return `target(*args)`. Cost: the import of torch, which launched code nearly always needs."""
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
