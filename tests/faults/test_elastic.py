"""Training on as many ranks as there is room for: room that comes while it trains, and room that is lost."""

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import forked
import scoring_runs
import torchlake as tl
import training_runs as runs
from pids import wait_for
from torchlake import atomic_io
from torchlake.runs import folder
from torchlake.training import restarts

STOPPED_AT = 6


class Widening(tl.Local):
    """This machine, with room for a second rank once the first has trained some steps."""

    def __init__(self, run: Path) -> None:
        super().__init__(processes=(1, 2))
        self.metrics = run / "metrics.jsonl"

    def capacity(self, most: int, *, gpus_per_process: int | None = 0, running: int = 0) -> int:
        trained = self.metrics.read_text().count('"loss"') if self.metrics.exists() else 0
        return most if trained >= STOPPED_AT - 1 else 1


ON_RAY = """
import json, logging, os, sys, threading
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import ray
import torchlake as tl
from pids import wait_for
from test_elastic import go_on_when
from torchlake.runs import folder as run_folder
from torchlake.training import restarts

logging.basicConfig(level="INFO")
options = json.loads(sys.argv[1])
run = Path(options.pop("run"))
restarts.POLL_INTERVAL_S = 0.2
stopped = Path(os.environ["TORCHLAKE_FAILPOINT_ONCE"])

def once_stopped(act):
    def wait():
        wait_for(stopped.exists, seconds=200)
        act()
    threading.Thread(target=wait, daemon=True).start()

HAPPENING
done = tl.train(run=run, engine=engine, **options)
print(json.dumps({"steps": done.steps}))
"""
ROOM_COMES = """
engine = tl.Ray(processes=(1, 2))
engine.join()
holder = ray.remote(num_cpus=1)(type("Holder", (), {"ready": lambda self: True})).remote()
ray.get(holder.ready.remote())
once_stopped(lambda: ray.kill(holder))
go_on_when(run / run_folder.MORE_ROOM)
"""
A_NODE_DIES = """
from ray._private import ray_constants
from ray.cluster_utils import Cluster
here = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
head = {**here, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
cluster = Cluster(initialize_head=True, head_node_args=head)
second = cluster.add_node(**here)
ray_constants.ENABLE_RAY_CLUSTER = False  # or this machine's address in the network is taken for that of 127.0.0.1
ray.init(cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
engine = tl.Ray(processes=(1, 2))
once_stopped(lambda: cluster.remove_node(second, allow_graceful=False))
"""


@pytest.fixture
def stops_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops (as by SIGSTOP) once in the middle, so that nothing depends on how fast it trains."""
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", f"rank0.step:{STOPPED_AT}:stop")
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_ONCE", str(tmp_path / "once"))
    for name, value in forked.ALONE.items():
        monkeypatch.setenv(name, value)


def go_on_when(happened: Path) -> threading.Thread:
    """Let the stopped rank go on once there is a file `happened` in its run folder."""

    def stopped() -> list[psutil.Process]:
        def opens(one: psutil.Process) -> bool:
            with suppress(psutil.Error):  # another user's, or it has ended
                return any(Path(file.path).is_relative_to(happened.parent) for file in one.open_files())
            return False

        found = [one for one in psutil.process_iter(["status"]) if one.info["status"] == psutil.STATUS_STOPPED]
        return [*filter(opens, found)]

    def wait() -> None:
        wait_for(lambda: happened.exists() and stopped(), seconds=200)
        for process in stopped():
            process.resume()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_more_ranks_train_as_soon_as_there_is_room(
    tmp_path: Path, tiny_bert: Path, stops_midway: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = runs.job(tmp_path, tiny_bert, batch_size=16, max_steps=9, max_restarts=0)
    runs.succeed(tmp_path / "one", sections, TORCHLAKE_FAILPOINT="none:1:raise")
    monkeypatch.setattr(restarts, "POLL_INTERVAL_S", 0.05)
    run = tmp_path / "run"
    resuming = go_on_when(run / folder.MORE_ROOM)
    done = tl.train(run=run, engine=Widening(run), **sections)
    resuming.join()
    assert_all_steps(run, tmp_path / "one")
    assert done.steps == 9
    assert atomic_io.read_json(run / folder.RESULT)["world_size"] == 2
    assert not (run / folder.MORE_ROOM).exists()
    # It went on where it had stopped, not from the checkpoint before.
    assert sum("stopped after step 6 of" in line for line in (run / "logs/rank_0.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happening", "stopping", "ranks"), [(ROOM_COMES, "rank0", [1, 2]), (A_NODE_DIES, "rank1", [2, 1])]
)
def test_ray_gives_and_takes_room(
    tmp_path: Path, tiny_bert: Path, happening: str, stopping: str, ranks: list[int]
) -> None:
    """A CPU that was taken is freed while one rank trains; of two nodes one dies under two ranks."""
    sections = runs.job(tmp_path, tiny_bert, batch_size=16, max_steps=9, max_restarts=1)
    runs.succeed(tmp_path / "one", sections)
    options = {**sections, "run": str(tmp_path / "run")}
    failpoint = f"{stopping}.step:{STOPPED_AT}:stop"
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY.replace("HAPPENING", happening), json.dumps(options), str(Path(__file__).parent)],
        env=scoring_runs.environment(failpoint, tmp_path / "once", dict(forked.ALONE)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "once").exists()
    assert_all_steps(tmp_path / "run", tmp_path / "one")
    told = [int(line.split("training on ")[1].split()[0]) for line in done.stderr.splitlines() if "training on" in line]
    assert told == ranks, done.stderr


def assert_all_steps(run: Path, reference: Path) -> None:
    assert runs.losses(run) == pytest.approx(runs.losses(reference), abs=1e-5)
    sizes: list[Any] = [line["rows"] for line in runs.metrics(run) if "loss" in line]
    assert sizes == [line["rows"] for line in runs.metrics(reference) if "loss" in line]
