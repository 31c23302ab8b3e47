"""Ranks by TorchTrainer of Ray Train: it places, shows and ends the workers, and in each a child process is the rank.

Ray Train gives each worker its rank; rank 0 holds a port and sends its address to all. A worker raises the failure of
its rank as plain values, so the first one is found as for any launch. `NEVER` says what is missing.
Price: Ray Train's own workers import torch and form a process group too, about 20 s for two on two cores.
"""

import signal
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import ray

from torchlake.engines._ray_launch import RankJob
from torchlake.errors import Interrupted, RankFailed, UsageError
from torchlake.processes.children import Children
from torchlake.processes.environment import rank_variables, thread_variables
from torchlake.processes.ranks import CAUSES, death
from torchlake.processes.remote import Driver, held_node, rank_environment
from torchlake.processes.serialization import Failure, rebuild, unpack

NEVER = {
    "output": "Ray Train keeps what workers print in their log files, `ray logs` shows them",
    "giving_up": "where another Ray runs than the one that was started here, Ray Train waits for room without end",
    "grace": "Ray Train ends workers of an interrupted run without asking them",
    "several_gpus_for_a_rank": "Ray Train shows every worker all GPUs of its machine, and LOCAL_RANK numbers them",
}
GRACE_S = 5.0  # for a rank whose worker Ray Train has ended


class RankError(Exception):
    """A rank's failure as plain values, which any process can read."""


def launch_with_torch_trainer(job: RankJob) -> Any:
    """Rank 0's value. `Engine.launch` says what this raises."""
    if job.share.gpus > 1:
        raise UsageError(f"gpus_per_process is {job.share.gpus:g}; TorchTrainer gives a rank one GPU.")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    with tempfile.TemporaryDirectory(prefix="torchlake-ray-train-") as folder:
        trainer: Any = TorchTrainer(
            cast("Any", _run_rank),  # returns a value, which its types do not know of yet
            train_loop_config={"job": job, "driver": Driver.here()},
            scaling_config=ScalingConfig(
                num_workers=job.number,
                use_gpu=job.share.gpus > 0,
                resources_per_worker=job.share.amounts,
                placement_strategy=job.strategy,
            ),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=0)),
        )
        try:
            return unpack(trainer.fit().return_value)
        except (KeyboardInterrupt, Interrupted, SystemExit) as stop:  # Ray Train leaves by sys.exit at SIGINT
            signum = stop.exit_code - 128 if isinstance(stop, Interrupted) else int(signal.SIGINT)
            raise Interrupted(f"stopped by {signal.Signals(signum).name}", signum=signum) from stop
        except TrainingFailedError as error:
            raise _first_of(error) from error


def _first_of(error: Exception) -> Exception:
    """The failure of the rank that failed first, as far as Ray Train knows of it."""
    found = []
    for rank, one in getattr(error, "worker_failures", {}).items():
        cause = one
        while cause is not None and not isinstance(cause, RankError):
            cause = getattr(cause, "_base_exc", None) or getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            is_cause, failure = cause.args
            found.append((not is_cause, failure["when"], rank, Failure(**failure)))
    if not found:
        lost = min(getattr(error, "worker_failures", {}), default=0)
        return RankFailed(f"Ray Train ended the ranks: {error}", rank=lost)
    _, _, rank, failure = min(found, key=lambda one: one[:3])
    return rebuild(failure, rank=rank, who="rank")


def _run_rank(config: Mapping[str, Any]) -> bytes | None:
    """In a worker of Ray Train: the rank as a child process. Its packed value; raises RankError."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    job, driver, context = config["job"], config["driver"], get_context()
    driver.check()
    rank, local, peers = context.get_world_rank(), context.get_local_rank(), context.get_local_world_size()
    machines = [-1] * context.get_world_size()
    machines[rank - local : rank - local + peers] = [context.get_node_rank()] * peers  # the others are elsewhere
    with held_node(ray.util.get_node_ip_address(), None) as (own, holder):
        master, port = broadcast_from_rank_zero((own.address, own.port))
        ranks = rank_variables(rank, machines=machines, master=master, port=port, interface=own.interface)
        variables = thread_variables(max(1, int(job.share.cpus))) | ranks
        environment, descriptors = rank_environment(variables, holder)
        with Children(grace_s=GRACE_S, **driver.setting()) as children:
            children.start(rank, "rank", job.payload, environment, descriptors)
            return _outcome(children, rank)


def _outcome(children: Children, rank: int) -> bytes | None:
    value = None
    while True:
        _, kind, said = children.events.get()
        if kind == "value":
            value = said
        elif kind == "error":
            raise RankError(False, asdict(unpack(said)))
        elif kind == "exit":
            if value is None:
                raise RankError(-said in CAUSES, asdict(death(rank, said)))
            return value if rank == 0 else None
