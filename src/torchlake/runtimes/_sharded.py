"""`eager` over several devices of one process: in parts of every layer, or layer after layer on GPUs.

By tensor parallelism if transformers has a plan for the model: this process is rank 0, and the other ranks follow it.

    rank 0          read, tokenize -> batch -+-> forward -+-> logits -> write the part
                                             |      | collectives
    ranks 1...N-1                 (a pipe)   +-> forward -+-> "done"

Rank 0 is the process that the engine started; it alone reads rows, writes and answers the engine. The others are its
children and get every batch from it. So for the engine, the commit and the log of attempts the group is one process.

If a rank dies, rank 0 exits at once, as if the batch had killed it: it is restarted with its followers, and the chunk
is scored again. No rank waits for a lost one, because rank 0 watches processes, not collectives. An exception is passed
on only if all ranks raised the same, which leaves them in step: rank 0 then halves the batch as without followers. If
they differ, some ranks wait in a collective that never ends; so the group exits after `DISAGREE_S` seconds.

Cost: the imports of a process per device; per batch a message of its token ids and the collectives of the model.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.distributed import process_group
from torchlake.errors import MissingExtra, UsageError, need_library, pip_install
from torchlake.failpoints import failpoint
from torchlake.models import load as models
from torchlake.models.config import tensor_parallel_refusal
from torchlake.models.generation import GenerationOptions
from torchlake.processes.children import Children
from torchlake.processes.environment import MASTER_FD, child_environment, interface_of, rank_variables, reserve_port
from torchlake.processes.serialization import describe_exit, pack, unpack
from torchlake.runtimes import EMPTY, Ended, Forward, Report, Text, Writer, eager

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_NO_CHILD: Any = None
DISAGREE_S = 30.0
"The longest time from the first rank's exception to the last one's."
LOAD_S = 3600.0
"The longest time that a rank waits for another one, which may read its weights from a slower disk."
HOST = "127.0.0.1"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def load_sharded(folder: Path, spec: TaskSpec, *, number: int, device: str) -> Forward:
    """Load a model over `number` GPUs or, where there are none ("cpu"), ranks.

    By tensor parallelism if the model allows it, else layer by layer. Raises the errors of `models.load_model`, and
    UsageError if the model or this machine does not allow it.
    """
    if not _by_tensors(folder, number, device):
        return eager.forward_of(_model(folder, spec, layer_by_layer()), folder, spec, device)
    group = _Group(partial(_join, folder, spec, device, None), number)

    def forward(**batch: np.ndarray) -> np.ndarray:
        scores: np.ndarray = group.run(batch, lambda model: model(**batch))
        return scores

    return forward


def open_sharded_writer(
    folder: Path, spec: TaskSpec, *, number: int, device: str, options: GenerationOptions
) -> Writer:
    """Load a model as `load_sharded` does, for text generation."""
    if not _by_tensors(folder, number, device):
        return eager.writer_of(_model(folder, spec, layer_by_layer()), folder, options)
    return _GroupWriter(_Group(partial(_join, folder, spec, device, options), number))


def _by_tensors(folder: Path, number: int, device: str) -> bool:
    """Return whether every rank gets parts of all layers; else they are placed over GPUs. Raises UsageError."""
    import torch

    if device == "cuda" and torch.cuda.device_count() < number:
        raise UsageError(
            f"gpus_per_process={number}: this process sees {torch.cuda.device_count()} GPUs. Request fewer, or grant "
            "more to each process."
        )
    reason = tensor_parallel_refusal(models.load_config(folder), number)
    if reason is None:
        return True
    if device == "cpu":
        raise UsageError(f"gpus_per_process={number}: {folder}: {reason}, and layers are placed over GPUs only.")
    log.info("%s: %s; its layers are placed over %d GPUs", folder, reason, number)
    return False


class _GroupWriter:
    """The Writer of rank 0; with each step the other ranks get the rows that were added, and make the same step.

    It reports at the end of a step, when all ranks are in step again.
    """

    def __init__(self, group: "_Group") -> None:
        self._group, self._own = group, group.own
        self._added: list[tuple[Any, ...]] = []
        self.refills: bool = self._own.refills

    @property
    def rows(self) -> Sequence[int]:
        """The numbers of the rows that have not ended."""
        return [*self._own.rows, *(one[0] for one in self._added)]

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row."""
        self._added.append((row, ids, options, begun))

    def text(self, row: int) -> Text:
        """Return what is written of a row that has not ended."""
        text: Text = self._own.text(row)
        return text

    def step(self, report: Report) -> None:
        """Make a step on all ranks."""
        message, self._added = {"added": self._added}, []
        report(self._group.run(message, lambda writer: _stepped(writer, **message)))


def _stepped(writer: Writer, *, added: Sequence[tuple[Any, ...]]) -> list[Ended]:
    """Add rows, make a step, and return those that have ended."""
    ended: list[Ended] = []
    for one in added:
        writer.add(*one)
    writer.step(ended.extend)
    return ended


