"""Chat templates rendered in a process of their own, which ends when one takes too much.

    worker    {"messages": [...], "asking": true, "spans": false}    ->  standard input      renderer: Jinja, no torch
    worker    {"text": "..."}, or why there is none                  <-  standard output

A template is a program of the model's authors. Jinja's sandbox limits what it sees, not how long it computes or what it
holds, and no thread could stop it inside one multiplication of a string. The operating system can: after CPU_S seconds
of computing SIGPROF ends the process, and the next conversation starts another; RLIMIT_AS limits its memory. This works
from any thread, and a renderer whose worker was killed ends as well. Price, once for each process that renders: 0.8 s
and 60 MB; for each conversation 20 microseconds more than in the worker, which takes 160 for six messages.
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
"Seconds of computing for one conversation; a long one takes a thousandth of it."
WALL_S = 60.0
"Seconds for one conversation on a machine that is busy or asleep."
MEMORY_BYTES = 1 << 30
"What a renderer may take beside what it starts with."
MOST_CHARACTERS = 1 << 24
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from torchlake.tasks import _rendering as it; it.serve()"
)

Spans = list[tuple[int, int]]
"Where in a text the assistant speaks: first character, and the one after the last."


class TooMuch(ValueError):
    """A conversation for which the template takes more than it may."""


@dataclass(kw_only=True)
class Renderer:
    """A process that renders one template with one set of special tokens, and the process id of who may ask it."""

    asked_for: str
    owner: int
    process: subprocess.Popen[bytes]

    def ask(self, request: str) -> dict[str, Any] | None:
        """Its answer, or None when it has ended. Raises TooMuch where it has not answered in WALL_S."""
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
            raise TooMuch(f"the template took more than {WALL_S:g} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def end(self) -> int:
        """End it; returns its exit status."""
        if self.owner == os.getpid():
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return self.process.wait() if self.owner == os.getpid() else 0


_lock = threading.Lock()
_renderer: Renderer | None = None


def render(tokenizer: Any, messages: list[dict[str, Any]], *, asking: bool, spans: bool = False) -> tuple[str, Spans]:
    """A conversation as the tokenizer's chat template writes it and, with `spans`, where the assistant speaks.

    Raises TooMuch naming the limit, ValueError with the template's own error, DataError when no template can be
    rendered here.
    """
    asked_for = json.dumps([tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map)], default=str)
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    request = json.dumps({"messages": plain, "asking": asking, "spans": spans}, default=str)
    with _lock:
        for _ in range(2):  # again, once, where something else ended the process
            renderer = _running(asked_for)
            try:
                answer = renderer.ask(request)
            except TooMuch:
                close()
                raise
            if answer is not None:
                break
            status = _end()
            if status == -signal.SIGPROF:
                raise TooMuch(f"the template computed for more than {CPU_S:g} s")
        else:
            raise TooMuch(f"the process that renders the template ended twice, with status {status}")
    if "limit" in answer:
        raise TooMuch(answer["limit"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"], [(start, end) for start, end in answer["spans"]]


def close() -> None:
    """End the renderer of this process, if there is one."""
    if _renderer is not None:
        _end()


def serve() -> None:
    """The renderer: answer what comes on standard input until it ends."""
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
                add_generation_prompt=request["asking"],
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


def _running(asked_for: str) -> Renderer:
    """The renderer of this process for that template, started where there is none."""
    global _renderer
    if _renderer is not None and (_renderer.asked_for, _renderer.owner) == (asked_for, os.getpid()):
        return _renderer
    close()
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # it ends with this process, not before it by a signal to both
    )
    started = Renderer(asked_for=asked_for, owner=os.getpid(), process=process)
    if started.ask(asked_for) is None:
        raise DataError(
            f"The process that renders chat templates does not start: {sys.executable} ended with status "
            f"{started.end()}; what it wrote to standard error says why."
        )
    _renderer = started
    return started


def _end() -> int:
    """End the renderer; returns its exit status, which is that of the template where it had ended."""
    global _renderer
    assert _renderer is not None
    ended, _renderer = _renderer, None
    with suppress(subprocess.TimeoutExpired):
        ended.process.wait(0.0 if ended.process.poll() is not None else 0.2)
    return ended.end()


atexit.register(close)
