"""One model over several devices: this process is rank 0 of a group, and the other ranks follow it.

    rank 0          read, tokenize -> batch -+-> forward -+-> logits -> write the part
                                             |      | collectives
    ranks 1...N-1                 (a pipe)   +-> forward -+-> "done"

Rank 0 is the process that the engine started; it alone reads rows, writes and answers the engine. The others are its
children and get every batch from it, so for the engine, the commit and the log of attempts the group is one process.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.distributed import process_group
from torchlake.errors import UsageError
from torchlake.failpoints import failpoint
from torchlake.models import load as models
from torchlake.models import parallel
from torchlake.processes.children import Children
from torchlake.processes.environment import MASTER_FD, child_environment, interface_of, rank_variables, reserve_port
from torchlake.processes.serialization import describe_exit, pack, unpack
from torchlake.runtimes import Forward
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.runtime_choice import REFERENCE

log = logging.getLogger(__name__)

_NO_CHILD: Any = None
DISAGREE_S = 30.0
"From the first rank's exception to that of the last."
LOAD_S = 3600.0
"For a rank to wait for another one, which may read its weights from a slower disk."
HOST = "127.0.0.1"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


def load_sharded(settings: ScoringSettings, spec: TaskSpec, *, device: str) -> Forward:
    """Load a model over `settings.gpus_per_process` GPUs or, where there are none ("cpu"), ranks.

    By tensor parallelism if the model allows it, else layer by layer. Raises as `models.load_model`, and UsageError if
    the model or this machine does not allow it.
    """
    import torch

    folder, number = Path(settings.model), settings.gpus_per_process
    if device == "cuda" and torch.cuda.device_count() < number:
        raise UsageError(
            f"gpus_per_process={number}: this process sees {torch.cuda.device_count()} GPUs. Ask for fewer, or grant "
            "more to each process."
        )
    reason = parallel.tensor_parallel_refusal(folder, number)
    if reason is None:
        return _Group(settings, spec, device).forward
    if device == "cpu":
        raise UsageError(f"gpus_per_process={number}: {folder}: {reason}, and layers are placed over GPUs only.")
    log.info("%s: %s; its layers are placed over %d GPUs", folder, reason, number)
    return _load(settings, spec, device, parallel.layer_by_layer())


def refuse(folder: Path, number: int, *, on_cpus: bool) -> None:
    """Raise UsageError if `load_sharded` would refuse `number` ranks on CPUs; on GPUs it knows another way."""
    reason = parallel.tensor_parallel_refusal(folder, number) if on_cpus else None
    if reason is not None:
        raise UsageError(
            f"gpus_per_process={number}: {folder}: {reason}, and layers are placed over GPUs only. Leave it out, or "
            "give a number that divides the heads of a model that has a plan."
        )


class _Group:
    """Rank 0 of a group, with its followers."""

    def __init__(self, settings: ScoringSettings, spec: TaskSpec, device: str) -> None:
        import torch

        number = settings.gpus_per_process
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
            payload = pack(partial(make_follower, settings, spec, device))
            self._followers = [
                self._children.start(rank, "worker", payload, child_environment(ranks[rank]))
                for rank in range(1, number)
            ]
            # The store closes the descriptor that it is given.
            os.environ |= ranks[0] | {MASTER_FD: str(os.dup(holder.fileno()))}
            self._run = _join(settings, spec, device)

    def forward(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Run a batch on all ranks. Raises what all of them raised; exits if they differ."""
        for follower in self._followers:
            follower.send((input_ids, attention_mask))
        error: Exception | None = None
        try:
            out = self._run(input_ids, attention_mask)
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


def make_follower(settings: ScoringSettings, spec: TaskSpec, device: str) -> Callable[[Batches], Iterator[str | None]]:
    """Load this rank's part of the model; the worker runs batches and yields the kind of error, or None, of each."""
    run = _join(settings, spec, device)

    def worker(batches: Batches) -> Iterator[str | None]:
        for input_ids, attention_mask in batches:
            error: Exception | None = None
            try:
                run(input_ids, attention_mask)
            except Exception as caught:
                error = caught
                log.warning("rank %s: %s: %s", os.environ["RANK"], _kind(error), error)
            yield _kind(error)

    return worker


def _join(settings: ScoringSettings, spec: TaskSpec, device: str) -> Forward:
    """Join the group that the environment names, and load this rank's part of the model."""
    group = ExitStack().enter_context(process_group(LOAD_S))  # left when the process exits
    run = _load(settings, spec, device, parallel.tensor_parallel(group.world_size))

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        failpoint("forward")
        failpoint(f"forward.rank{group.rank}")
        return run(input_ids, attention_mask)

    return forward


def _load(settings: ScoringSettings, spec: TaskSpec, device: str, placement: Mapping[str, Any]) -> Forward:
    """Load the model as transformers places it, as the runtime `eager`."""
    folder = Path(settings.model)
    model = models.load_model(folder, spec, auto_class=plugins.load("tasks", spec.task).AUTO_CLASS, placement=placement)
    if "device_map" in placement:
        parallel.check_on_gpus(model, folder, settings.gpus_per_process)
    eager = plugins.load("runtimes", REFERENCE)
    if settings.generation is not None:
        made: Forward = eager.generator_of(model, folder, settings.generation)
    else:
        made = eager.forward_of(model, folder, spec, device)
    return made


def _kind(error: Exception | None) -> str | None:
    return None if error is None else type(error).__name__


def _exit(reason: str) -> NoReturn:
    """End this process, and with it its followers, whatever it waits for."""
    log.error("the ranks that share the model stop: %s", reason)
    os._exit(1)
