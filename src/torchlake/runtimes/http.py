"""Models behind HTTP: OpenAI-compatible chat completions, completions and embeddings.

It has no model folder, and no forward pass: rows go out as texts or messages, and come back as answers, so `predict`
runs it by `scoring/endpoint/`. `Asking` keeps as many requests open as its limits allow, in a thread with an event
loop, across the chunks of a job: the endpoint always has work while there is some.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import MissingExtra, UsageError, pip_install
from torchlake.runtimes import Forward
from torchlake.runtimes._http.answers import Answer
from torchlake.runtimes._http.limits import LimitOptions, Limits
from torchlake.runtimes._http.requests import Endpoint

if TYPE_CHECKING:
    from torchlake.runtimes._http.client import Client

NO_FOLDER = "it asks an endpoint, and reads no model folder; give endpoint and model_name (--endpoint, --model-name)"
TOLERANCE = 1.0
# Those of a model folder; `scoring/endpoint/` has the tasks of endpoints.
tasks: tuple[str, ...] | None = ()
never: dict[str, str] = dict.fromkeys(plugins.names("tasks"), NO_FOLDER)
TOKEN_TYPES = False
CLOSE_S = 10.0


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
    """The open requests of one process. `may_start(open, tokens)` says before a request whether it may be sent: the
    number of those that are open with it, and the estimated tokens of all their prompts.

    Raises UsageError for a key that is not there.
    """

    def __init__(self, endpoint: Endpoint, limits: LimitOptions, may_start: Callable[[int, float], bool]) -> None:
        endpoint.key()
        self._endpoint, self._may_start = endpoint, may_start
        self._limits = Limits(limits, endpoint.most_tokens)
        self._waiting: asyncio.Queue[Question] = asyncio.Queue()
        self._askers: weakref.WeakSet[Asker] = weakref.WeakSet()
        self._error: BaseException | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._in_batches = 0
        "The requests of open batches."
        self._open_tokens = 0.0
        "The estimate of the tokens of prompts that are being asked."
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="asking", daemon=True)
        self._thread.start()

    def add(self, questions: Sequence[Question]) -> None:
        """Ask these after those that were added before. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._add, list(questions))

    def add_batch(self, questions: Sequence[Question], known: str | None, begin: Callable[[str], None]) -> None:
        """Ask these by a batch, all at once: a `known` one, else one whose id `begin` gets."""
        self._loop.call_soon_threadsafe(self._add_batch, list(questions), known, begin)

    def close(self) -> None:
        """End the thread; open requests are dropped."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _add(self, questions: list[Question]) -> None:
        for one in questions:
            self._askers.add(one.asker)
            self._waiting.put_nowait(one)
        if self._error is not None:
            self._fail(self._error)

    def _add_batch(self, questions: list[Question], known: str | None, begin: Callable[[str], None]) -> None:
        task = self._loop.create_task(self._ask_batch(questions, known, begin))
        self._batches.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(self._batches.discard)
        self._askers.add(questions[0].asker)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        asking = self._loop.create_task(self._ask_all())
        asking.add_done_callback(self._ended)
        self._loop.run_forever()
        tasks = [asking, *self._batches]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

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
                    one = await self._waiting.get()
                    await self._limits.enter()
                    # Open requests may cost less than was set aside for them, so only the last one gives up.
                    while not (may := self._may_start(self._limits.open, self._open_tokens + one.tokens)):
                        if self._limits.open <= 1:
                            break
                        await self._limits.changed()
                    if may:
                        self._open_tokens += one.tokens
                        group.create_task(self._ask(client, one))
                    else:
                        self._limits.leave()
                        one.asker.skip(one.row)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            await client.close()

    async def _ask_batch(self, questions: list[Question], known: str | None, begin: Callable[[str], None]) -> None:
        from torchlake.runtimes._http.batches import run_batch
        from torchlake.runtimes._http.client import Client

        mean = sum(one.tokens for one in questions) / len(questions)
        asked = self._in_batches + len(questions)
        if known is None and not self._may_start(asked, mean * asked):
            for one in questions:
                one.asker.skip(one.row)
            return
        client = Client(self._endpoint, self._limits)
        self._in_batches += len(questions)
        try:
            answers = await run_batch(client, {one.row: one.body for one in questions}, known, begin)
        finally:
            self._in_batches -= len(questions)
            await client.close()
        left = [one for one in questions if one.row not in answers]
        for one in reversed(questions):  # the first row carries the batch's id, until it has an answer
            if one.row in answers:
                one.asker.keep(one.row, answers[one.row])
            elif known is None:  # the endpoint did not come to it in its time
                one.asker.keep(one.row, Answer(error="batch: the endpoint did not answer in time", final=False))
        if left and known is not None:  # the batch was begun for other rows
            await self._ask_batch(left, None, begin)

    async def _ask(self, client: "Client", one: Question) -> None:
        try:
            one.asker.keep(one.row, await client.ask(one.body, one.name, one.tokens))
        finally:
            self._open_tokens -= one.tokens
            self._limits.leave()
