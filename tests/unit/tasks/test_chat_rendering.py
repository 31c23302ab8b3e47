"""Chat templates have limits of time, memory and size, and within them they render as transformers does."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.config.task_spec import RowOptions
from torchlake.data.batching import Ragged
from torchlake.engines.local import Local
from torchlake.models import folders
from torchlake.tasks import _chat, _rendering
from torchlake.tasks._whole_rows import whole_rows

CHAT = [{"role": "user", "content": "good ?"}, {"role": "assistant", "content": "yes , all"}]
LONG = "range(99999)"
TIME, MEMORY, SIZE = "computed for more than 2 s", "more than 1,024 MiB of memory", "more than 16,777,216 characters"
HOSTILE = {
    "loops": (f"{{% for i in {LONG} %}}{{% for j in {LONG} %}}{{% endfor %}}{{% endfor %}}", TIME),
    "calls": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        TIME,
    ),
    "one power": ("{% set n = 9 %}{{ n ** (n ** n) % 7 }}", TIME),
    "one product": ("{% set n = 10 %}{{ 'x' * n ** 10 }}", MEMORY),
    "one product of constants": ("{{ 'x' * 10 ** 10 }}", MEMORY),
    "one call of a method": ("{{ 'x'.ljust(10 ** 10) }}", MEMORY),
    "one filter": (f"{{{{ {LONG} | join('x' * 99999) }}}}", MEMORY),
    "doubling": (
        "{% set it = namespace(x='ab') %}{% for i in range(60) %}{% set it.x = it.x ~ it.x %}{% endfor %}",
        MEMORY,
    ),
    "output": (f"{{% for i in {LONG} %}}{{{{ 'x' * 1000 }}}}{{% endfor %}}", SIZE),
}
MARKING = (
    "{% for message in messages %}{{ '<' + message.role + '>\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '\n' }}{% endif %}{% endfor %}"
)
HONEST = [
    tiny.CHAT_TEMPLATE,
    MARKING,
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.name is defined }}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}",
    "{{ messages[0].content.split(' ') | join('|') }} ü \U0001f600",
]


def tokenizer(template: str) -> Any:
    made = tiny.language_tokenizer()
    made.chat_template = template
    return made


def column(*chats: Any) -> pa.Array:
    return pa.array(list(chats))


def rendered(made: Any, chats: pa.Array, *, answered: bool = True) -> tuple[pa.Array, dict[int, str]]:
    """The texts of conversations, which an answer follows if it is `answered`."""
    requests, bad = _chat.chat_requests(chats)
    if not answered:
        requests = {row: replace(each, want="whole") for row, each in requests.items()}
    texts, errors = _chat.render_chats(made, requests, len(chats))
    return texts, {**bad, **errors}


@pytest.mark.parametrize("name", sweep(HOSTILE, quick=["loops"]))
def test_a_template_that_takes_too_much_is_an_error_row(name: str) -> None:
    """In a thread, as workers tokenize: nothing of this process is touched, and the next template renders."""
    template, limit = HOSTILE[name]
    with ThreadPoolExecutor(1) as pool:
        texts, errors = pool.submit(rendered, tokenizer(template), column(CHAT, None)).result()
        assert texts.to_pylist() == [None, None]
        assert errors.keys() == {0}
        assert limit in errors[0]
        texts, errors = pool.submit(rendered, tokenizer("fine"), column(CHAT)).result()
    assert (texts.to_pylist(), errors) == (["fine"], {})


@pytest.mark.slow
def test_a_long_conversation_has_more_time_for_its_answers() -> None:
    turns = [{"role": role, "content": "x"} for _ in range(1000) for role in ("user", "assistant")]
    request = _rendering.Request(messages=turns)
    assert _rendering.cpu_seconds(request) == pytest.approx(_rendering.CPU_S * 1000 / _rendering.TURNS)
    for short in (replace(request, messages=turns[:20]), replace(request, want="whole")):
        assert _rendering.cpu_seconds(short) == _rendering.CPU_S
    hostile = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    [found] = _rendering.render(tokenizer(hostile), [replace(request, messages=turns[:192])])
    assert "computed for more than 3 s" in str(found)


@pytest.mark.slow
def test_the_answers_of_hundreds_of_turns_are_found() -> None:
    turns = [{"role": role, "content": "good ?"} for _ in range(500) for role in ("user", "assistant")]
    [found] = _rendering.render(tokenizer(tiny.CHAT_TEMPLATE), [_rendering.Request(messages=turns)])
    assert isinstance(found, list)
    assert len(found[0].spans or ()) == 500


@pytest.mark.parametrize("template", HONEST)
def test_texts_are_those_of_transformers(template: str) -> None:
    made = tokenizer(template)
    chats = [CHAT, CHAT[:1], [{"role": "system", "content": " \U0001f600 \n", "name": "one"}, *CHAT]]
    for add_generation_prompt in (False, True):
        texts, errors = rendered(made, column(*chats), answered=add_generation_prompt)
        assert errors == {}
        assert texts.to_pylist() == [
            made.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
            for chat in chats
        ]


def test_what_the_assistant_says_is_what_transformers_marks() -> None:
    made = tokenizer(MARKING)
    chats = [CHAT, CHAT * 3, [*CHAT, {"role": "user", "content": "a film"}]]
    rows = whole_rows(made, {"text": column(*chats)}, RowOptions(), 4096, "answers")
    assert rows.errors == {}
    ids = rows.arrays["input_ids"]
    assert isinstance(ids, Ragged)
    for row, chat in zip((each.tolist() for each in np.split(ids.values, ids.offsets[1:-1])), chats, strict=True):
        theirs = made.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        whole = [token if marked else ~token for token, marked in zip(*_columns(theirs), strict=True)]
        assert row[: len(whole)] == whole
        assert [token if token >= 0 else ~token for token in row[len(whole) :]] == [made.eos_token_id]


def _columns(tokens: Any) -> tuple[list[int], list[int]]:
    return tokens["input_ids"], tokens["assistant_masks"]


def test_the_templates_own_error_is_told() -> None:
    _, errors = rendered(tokenizer("{{ raise_exception('roles must alternate') }}"), column(CHAT))
    assert errors == {0: "bad_chat: roles must alternate"}


def test_tools_that_a_template_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and only if there are any."""
    tool = {"type": "function", "function": {"name": "weather"}}
    plain = _rendering.Request(messages=CHAT)
    asked = replace(plain, tools=[tool])
    _rendering._warn_of_tools.cache_clear()
    _rendering.render(tokenizer("{{ tools | tojson }}"), [asked])
    _rendering.render(tokenizer("fine"), [plain])
    assert caplog.messages == []
    for _ in range(2):
        _rendering.render(tokenizer("fine"), [plain, asked])
    assert caplog.messages == ["the chat template does not write tools, so the model does not read them."]


