"""The process in which chat templates run: conversations in, their texts or errors out, a JSON line for each.

    standard input:   [["{% for ...", ...], ...], a template; then
                      {"messages": [...], "tools": null, "options": {}, "want": "answers", "first": 0}
                      an empty line: the last one of those that are sent together
    standard output:  {"texts": [["...", [[9, 14]], [9]]]}, {"limit": "..."} or {"error": "..."}

SIGPROF ends it when a conversation takes too long, and RLIMIT_AS limits its memory; `_rendering.py` starts it.
"""

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from torchlake.tasks._assistant_turns import Rendered, Spans, answers_in, turn_end
from torchlake.tasks._rendering import MEMORY_BYTES, MOST_CHARACTERS, Request, cpu_seconds
from torchlake.tasks._tool_calls import Form, find_form, with_form

TOGETHER_BYTES, TOGETHER_S = 1 << 16, 0.1
"How many bytes of answers wait for each other, and for how long before the next conversation begins."


def serve() -> None:
    """Run the renderer: answer requests from standard input until it is closed."""
    import_module("transformers.utils.chat_template_utils")  # before memory is limited

    answers = os.fdopen(os.dup(1), "wb", buffering=TOGETHER_BYTES)
    os.dup2(2, 1)
    with suppress(OSError, ValueError):  # systems without /proc have no such limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
    flushed = 0.0
    for line in sys.stdin.buffer:
        if line == b"\n" or time.monotonic() > flushed + TOGETHER_S:
            answers.flush()
            flushed = time.monotonic()
        if line == b"\n":
            continue
        given = json.loads(line)
        if isinstance(given, list):
            sources, *tokens = given
            plain, calling = (_Template(source, *tokens) for source in sources)
            answers.write(b"{}\n")
            continue
        request = Request(**given)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds(request))
        answer: dict[str, Any]
        try:
            texts = (calling if request.tools else plain).texts(request)
            answer = {"texts": [(each.text, each.spans, each.prompts, each.messages) for each in texts]}
            if sum(len(each.text) for each in texts) > MOST_CHARACTERS:
                answer = {"limit": f"the template wrote more than {MOST_CHARACTERS:,} characters"}
        except MemoryError:
            answer = {"limit": f"the template took more than {MEMORY_BYTES >> 20:,} MiB of memory"}
        except Exception as error:  # a template may raise anything
            answer = {"error": str(error)[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")


class _Template:
    """A chat template with its special tokens and, unless that is None, the time that it gets."""

    def __init__(self, source: str, special: Mapping[str, Any], tokens: Sequence[str], time: str | None) -> None:
        from transformers.utils import chat_template_utils

        module: Any = chat_template_utils
        module.datetime = datetime
        if time is not None:  # transformers reads the clock itself, and passes no function to a template
            now = datetime.fromisoformat(time)
            module.datetime = type("Clock", (datetime,), {"now": classmethod(lambda _: now)})
        self.module = module
        self.source, self.special, self.tokens = source, special, tokens
        self.marked = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        self.end: tuple[str | None, str] | None = None
        self.form: Form | None = None

    def texts(self, request: Request) -> list[Rendered]:
        """Return what a request wants; see there."""
        messages: Sequence[Mapping[str, Any]] = request.messages
        options = {"documents": None, **self.special, **request.options}
        template = self.module._compile_jinja_template(self.source)
        variables = {**template.globals, "tools": request.tools, **options}

        def make(some: Sequence[Mapping[str, Any]], prompt: bool, tools: Any = request.tools) -> tuple[str, Spans]:
            # As `render_jinja_template`, which copies the messages first, in case they are not read from JSON.
            given = {**variables, "messages": some, "tools": tools, "add_generation_prompt": prompt}
            pieces, marks = list[str](), list[tuple[int, int]]()
            marking = self.marked and not prompt and request.want in ("answers", "last")
            with template.environment.activate_tracker(pieces, marks) if marking else nullcontext():
                for piece in template.root_render_func(template.new_context(given, shared=True)):
                    pieces.append(piece)  # where a mark begins is counted in them
            return "".join(pieces), marks

        messages = getattr(self.module, "_alias_reasoning_fields", list)(messages)
        if any("tool_calls" in message for message in messages):
            self.form = self.form or find_form(lambda some, tools: make(some, False, tools)[0])
            messages = [with_form(message, self.form) for message in messages]
        if request.want == "continue":
            given = {**options, "chat_template": self.source, "tools": request.tools, "continue_final_message": True}
            return [Rendered(self.module.render_jinja_template([messages], **given)[0][0], messages=len(messages))]
        if request.want in ("prompt", "whole"):
            return [Rendered(make(messages, request.want == "prompt")[0], messages=len(messages))]
        if self.end is None:
            self.end = turn_end(make, self.tokens)
        last = request.want == "last"
        return answers_in(make, messages, first=request.first, last=last, end=self.end, marked=self.marked)
