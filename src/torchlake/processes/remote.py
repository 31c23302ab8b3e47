"""Start children on other machines: give them what they need from the driver, and bring back their output."""

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any

from torchlake.errors import RankFailed
from torchlake.processes.children import Children
from torchlake.processes.chunk_process import ChunkProcess
from torchlake.processes.environment import (
    MASTER_FD,
    child_environment,
    interface_of,
    rank_variables,
    reserve_port,
    thread_variables,
)
from torchlake.processes.hardware import visible_devices
from torchlake.processes.serialization import Failure, to_failure

OUTPUT_WAIT_S = 2.0  # for the remaining output of processes that have exited

Send = Callable[[int, bytes], None]
"""A function that gets a stream (1: stdout, 2: stderr) and complete lines."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The process that started the job: its module path, working directory and versions."""

    path: tuple[str, ...]
    folder: str
    python: str
    torchlake: str

    @classmethod
    def here(cls) -> "Driver":
        """Return the description of this process."""
        return cls(
            path=tuple(os.path.abspath(entry) for entry in sys.path),
            folder=os.getcwd(),
            python=_python(),
            torchlake=version("torchlake"),
        )

    def check_versions(self) -> None:
        """Raise RankFailed if this process has another Python or torchlake than the driver."""
        for what, here, there in (
            ("Python", _python(), self.python),
            ("torchlake", version("torchlake"), self.torchlake),
        ):
            if here != there:
                raise RankFailed(
                    f"{platform.node()} has {what} {here}, but the driver has {what} {there}; functions cannot be sent "
                    "between them. Install the same version on all machines of the cluster.",
                    rank=0,
                )

    def version_failure(self) -> Failure | None:
        """Return the failure of `check_versions`, or None."""
        try:
            self.check_versions()
        except RankFailed as error:
            return to_failure(error)
        return None

    def child_options(self) -> dict[str, Any]:
        """Return `path` and `folder` for `Children` here: this process's modules, then the driver's if they exist."""
        here = [os.path.abspath(entry) for entry in sys.path]
        there = [entry for entry in self.path if entry not in here and os.path.exists(entry)]
        return {"path": here + there, "folder": self.folder if os.path.isdir(self.folder) else None}

    def chunk_process(
        self,
        payload: bytes,
        variables: Mapping[str, str],
        gpus: Sequence[str] | None,
        *,
        idle_s: float | None = None,
        output: tuple[int, int] | None = None,
    ) -> ChunkProcess:
        """Return a running ChunkProcess in this process's environment, updated with `gpus` and `variables`."""
        children = Children(output=output, **self.child_options())
        return ChunkProcess(payload, child_environment(variables, gpus), children, idle_s=idle_s).__enter__()


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where one rank runs."""

    address: str
    "The address at which other machines reach this machine."
    port: int
    "A reserved port at that address, for the rendezvous."
    interface: str | None
    gpus: tuple[str, ...] | None
    "The devices that the engine granted, as in CUDA_VISIBLE_DEVICES; None: the engine does not grant devices."


@contextmanager
def reserve_node(address: str, gpus: Sequence[str] | None) -> Iterator[tuple[Node, int]]:
    """Yield this machine as the node of a rank, and the file descriptor of its reserved port."""
    with reserve_port(address) as holder:
        host, port = holder.getsockname()[:2]
        granted = None if gpus is None else tuple(gpus)
        yield Node(address=address, port=port, interface=interface_of(host), gpus=granted), holder.fileno()


def group_variables(nodes: Sequence[Node], threads: int) -> tuple[list[int], list[dict[str, str]]]:
    """Assign ranks to nodes so that the ranks of a machine are consecutive.

    Returns, for each rank, its index in `nodes` and its variables, with `threads` cores each. Raises UsageError as
    `visible_devices`.
    """
    addresses = list(dict.fromkeys(node.address for node in nodes))
    order = sorted(range(len(nodes)), key=lambda index: (addresses.index(nodes[index].address), index))
    machines = [addresses.index(nodes[index].address) for index in order]
    master = nodes[order[0]]
    result = []
    for rank, index in enumerate(order):
        node = nodes[index]
        variables = thread_variables(threads) | rank_variables(
            rank, machines=machines, master=master.address, port=master.port, interface=node.interface
        )
        if node.gpus:
            machine = (nodes[other] for other in order if nodes[other].address == node.address)
            variables["CUDA_VISIBLE_DEVICES"] = visible_devices([one.gpus for one in machine if one.gpus is not None])
        result.append(variables)
    return order, result


def rank_environment(variables: Mapping[str, str], port_descriptor: int) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the environment of a rank here and the file descriptors that it inherits: for rank 0, the port's."""
    if variables["RANK"] != "0":
        return child_environment(variables), ()
    return child_environment({**variables, MASTER_FD: str(port_descriptor)}), (port_descriptor,)


def _python() -> str:
    return platform.python_version().rpartition(".")[0]


@contextmanager
def capture_output(send: Send) -> Iterator[tuple[int, int]]:
    """Yield file descriptors for the stdout and stderr of children; pass what they write to `send`."""
    pipes = [os.pipe() for _ in (1, 2)]
    threads = [
        threading.Thread(target=_pass_on, args=(read, stream, send), daemon=True)
        for stream, (read, _) in enumerate(pipes, start=1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield pipes[0][1], pipes[1][1]
    finally:
        for _, write in pipes:
            os.close(write)
        for thread in threads:
            thread.join(OUTPUT_WAIT_S)


def drain(queue: "SimpleQueue[Any]") -> list[Any]:
    """Wait for one item, and return it with all others in the queue."""
    items = [queue.get()]
    while not queue.empty():
        items.append(queue.get())
    return items


def print_output(stream: int, lines: bytes, *, stdout_to_stderr: bool = False) -> None:
    """Print lines on this process's stdout or stderr (in a notebook, a text stream); ignore a closed stream."""
    file = sys.stderr if stdout_to_stderr or stream == 2 else sys.stdout
    if file is not None:
        with suppress(ValueError, OSError):
            file.write(lines.decode(errors="replace"))
            file.flush()


def _pass_on(descriptor: int, stream: int, send: Send) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        rest = b""
        while data := pipe.read(1 << 16):
            lines, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                send(stream, lines + newline)
        if rest:
            send(stream, rest + b"\n")