def test_a_template_that_never_fits_is_given_up() -> None:
    """Five rows in a row; a row that renders begins the count anew."""
    template = "{% if 'evil' in messages[0].content %}{{ 'x' * 10 ** 10 }}{% else %}fine{% endif %}"
    evil, good = ([{"role": "user", "content": word}] for word in ("evil", "good"))
    texts, errors = rendered(tokenizer(template), column(*[evil] * 4, good, *[evil] * 6, good))
    assert texts.to_pylist() == [*[None] * 4, "fine", *[None] * 7]
    assert all(MEMORY in errors[row] for row in (0, 1, 2, 3, 5, 6, 7, 8, 9))
    assert all("not tried after 5 rows" in errors[row] for row in (10, 11))


@pytest.mark.slow
@pytest.mark.parametrize("evil", [{3}, {0, 3, 4}])
def test_the_row_that_takes_too_much_is_found_among_those_sent_together(evil: set[int]) -> None:
    """The answers before it are lost with the process."""
    template = f"{{% if messages[0].content in {sorted(map(str, evil))} %}}{HOSTILE['loops'][0]}{{% endif %}}fine"
    chats = [[{"role": "user", "content": str(row)}] for row in range(8)]
    texts, errors = rendered(tokenizer(template), column(*chats))
    assert errors.keys() == evil
    assert all(TIME in each for each in errors.values())
    assert texts.to_pylist() == [None if row in evil else "fine" for row in range(8)]