class _Group:
    """Rank 0 of a group, with its followers."""

    def __init__(self, join: Callable[[], Any], number: int) -> None:
        import torch

        threads = max(1, torch.get_num_threads() // number)
        torch.set_num_threads(threads)
        self._reports: SimpleQueue[str | None] = SimpleQueue()
        self._children = Children(stdout_to_stderr=True).__enter__()
        threading.Thread(target=self._listen, name="followers", daemon=True).start()
        with reserve_port(HOST) as holder:
            port, interface = holder.getsockname()[1], interface_of(HOST)
            ranks = [
                rank_variables(rank, machines=[0] * number, master=HOST, port=port, interface=interface)
                | dict.fromkeys(THREADS, str(threads))
                for rank in range(number)
            ]
            payload = pack(partial(make_follower, join))
            self._followers = [
                self._children.start(rank, "worker", payload, child_environment(ranks[rank]))
                for rank in range(1, number)
            ]
            # The store closes the descriptor that it is given.
            os.environ |= ranks[0] | {MASTER_FD: str(os.dup(holder.fileno()))}
            self.own = join()
            "The Forward or the Writer of this rank."

    def run(self, message: Mapping[str, Any], own: Callable[[Any], Any]) -> Any:
        """Send a message to all ranks, and return what `own` does of it here.

        Raises the error that all ranks raised; exits if they differ.
        """
        for follower in self._followers:
            follower.send(message)
        error: Exception | None = None
        try:
            failpoint("forward")
            failpoint("forward.rank0")
            out = own(self.own)
        except Exception as caught:
            error = caught
            self._children.events.put((_NO_CHILD, "failed", None))
        reports = {self._reports.get() for _ in self._followers}
        self._children.events.put((_NO_CHILD, "settled", None))
        if reports != {_kind(error)}:
            _exit(f"rank 0 had {_kind(error) or 'no error'} in a batch, the others {reports}")
        if error is not None:
            raise error
        return out

    def _listen(self) -> None:
        """Pass on the followers' reports; exit if one of them dies, or if the ranks do not fail together."""
        deadline: float | None = None
        failed: dict[int, str] = {}
        while True:
            try:
                wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                child, kind, value = self._children.events.get(timeout=wait_s)
            except Empty:
                _exit("; ".join(failed.values()) or "one rank failed in a batch, another one did not")
            if kind == "settled":
                deadline = None
                continue
            if kind == "result":
                report = unpack(value)
                self._reports.put(report)
                if report is None:
                    continue
            elif kind == "error":
                failed[child.number] = f"rank {child.number} failed: {unpack(value).message}"
            elif kind == "exit" and child.number not in failed:
                _exit(f"rank {child.number} {describe_exit(value)}")
            elif kind in ("ready", "pull"):
                continue
            deadline = deadline or time.monotonic() + DISAGREE_S


def make_follower(join: Callable[[], Any]) -> Callable[[Iterator[dict[str, Any]]], Iterator[str | None]]:
    """Load this rank's part of the model; the worker runs messages, and yields for each the kind of its error, or
    None."""
    own = join()
    run = own if callable(own) else partial(_stepped, own)
    rank = os.environ["RANK"]

    def worker(messages: Iterator[dict[str, Any]]) -> Iterator[str | None]:
        for message in messages:
            error: Exception | None = None
            try:
                failpoint("forward")
                failpoint(f"forward.rank{rank}")
                run(**message)
            except Exception as caught:
                error = caught
                log.warning("rank %s: %s: %s", rank, _kind(error), error)
            yield _kind(error)

    return worker


def _join(folder: Path, spec: TaskSpec, device: str, options: GenerationOptions | None) -> Forward | Writer:
    """Join the group that the environment names, and load this rank's part of the model."""
    group = ExitStack().enter_context(process_group(LOAD_S))  # left when the process exits
    model = _model(folder, spec, tensor_parallel(group.world_size))
    if options is not None:
        return eager.writer_of(model, folder, options)
    return eager.forward_of(model, folder, spec, device)


def _model(folder: Path, spec: TaskSpec, placement: Mapping[str, Any]) -> Any:
    """Load the model as transformers places it, for the runtime `eager`."""
    model = plugins.load("tasks", spec.task).load_model(folder, spec, placement=placement)
    if "device_map" in placement:
        check_on_gpus(model, folder)
    return model


def tensor_parallel(ranks: int) -> Mapping[str, Any]:
    """Return the arguments with which `load_model` lets transformers load this rank's parts; needs a process group."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        raise MissingExtra(
            f"Tensor parallelism needs a newer transformers: {pip_install('torchlake[large]')}"
        ) from error

    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}


def layer_by_layer() -> Mapping[str, Any]:
    """Return the arguments with which `load_model` lets transformers place layers over the GPUs of this process.

    Raises MissingExtra without accelerate, which moves activations from one GPU to the next.
    """
    need_library("accelerate", "large", "Placing layers over several GPUs")
    return {"device_map": "balanced"}


def check_on_gpus(model: "torch.nn.Module", folder: Path) -> None:
    """Raise UsageError if a part is in main memory or, as "meta", on disk, where accelerate places parts that do not
    fit on GPUs."""
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        raise UsageError(
            f"{folder}: the model does not fit into the memory of the process's GPUs: a part is in main memory or on "
            "disk, and every batch would wait for it. Give each process more GPUs."
        )


def _kind(error: Exception | None) -> str | None:
    return None if error is None else type(error).__name__


def _exit(reason: str) -> NoReturn:
    """End this process, and with it its followers, whatever it waits for."""
    log.error("the ranks that share the model stop: %s", reason)
    os._exit(1)
