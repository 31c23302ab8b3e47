"""Work of a benchmark in a fresh process on one thread: its memory and its clock are its own."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def alone(work: Callable[..., dict[str, Any]], *given: Any, out: Path, limit_s: float) -> dict[str, Any]:
    """Return what `work(*given)` returns, by way of the file `out`, or the reason why there is nothing.

    It is ended after `limit_s` seconds.
    """
    out.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=_tell, args=(work, given, out))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        return {"reason": f"no end after {limit_s:g} s"}
    return dict(json.loads(out.read_text())) if out.exists() else {"reason": f"ended with {process.exitcode}"}


def _tell(work: Callable[..., dict[str, Any]], given: tuple[Any, ...], out: Path) -> None:
    import torch

    torch.set_num_threads(1)
    out.write_text(json.dumps(work(*given)))
