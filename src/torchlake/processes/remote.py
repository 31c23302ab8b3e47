"""Children on other machines: what is needed of the driver to start them there, and what their ranks print."""

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torchlake.errors import RankFailed
from torchlake.processes.environment import (
    MASTER_FD,
    RANK_VARIABLES,
    held_port,
    interface_of,
    rank_variables,
    thread_variables,
    visible_to_all,
)

LAST_WORDS_S = 2.0  # for the last words of processes that have ended

Send = Callable[[int, bytes], None]
"""Takes a stream (1: stdout, 2: stderr) and whole lines."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The process that started the job: where it runs, where it finds modules, and its versions."""

    path: tuple[str, ...]
    folder: str
    python: str
    torchlake: str

    @classmethod
    def here(cls) -> "Driver":
        """This process."""
        return cls(
            path=tuple(os.path.abspath(entry) for entry in sys.path),
            folder=os.getcwd(),
            python=_python(),
            torchlake=version("torchlake"),
        )

    def check(self) -> None:
        """Raise RankFailed when functions cannot travel from the driver to this process."""
        for what, here, there in (
            ("Python", _python(), self.python),
            ("torchlake", version("torchlake"), self.torchlake),
        ):
            if here != there:
                raise RankFailed(
                    f"{platform.node()} has {what} {here} and the driver {what} {there}; functions cannot travel "
                    "between them. Install the same version on all machines of the cluster.",
                    rank=0,
                )

    def setting(self) -> dict[str, Any]:
        """`path` and `folder` of children here: this process's modules, then the driver's as far as they exist here."""
        here = [os.path.abspath(entry) for entry in sys.path]
        there = [entry for entry in self.path if entry not in here and os.path.exists(entry)]
        return {"path": here + there, "folder": self.folder if os.path.isdir(self.folder) else None}


@dataclass(frozen=True, kw_only=True)
class Node:
    """The place of one rank, as its own machine sees it."""

    address: str
    "Of its machine, as the other machines reach it."
    port: int
    "A free one that it holds at that address, for ranks to meet at."
    interface: str | None
    gpus: tuple[str, ...] | None
    "The devices that the engine granted, in CUDA's words; None where it grants none."


@contextmanager
def held_node(address: str, gpus: Sequence[str] | None) -> Iterator[tuple[Node, int]]:
    """This machine as the place of a rank, and the open file that holds its port."""
    with held_port(address) as holder:
        place = holder.getsockname()
        node = Node(
            address=address,
            port=place[1],
            interface=interface_of(place[0]),
            gpus=None if gpus is None else tuple(gpus),
        )
        yield node, holder.fileno()


def group_variables(nodes: Sequence[Node], threads: int) -> list[dict[str, str]]:
    """The variables of each rank of a group in these places, with `threads` cores for each; ranks of one machine follow
    each other. Raises UsageError for GPUs that ranks cannot use, as `visible_to_all` says."""
    addresses = list(dict.fromkeys(node.address for node in nodes))
    machines = [addresses.index(node.address) for node in nodes]
    result = []
    for rank, node in enumerate(nodes):
        variables = thread_variables(threads) | rank_variables(
            rank, machines=machines, master=nodes[0].address, port=nodes[0].port, interface=node.interface
        )
        shares = [other.gpus for other in nodes if other.address == node.address and other.gpus is not None]
        if node.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = visible_to_all(shares)
        result.append(variables)
    return result


def own_environment(variables: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """This process's environment, but for what says that it is a rank, with `variables` laid over it."""
    result = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    if gpus is not None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**result, **variables}


def rank_environment(variables: Mapping[str, str], holder: int) -> tuple[dict[str, str], tuple[int, ...]]:
    """The environment of a rank here, and the open files that it inherits: rank 0 that of the port."""
    if variables["RANK"] != "0":
        return own_environment(variables), ()
    return own_environment({**variables, MASTER_FD: str(holder)}), (holder,)


def _python() -> str:
    return platform.python_version().rpartition(".")[0]


@contextmanager
def captured(send: Send) -> Iterator[tuple[int, int]]:
    """Two open files for children to print to, as their stdout and stderr."""
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
            thread.join(LAST_WORDS_S)


def show(stream: int, lines: bytes, *, stdout_to_stderr: bool = False) -> None:
    """Print lines on this process's own stream; in a notebook that is no file but takes text. A stream that is closed,
    or a pipe that its reader has left (`| head`), takes no more and stops nothing."""
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
