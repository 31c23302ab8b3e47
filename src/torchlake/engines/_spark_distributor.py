"""Ranks by TorchDistributor, pyspark's own launcher of torchrun. `NEVER` says what is missing."""

import pickle
import sys
from typing import Any

from torchlake.engines._spark_launch import LaunchJob, submitted
from torchlake.engines._spark_session import reason_of
from torchlake.errors import Interrupted, RankFailed
from torchlake.processes.ranks import interrupted
from torchlake.processes.remote import Driver

_UNSAID = "TorchDistributor says that a process failed, not how; its output has the traceback"
NEVER = {
    "the_first_rank_to_fail_is_the_error": _UNSAID,
    "a_rank_that_fails_stops_those_that_wait_for_it": _UNSAID,
    "a_killed_rank_is_named_with_its_signal": _UNSAID,
    "an_error_of_ours_in_a_rank_comes_back_as_itself": _UNSAID,
    "grace": "TorchDistributor's tasks are killed by Spark, and ranks are not asked to stop before",
    "threads": "torchrun sets OMP_NUM_THREADS of its ranks",
}
"What the launcher torch_distributor does not keep of the engines' contract, by its test, and why."


def launch_with_torch_distributor(job: LaunchJob, gpus_per_process: int) -> Any:
    """Rank 0's value, by pyspark's own launcher; `NEVER` says what is missing."""

    def run() -> Any:
        from pyspark.ml.torch.distributor import TorchDistributor

        distributor = TorchDistributor(job.number, local_mode=False, use_gpu=gpus_per_process > 0)
        return distributor.run(_call_packed, Driver.here(), job.payload)

    with submitted(job, run) as outcome:
        try:
            value = outcome.get()
        except (KeyboardInterrupt, Interrupted) as stop:
            raise interrupted(stop) from stop
    if isinstance(value, Exception):
        raise RankFailed(f"TorchDistributor: {reason_of(value)}", rank=0) from value
    return value


def _call_packed(driver: Driver, payload: bytes) -> Any:
    driver.check()
    sys.path[:] = driver.setting()["path"]
    function, *args = pickle.loads(payload)
    return function(*args)
