"""How many requests a process has open, and when the next may start.

    open      grows by one with each answer, then with each round of answers, while latency holds; halves after a 429
    rates     requests and tokens per minute: each request has its own moment, evenly spaced, so no minute has more
    pauses    Retry-After stops all requests of the process

One thread uses it: that of the event loop. The tokens of a request are an estimate until its answer has arrived.
"""

import asyncio
import fcntl
import math
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

MARGIN = 1.01
"Rates are kept a little below the limit: clocks differ, and requests start late."
FIRST, MOST = 8, 1024
"Open requests at the start, and at most."
SLOWER = 2.0
"How many times its best latency an endpoint may take before the number of open requests stops growing."
SMOOTH = 0.1
REQUESTS_OF_A_PROCESS = 60
"A process for fewer requests a minute would not use its share of the limit: shares are whole requests."
PAIR = struct.Struct("<dd")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits of a job, or of one of its processes; None: there is none, or it is found while running."""

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    shared: str | None = None
    "A file by which the processes of this machine share the two rates; None: each has its own."

    def processes(self, wanted: int, chunks: int) -> int:
        """Return how many processes share the limits of a job."""
        most = [wanted, chunks, *([] if self.concurrency is None else [self.concurrency])]
        if self.requests_per_minute is not None:
            most.append(int(self.requests_per_minute / REQUESTS_OF_A_PROCESS))
        return max(1, min(most))

    def of_process(self, processes: int, shared: str | None) -> "LimitOptions":
        """Return the limits of each process: they share the rates by a file, else each has an equal part."""
        requests, tokens = self.requests_per_minute, self.tokens_per_minute
        if shared is None and processes > 1:
            requests = requests and math.floor(requests / processes)
            tokens = tokens and tokens / processes
        each = self.concurrency and max(1, self.concurrency // processes)
        return LimitOptions(concurrency=each, requests_per_minute=requests, tokens_per_minute=tokens, shared=shared)


class _Rates:
    """Evenly spaced moments: a request, and its tokens, take their time before the next may start.

    With a file, all processes of this machine that name it have one order of moments, so those that still have rows use
    the limit of the others. A new process waits as if the last request was just now.
    """

    def __init__(self, options: LimitOptions) -> None:
        limits = (options.requests_per_minute, options.tokens_per_minute)
        self._units_s = [0.0 if one is None else 60.0 / one * MARGIN for one in limits]
        now = time.monotonic()
        self._next = [now + self._units_s[0], now]
        self._file = None
        if options.shared is not None and any(self._units_s):
            self._file = os.open(options.shared, os.O_RDWR | os.O_CREAT, 0o666)

    def reserve(self, not_before: float, tokens: float) -> float:
        """Return the moment of a request, at or after `not_before`."""
        with self._moments() as moments:
            begin = max(not_before, *moments)
            moments[:] = [begin + unit * one for unit, one in zip(self._units_s, (1.0, tokens), strict=True)]
        return begin

    def correct(self, tokens: float) -> None:
        """Add tokens to those of an earlier request."""
        with self._moments() as moments:
            moments[1] += tokens * self._units_s[1]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _moments(self) -> AbstractContextManager[list[float]]:
        """Return the moments from which on the next request, and the next token, may start; they may be changed."""
        return nullcontext(self._next) if self._file is None else changing(self._file, self._next)


@contextmanager
def changing(file: int, first: Sequence[float]) -> Iterator[list[float]]:
    """Yield the two numbers of a file, `first` if it has none, to be changed while other processes wait."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        kept = os.pread(file, PAIR.size, 0)
        numbers = list(PAIR.unpack(kept) if len(kept) == PAIR.size else first)
        yield numbers
        os.pwrite(file, PAIR.pack(*numbers), 0)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class Limits:
    """The limits of the requests of one process."""

    def __init__(self, options: LimitOptions, most_tokens: int) -> None:
        self._adaptive = options.concurrency is None
        self.most = float(min(FIRST, MOST) if options.concurrency is None else options.concurrency)
        "Requests that may be open."
        self.open = 0
        self._rates = _Rates(options)
        self._room = asyncio.Event()
        self._paused = 0.0
        self._halved = 0.0
        self._starting = True
        self._latency = self._best = 0.0
        self._written = float(most_tokens)
        "Tokens of an answer: the most at first, then what answers have had."

    def close(self) -> None:
        """Close the file of the shared rates; nothing may start afterwards."""
        self._rates.close()

    async def enter(self) -> None:
        """Wait until one more request may be open."""
        while self.open >= int(self.most):
            await self.changed()
        self.open += 1

    async def changed(self) -> None:
        """Wait until a request has ended, or more may be open."""
        self._room.clear()
        await self._room.wait()

    def leave(self) -> None:
        """Count a request as ended."""
        self.open -= 1
        self._room.set()

    async def start(self, prompt_tokens: float) -> float:
        """Wait for the moment of an attempt; return the tokens that it is expected to take."""
        while True:
            now, tokens = time.monotonic(), prompt_tokens + self._written
            begin = self._rates.reserve(max(now, self._paused), tokens)
            if begin > now:
                await asyncio.sleep(begin - now)
            if time.monotonic() >= self._paused:  # not paused while it waited
                return tokens

    def answered(self, seconds: float, expected: float, used: tuple[int, int] | None) -> None:
        """Learn from an answer: its latency, and the tokens of its prompt and text if they are known."""
        if used is not None:
            self._written += SMOOTH * (used[1] - self._written)
            self._rates.correct(sum(used) - expected)
        self._latency += (SMOOTH if self._latency else 1.0) * (seconds - self._latency)
        self._best = min(self._best * (1 + SMOOTH / 10) or self._latency, self._latency)
        if not self._adaptive or self.open < int(self.most):
            return  # there was room for more already
        if self._latency > SLOWER * self._best:
            self._starting = False
            return
        self.most = min(MOST, self.most + (1.0 if self._starting else 1.0 / self.most))
        self._room.set()

    def refused(self, seconds: float, retry_after: float) -> None:
        """Halve the open requests after a 429, once in the time of a request, and pause for `retry_after` seconds."""
        now = time.monotonic()
        self._paused = max(self._paused, now + retry_after)
        if self._adaptive and now - seconds >= self._halved:  # it was sent after the last time
            self._halved, self._starting = now, False
            self.most = max(1.0, self.most / 2)


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a response asks to wait; 0 if it does not say it."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        given = headers.get(name, "")
        try:
            seconds = float(given) * unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(given).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                continue
        if 0 < seconds < float("inf"):
            return seconds
    return 0.0
