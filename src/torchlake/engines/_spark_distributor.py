"""Launch ranks with TorchDistributor, pyspark's own launcher. `UNSUPPORTED` lists what it cannot do."""

import pickle
import sys
from typing import Any

from torchlake.engines._spark_launch import LaunchJob, submitted
from torchlake.engines._spark_session import reason_of
from torchlake.errors import Interrupted, RankFailed
from torchlake.processes.ranks import to_interrupted
from torchlake.processes.remote import Driver

_NO_DETAILS = "TorchDistributor reports that a process failed, but not how; the traceback is in its output"
UNSUPPORTED = {
    "the_first_rank_to_fail_is_the_error": _NO_DETAILS,
    "a_rank_that_fails_stops_those_that_wait_for_it": _NO_DETAILS,
    "a_killed_rank_is_named_with_its_signal": _NO_DETAILS,
    "an_error_of_ours_in_a_rank_comes_back_as_itself": _NO_DETAILS,
    "grace": "Spark kills TorchDistributor's tasks without a signal to the ranks",
    "threads": "torchrun sets OMP_NUM_THREADS",
}
"The tests of tests/conformance/test_engines.py that the launcher torch_distributor fails, and why."


def launch_with_torch_distributor(job: LaunchJob, gpus_per_process: int) -> Any:
    """Run the ranks and return rank 0's value."""

    def run() -> Any:
        from pyspark.ml.torch.distributor import TorchDistributor

        distributor = TorchDistributor(job.number, local_mode=False, use_gpu=gpus_per_process > 0)
        return distributor.run(_call_packed, Driver.here(), job.payload)

    with submitted(job, run) as outcome:
        try:
            value = outcome.get()
        except (KeyboardInterrupt, Interrupted) as stop:
            raise to_interrupted(stop) from stop
    if isinstance(value, Exception):
        raise RankFailed(f"TorchDistributor: {reason_of(value)}", rank=0) from value
    return value


def _call_packed(driver: Driver, payload: bytes) -> Any:
    driver.check_versions()
    sys.path[:] = driver.child_options()["path"]
    function, *args = pickle.loads(payload)
    return function(*args)
