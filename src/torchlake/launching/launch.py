"""launch: the user's own torch code as N ranks, on any engine; the equivalent of torchrun.

    launch(train, 1e-3, processes=2)                          a function; returns rank 0's value
    launch_script("train.py", ["--lr", "0.1"], processes=2)   a script, run as `python train.py --lr 0.1` in every rank
    launch_script("package.module:function", ["0.1"])         a function by name, called with the arguments as strings

RANK, WORLD_SIZE, MASTER_ADDR and the others are set in each rank, so `torch.distributed.init_process_group()` needs no
arguments.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchlake.engines import Engine, ProcessRange, as_engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.launching import by_name, groups, scripts

Value = TypeVar("Value")


def launch(
    target: Callable[..., Value],
    *args: Any,
    engine: Engine | str | None = None,
    processes: ProcessRange | None = None,
    gpus_per_process: int = 0,
) -> Value:
    """Run `target(*args)` as `processes` ranks at the same time and return rank 0's value.

    `engine` is an engine or its name ("spark"); by default local. `processes` may be a range (fewest, most): as many
    ranks start as there is capacity for.

    Raises, as `Engine.launch` documents: RankFailed with the first failing rank's traceback, a rank's own
    TorchlakeError, Interrupted, UsageError.
    """
    if not callable(target):
        raise UsageError(f"launch takes a function, not {target!r}; for a script or a name, use launch_script.")
    running = as_engine(engine) or Local()
    ranks: dict[str, Any] = {"processes": processes, "gpus_per_process": gpus_per_process}
    value: Value = running.launch(groups.call_holding_groups, target, *args, **ranks)
    return value


def launch_script(
    target: str,
    args: Sequence[str] = (),
    *,
    engine: Engine | None = None,
    processes: int | None = None,
    gpus_per_process: int = 0,
    stdout_to_stderr: bool = False,
) -> Any:
    """Run "script.py" or "package.module:function" as N ranks; return rank 0's value, None for scripts.

    `stdout_to_stderr` applies to the default engine only. A script that calls sys.exit(0) succeeds; another status is a
    RankFailed naming the rank. Raises UsageError if there is no such script, module or function, and the errors of
    `launch`.
    """
    module, colon, function = target.partition(":")
    if colon and module and function and not os.path.exists(target):
        by_name.check_module(module)
        job = functools.partial(by_name.call_by_name, module, function, os.getcwd())
    else:
        job = functools.partial(scripts.run_script, scripts.check_script(target), Path(target).read_bytes())
    engine = engine or Local(stdout_to_stderr=stdout_to_stderr)
    return launch(job, *map(str, args), engine=engine, processes=processes, gpus_per_process=gpus_per_process)
