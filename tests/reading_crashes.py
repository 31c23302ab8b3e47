"""The local engine with workers that crash while they read or tokenize a chunk: a word in its texts decides.

The crash stands where a decoder or a tokenizer stands; processes, chunks, strikes, parts and commit are the real ones.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import misbehaving
import torchlake as tl
from torchlake.jobs.worker import poison_rows
from torchlake.models import load
from torchlake.storage import liveness
from torchlake.tables.reading import ChunkReader
from torchlake.tasks import _tokens

WORD = "awful"
SCORING = threading.Event()
"A forward pass has begun in this process."
log_of_crashes = Path()
"In a worker: the engine's `log`."
DEAD = {"suspects": {"read": [], "tokenize": [], "score": []}, "quarantined": {}, "lost_reads": 0}


class Crashing(tl.Local):
    """One worker process, which crashes in a `step` of a chunk that has WORD in a text, `times` times over all runs.

    `how` is kill, abort or hang; `log` is a file that gets a letter for each crash.
    """

    def __init__(self, step: str, how: str, times: int, log: Path) -> None:
        super().__init__(processes=1)
        self.crash = (step, how, times, log)

    def run_chunks(self, make_worker: Callable[[], Any], chunks: Iterable[Any], **options: Any) -> Any:
        return super().run_chunks(partial(_make_crashing, make_worker, *self.crash), chunks, **options)


def crashes(log: Path) -> int:
    """How many there were."""
    return len(log.read_text()) if log.exists() else 0


def scored_until_the_first_crash(folder: Path, spec: load.TaskSpec, *, device: str):
    """`misbehave`; until the first crash a forward pass does not end, so that the crash comes beside it."""
    inner = misbehaving.misbehave(folder, spec, device=device)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        SCORING.set()
        if not crashes(log_of_crashes):
            threading.Event().wait(30)
        return inner(input_ids, attention_mask)

    return forward


def leave_dead(folder: Path, chunk: int, *running: Any, **known: Any) -> None:
    """In `folder` what an attempt at a chunk leaves that knew and did this when it was killed."""
    folder.mkdir(exist_ok=True)
    state = {
        **DEAD,
        **known,
        "machine": liveness.machine_id(),
        "pid": 2**22 + 1,
        "started": 0,
    }  # no process has this id
    path = folder / f"{chunk}-dead{len(list(folder.iterdir()))}.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in (state, *running)))


def _make_crashing(make_worker: Callable[[], Any], step: str, how: str, times: int, log: Path) -> Any:
    """In the child: put the crash into the step, then make the worker.

    A chunk that is read ahead crashes beside the scoring of the one before it.
    """
    global log_of_crashes
    log_of_crashes, poison_rows.WHOLE_CHUNK_S = log, 1.0
    read, tokenize = ChunkReader.read, _tokens.tokenize
    chunks = []

    def crash_at_the_word(texts: list[str | None]) -> None:
        if not any(WORD in (text or "") for text in texts) or crashes(log) >= times:
            return
        if len(chunks) > 1 and threading.current_thread() is not threading.main_thread():
            assert SCORING.wait(30), "the chunk before this one is not scored"
        with open(log, "a") as file:
            file.write("x")
        if how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os.abort()

    def crashing_read(self: ChunkReader, chunk: Any) -> Any:
        chunks.append(chunk.index)
        table, unreadable = read(self, chunk)
        if step == "read":
            crash_at_the_word(table["text"].to_pylist())
        return table, unreadable

    def crashing_tokenize(tokenizer: Any, texts: list[str], max_length: int) -> Any:
        if step == "tokenize":
            crash_at_the_word(texts)
        return tokenize(tokenizer, texts, max_length)

    ChunkReader.read = crashing_read  # type: ignore[method-assign]
    _tokens.tokenize = crashing_tokenize
    return make_worker()
