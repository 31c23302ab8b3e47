"""The logs of a run: `metrics.jsonl`, one line per step or validation, and `logs/rank_N.jsonl`.

Both are JSON lines, flushed line by line, so `tail -f` shows the current state and a kill loses at most half a line. A
run that continues from step S first removes the metrics after S, as if it had never been interrupted.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torchlake import atomic_io
from torchlake.redaction import redacted

Line = dict[str, Any]
OnStep = Callable[[Line], Any]
"A user's function of the numbers of a step or of a validation; True stops the run after a checkpoint."
METRICS = "metrics.jsonl"
VALIDATION = "validation_"
"Prefix of the names in a validation line; other lines are steps."


@contextmanager
def metrics_file(path: Path) -> Iterator[IO[str]]:
    """Open `path` for `write_line`, and sync it to disk at the end."""
    with open(path, "a", encoding="utf-8") as file:
        yield file
    sync(path)


def write_line(file: IO[str], line: Line) -> None:
    """Append one JSON line. NaN and the infinities become "nan", "inf" and "-inf", because JSON lacks them."""
    plain = {key: _encode(value) for key, value in line.items()}
    try:
        file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        raise atomic_io.storage_error(error, Path(file.name)) from error


def sync(path: Path) -> None:
    """Sync the lines to disk: after a power cut, a checkpoint must not be newer than its metrics."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_validation(line: Line) -> bool:
    """Return whether a line is a validation; others are steps."""
    return any(name.startswith(VALIDATION) for name in line)


def parse_line(text: str | bytes) -> Line:
    """Parse one line of a metrics file, non-finite numbers as floats."""
    line = json.loads(text)
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def read_metrics(path: Path) -> list[Line]:
    """Return the lines of a metrics file, non-finite numbers as floats; without an incomplete last line."""
    if not path.exists():
        return []
    return [parse_line(text) for text in _complete_lines(path)]


def truncate_metrics(path: Path, step: int, validated: int) -> None:
    """Remove the steps after `step`, the validations after step `validated`, and an incomplete last line."""
    if not path.exists():
        return
    lines = [(text, parse_line(text)) for text in _complete_lines(path)]
    kept = [text for text, line in lines if line["step"] <= (validated if is_validation(line) else step)]
    atomic_io.write_bytes(path, "".join(kept).encode(), site="metrics.cut")


@contextmanager
def log_file(path: Path, *, rank: int) -> Iterator[None]:
    """Send what this package logs to `path` as well, one JSON object a line: time, level, rank, logger, message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonFormatter(rank))
    logger = logging.getLogger("torchlake")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


class JsonFormatter(logging.Formatter):
    """A log record as one JSON line, without secrets."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: Line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "rank": self.rank,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def _complete_lines(path: Path) -> list[str]:
    # Read at once: line by line, a line that is completed meanwhile would be read in two pieces.
    text = path.read_text(encoding="utf-8", errors="replace")
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
