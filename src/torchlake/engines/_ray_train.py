"""Launch ranks with Ray Train's TorchTrainer, which places, displays and ends workers; each runs a rank as a child.

Ray Train numbers the workers; rank 0 reserves a port and broadcasts its address. A worker raises the failure of its
rank as plain values, so that the first one is found as in any launch. `UNSUPPORTED` lists what Ray Train cannot do.
Cost: Ray Train's own workers import torch and form a process group, which takes about 20 s for two workers on two
cores.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import ray

from torchlake.engines._ray_launch import RankJob
from torchlake.errors import Interrupted, RankFailed, UsageError
from torchlake.processes.children import Children
from torchlake.processes.environment import rank_variables, thread_variables
from torchlake.processes.interrupts import restored_interrupt
from torchlake.processes.ranks import exit_failure, is_crash, to_interrupted
from torchlake.processes.remote import Driver, rank_environment, reserve_node
from torchlake.processes.serialization import Failure, to_exception, unpack

UNSUPPORTED = {
    "output": "Ray Train writes the workers' output to their log files; see `ray logs`",
    "giving_up": "on a cluster that was not started here, Ray Train waits for capacity forever",
    "grace": "Ray Train ends the workers of an interrupted run without a signal to them",
    "several_gpus_for_a_rank": "Ray Train shows every worker all GPUs of its machine, and LOCAL_RANK numbers them",
}
GRACE_S = 5.0  # for a rank whose worker Ray Train ended


class RankError(Exception):
    """A rank's failure as plain values, which any process can unpickle."""


def launch_with_torch_trainer(job: RankJob) -> Any:
    """Run the ranks and return rank 0's value. Raises the errors of `Engine.launch`."""
    if job.share.gpus > 1:
        raise UsageError(f"gpus_per_process is {job.share.gpus:g}, but TorchTrainer gives each rank one GPU.")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    with tempfile.TemporaryDirectory(prefix="torchlake-ray-train-") as folder:
        trainer: Any = TorchTrainer(
            cast("Any", _run_rank),  # its type hints do not allow a return value
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
            # Ray Train leaves its handler in place, for which the first Ctrl-C of a later job ends the process with 0.
            with restored_interrupt():
                return unpack(trainer.fit().return_value)
        except (KeyboardInterrupt, Interrupted) as stop:
            raise to_interrupted(stop) from stop
        except SystemExit as stop:  # Ray Train calls sys.exit on SIGINT
            raise to_interrupted(KeyboardInterrupt()) from stop
        except TrainingFailedError as error:
            raise _first_of(error) from error


def _first_of(error: Exception) -> Exception:
    """Return the failure of the rank that failed first, as far as Ray Train reports it."""
    found = []
    for rank, one in getattr(error, "worker_failures", {}).items():
        cause = one
        while cause is not None and not isinstance(cause, RankError):
            cause = getattr(cause, "_base_exc", None) or getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            crashed, failure = cause.args
            found.append((not crashed, failure["when"], rank, Failure(**failure)))
    if not found:
        lost = min(getattr(error, "worker_failures", {}), default=0)
        return RankFailed(f"Ray Train ended the ranks: {error}", rank=lost)
    _, _, rank, failure = min(found, key=lambda one: one[:3])
    return to_exception(failure, rank=rank, who="rank")


def _run_rank(config: Mapping[str, Any]) -> bytes | None:
    """Run the rank of a Ray Train worker as a child process; return its packed value. Raises RankError."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    job, driver, context = config["job"], config["driver"], get_context()
    driver.check_versions()
    rank, local, peers = context.get_world_rank(), context.get_local_rank(), context.get_local_world_size()
    machines = [-1] * context.get_world_size()
    machines[rank - local : rank - local + peers] = [context.get_node_rank()] * peers  # -1: another machine
    with reserve_node(ray.util.get_node_ip_address(), None) as (own, holder):
        master, port = broadcast_from_rank_zero((own.address, own.port))
        ranks = rank_variables(rank, machines=machines, master=master, port=port, interface=own.interface)
        variables = thread_variables(max(1, int(job.share.cpus))) | ranks
        environment, descriptors = rank_environment(variables, holder)
        with Children(grace_s=GRACE_S, **driver.child_options()) as children:
            children.start(rank, "rank", job.payload, environment, descriptors)
            return _outcome(children, rank)


def _outcome(children: Children, rank: int) -> bytes | None:
    value = None
    while True:
        _, kind, received = children.events.get()
        if kind == "value":
            value = received
        elif kind == "error":
            raise RankError(False, asdict(unpack(received)))
        elif kind == "exit":
            if value is None:
                raise RankError(is_crash(received), asdict(exit_failure(rank, received)))
            return value if rank == 0 else None
