"""A Writer whose rows are written by the process of an engine.

    added rows -> a window of rows that the engine has -> answers in any order -> rows that have ended

Rows beyond the window wait here, so the engine always has more than it computes at once, and a death concerns a bounded
number of them. Rows of the next chunks enter as others end (`jobs/worker/texts.py`), so the engine does not drain at
the end of a chunk.

A death is a fault of the rows that the engine had: they are tried again in halves, in a new process, until one that has
died before is alone and dies again: `killed_process: twice`, or `timeout: ...` for a process that was silent for
`silent_s` seconds and was ended. The window is halved at each death, in case memory was the reason, and grows again.
Cost: a start of the engine per death, so about log2(window) starts for a row that kills.

A process that breaks the protocol is ended, and no row is to blame. After `MAX_BROKEN` such processes, `MAX_STARTS` in
a row that end before they are ready, or `MAX_DEATHS` in a row without an answer, the job ends.
"""

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchlake.errors import EngineFailed, UsageError
from torchlake.models.generation import END, GenerationOptions
from torchlake.runtimes import EMPTY, Ended, Report, Text
from torchlake.runtimes._foreign import protocol
from torchlake.runtimes._foreign.process import EngineDied, EngineProcess, Launch

log = logging.getLogger(__name__)

STEP_S = 1.0
MAX_STARTS, MAX_BROKEN, MAX_DEATHS = 3, 3, 20
SILENT = "gave no answer"
FIRST_ROWS = 64
"Rows that are taken before the engine is ready and tells how many it wants."
SHORTEST = 1024
"Tokens that an engine is started for at least, so that longer rows seldom need another start."


@dataclass(eq=False)
class OpenRow:
    """A row that has not ended."""

    number: int
    prompt: np.ndarray
    "(L,) int32"
    options: GenerationOptions
    deaths: int = 0
    "Of processes that had the row."

    @property
    def size(self) -> int:
        """The tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.options.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What the answers of a model have to be."""

    ends: Collection[int]
    "The tokens that end texts."
    vocabulary: int
    positions: int | None
    "The most tokens of prompt and text; None: no limit."
    translate: Callable[[np.ndarray, GenerationOptions], dict[str, Any]]
    "Returns the `options` of a row's frame."
    silent_s: float
    "Seconds without an answer after which a process is ended."


