"""Processes for tests that start in milliseconds: forks of one that has imported everything and computed nothing.

A fresh Python needs 4 to 8 seconds of CPU to import torch, transformers and torchlake. Where the start of a process is
not what a test is about, it takes a fork of the server here: one server for all processes of a test session, started
by the first that asks and gone with the session. A fork has the environment, folder, modules' path and file
descriptors that its caller names, may be killed like a machine that loses its power, and computes on one thread, so
that equal jobs give equal bytes. Run as a script this file is the server.

    start(function, *args)       a function of a module, in a process of its own
    run_script(text, arguments)  as `python -c`
    `children_are_forked`        the local engine's workers and ranks, and renderers of chat templates, are forks, too
"""

import atexit
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

ALONE = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHLAKE_PROGRESS": "0",
    # transformers imports DeepSpeed, where accelerate is installed too, as it writes a model; it imports MLflow.
    "DS_ACCELERATOR": "cpu",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"Libraries read these when they are imported, so the server starts with them."
PRELOADED = (
    "torchlake.training.loop",
    "torchlake.training.train",
    "torchlake.scoring.predict",
    "torchlake.scoring.workers.chunks",
    "torchlake.evaluation.evaluate",
    "torchlake.runtimes.varlen",
    "torchlake.runtimes.eager",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "torchlake.strategies.ddp",
    "torchlake.strategies.fsdp",
    "torchlake.tasks.text_classification",
    "torchlake.tasks._rendering_process",
    "transformers.utils.chat_template_utils",
    "torch.distributed.algorithms.join",
    "deepspeed",
    "peft",
    "deltalake",
    "obstore.store",
    "s3fs",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
    "huggingface_hub.hf_api",
    "sklearn.metrics",
    "pandas",
    "moto.server",
    "moto.s3.responses",
    "torchmetrics",
    "narwhals.plugins",
    "torchlake.cli.main",
    "torchlake.tuning.tune",
    "torchlake.outputs.targets.delta",
    "torchlake.outputs.targets.hub",
    "torchlake.outputs.targets.iceberg",
    "torchlake.outputs.targets.object_folder",
    "torchlake.tables.sources.delta",
    "torchlake.tables.sources.iceberg",
    # The tests' own modules whose functions are called in forks.
    "exactly_once",
    "misbehaving",
    "sink_jobs",
    "tiny",
    "training_runs",
    "tuning_runs",
)
"Imported, but not used before a fork: the threads that a library starts when it is used would not be in the fork."
MAIN = "import sys; from torchlake.cli.main import main; sys.exit(main())"
"The script that is the command line."
_forking = False
SERVER = "TORCHLAKE_TEST_FORKS"
"Names the folder of the session's server: its socket, its lock and its log."


class Process:
    """A fork of the server, as its caller knows it: like `subprocess.Popen`, as far as tests need one.

    One that its caller forgets is killed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._descriptor: int | None = connection.detach()
        self._code: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.pid = self._number(None)

    def wait_for_end(self, timeout: float | None = None) -> None:
        """Wait until it has ended. Its process id is not used again before `wait`. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            self._code = self._number(timeout)

    def wait(self, timeout: float | None = None) -> int:
        """Wait as above and return its exit code, negative for a signal."""
        self.wait_for_end(timeout)
        self.__del__()
        assert self._code is not None
        return self._code

    def poll(self) -> int | None:
        """Return its exit code, None before it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait_for_end(0.0)
        return self._code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self, timeout: float | None) -> int:
        """Read a line from the server."""
        assert self._descriptor is not None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout or 0.0)
            byte = os.read(self._descriptor, 1)
            if not byte:
                raise RuntimeError(f"the server of forks has ended; {os.environ[SERVER]}/log says why")
            line += byte
        return int(line)

    def __del__(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def start(
    function: Callable[..., Any] | str,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: Sequence[str] | None = None,
    folder: str | None = None,
    files: Mapping[int, int] | None = None,
) -> Process:
    """Call a function, given by itself or as "module:name", in a fork. It exits with 0, or 1 after an exception.

    `environment`, `path` (of modules) and `folder` are those of this process if they are not given. `files` are the
    file descriptors that the fork has, to those of this process; stdin is empty, stdout and stderr are inherited.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    wanted = {1: 1, 2: 2, **(files or {})}
    request = {
        "function": name,
        "args": pickle.dumps(args),
        "forking": _forking,
        "environment": dict(os.environ if environment is None else environment),
        "path": [os.path.abspath(entry) for entry in (sys.path if path is None else path)],
        "folder": os.getcwd() if folder is None else folder,
        "files": list(wanted),
    }
    body = pickle.dumps(request)
    connection = _connect()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], list(wanted.values()))
    connection.sendall(body)
    return Process(connection)


