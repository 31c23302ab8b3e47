"""Log to standard error, without secrets, at the level of --quiet or --verbose.

Child processes on this machine read the level from the environment; on a cluster, the cluster configures logging.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchlake.redaction import redacted

LEVEL = "TORCHLAKE_LOG"
"Environment variable: the lowest level that child processes log to standard error."
PROGRESS = "TORCHLAKE_PROGRESS"


class RedactingFormatter(logging.Formatter):
    """A formatter that removes secrets from log lines and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return str(redacted(super().format(record)))


def log_to_stderr(level: int) -> None:
    """Log torchlake's messages of `level` and above to standard error, unless the process has configured logging.

    Messages of other libraries are logged from WARNING, or from `level` if that is higher.
    """
    handler = logging.StreamHandler(sys.stderr)
    detailed = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    handler.setFormatter(RedactingFormatter(detailed if level <= logging.DEBUG else "%(message)s"))
    handler.setLevel(level)
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING))
    logging.getLogger("torchlake").setLevel(level)


@contextmanager
def log_level(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Log from ERROR and hide progress (quiet), or log from DEBUG (verbose), here and in child processes."""
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
    added = {LEVEL: logging.getLevelName(level)} if quiet or verbose else {}
    if quiet:
        added[PROGRESS] = "0"
    before = {name: os.environ.get(name) for name in added}
    logger = logging.getLogger("torchlake")
    level_before = logger.level
    os.environ.update(added)
    log_to_stderr(level)
    try:
        yield
    finally:
        logger.setLevel(level_before)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def log_as_parent() -> None:
    """Log from a child process to standard error at the parent's level, if it has set one."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, ""))
    if level is not None:
        log_to_stderr(level)
