"""What a run tells about itself: `metrics.jsonl`, one line per step or validation, and `logs/rank_N.jsonl`.

Both are JSON lines, appended and flushed line by line, so that `tail -f` shows a run as it is and a kill costs at most
half a line. A run that continues from step S first cuts the metrics after S: the file reads as if nothing had happened.
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torchlake import atomic_io
from torchlake.config.redaction import redacted

Line = dict[str, Any]
METRICS = "metrics.jsonl"
VALIDATION = "validation_"
"Begins the names in a line that tells of a validation; other lines tell of a step."


@contextmanager
def metrics_file(path: Path) -> Iterator[IO[str]]:
    """`path`, open for `write_line`, and on the disk when left."""
    with open(path, "a", encoding="utf-8") as file:
        yield file
    sync(path)


def write_line(file: IO[str], line: Line) -> None:
    """Append one JSON line. NaN and the infinities, which JSON has no numbers for, become "nan", "inf" and "-inf"."""
    plain = {key: _encode(value) for key, value in line.items()}
    try:
        file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        raise atomic_io.storage_error(error, Path(file.name)) from error


def sync(path: Path) -> None:
    """Make the lines written so far durable: a checkpoint must not survive a power cut that its metrics do not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_validation(line: Line) -> bool:
    """Whether a line tells of a validation; others tell of a step."""
    return any(name.startswith(VALIDATION) for name in line)


def parse_line(text: str | bytes) -> Line:
    """One line of a metrics file, non-finite numbers as floats again."""
    return _decode(json.loads(text))


def read_metrics(path: Path) -> list[Line]:
    """The lines of a metrics file, non-finite numbers as floats again; a torn last line is left out."""
    if not path.exists():
        return []
    return [_decode(line) for line in _lines(path)]


def truncate_metrics(path: Path, step: int, validated: int) -> None:
    """Drop the steps after `step`, the validations after step `validated`, and what a kill left of the last line."""
    if not path.exists():
        return
    kept = [
        json.dumps(line, ensure_ascii=False) + "\n"
        for line in _lines(path)
        if line["step"] <= (validated if is_validation(line) else step)
    ]
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


def _lines(path: Path) -> Iterator[Line]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            if text.endswith("\n"):
                yield json.loads(text)


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(line: Line) -> Line:
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}
