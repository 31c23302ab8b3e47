"""Models behind HTTP: OpenAI-compatible chat completions, completions and embeddings.

It has no model folder, and no forward pass: rows go out as texts or messages, and come back as answers, so `predict`
runs it by `scoring/endpoint/`. `Asking` keeps as many requests open as its limits allow, in a thread with an event
loop, across the chunks of a job: the endpoint always has work while there is some.
"""

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import MissingExtra, UsageError, pip_install
from torchlake.runtimes import Forward
from torchlake.runtimes._http.answers import Answer
from torchlake.runtimes._http.limits import LimitOptions, Limits
from torchlake.runtimes._http.requests import Begun, Endpoint, Note

if TYPE_CHECKING:
    from torchlake.runtimes._http.client import Client

NO_FOLDER = "it asks an endpoint, and reads no model folder; give endpoint and model_name (--endpoint, --model-name)"
TOLERANCE = 1.0
# Those of a model folder; `scoring/endpoint/` has the tasks of endpoints.
tasks: tuple[str, ...] | None = ()
never: dict[str, str] = dict.fromkeys(plugins.names("tasks"), NO_FOLDER)
TOKEN_TYPES = False
CLOSE_S, ROOM_S = 10.0, 0.5


def refusal(folder: Path) -> str | None:
    """Return why it cannot run a model folder."""
    return NO_FOLDER


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Raise UsageError."""
    raise UsageError(f"The runtime 'http' cannot run {folder}: {NO_FOLDER}.")


def check_library() -> None:
    """Raise MissingExtra if the HTTP client is not installed."""
    if find_spec("httpx") is None:
        raise MissingExtra(
            f"The runtime 'http' needs the library 'httpx', which is not installed: {pip_install('torchlake[http]')}"
        )


class Asker(Protocol):
    """Who asks: the rows of a chunk. The methods are called in the thread of `Asking`."""

    def begin(self, row: int, *, lost: bool = True) -> bool:
        """Return whether a request of a row may be sent; one before it is `lost`, or else was never worked on."""

    def may_get_room(self) -> bool:
        """Return whether a request that may not be sent may be later, by the ends of other processes' requests."""

    def keep(self, row: int, answer: Answer) -> None:
        """Take the answer of a row; the slot of its request is free afterwards."""

    def skip(self, row: int) -> None:
        """Note that a row is not asked, because a limit is reached."""

    def fail(self, error: BaseException) -> None:
        """Note that nothing more is asked."""


@dataclass(frozen=True)
class Question:
    """A request of a row, not yet sent."""

    asker: Asker
    row: int
    name: str
    "Its name in the log of the endpoint."
    body: bytes
    tokens: float
    "An estimate of those of the prompt."


class Asking:
    """The open requests of one process, which end with it. Raises UsageError for a key that is not there."""

    def __init__(self, endpoint: Endpoint, limits: LimitOptions) -> None:
        endpoint.key()
        self._requests = _Requests(endpoint, limits)
        self._requests.thread.start()
        self._stop = weakref.finalize(self, self._requests.stop)
        self._stop.atexit = False

    def add(self, questions: Sequence[Question]) -> None:
        """Ask these after those that were added before. Any thread may call it."""
        self._requests.loop.call_soon_threadsafe(self._requests.add, list(questions))

    def add_batch(self, questions: Sequence[Question], known: Callable[[], Begun | None], note: Note) -> None:
        """Ask these by a batch, all at once: the `known` one, else one that `note` gets, for the next attempt."""
        self._requests.loop.call_soon_threadsafe(self._requests.add_batch, list(questions), known, note)

    def close(self) -> None:
        """End the thread; open requests are dropped."""
        self._stop()  # which lets go of the error of a request, and of what its traceback refers to
        self._requests.thread.join(CLOSE_S)


class _Requests:
    """The thread of `Asking`, its event loop and its connections. It does not refer to `Asking`, so that may end."""

    def __init__(self, endpoint: Endpoint, limits: LimitOptions) -> None:
        self._endpoint = endpoint
        self._limits = Limits(limits, endpoint.most_tokens)
        self._waiting: asyncio.Queue[Question] = asyncio.Queue()
        self._askers: weakref.WeakSet[Asker] = weakref.WeakSet()
        self._error: BaseException | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="asking", daemon=True)

    def stop(self) -> None:
        """Let the thread end. Any thread may call it, also this one."""
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def add(self, questions: list[Question]) -> None:
        for one in questions:
            self._askers.add(one.asker)
            self._waiting.put_nowait(one)
        if self._error is not None:
            self._fail(self._error)

    def add_batch(self, questions: list[Question], known: Callable[[], Begun | None], note: Note) -> None:
        task = self.loop.create_task(self._ask_batch(questions, known, note))
        self._batches.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(self._batches.discard)
        self._askers.add(questions[0].asker)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        asking = self.loop.create_task(self._ask_all())
        asking.add_done_callback(self._ended)
        self.loop.run_forever()
        tasks = [asking, *self._batches]
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()
        self._limits.close()

    def _ended(self, asking: "asyncio.Task[None]") -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits for an answer why it does not come."""
        self._error = error
        for asker in self._askers:
            asker.fail(error)

    async def _ask_all(self) -> None:
        from torchlake.runtimes._http.client import Client

        client = Client(self._endpoint, self._limits)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._ask_next(client, group)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            await client.close()

    async def _ask_next(self, client: "Client", group: asyncio.TaskGroup) -> None:
        one = await self._waiting.get()
        await self._limits.enter()
        if await self._begin(one):
            group.create_task(self._ask(client, one))
        else:
            self._limits.leave()
            one.asker.skip(one.row)

    async def _begin(self, one: Question) -> bool:
        """Return whether a request may be sent: open ones may take less than their most, so only the last gives up."""
        while not one.asker.begin(one.row):
            if self._limits.open > 1:
                await self._limits.changed()
            elif one.asker.may_get_room():
                await asyncio.sleep(random.uniform(0.0, ROOM_S))
            else:
                return False
        return True

    async def _ask_batch(self, questions: list[Question], find: Callable[[], Begun | None], note: Note) -> None:
        from torchlake.runtimes._http.batches import run_batch
        from torchlake.runtimes._http.client import Client

        known = find()
        asked: list[Question] = []
        for one in questions:
            if known is not None or one.asker.begin(one.row, lost=False):
                asked.append(one)
            else:
                one.asker.skip(one.row)
        if not asked:
            return
        client = Client(self._endpoint, self._limits)
        try:
            again = frozenset() if known is None else known.settled
            answers = await run_batch(client, {one.row: one.body for one in asked if one.row not in again}, known, note)
        finally:
            await client.close()
        left = [one for one in asked if one.row not in answers]
        for one in reversed(asked):  # the first row carries the batch, until it has an answer
            if one.row in answers:
                one.asker.keep(one.row, answers[one.row])
            elif known is None:  # the endpoint did not come to it in its time
                one.asker.keep(one.row, Answer(error="batch: the endpoint did not answer in time", final=False))
        if left and known is not None:  # the batch was begun for other rows
            await self._ask_batch(left, lambda: None, note)

    async def _ask(self, client: "Client", one: Question) -> None:
        try:
            answer = await client.ask(one.body, one.name, one.tokens, partial(one.asker.begin, one.row))
            if answer is None:
                one.asker.skip(one.row)
            else:
                one.asker.keep(one.row, answer)
        finally:
            self._limits.leave()
