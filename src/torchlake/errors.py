"""The exceptions of torchlake, and the exit code of the command line for each.

    TorchlakeError                 70  a fault in torchlake, or an unexpected one
    ├── UsageError                 64  the command or its arguments are wrong
    │   ├── PortTaken               2  another server listens on the port
    │   └── TaskError              64  the code of a task breaks the protocol of tasks
    ├── DataError                  65  a table, job file, model folder or checkpoint cannot be used as it is
    │   ├── ConfigError            65  the job file (or a --set) is wrong; it is a UsageError, too
    │   ├── TableError             65  a table cannot be read
    │   │   └── Unavailable        65  a file cannot be fetched: no permission, no connection, removed
    │   └── FingerprintError       65  the output or run folder belongs to another job
    ├── TooManyErrors               4  more rows failed than the job allows
    ├── Diverged                    5  the loss was not finite several times in a row
    ├── LimitReached                6  a limit of cost or tokens was reached; finished rows are kept
    ├── OutputError                73  the output cannot be created
    ├── StorageError               74  reading or writing failed midway (disk full, folder removed)
    │   └── AccessError            73  a storage refuses access: credentials, permission, bucket or region
    ├── Locked                     75  another writer holds the output or the run
    ├── LeaseLost                  76  another writer took over the output or the run
    ├── UnsafeError                77  refused: loading the input could run code
    ├── MissingExtra               64  an optional library is not installed
    ├── RankFailed                 70  a process of a launched group failed
    ├── EngineFailed               70  an engine in an interpreter of its own does not start, or breaks the protocol
    ├── OutOfMemory                70  a rank ran out of memory; smaller micro-batches are tried next
    ├── RowErrors                  70  rows of a batch cannot be used; scoring makes error rows of them
    └── Interrupted            130/143  stopped by SIGINT or SIGTERM, after saving
        ├── StopAsked             143  stopped by the file `stop` in the run folder, after saving
        └── MoreRoom              143  ranks stopped, after saving, so that more of them can start

Messages say what happened, where (file, row, key, rank), and what to do. `TorchlakeError` is a `ValueError`, so callers
of the Python API may catch the standard type.
"""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec


class TorchlakeError(ValueError):
    """The base class; `exit_code` is the exit status of the command line."""

    exit_code = 70


class UsageError(TorchlakeError):
    exit_code = 64


class PortTaken(UsageError):
    """Another server listens on the port."""

    exit_code = 2


class TaskError(UsageError):
    """The code of a task breaks the protocol of `torchlake.tasks`; the message names the task and the method."""


class RowErrors(TorchlakeError):
    """Some rows of a batch cannot be used, the others can; a task's `collate` raises it."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)
        "{position in the batch: reason}"


class MissingExtra(UsageError):
    """An optional library is missing; the message has the pip command that installs it."""


class DataError(TorchlakeError):
    exit_code = 65


class ConfigError(DataError, UsageError):
    """A job file or an override is wrong; the message names file, line and nearest key."""


class TableError(DataError):
    """A table cannot be read; the message names file, column or row."""


class Unavailable(TableError):
    """A file cannot be fetched: no permission, no connection, or it was removed. Its content may be intact."""


class FingerprintError(DataError):
    """The folder belongs to another job; the message lists the differences."""


class TooManyErrors(TorchlakeError):
    exit_code = 4


class Diverged(TorchlakeError):
    exit_code = 5


class LimitReached(TorchlakeError):
    """A limit of cost or tokens was reached, the job's own or the endpoint's; the same command continues."""

    exit_code = 6


class OutputError(TorchlakeError):
    exit_code = 73


class StorageError(TorchlakeError):
    exit_code = 74


class AccessError(StorageError):
    """A storage refuses access, which a retry does not change: credentials, permission, bucket or region."""

    exit_code = 73


class Locked(TorchlakeError):
    exit_code = 75


class LeaseLost(TorchlakeError):
    exit_code = 76


class UnsafeError(TorchlakeError):
    exit_code = 77


class RankFailed(TorchlakeError):
    """A rank of a launch failed. `rank` failed first, with `traceback`.

    `signal` is the number of the signal that killed it; None if it raised an exception.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "", signal: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal = signal


class EngineFailed(TorchlakeError):
    """An engine in an interpreter of its own did not start several times, or broke the protocol."""


class OutOfMemory(TorchlakeError):
    """One of several ranks ran out of memory; all ranks start again with smaller micro-batches."""


class Interrupted(TorchlakeError):
    """The job was stopped on request; the same command continues it."""

    def __init__(self, message: str, *, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Raised by the command line's signal handler, at any line of the main thread.

    Like KeyboardInterrupt it is not an Exception, so that code that turns a failure into another error or continues
    without a result (here and in libraries) does not mistake the signal for that failure. `signum` is SIGPIPE if the
    reader of standard error is gone.
    """

    def __init__(self, message: str = "", *, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signum


class StopAsked(Interrupted):
    """The file `stop` in the run folder stopped the job; the same command continues it."""


class MoreRoom(Interrupted):
    """More ranks can run: the ranks saved and stopped, and `train` starts again with more of them."""


def pip_install(*requirements: str) -> str:
    """Return the command that installs `requirements` where torchlake runs, for messages.

    An extra, as in "torchlake[spark]", adds its libraries to the torchlake that is installed, from a clone too. It is
    "pip install ..." if the shell's pip belongs to this Python; otherwise the command names this Python.
    """
    # Without the hooks of `importlib.util.find_spec`: setuptools takes a search for pip for its start, and from then on
    # leaves `import distutils` to Python, which breaks the libraries that import setuptools later.
    if PathFinder.find_spec("pip") is None:
        command = f"uv pip install --python {shlex.quote(sys.executable)}"
    elif os.path.dirname(shutil.which("pip") or "") == os.path.dirname(sys.executable):
        command = "pip install"
    else:
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join([command, *map(shlex.quote, requirements)])


def need_library(library: str, extra: str, what: str) -> None:
    """Raise MissingExtra if a library is not installed; `what` needs it, and an extra of torchlake installs it."""
    if find_spec(library) is None:
        raise MissingExtra(
            f"{what} needs the library {library.replace('_', '-')!r}, which is not installed: "
            f"{pip_install(f'torchlake[{extra}]')}"
        )


def stopped_by(signum: int) -> str:
    """Return in words which signal stopped a job."""
    return f"Stopped by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}"


_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", NCCL's "Cuda failure 'out of memory'", MPS, HIP
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "cannot allocate memory",  # the operating system
    "not enough memory",  # the same on Windows
    "unable to allocate",  # numpy
    "failed to cuda malloc",  # NCCL
    "std::bad_alloc",
    "status_alloc_failed",  # cuBLAS, cuSOLVER, cuDNN, cuSPARSE
    "cublas_status_not_initialized",  # cublasCreate without memory for its workspace
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or a cause of it, reports that a machine or device ran out of memory."""
    cause: BaseException | None = error
    while cause is not None:
        message = str(cause).lower()
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if any(phrase in message for phrase in _OUT_OF_MEMORY):
            return True
        cause = cause.__cause__
    return False