@pytest.mark.slow
def test_a_renderer_that_something_else_ended_is_started_again() -> None:
    made = tokenizer("fine")
    rendered(made, column(CHAT))
    assert _rendering._renderer is not None
    first = _rendering._renderer.process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert rendered(made, column(CHAT))[0].to_pylist() == ["fine"]
    assert _rendering._renderer.process.pid != first.pid
    assert os.getsid(_rendering._renderer.process.pid) != os.getsid(0)  # a signal to this session does not end it
    _rendering.close()
    assert _rendering._renderer is None


@pytest.mark.parametrize("template", ["fine", HOSTILE["loops"][0]])
def test_a_renderer_ends_with_its_worker(template: str) -> None:
    """Also in the midst of a template that never ends."""
    program = (
        "import json, os, sys\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from torchlake.tasks import _rendering\n"
        "process = _rendering._running(json.dumps([[sys.argv[1]] * 2, {}, [], None])).process\n"
        "request = {'messages': [{'role': 'user', 'content': 'x'}], 'want': 'prompt'}\n"
        "process.stdin.write(json.dumps(request).encode() + b'\\n')\n"
        "process.stdin.flush()\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    source = str(Path(tl.__file__).parents[1])
    with subprocess.Popen([sys.executable, "-c", program, template, source], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert worker.wait() == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)


def test_a_bad_conversation_costs_itself(tmp_path: Path, tiny_gpt2: Path) -> None:
    """In workers, which tokenize beside the model: the other rows have their answers."""
    base = tmp_path / "model"
    made = AutoTokenizer.from_pretrained(tiny_gpt2)
    made.chat_template = (
        "{% if 'evil' in messages[0].content %}" + HOSTILE["one product"][0] + "{% endif %}" + tiny.CHAT_TEMPLATE
    )
    tiny.build_language_model(base)
    made.save_pretrained(base)
    words = ["good ?", "evil", "bad ?"]
    chats = [json.dumps([{"role": "user", "content": word}]) for word in words]
    pq.write_table(pa.table({"text": chats}), tmp_path / "chats.parquet")
    tl.predict(
        base, tmp_path / "chats.parquet", tmp_path / "out", chat=True, max_new_tokens=2, engine=Local(processes=1)
    )
    errors = [row["error"] for row in pq.read_table(tmp_path / "out").to_pylist()]
    assert errors == [None, f"chat_limit: the template took {MEMORY}", None]


TOOL_USE, PLAIN = (
    "{% for m in messages %}tools {{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
)
TEMPLATES: dict[str, tuple[Any, dict[str, str]]] = {
    "config": (PLAIN, {}),
    "replaced": ("{{ 1 / 0 }}", {"chat_template": PLAIN}),
    "several": ([{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOL_USE}], {}),
    "tools beside a default": ("{{ 1 / 0 }}", {"chat_template": PLAIN, "additional_chat_templates/tool_use": TOOL_USE}),
    "a default beside": (None, {"additional_chat_templates/default": PLAIN}),
    "tools alone": (PLAIN, {"additional_chat_templates/tool_use": TOOL_USE}),
    "tools alone, in a list": ([{"name": "tool_use", "template": TOOL_USE}], {}),
}


@pytest.mark.parametrize("place", TEMPLATES)
def test_the_template_is_the_one_that_transformers_chooses(tmp_path: Path, tiny_gpt2: Path, place: str) -> None:
    """A row for which there is none, because several have no default, is an error; the others are rendered."""
    folder, (named, files) = tmp_path / "model", TEMPLATES[place]
    shutil.copytree(tiny_gpt2, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    for name, template in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "f"}}]
    requests = [_rendering.Request(messages=CHAT, tools=each, want="whole") for each in (tools, None)]
    for request, found in zip(requests, _rendering.render(tokenizer, requests), strict=True):
        if isinstance(found, ValueError):
            with pytest.raises(ValueError, match=re.escape(str(found))):
                tokenizer.apply_chat_template(CHAT, tools=request.tools, tokenize=False)
        else:
            assert found[0].text == tokenizer.apply_chat_template(CHAT, tools=request.tools, tokenize=False)
    text = folders.chat_template(folder)
    assert text is not None
    assert "1 / 0" not in text, "no template that is not used"
    assert ("tools" in text) == (tokenizer.get_chat_template(tools=tools) == TOOL_USE)
