"""Launch the ranks of a training, and restart them until it is finished.

    a rank was killed, hung or failed    from the newest complete checkpoint, at most `train.max_restarts` times
    memory ran out on a rank             with smaller micro-batches
    capacity for more ranks              saved, then continued on as many as there is capacity for (processes: [2, 8])

The number of ranks only changes the order of sums: a step has the same rows on any number (losses agree to 1e-5). Cost
of a restart: some seconds to start processes, and the steps since the last checkpoint (none if ranks were asked to
stop).
"""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io, plugins
from torchlake.checkpoints import location, retention
from torchlake.checkpoints.location import CheckpointStore
from torchlake.checkpoints.store import check_owner
from torchlake.engines import Engine, ProcessRange, process_bounds
from torchlake.errors import Interrupted, MoreRoom, OutOfMemory, RankFailed, StopAsked
from torchlake.failpoints import failpoint
from torchlake.processes.interrupts import announce_interrupt
from torchlake.runs import folder, metrics_log

if TYPE_CHECKING:
    from torchlake.checkpoints.format import Checkpoint

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 30.0
"Seconds between two checks for more capacity: a check queries the cluster, and a success costs a restart."


def run_with_restarts(
    engine: Engine,
    settings: Mapping[str, Any],
    processes: ProcessRange,
    strategy_for: Callable[[int], str],
    store: CheckpointStore,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Launch the ranks until they finish; return rank 0's summary, its `world_size`, and the `steps` of this call.

    `settings` are the fields of `RankSettings` that all attempts share; `strategy_for` returns the strategy for a
    number of ranks. Checkpoints are in `store`; `identity` says which run they belong to. Raises RankFailed listing
    every attempt when all are used up, FingerprintError if `store` belongs to another run, LeaseLost if another launch
    took it over.
    """
    from torchlake.checkpoints import format

    run, max_restarts = Path(settings["run"]), settings["job"].train.max_restarts
    failed: list[str] = []
    first: int | None = None
    launch = ""
    while True:
        if launch:  # a launch that was replaced must not take the store back
            check_owner(store, launch)
        # New for each attempt: in a store elsewhere, a rank of the previous attempt that still runs can no longer
        # publish.
        launch = secrets.token_hex(6)
        # Claimed before it is read: otherwise a rank of the previous attempt could publish a checkpoint after the
        # choice below, and this attempt would train the same steps again.
        location.claim(store, identity, launch)
        # Read again for each attempt: the failed one may have saved, or the newest checkpoint may turn out to be
        # corrupt.
        newest, problems = format.newest(store, launch)
        step = _step_of(newest)
        first = step if first is None else first
        for problem in problems:
            log.warning("%s", problem)
        where = "the beginning" if newest is None else f"step {step:,}"
        # Asked for each attempt, because the machine of a dead rank is gone, and others may have joined.
        number = engine.num_ranks(processes, None)
        log.info("training on %d rank%s from %s; loading the model", number, "s" * (number > 1), where)
        start = {
            **settings,
            "strategy": strategy_for(number),
            "checkpoint": None if newest is None else str(newest.path),
            "attempt": launch,
        }
        try:
            with announce_interrupt(_kept(step)), _watching_capacity(engine, processes, number, run):
                summary: dict[str, Any] = engine.launch(
                    plugins.carried(settings["spec"].task, train_rank),
                    start,
                    processes=number,
                    gpus_per_process=None,
                    name=f"train {run.name}",
                    stop_file=str(run / folder.INTERRUPTED),
                )
            if settings["job"].train.keep_checkpoints is None:
                check_owner(store, launch)
                retention.prune(store, retention.KEPT_AT_THE_END, launch)
            return {**summary, "steps": summary["total_steps"] - first, "world_size": number}
        # Neither this nor OutOfMemory counts as a failure: both start again with other settings. Halving ends at one
        # row, with a UsageError.
        except MoreRoom as request:
            log.info("%s", request)
        except OutOfMemory as error:
            log.warning("%s", error)
        except Interrupted as stop:
            raise _with_what_is_kept(stop, store, launch) from stop.__cause__
        except RankFailed as error:
            failed.append(f"attempt {len(failed) + 1}, from {where}: {str(error).splitlines()[0]}")
            if len(failed) > max_restarts:
                raise _out_of_restarts(failed, max_restarts, store, run, error) from error
            log.warning("%s; starting again", failed[-1])
            folder.remove_half_written(run)


def train_rank(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run one rank of the launch; called by `engine.launch`. `settings` are the fields of `RankSettings`.

    SIGTERM only sets a flag; the loop checks it, and the stop files in the run folder, where it can save. The handler
    must be in place before torch is imported, which takes seconds.
    """
    terminated = threading.Event()
    run = Path(settings["run"])
    reasons = {run / folder.STOP: StopAsked, run / folder.MORE_ROOM: MoreRoom}
    interrupted = run / folder.INTERRUPTED
    if settings["job"].train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    # Raising from the handler could interrupt a collective or a write in the middle; the loop stops between two steps.
    before = signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())

    def stop_requested() -> bool:
        return terminated.is_set() or interrupted.exists() or any(file.exists() for file in reasons)

    from torchlake.training.loop import run_rank
    from torchlake.training.rows import RankSettings

    rank = int(os.environ.get("RANK", "0"))
    with metrics_log.log_file(run / "logs" / f"rank_{rank}.jsonl", rank=rank):
        try:
            failpoint(f"rank{rank}.start")
            return run_rank(RankSettings(**settings), stop_requested)
        except Interrupted as error:
            log.info("rank %d stopped: %s", rank, error)
            # A signal wins over the files: the machine is going away, and a restart for more ranks would be killed with
            # it.
            reason = next((reason for file, reason in reasons.items() if file.exists()), None)
            if reason is None or terminated.is_set() or interrupted.exists():
                raise
            raise reason(str(error)) from error
        except Exception:
            log.exception("rank %d stopped", rank)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _with_what_is_kept(stop: Interrupted, store: CheckpointStore, launch: str) -> Interrupted:
    """Return the error with what is saved, which a rank has said already if it could."""
    from torchlake.checkpoints import format

    if ";" in str(stop):
        return stop
    return Interrupted(f"{stop}; {_kept(_step_of(format.newest(store, launch)[0]))}", signum=stop.exit_code - 128)


