"""Functions for tests of `map`, in a module that is quick to import in other processes."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

SCHEMA = {"words": pa.int64(), "upper": pa.string()}
KILLER, SLEEPER, RAISER = "killer", "sleeper", "raiser"
Function = Callable[[pa.Table], pa.Table]


def make_counter() -> Function:
    """The number of words of a text, and the text in capitals."""
    return count


def count(batch: pa.Table) -> pa.Table:
    texts = batch["text"]
    return pa.table({"upper": pc.utf8_upper(texts), "words": pc.list_value_length(pc.utf8_split_whitespace(texts))})


def make_misbehaving(log: Path | None = None) -> Function:
    """`count`, unless a text says otherwise; every row that is counted leaves a line in `log`."""

    def misbehave(batch: pa.Table) -> pa.Table:
        texts = batch["text"].to_pylist()
        if any(KILLER in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(SLEEPER in text for text in texts):
            while True:
                time.sleep(3600)
        if any(RAISER in text for text in texts):
            raise ValueError("this text raises")
        if log is not None:
            with open(log, "a", encoding="utf-8") as file:
                file.write("row\n" * len(texts))
        return count(batch)

    return misbehave


def logging_to(log: str) -> Callable[[], Function]:
    return partial(make_misbehaving, Path(log))


def make_renamer() -> Function:
    return lambda batch: pa.table({"n": batch["words"]})


def make_numbers() -> Function:
    return lambda batch: pa.table({"n": batch["id"]})


COPY = {"text": pa.string(), "label": pa.string()}


def make_copier() -> Function:
    return lambda batch: pa.table({name: batch[name] for name in COPY})