def run_script(
    text: str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    path: Sequence[str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python -c text *arguments` does, in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(
            _script, text, list(arguments), environment=environment, path=path, files={1: out.fileno(), 2: err.fileno()}
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(["python", "-c", text, *arguments], code, *printed)


def _script(text: str, arguments: list[str]) -> None:
    sys.argv[:] = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


@contextmanager
def children_are_forked() -> Iterator[None]:
    """Inside, workers and ranks of the local engine and renderers are forks, also in the forks of this process."""
    global _forking
    from torchlake.processes import children
    from torchlake.tasks import _rendering

    before = _forking, children.start_python, children.wait_for_end, _rendering.start_process
    _fork_children()
    try:
        yield
    finally:
        _forking, children.start_python, children.wait_for_end, _rendering.start_process = before


def _fork_children() -> None:
    global _forking
    from torchlake.processes import children
    from torchlake.tasks import _rendering

    _forking = True
    children.start_python = _start_child  # type: ignore[assignment]
    real = children.wait_for_end

    def wait_for_end(process: Any) -> None:
        """Wait for a fork; for a process that another module starts, too, which may import this function only now."""
        Process.wait_for_end(process) if isinstance(process, Process) else real(process)

    children.wait_for_end = wait_for_end
    _rendering.start_process = _start_renderer  # type: ignore[assignment]


def _start_child(
    numbers: tuple[int, int, int], path: Sequence[str], *, descriptors: tuple[int, ...], **options: Any
) -> Process:
    """Stand in for `torchlake.processes.children.start_python`."""
    descriptor, _, death_signal = numbers
    files = {number: number for number in (descriptor, *descriptors)}
    files |= {stream: options[name] for stream, name in ((1, "stdout"), (2, "stderr")) if options[name] is not None}
    return start(
        _child,
        descriptor,
        death_signal,
        environment=options["environment"],
        path=path,
        folder=options["folder"],
        files=files,
    )


def _start_renderer() -> Process:
    """Stand in for `torchlake.tasks._rendering.start_process`."""
    (read, stdin), (stdout, write) = os.pipe(), os.pipe()
    process = start("torchlake.tasks._rendering_process:serve", files={0: read, 1: write})
    for descriptor in (read, write):
        os.close(descriptor)
    process.stdin, process.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
    return process


def _child(descriptor: int, death_signal: int) -> None:
    from torchlake.processes.child import main

    main(descriptor, os.getppid(), death_signal)


def _connect() -> socket.socket:
    """Return a connection to the session's server, which is started if there is none."""
    address = str(Path(os.environ[SERVER]) / "socket")
    connection = socket.socket(socket.AF_UNIX)
    with suppress(FileNotFoundError, ConnectionRefusedError):
        connection.connect(address)
        return connection
    start_server()
    connection.connect(address)
    return connection


def start_server() -> None:
    """Start the session's server, if no process has: it takes 10 seconds."""
    home = Path(os.environ[SERVER])
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "started").exists():
            return
        variables = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(home / "socket"), (home / "session").read_text()]
        with open(home / "log", "wb") as log:
            done = subprocess.run(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        assert done.returncode == 0, (home / "log").read_text()
        (home / "started").touch()


def for_speed() -> Iterator[tuple[Any, str, Any]]:
    """Yield modules with names and values that every process of the tests sets; without them the suite takes minutes
    more. Pages have no pictures and label hints, and their intervals come from few resamples."""
    for module in ("reporting.figures", "evaluation.sections.label_hints"):
        yield importlib.import_module(f"torchlake.{module}"), "find_spec", lambda library: None
    for module in ("embeddings", "labeled", "perplexity", "preferences", "sections.spans", "sections.sums"):
        yield importlib.import_module(f"torchlake.evaluation.{module}"), "RESAMPLES", 20
    yield importlib.import_module("torchlake.evaluation.labeled"), "RESAMPLES_OF_TASKS", 20


def open_session() -> tempfile.TemporaryDirectory[str]:
    """Have the processes of this session share a server, which ends with this process."""
    home = tempfile.TemporaryDirectory(prefix="torchlake-forks-")
    (Path(home.name) / "session").write_text(str(os.getpid()))
    os.environ[SERVER] = home.name
    return home


def serve(address: str, session: int) -> None:
    """Fork a process for each connection; write its pid and, when it has ended, its exit code.

    A fork whose connection is closed is killed, with its process group. The server ends with the process `session`.
    """
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # an extra that is not installed: `make gpu` runs without them
            importlib.import_module(name)
    # What every training and page would compute once more: facts of the machine, a template, names of weights.
    importlib.import_module("torchlake.reporting.doctor").doctor()
    importlib.import_module("torchlake.reporting.page")._template()
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")
    for module, name, value in for_speed():
        setattr(module, name, value)
    # torch would take its operators apart one by one at the end of every fork.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    if os.fork():
        os._exit(0)  # who started the server waits for this one
    over = os.pidfd_open(session)
    forks: dict[socket.socket, Fork] = {}
    while True:
        ends = {fork.descriptor: connection for connection, fork in forks.items() if not fork.ended}
        ready, _, _ = select.select([listener, over, *forks, *ends], [], [])
        if over in ready:
            os._exit(0)
        for connection in {ends[one] for one in ready if one in ends}:
            forks[connection].tell_end(connection)
        for connection in [one for one in ready if one in forks]:  # its caller has seen the end, or has ended itself
            forks.pop(connection).clear()
            connection.close()
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            pid = os.fork()
            if pid == 0:
                for other in (listener, connection, *forks):
                    other.close()
                _run(request, files)
            for file in files:
                os.close(file)
            forks[connection] = Fork(pid=pid, descriptor=os.pidfd_open(pid))
            with suppress(OSError):
                connection.sendall(b"%d\n" % pid)


@dataclass
class Fork:
    """A fork, as the server knows it."""

    pid: int
    descriptor: int
    ended: bool = False

    def tell_end(self, connection: socket.socket) -> None:
        """Write the exit code of one that has ended; it stays a zombie, so that its process id is not used again."""
        self.ended = True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with suppress(OSError):
            connection.sendall(b"%d\n" % code)

    def clear(self) -> None:
        """Kill its process group and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 8, 16)
    size, body = int.from_bytes(head, "big"), bytearray()
    while len(body) < size:
        body += connection.recv(size - len(body))
    return pickle.loads(bytes(body)), files


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the process that was asked for."""
    global _forking
    code = 1
    try:
        os.setsid()
        # First out of the way, above all wanted numbers: one of these may be that of another file.
        above = max(request["files"], default=0) + 1
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(moved, request["files"], strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        os.chdir(request["folder"])
        # Read when it is imported, which was in the server.
        if catalog := sys.modules.get("pyiceberg.catalog"):
            catalog._ENV_CONFIG = sys.modules["pyiceberg.utils.config"].Config()  # type: ignore[attr-defined]
        if request["forking"]:
            _fork_children()
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(*pickle.loads(request["args"]))
        code = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the end of Python does
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