def _step_of(checkpoint: "Checkpoint | None") -> int:
    """Return the step of a checkpoint, 0 for none."""
    return 0 if checkpoint is None else int(checkpoint.state["step"])


def _kept(step: int) -> str:
    """Return in words what is saved, by the step of the newest checkpoint."""
    return f"the checkpoint of step {step:,} is kept" if step else "nothing was saved yet"


@contextmanager
def _watching_capacity(engine: Engine, processes: ProcessRange, number: int, run: Path) -> Iterator[None]:
    """Ask the `number` ranks that train to stop as soon as there is capacity for more."""
    stop_file, done = run / folder.MORE_ROOM, threading.Event()
    atomic_io.remove([stop_file, run / folder.INTERRUPTED])  # left by a killed launcher
    # At the largest number there is nothing to wait for, and the thread would query the cluster for nothing.
    if number == process_bounds(processes)[1]:
        yield
        return

    def poll() -> None:
        while not done.wait(POLL_INTERVAL_S):
            try:
                found = engine.num_ranks(processes, None, running=number)
            except Exception as error:  # any library's error; training continues
                log.warning("cannot determine whether there is capacity for more ranks: %s", error)
                continue
            if found > number:
                log.info("there is capacity for %d ranks and %d are training: they save and start again", found, number)
                stop_file.touch()
                return

    thread = threading.Thread(target=poll, name="capacity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # Joined before the file is removed: the thread could create it afterwards, and stop the next attempt at its
        # start.
        thread.join()
        atomic_io.remove([stop_file])


def _out_of_restarts(
    attempts: list[str], max_restarts: int, store: CheckpointStore, run: Path, last: RankFailed
) -> RankFailed:
    """Return the RankFailed that lists every attempt."""
    times = "once" if len(attempts) == 1 else f"{len(attempts)} times"
    message = "\n".join(
        [
            f"training failed {times} (train.max_restarts={max_restarts}):",
            *attempts,
            f"Checkpoints are kept in {store}, each rank's log in {run / 'logs'}.",
            "Run the same command again to continue.",
            *([f"\n{last.traceback}"] if last.traceback else []),
        ]
    )
    return RankFailed(message, rank=last.rank, traceback=last.traceback, signal=last.signal)