class ForeignWriter:
    """See the module."""

    refills = elsewhere = True

    def __init__(self, launch: Launch, model: EngineModel) -> None:
        self._launch, self._model = launch, model
        self._rows: dict[int, OpenRow] = {}
        self._waiting: deque[OpenRow] = deque()
        self._groups: list[deque[OpenRow]] = []
        "Rows that were open when a process died, tried group by group from the end; before them no other rows."
        self._open: dict[int, OpenRow] = {}
        "By the number in their frames."
        self._process: EngineProcess | None = None
        self._window = self._most = self._length = self._next = self._done = 0
        self._broken = self._deaths = 0
        self._heard = 0.0
        self._asked = self._replied = False

    @property
    def rows(self) -> Sequence[int]:
        """The numbers of the rows that have not ended."""
        return list(self._rows)

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row. It is written from its beginning: `begun` is empty, because parts of texts are not known."""
        one = OpenRow(row, ids.astype("<i4"), options)
        self._rows[row] = one
        self._waiting.append(one)

    @property
    def most(self) -> int:
        """The most rows that may be added: half as many as the window wait for room in it."""
        return (self._most or FIRST_ROWS) * 3 // 2

    def text(self, row: int) -> Text:
        """Return the empty text: the engine tells texts that are complete."""
        return EMPTY

    def step(self, report: Report) -> None:
        """Give the engine more rows, and report those that have ended, after a second at most."""
        try:
            report(self._step())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, and forget all rows."""
        self._end()
        for some in (self._rows, self._open, self._waiting, self._groups):
            some.clear()

    def _step(self) -> list[Ended]:
        ended: list[Ended] = []
        try:
            process = self._feed()
            for header, ids, logprobs in process.exchange(STEP_S):
                ended += self._answer(header, ids, logprobs)
            self._check_silence(process)
        except EngineDied as death:
            ended += self._died(str(death))
        except protocol.BrokenFrame as error:
            self._discard(str(error))
        return ended

    def _check_silence(self, process: EngineProcess) -> None:
        """Ask a process that has been silent for half of the time; raise EngineDied after all of it."""
        limit_s, silent_s = self._model.silent_s, time.monotonic() - self._heard
        if not self._open or silent_s < limit_s / 2:
            self._asked, self._replied = False, False
        elif silent_s > limit_s:
            does = "computes, and no row has ended" if self._replied else "hangs"
            raise EngineDied(f"{SILENT} for {limit_s:g} s: it {does}")
        elif not self._asked:
            self._asked = True
            process.send(protocol.pack({"type": "ping"}))

    def _feed(self) -> EngineProcess:
        """Fill the window, and return the process, which is started if need be."""
        process = self._process
        while len(self._open) < self._window or process is None:
            queue = self._groups[-1] if self._groups else self._waiting
            if not queue:
                if not self._groups or self._open:  # the next group comes when this one has ended
                    break
                self._groups.pop()
                continue
            if process is None or queue[0].size > self._length:
                if self._open:
                    break  # a longer limit needs another process
                process = self._start(max(one.size for one in queue))
            one = queue.popleft()
            if not self._open:
                self._heard = time.monotonic()
            self._open[self._next] = one
            header = {"type": "add", "row": self._next, "options": self._model.translate(one.prompt, one.options)}
            process.send(protocol.pack(header, array("i", one.prompt.tobytes())))
            self._next += 1
        assert process is not None, "there are rows"
        return process

    def _start(self, size: int) -> EngineProcess:
        """Start a process for rows of `size` tokens. Raises EngineFailed, and UsageError if it refuses the model."""
        self._end()
        self._length = max(SHORTEST, 1 << (size - 1).bit_length())
        if self._model.positions is not None:
            self._length = min(self._length, self._model.positions)
        why = printed = where = ""
        for _ in range(MAX_STARTS):
            process = self._process = self._launch(self._length)
            try:
                ready = process.ready()
                self._most = max(1, int(ready["limits"]["open"]))
            except UsageError:
                self._end()
                raise
            except (EngineDied, protocol.BrokenFrame, KeyError, TypeError, ValueError) as error:
                self._end()
                why, printed, where = str(error), process.printed, process.where
                log.warning("%s: the engine was not ready: it %s", where, why)
                continue
            self._window = min(self._window, self._most) or self._most
            self._done = 0
            return process
        raise EngineFailed(
            f"{where}: the engine ended {MAX_STARTS} times before it was ready; the last time it {why}. It printed "
            f"last:\n{printed}"
        )

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _answer(self, header: dict[str, Any], ids: bytes, logprobs: bytes) -> list[Ended]:
        """Return the row that a frame ends, if any. Raises BrokenFrame."""
        kind, number, reason = header["type"], header.get("row"), header.get("reason")
        if kind == "pong":
            self._replied = True
            return []
        if kind not in ("done", "failed"):
            raise protocol.BrokenFrame(f"a frame {kind!r}")
        if not isinstance(number, int) or number not in self._open:
            raise protocol.BrokenFrame(f"an answer to row {number!r}, which it does not have")
        one = self._open[number]
        if kind == "done":
            ended = Ended(row=one.number, text=self._text(one, reason, ids, logprobs), reason=_reason(reason))
        else:
            ended = Ended(row=one.number, text=EMPTY, reason="failed", error=f"engine_refused: {reason}")
        del self._open[number], self._rows[one.number]
        self._heard, self._deaths = time.monotonic(), 0
        self._done += 1
        if self._done >= self._window and not self._groups:
            self._window, self._done = min(self._most, 2 * self._window), 0
        return [ended]

    def _text(self, one: OpenRow, reason: Any, ids: bytes, logprobs: bytes) -> Text:
        tokens = np.frombuffer(ids, "<i4")
        if len(tokens) > one.options.max_new_tokens:
            raise protocol.BrokenFrame(
                f"an answer of {len(tokens)} tokens, and {one.options.max_new_tokens} are allowed"
            )
        if len(tokens) and tokens.view("<u4").max() >= self._model.vocabulary:  # one below 0 is a large one
            wrong = tokens[(tokens < 0) | (tokens >= self._model.vocabulary)][0]
            raise protocol.BrokenFrame(f"an answer with token {wrong}, and the model has {self._model.vocabulary}")
        if reason not in ("end", "stop", "length"):
            raise protocol.BrokenFrame(f"an answer that ended for the reason {reason!r}")
        if reason == "end":
            more = getattr(one.options, "stop_token_ids", ())
            if not len(tokens) or not (tokens[-1] in self._model.ends or tokens[-1] in more):
                raise protocol.BrokenFrame("an answer that ended at a token that is not an end")
            tokens = np.append(tokens[:-1], np.int32(END))
        if not getattr(one.options, "logprobs", None):
            return Text(tokens=tokens)
        values = np.frombuffer(logprobs, "<f4")
        if len(values) != len(tokens):
            raise protocol.BrokenFrame(f"an answer of {len(tokens)} tokens with {len(values)} log-probabilities")
        return Text(tokens=tokens, logprobs=values)

    def _died(self, why: str) -> list[Ended]:
        """Start over without the process; return the row that is known to have killed it, if there is one."""
        process, rows = self._process, list(self._open.values())
        assert process is not None, "it was running"
        self._end()
        self._open.clear()
        log.warning("%s: the engine %s, and had %d rows", process.where, why, len(rows))
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise EngineFailed(
                f"{process.where}: the engine died {MAX_DEATHS} times without an answer; the last time it {why}. It "
                f"printed last:\n{process.printed}"
            )
        for one in rows:
            one.deaths += 1
        self._window = max(1, self._window // 2)
        if len(rows) == 1 and rows[0].deaths > 1:
            error = "timeout: gave no answer, twice" if why.startswith(SILENT) else "killed_process: twice"
            del self._rows[rows[0].number]
            return [Ended(row=rows[0].number, text=EMPTY, reason="failed", error=error)]
        half = (len(rows) + 1) // 2
        self._groups += [deque(some) for some in (rows[half:], rows[:half]) if some]
        return []

    def _discard(self, what: str) -> None:
        """Start over without a process that has broken the protocol. Raises EngineFailed the third time."""
        process = self._process
        assert process is not None, "it was running"
        self._end()
        self._broken += 1
        if self._broken >= MAX_BROKEN:
            raise EngineFailed(
                f"{process.where}: {MAX_BROKEN} processes of the engine broke the protocol; the last one sent {what}. "
                f"It printed last:\n{process.printed}"
            )
        log.warning("%s: the engine broke the protocol and is started again: it sent %s", process.where, what)
        (self._groups[-1] if self._groups else self._waiting).extendleft(reversed(self._open.values()))
        self._open.clear()


def _reason(reason: Any) -> str:
    return "length" if reason == "length" else "stop"
