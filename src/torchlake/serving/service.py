"""A model that is served, and the state of its server; a new model without a restart.

The new folder is loaded beside the old one, checked, and takes the next requests. Requests that have begun keep the old
model, whose memory is freed after the last of them; until then both are loaded.
"""

import asyncio
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.model_files.embedding import PROMPTS, read_object
from torchlake.errors import DataError, TorchlakeError
from torchlake.models import folders
from torchlake.models.safety import check_folder
from torchlake.scoring.in_process import Model
from torchlake.serving.batching import Batcher
from torchlake.serving.metrics import ServerMetrics
from torchlake.serving.options import ServeOptions
from torchlake.serving.protocols import tei
from torchlake.tables.arrays import from_strings
from torchlake.tasks import ANY

log = logging.getLogger(__name__)

LOOK_S = 1.0
"Seconds between two looks at the folder."


@dataclass(eq=False)
class Service:
    """A model that is served, and the state of its server."""

    source: str
    "The model folder, run or name, as it was given."
    load: Callable[[], Model]
    options: ServeOptions
    model: Model = field(init=False)
    sha: str = field(init=False)
    metrics: ServerMetrics = field(init=False)
    draining: bool = False
    over: bool = False
    "Whether the time to answer accepted requests is over."
    tasks: set["asyncio.Task[Any]"] = field(default_factory=set)
    "The requests in flight."
    watching: "asyncio.Task[None] | None" = None
    _watched: "weakref.WeakSet[Batcher]" = field(default_factory=weakref.WeakSet)
    "The threads of the model, and of those before it while they compute."
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.taken = identity(self.source)  # before it is read: what changes meanwhile is a new model
        model = self.load()
        self.metrics = ServerMetrics()  # its files tell other processes that this one serves
        self.take(model)

    def take(self, model: Model) -> None:
        """Answer the next requests with `model`, after a first row; those in flight keep theirs.

        Raises DataError if the model cannot score a row.
        """
        kinds = plugins.load("tasks", model.spec.task).inputs
        if ANY not in kinds.values():
            row = {name: from_strings(["1"]) for name in model.spec.input_columns}
            (error,) = model.score(pa.table(row), {}).table["error"].to_pylist()
            if error is not None:
                raise DataError(f"{self.source}: the model cannot score a row: {error}")
        self._watched = weakref.WeakSet([*self._watched, model.reader, model.batcher])
        self.metrics.named(model.sha, getattr(self, "sha", None))
        folder = Path(model.folder)
        self.kind_of_model = tei.kind_of(folder, model.spec)
        prompts = read_object(folder / PROMPTS).get("prompts") or {} if model.spec.task == "feature_extraction" else {}
        self.prompts: dict[str, str] = {name: text or "" for name, text in prompts.items()}
        self.task_sha = hashlib.sha256(repr(model.spec).encode()).hexdigest()
        self.model, self.sha = model, model.sha

    @property
    def name(self) -> str:
        """The name of the model."""
        path = Path(self.source).absolute()
        return self.options.name or (path.parent.name if path.name == "model" and path.parent.name else path.name)

    @property
    def names(self) -> set[str]:
        """The names by which OpenAI's clients may ask for the model."""
        return {self.name, self.source, Path(self.source).name}

    @property
    def hung(self) -> str | None:
        """Why the process has to be started again: a model hangs, or has lost its device."""
        return next((each.broken for each in self._watched if each.broken is not None), None)

    @property
    def unhealthy(self) -> str | None:
        """Why /health is not 200."""
        return self.hung or ("stopping" if self.draining else None)

    def ensure_watching(self) -> None:
        """Begin to watch the model, in the event loop that runs; calls after the first do nothing."""
        if self.hung is None and (self.watching is None or self.watching.done()):
            self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def watch(self) -> None:
        """Give up rows that take too long, count who waits, and look for a new model."""
        looking = asyncio.create_task(watch_folder(self)) if self.options.reload else None
        try:
            while self.hung is None:
                await asyncio.sleep(min(1.0, self.options.row_timeout / 4))
                for each in self._watched:
                    each.abandon(self.options.row_timeout)
                self.note_queue()
        finally:
            if looking is not None:
                looking.cancel()

    def note_queue(self) -> None:
        """Put the number of requests that wait in the metrics."""
        self.metrics.queue.set(sum(each.queued for each in self._watched))


async def watch_folder(service: Service) -> None:
    """Take a new model whenever the folder that was given has one that stays the same for a second."""
    loop = asyncio.get_running_loop()
    before = service.taken
    while True:
        await asyncio.sleep(LOOK_S)
        found = await loop.run_in_executor(None, identity, service.source)
        if found is not None and found == before and found != service.taken:
            service.taken = found
            await renew(service)
        before = found


async def renew(service: Service) -> bool:
    """Load the model that is in the folder now, and answer with it; return whether that was done.

    If it cannot be used, the old one stays, and one line of the log says why.
    """
    loop = asyncio.get_running_loop()
    try:
        async with service.renewing:  # one after the other, or the older model could be taken last
            made = await loop.run_in_executor(None, checked_model, service)
            before = service.sha
            await loop.run_in_executor(None, service.take, made)
    except Exception as error:
        service.metrics.reload_failures.inc()
        log.error("the model stays %s: %s", service.sha[:12], " ".join(str(error).split()))
        return False
    log.info("the model is now %s, before it was %s", made.sha[:12], before[:12])
    return True


def checked_model(service: Service) -> Model:
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
        beside = {path for path in folder.iterdir() if path.is_file()}  # such as the runtime that optimize chose
        parts = [(str(path), path.stat()) for path in beside | folders.files_of(folder)]
    except (TorchlakeError, OSError):
        return None
    return str(folder), *sorted((name, it.st_ino, it.st_size, it.st_ctime_ns) for name, it in parts)
