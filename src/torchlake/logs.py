"""Where log messages go: to standard error, without secrets, from the level that the command line was given.

Child processes on this machine read the level from the environment; those of a cluster log as the cluster does.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchlake.config.redaction import redacted

LEVEL = "TORCHLAKE_LOG"
"Environment variable: the level from which child processes log to standard error."
PROGRESS = "TORCHLAKE_PROGRESS"


class WithoutSecrets(logging.Formatter):
    """A log line, and its traceback, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return str(redacted(super().format(record)))


def log_to_stderr(level: int) -> None:
    """Write what torchlake logs from `level` on to standard error, unless the process has a place for it already.

    Other libraries' messages are written from the level WARNING on, or from `level` if that is higher.
    """
    handler = logging.StreamHandler(sys.stderr)
    detailed = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    handler.setFormatter(WithoutSecrets(detailed if level <= logging.DEBUG else "%(message)s"))
    handler.setLevel(level)
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING))
    logging.getLogger("torchlake").setLevel(level)


@contextmanager
def loudness(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Log from ERROR on and without progress, or from DEBUG on, in this process and those that it starts here."""
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
    """In a child process: log to standard error from the level that its parent was given, if it was given one."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, ""))
    if level is not None:
        log_to_stderr(level)
