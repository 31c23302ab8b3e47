"""Render chat templates in a separate process with limits on time and memory.

Jinja's sandbox limits what a template can access, not its CPU time or memory, and a thread cannot interrupt a single
long string multiplication. So the operating system enforces the limits (`_rendering_process.py`): after CPU_S seconds
SIGPROF ends the process, and the next conversation starts another. The renderer exits when its worker does.
One request asks for all renderings of a conversation, and several requests are on their way at once, as many bytes as a
pipe holds. Cost: 0.8 s and 60 MB for each process that renders, and 20 microseconds for each conversation.
"""

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Literal

from torchlake.errors import DataError
from torchlake.tasks._assistant_turns import Rendered

log = logging.getLogger(__name__)

CPU_S = 2.0
"CPU seconds for one conversation; most take a thousandth of this."
TURNS = 64
"Answers of a conversation that may take CPU_S; with more answers the limit grows in proportion."
WALL_S = 60.0
"Wall-clock seconds for one conversation, on a busy or suspended machine."
MEMORY_BYTES = 1 << 30
"Memory limit above what the renderer uses after startup."
MOST_CHARACTERS = 1 << 24
MAX_CONSECUTIVE_LIMITS = 5
"After this many consecutive conversations over a limit, the others are not tried."
AT_ONCE_BYTES = 1 << 15
"Requests on their way: fewer bytes than a pipe holds, so that neither process waits for the other to read."
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from torchlake.tasks import _rendering_process as it; "
    "it.serve()"
)
NOW = "strftime_now"
"The function that tells templates the time."


class RenderLimitExceeded(ValueError):
    """Rendering a conversation exceeded a limit."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A conversation, and what to render of it."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    "Further variables of the template."
    want: Literal["prompt", "continue", "whole", "answers", "last"] = "answers"
    """`prompt`: the text before the next answer. `continue`: up to the end of the last message, which is not ended.
    `whole`: all messages. `answers`: the same with the places of the assistant's turns, or one text for each; see
    `answers_in`. `last`: the text up to the last answer, and its place."""
    first: int = 0
    "Turns before this message are not answers."


@dataclass(kw_only=True)
class Renderer:
    """A process that renders by one template at a time, with its special tokens; only process `owner` may use it."""

    template_key: str
    owner: int
    process: subprocess.Popen[bytes]

    def ask(self, requests: Sequence[bytes]) -> tuple[list[dict[str, Any]], bool]:
        """Send requests, each a line; return the answers, fewer if the process has exited, and whether it has.

        The last ones may be lost with it. After WALL_S without an answer the process counts as running.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(b"".join(requests) + b"\n")
            self.process.stdin.flush()
        except OSError:
            return [], True
        answers, rest, ready = list[dict[str, Any]](), bytearray(), select.poll()
        ready.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        while len(answers) < len(requests):
            if not ready.poll(WALL_S * 1000):
                return answers, False
            piece = os.read(self.process.stdout.fileno(), 1 << 20)
            if not piece:
                return answers, True
            rest += piece
            if b"\n" in piece:
                *lines, last = rest.split(b"\n")
                answers += map(json.loads, lines)
                rest = bytearray(last)
        return answers, False

    def end(self) -> int:
        """Kill the process and return its exit status."""
        if self.owner == os.getpid():
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return self.process.wait() if self.owner == os.getpid() else 0


_lock = threading.Lock()
_renderer: Renderer | None = None


def time_of_job(template: str | None, made: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, str]:
    """Return the time that templates get in a job, as part of its fingerprint: when it was planned first.

    `made` is the fingerprint without it, `earlier` that of the output, whose job it may continue. Empty if the template
    does not ask, and for an output of a version that did not record it.
    """
    if template is None or NOW not in template:
        return {}
    before = dict(earlier)
    recorded = before.pop("time", None)
    if before != json.loads(json.dumps(made)):
        recorded = datetime.now().isoformat(timespec="seconds")
    return {} if recorded is None else {"time": recorded}


def tell_time(tokenizer: Any, time: str) -> None:
    """Let `render` tell the templates of this tokenizer that it is `time`; else it is when each is rendered."""
    tokenizer.time_of_job = time


