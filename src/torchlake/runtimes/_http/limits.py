"""How many requests a process has open, and when the next may start.

    open      grows by one with each answer, then with each round of answers, while latency holds; halves after a 429
    rates     requests and tokens per minute: each request has its own moment, evenly spaced, so no minute has more
    pauses    Retry-After stops all requests of the process

One thread uses it: that of the event loop. The tokens of a request are an estimate until its answer has arrived.
"""

import asyncio
import time
from dataclasses import dataclass

MARGIN = 1.01
"Rates are kept a little below the limit: clocks differ, and requests start late."
FIRST, MOST = 8, 1024
"Open requests at the start, and at most."
SLOWER = 2.0
"How many times its best latency an endpoint may take before the number of open requests stops growing."
SMOOTH = 0.1


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits of one process; None: there is none, or it is found while running."""

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class _Rate:
    """Evenly spaced moments: `amount` units take their time before the next may start."""

    def __init__(self, per_minute: float) -> None:
        self._unit_s = 60.0 / per_minute * MARGIN
        # A process that replaces one that died does not know its last request: it waits as if that was just now.
        self.next = time.monotonic() + self._unit_s

    def take(self, at: float, amount: float) -> None:
        self.next = max(self.next, at) + amount * self._unit_s

    def correct(self, amount: float) -> None:
        self.next += amount * self._unit_s


class Limits:
    """The limits of the requests of one process."""

    def __init__(self, options: LimitOptions, most_tokens: int) -> None:
        self._adaptive = options.concurrency is None
        self.most = float(min(FIRST, MOST) if options.concurrency is None else options.concurrency)
        "Requests that may be open."
        self.open = 0
        self._requests = None if options.requests_per_minute is None else _Rate(options.requests_per_minute)
        self._tokens = None if options.tokens_per_minute is None else _Rate(options.tokens_per_minute)
        if self._tokens is not None:
            self._tokens.next = time.monotonic()
        self._room = asyncio.Event()
        self._paused = 0.0
        self._halved = 0.0
        self._starting = True
        self._latency = self._best = 0.0
        self._written = float(most_tokens)
        "Tokens of an answer: the most at first, then what answers have had."

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
            rates = [rate for rate in (self._requests, self._tokens) if rate is not None]
            begin = max(now, self._paused, *(rate.next for rate in rates))
            if self._requests is not None:
                self._requests.take(begin, 1)
            if self._tokens is not None:
                self._tokens.take(begin, tokens)
            if begin > now:
                await asyncio.sleep(begin - now)
            if time.monotonic() >= self._paused:  # not paused while it waited
                return tokens

    def answered(self, seconds: float, expected: float, used: tuple[int, int] | None) -> None:
        """Learn from an answer: its latency, and the tokens of its prompt and text if they are known."""
        if used is not None:
            self._written += SMOOTH * (used[1] - self._written)
            if self._tokens is not None:
                self._tokens.correct(sum(used) - expected)
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
