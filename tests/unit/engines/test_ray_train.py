"""A launch by TorchTrainer, beyond what `tests/conformance/test_engines.py` holds it to."""

import os
import signal
import threading
from pathlib import Path

import pytest
import ray as ray_library

import torchlake as tl
from pids import gone, note, pid, wait_for
from torchlake.engines._ray_cluster import ProcessResources
from torchlake.engines._ray_launch import RankJob
from torchlake.engines._ray_train import UNSUPPORTED, launch_with_torch_trainer
from torchlake.errors import Interrupted, UsageError


def test_several_gpus_for_a_rank_are_refused() -> None:
    assert "several_gpus_for_a_rank" in UNSUPPORTED
    job = RankJob(
        payload=b"", number=1, share=ProcessResources(gpus=2.0), strategy="PACK", name="launch", stdout_to_stderr=False
    )
    with pytest.raises(UsageError, match="TorchTrainer gives each rank one GPU"):
        launch_with_torch_trainer(job)


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    def interrupt() -> None:
        for rank in "01":
            wait_for((tmp_path / f"{rank}.pid").exists, seconds=100)
        os.kill(os.getpid(), signal.SIGINT)

    thread, before = threading.Thread(target=interrupt), signal.getsignal(signal.SIGINT)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        tl.Ray(processes=2, launcher="torch_trainer").launch(_wait, tmp_path)
    thread.join()
    assert caught.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    wait_for(lambda: all(gone(pid(tmp_path, rank)) for rank in "01"))
    wait_for(lambda: ray_library.available_resources().get("CPU") == 2)


def _wait(folder: Path) -> None:
    note(folder, os.environ["RANK"])
    threading.Event().wait()
