"""What can go wrong, as a tree; every leaf knows the exit code the command line ends with.

    TorchlakeError                 70  a fault of ours, or one nobody foresaw
    ├── UsageError                 64  the command or the arguments are off
    ├── DataError                  65  a table, job file, model folder or checkpoint cannot be used as it is
    │   ├── ConfigError            65  the job file (or a --set) is wrong
    │   ├── TableError             65  a table cannot be read as asked
    │   │   └── Unavailable        65  its storage does not give a file: no permission, no connection, gone
    │   └── FingerprintError       65  the output or run folder belongs to another job
    ├── TooManyErrors               4  more rows failed than the job allows
    ├── Diverged                    5  the loss stayed non-finite
    ├── OutputError                73  the output cannot be created
    ├── StorageError               74  reading or writing failed part-way (disk full, folder removed)
    ├── Locked                     75  another writer holds the output or the run
    ├── LeaseLost                  76  another writer took the output over while this one slept
    ├── UnsafeError                77  refused: the input would have to run code to be loaded
    ├── MissingExtra               64  an optional library is not installed
    ├── RankFailed                 70  a process of a launched group failed
    ├── OutOfMemory                70  a rank's memory ran out; smaller micro-batches are tried next
    └── Interrupted            130/143  stopped by SIGINT or SIGTERM after saving what can be saved
        ├── StopAsked             143  stopped by the file `stop` in the run folder, after saving
        └── MoreRoom              143  ranks stopped, after saving, so that more of them can start

Messages are for people: what happened, where (file, row, key, rank), and what to do about it. `TorchlakeError` is a
`ValueError`, so callers of the Python API may catch the standard type.
"""

import signal


class TorchlakeError(ValueError):
    """The root: carries `exit_code`, the status the command line ends with."""

    exit_code = 70


class UsageError(TorchlakeError):
    exit_code = 64


class MissingExtra(UsageError):
    """An optional library is missing; the message holds the pip line that installs it."""


class DataError(TorchlakeError):
    exit_code = 65


class ConfigError(DataError):
    """A job file or an override is wrong; the message names file, line and nearest key."""


class TableError(DataError):
    """A table cannot be read as asked; the message names file, column or row."""


class Unavailable(TableError):
    """A file that the storage does not give: there is no permission, no connection, or it is gone. It may be sound."""


class FingerprintError(DataError):
    """The folder holds the work of another job; the message lists what differs."""


class TooManyErrors(TorchlakeError):
    exit_code = 4


class Diverged(TorchlakeError):
    exit_code = 5


class OutputError(TorchlakeError):
    exit_code = 73


class StorageError(TorchlakeError):
    exit_code = 74


class Locked(TorchlakeError):
    exit_code = 75


class LeaseLost(TorchlakeError):
    exit_code = 76


class UnsafeError(TorchlakeError):
    exit_code = 77


class RankFailed(TorchlakeError):
    """One rank of a launched group failed; `rank` is the first to fail, `traceback` its own words.

    `signal` is the number of the signal that killed it, None when it raised.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "", signal: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal = signal


class OutOfMemory(TorchlakeError):
    """Memory ran out on one of several ranks; all of them begin again with smaller micro-batches."""


class Interrupted(TorchlakeError):
    """The job was asked to stop; running the same command again continues it."""

    def __init__(self, message: str, *, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class StopAsked(Interrupted):
    """The file `stop` in the run folder asked the job to stop; running the same command again continues it."""


class MoreRoom(Interrupted):
    """There is room for more ranks than train: they saved and stopped, and `train` starts them again."""


_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", NCCL's "Cuda failure 'out of memory'", MPS, HIP
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "cannot allocate memory",  # the operating system
    "not enough memory",  # the same on Windows
    "unable to allocate",  # numpy
    "failed to cuda malloc",  # NCCL
    "std::bad_alloc",
    "status_alloc_failed",  # cuBLAS, cuSOLVER, cuDNN, cuSPARSE
    "cublas_status_not_initialized",  # what cublasCreate says when there is no room for its workspace
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the memory of a machine or a device ran out."""
    seen: BaseException | None = error
    while seen is not None:
        words = str(seen).lower()
        if (
            isinstance(seen, MemoryError)
            or type(seen).__name__ == "OutOfMemoryError"
            or any(w in words for w in _OUT_OF_MEMORY)
        ):
            return True
        seen = seen.__cause__
    return False
