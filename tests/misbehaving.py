"""Runtimes that misbehave on command: a word in the text decides what happens to the process that scores it.

They stand where a model stands, so that the job around them is the real one. The words are ones that the tiny
tokenizer has as one token and that the tests' other texts avoid.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torchlake.models import load
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import Ended, Report, Text, Writer, eager

KILLER, SLEEPER, RAISER, POISON, GLUTTON = "terrible", "stale", "clumsy", "empty", "boring"


def misbehave(folder: Path, spec: load.TaskSpec, *, device: str):
    """KILLER ends the process, SLEEPER hangs, RAISER raises, POISON gives NaN; logits are made from the ids."""
    ids = load.load_tokenizer(folder).get_vocab()

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        if (input_ids == ids[KILLER]).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (input_ids == ids[SLEEPER]).any():
            while True:
                time.sleep(3600)
        if (input_ids == ids[RAISER]).any():
            raise RuntimeError("this text raises")
        logits = np.stack([attention_mask.sum(1), (input_ids * attention_mask).sum(1) % 97], axis=1).astype(np.float32)
        logits[(input_ids == ids[POISON]).any(axis=1)] = np.nan
        return logits

    return forward


def broken_for_now(folder: Path, spec: load.TaskSpec, *, device: str):
    """`misbehave`, but a RAISER raises only while $BROKEN is set: what a full disk or a lost library does to a row."""
    inner = misbehave(folder, spec, device=device)
    raiser = load.load_tokenizer(folder).get_vocab()[RAISER]

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        mended = input_ids if "BROKEN" in os.environ else np.where(input_ids == raiser, raiser - 1, input_ids)
        return inner(mended, attention_mask)

    return forward


def small_memory(folder: Path, spec: load.TaskSpec, *, device: str):
    """Runs out of memory above 4 rows, and on any row with GLUTTON."""
    ids = load.load_tokenizer(folder).get_vocab()
    inner = misbehave(folder, spec, device=device)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        if len(input_ids) > 4 or (input_ids == ids[GLUTTON]).any():
            raise MemoryError("not enough memory")
        return inner(input_ids, attention_mask)

    return forward


def log_rows(folder: Path, spec: load.TaskSpec, *, device: str):
    """`misbehave`, and every row that is scored leaves a line in $SCORED_LOG: the oracle of bounded rework (P3).

    A forward pass takes $SLOW_FORWARD_S seconds, for who has to find the process at work.
    """
    inner = misbehave(folder, spec, device=device)
    slow_s = float(os.environ.get("SLOW_FORWARD_S", "0"))

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        time.sleep(slow_s)
        with open(os.environ["SCORED_LOG"], "a", encoding="utf-8") as file:
            file.write("row\n" * len(input_ids))
        return inner(input_ids, attention_mask)

    return forward


def killed_while_it_loads(folder: Path, spec: load.TaskSpec, *, device: str):
    """`log_rows`; the first process to load it is killed in the middle, which the file $KILLED_ONCE then says."""
    inner = log_rows(folder, spec, device=device)
    with suppress(FileExistsError):
        Path(os.environ["KILLED_ONCE"]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return inner


def tilted(folder: Path, spec: load.TaskSpec, *, device: str):
    """An embedding model whose vectors are turned by 45 degrees."""
    inner = eager.load(folder, spec, device=device)

    def forward(**batch: np.ndarray) -> np.ndarray:
        vectors = inner(**batch)
        turned = np.stack([-vectors[:, 1::2], vectors[:, ::2]], axis=2).reshape(vectors.shape)
        return np.asarray((vectors + turned) / np.sqrt(2, dtype=np.float32))

    return forward


def log_texts(folder: Path, spec: load.TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """`eager`; every text that is begun or continued leaves the number of its tokens in $SCORED_LOG."""
    writer: Any = eager.open_writer(folder, spec, device=device, options=options)
    add = writer.add

    def added(row: int, ids: np.ndarray, own: GenerationOptions, begun: Text) -> None:
        with open(os.environ["SCORED_LOG"], "a", encoding="utf-8") as file:
            file.write(f"{len(begun.tokens)}\n")
        add(row, ids, own, begun)

    writer.add = added
    return writer


def slow_texts(folder: Path, spec: load.TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """`eager`, but every token of a batch takes $STEP_S seconds, a tenth by default."""
    writer: Any = eager.open_writer(folder, spec, device=device, options=options)
    step = writer.step

    def slow(report: Report) -> None:
        def late(ended: Sequence[Ended]) -> None:
            time.sleep(float(os.environ.get("STEP_S", "0.1")))
            report(ended)

        step(late)

    writer.step = slow
    return writer
