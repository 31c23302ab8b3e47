"""Render chat templates in a separate process with limits on time and memory.

    worker  ->  standard input:   {"messages": [...], "add_generation_prompt": true, "spans": false}
    worker  <-  standard output:  {"text": "...", "spans": [...]}, {"limit": "..."} or {"error": "..."}

Jinja's sandbox limits what a template can access, not its CPU time or memory, and a thread cannot interrupt a single
long string multiplication. So the operating system enforces the limits: after CPU_S seconds SIGPROF ends the process,
and the next conversation starts another; RLIMIT_AS limits its memory. The renderer exits when its worker does.
Cost: 0.8 s and 60 MB for each process that renders, and 20 microseconds for each conversation (rendering six messages
takes 160).
"""

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlake.errors import DataError

CPU_S = 2.0
"CPU seconds for one conversation; a long one takes a thousandth of this."
WALL_S = 60.0
"Wall-clock seconds for one conversation, on a busy or suspended machine."
MEMORY_BYTES = 1 << 30
"Memory limit above what the renderer uses after startup."
MOST_CHARACTERS = 1 << 24
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from torchlake.tasks import _rendering as it; it.serve()"
)

Spans = list[tuple[int, int]]
"The assistant's turns in rendered text: (first character, one past the last)."


class RenderLimitExceeded(ValueError):
    """Rendering a conversation exceeded a limit."""


@dataclass(kw_only=True)
class Renderer:
    """A process that renders one template with one set of special tokens; only process `owner` may use it."""

    template_key: str
    owner: int
    process: subprocess.Popen[bytes]

    def ask(self, request: str) -> dict[str, Any] | None:
        """Send a request; return the answer, or None if the process has exited. Raises RenderLimitExceeded after WALL_S
        without an answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{request}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return None
        ready = select.poll()
        ready.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        if not ready.poll(WALL_S * 1000):
            raise RenderLimitExceeded(f"the template took more than {WALL_S:g} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

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


def render(
    tokenizer: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool, spans: bool = False
) -> tuple[str, Spans]:
    """Render a conversation with the tokenizer's chat template; with `spans`, also return the assistant's turns.

    Raises RenderLimitExceeded, ValueError with the template's own error, and DataError if the renderer cannot start.
    """
    template_key = json.dumps([tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map)], default=str)
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    request = json.dumps(
        {"messages": plain, "add_generation_prompt": add_generation_prompt, "spans": spans}, default=str
    )
    with _lock:
        for _ in range(2):  # retry once if something else killed the process
            renderer = _running(template_key)
            try:
                answer = renderer.ask(request)
            except RenderLimitExceeded:
                close()
                raise
            if answer is not None:
                break
            status = _end()
            if status == -signal.SIGPROF:
                raise RenderLimitExceeded(f"the template computed for more than {CPU_S:g} s")
        else:
            raise RenderLimitExceeded(f"the process that renders the template ended twice, with status {status}")
    if "limit" in answer:
        raise RenderLimitExceeded(answer["limit"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"], [(start, end) for start, end in answer["spans"]]


def close() -> None:
    """End the renderer of this process, if any."""
    if _renderer is not None:
        _end()


def serve() -> None:
    """Run the renderer: answer requests from standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from transformers.utils.chat_template_utils import render_jinja_template

    template, special = json.loads(sys.stdin.buffer.readline())
    with suppress(OSError, ValueError):  # systems without /proc have no such limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer: dict[str, Any]
        try:
            rendered: Any = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=template,
                add_generation_prompt=request["add_generation_prompt"],
                return_assistant_tokens_mask=request["spans"],
                **special,
            )
            text, spans = rendered[0][0], rendered[1][0] if request["spans"] else []
            answer = {"text": text, "spans": spans}
            if len(text) > MOST_CHARACTERS:
                answer = {"limit": f"the template wrote more than {MOST_CHARACTERS:,} characters"}
        except MemoryError:
            answer = {"limit": f"the template took more than {MEMORY_BYTES >> 20:,} MiB of memory"}
        except Exception as error:  # a template may raise anything
            answer = {"error": str(error)[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _running(template_key: str) -> Renderer:
    """Return this process's renderer for that template, starting one if needed."""
    global _renderer
    if _renderer is not None and (_renderer.template_key, _renderer.owner) == (template_key, os.getpid()):
        return _renderer
    close()
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a signal to the worker's group must not end it first
    )
    started = Renderer(template_key=template_key, owner=os.getpid(), process=process)
    if started.ask(template_key) is None:
        raise DataError(
            f"The process that renders chat templates does not start: {sys.executable} ended with status "
            f"{started.end()}; what it wrote to standard error says why."
        )
    _renderer = started
    return started


def _end() -> int:
    """End the renderer and return its exit status."""
    global _renderer
    assert _renderer is not None
    ended, _renderer = _renderer, None
    with suppress(subprocess.TimeoutExpired):
        ended.process.wait(0.0 if ended.process.poll() is not None else 0.2)
    return ended.end()


atexit.register(close)
