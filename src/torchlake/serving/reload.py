"""A new model without a restart: the new folder is loaded beside the old one, checked, and takes the next requests.

Requests that have begun keep the old model, whose memory is freed after the last of them; until then both are loaded.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.errors import DataError, TorchlakeError
from torchlake.models import folders
from torchlake.models.safety import check_folder
from torchlake.scoring.in_process import Model

if TYPE_CHECKING:
    from torchlake.serving.asgi import Service

log = logging.getLogger(__name__)

LOOK_S = 1.0
"Seconds between two looks at the folder."


async def watch_model(service: "Service") -> None:
    """Take a new model whenever the folder that was given has one that stays the same for a second."""
    loop = asyncio.get_running_loop()
    taken = before = await loop.run_in_executor(None, identity, service.source)
    while True:
        await asyncio.sleep(LOOK_S)
        found = await loop.run_in_executor(None, identity, service.source)
        if found is not None and found == before and found != taken:
            taken = found
            await renew(service)
        before = found


async def renew(service: "Service") -> bool:
    """Load the model that is in the folder now, and answer with it; return whether that was done.

    If it cannot be used, the old one stays, and one line of the log says why.
    """
    loop = asyncio.get_running_loop()
    try:
        made = await loop.run_in_executor(None, checked_model, service)
        before = service.sha
        await loop.run_in_executor(None, service.take, made)
    except (TorchlakeError, OSError, ValueError, MemoryError, RuntimeError) as error:
        service.metrics.reload_failures.inc()
        log.error("the model stays %s: %s", service.sha[:12], " ".join(str(error).split()))
        return False
    log.info("the model is now %s, before it was %s", made.sha[:12], before[:12])
    return True


def checked_model(service: "Service") -> Model:
    """Return the model that is in the folder now. Raises DataError if requests could tell it from the old one."""
    check_folder(folders.model_folder(service.source))
    made, old = service.load(), service.model
    new, spec = made.spec, old.spec
    for name in ("task", "problem", "labels", "input_columns", "dimensions"):
        if getattr(new, name) != getattr(spec, name):
            raise DataError(f"{service.source}: its {name} differs from that of the model that is loaded")
    return made


def identity(source: str) -> tuple[Any, ...] | None:
    """Return what tells a model folder from another one at the same path; None while there is none."""
    try:
        folder = Path(folders.model_folder(source)).resolve()
        parts = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    except (TorchlakeError, OSError):
        return None
    return str(folder), *sorted((name, it.st_ino, it.st_size, it.st_mtime_ns) for name, it in parts)