def render(tokenizer: Any, requests: Sequence[Request]) -> list[list[Rendered] | ValueError]:
    """Return for each conversation its texts by the tokenizer's chat template, or why it has none.

    That is RenderLimitExceeded, or a ValueError with the template's own words. After MAX_CONSECUTIVE_LIMITS
    conversations over a limit the others are not tried. Raises DataError if the renderer cannot start.
    """
    if not requests:
        return []
    if not tokenizer.chat_template:
        return [ValueError("the tokenizer has no chat template") for _ in requests]
    special = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    sources = [_source(tokenizer, None), _source(tokenizer, [])]  # for tools it may be another
    if "tools" not in sources[1] and any(request.tools for request in requests):
        _warn_of_tools()
    time = getattr(tokenizer, "time_of_job", None)
    template_key = json.dumps([sources, dict(tokenizer.special_tokens_map), sorted(special), time], default=str)
    lines = [json.dumps(vars(request), default=str).encode() + b"\n" for request in requests]
    found: list[list[Rendered] | ValueError] = []
    exceeded = 0
    with _lock:
        while len(found) < len(lines):
            if exceeded >= MAX_CONSECUTIVE_LIMITS:
                why = f"not tried after {exceeded} rows in a row for which the template took too much"
                found += [RenderLimitExceeded(why)] * (len(lines) - len(found))
                break
            first, stop, size = len(found), len(found) + 1, len(lines[len(found)])
            while not exceeded and stop < len(lines) and size + len(lines[stop]) <= AT_ONCE_BYTES:
                size, stop = size + len(lines[stop]), stop + 1
            for each in _answers(template_key, lines[first:stop]):
                found.append(each)
                exceeded = exceeded + 1 if isinstance(each, RenderLimitExceeded) else 0
                if exceeded >= MAX_CONSECUTIVE_LIMITS:
                    break
    return found


@cache
def _warn_of_tools() -> None:
    """Say once per process that tools are left out."""
    log.warning("the chat template does not write tools, so the model does not read them.")


def _source(tokenizer: Any, tools: list[Any] | None) -> str:
    """Return the template of conversations; one that says why for a tokenizer that has none for them."""
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:  # it has several, without a default
        return f"{{{{ raise_exception({json.dumps(str(error))}) }}}}"


def _answers(template_key: str, lines: Sequence[bytes]) -> list[list[Rendered] | ValueError]:
    """Return the answers to some requests; one or more, up to the first for which the renderer ended."""
    for _ in range(2):  # retry once if something else killed the process
        answers, ended = _running(template_key).ask(lines)
        made = [_answer(each) for each in answers]
        if len(made) == len(lines):
            return made
        status = _end()
        if len(lines) - len(made) > 1:  # some may be lost, so which one ended it is not known
            for line in lines[len(made) :]:
                made += _answers(template_key, [line])
                if isinstance(made[-1], RenderLimitExceeded):
                    break
            return made
        if not ended:
            return [*made, RenderLimitExceeded(f"the template took more than {WALL_S:g} s")]
        if status == -signal.SIGPROF:
            limit = cpu_seconds(Request(**json.loads(lines[len(made)])))
            return [*made, RenderLimitExceeded(f"the template computed for more than {limit:g} s")]
        if made:
            return made
    return [RenderLimitExceeded(f"the process that renders the template ended twice, with status {status}")]


def _answer(answer: Mapping[str, Any]) -> list[Rendered] | ValueError:
    if "limit" in answer:
        return RenderLimitExceeded(answer["limit"])
    if "error" in answer:
        return ValueError(answer["error"])
    return [Rendered(*each) for each in answer["texts"]]


def close() -> None:
    """End the renderer of this process, if any."""
    if _renderer is not None:
        _end()


def cpu_seconds(request: Request) -> float:
    """Return the CPU seconds that a conversation may take: each of its answers is two renderings."""
    turns = sum(one.get("role") == "assistant" for one in request.messages) if request.want == "answers" else 0
    return CPU_S * max(1.0, turns / TURNS)


def _running(template_key: str) -> Renderer:
    """Return this process's renderer with that template, starting one if needed."""
    global _renderer
    line = f"{template_key}\n".encode()
    one = _renderer
    if one is not None and one.owner == os.getpid() and (one.template_key == template_key or one.ask([line])[0]):
        one.template_key = template_key
        return one
    close()
    started = Renderer(template_key=template_key, owner=os.getpid(), process=start_process())
    if not started.ask([line])[0]:
        raise DataError(
            f"The process that renders chat templates does not start: {sys.executable} ended with status "
            f"{started.end()}; what it wrote to standard error says why."
        )
    _renderer = started
    return started


def start_process() -> subprocess.Popen[bytes]:
    """Start a process that renders; see `_rendering_process.py`."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a signal to the worker's group must not end it first
    )


def _end() -> int:
    """End the renderer and return its exit status."""
    global _renderer
    assert _renderer is not None
    ended, _renderer = _renderer, None
    with suppress(subprocess.TimeoutExpired):
        ended.process.wait(0.0 if ended.process.poll() is not None else 0.2)
    return ended.end()


atexit.register(close)
