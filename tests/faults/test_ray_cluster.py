"""The Ray engine under losses: nodes, actors and drivers that are killed, room that comes late, a driver interrupted.

A scenario that needs a cluster of its own is a function of this file that runs in a process of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray as ray_library
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from ray._private import ray_constants
from ray._private.state import actors
from ray.util import placement_group_table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a scenario

import torchlake as tl
from pids import gone, note, pid, wait_for
from torchlake.engines import _ray_chunks
from torchlake.errors import Interrupted, RankFailed

HERE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}


def play(scenario: Callable[..., Any], *arguments: object, **variables: str) -> list[str]:
    """Run a scenario of this file in a process of its own; the lines that it printed."""
    done = subprocess.run(
        [sys.executable, __file__, scenario.__name__, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_node_lost_at_the_tail_costs_a_chunk_a_second_run(tmp_path: Path) -> None:
    assert "[0, 1]" in play(lose_a_node, tmp_path)


def lose_a_node(folder: Path) -> None:
    """Two nodes of one CPU. One has ended its only chunk when the other dies with the last one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**HERE, "include_dashboard": False})
    second = cluster.add_node(**HERE)
    ray_constants.ENABLE_RAY_CLUSTER = False  # or this machine's address in the network is taken for that of 127.0.0.1
    ray_library.init(cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
    doomed = second.all_processes["raylet"][0].process.pid
    results = []
    with closing(tl.Ray(processes=2).run_chunks(partial(_stuck_below, folder, doomed), [0, 1])) as chunks:
        for result in chunks:
            results.append(result)
            if len(results) == 1:
                cluster.remove_node(second, allow_graceful=False)
    print(sorted(results))


def _stuck_below(folder: Path, doomed: int) -> Callable[[Iterator[int]], Iterator[int]]:
    """A worker that never ends a chunk on the doomed node, and elsewhere ends one when the other is there."""
    below = doomed in [parent.pid for parent in psutil.Process().parents()]

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if below:
                note(folder, "stuck")
                threading.Event().wait()
            pid(folder, "stuck")
            yield chunk

    return worker


@pytest.mark.slow
@pytest.mark.parametrize("job", ["chunks", "ranks"])
def test_a_cluster_without_cpus_grows_when_a_job_asks(tmp_path: Path, job: str) -> None:
    with growing_cluster(tmp_path) as address:
        out = play(ask_for_room, tmp_path, job, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
    assert {"chunks": "[0, 1]", "ranks": "2"}[job] in out


def ask_for_room(folder: Path, job: str) -> None:
    """Both chunks, or both ranks, have to run at the same time."""
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray_library.init(os.environ["RAY_ADDRESS"], _node_ip_address="127.0.0.1", log_to_driver=False)
    assert not ray_library.cluster_resources().get("CPU")
    if job == "chunks":
        print(sorted(tl.Ray().run_chunks(partial(_meeting, folder), [0, 1])))
    else:
        print(tl.Ray(processes=2).launch(_meet, folder))


def _meeting(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            _meet(folder, str(chunk))
            yield chunk

    return worker


def _meet(folder: Path, name: str | None = None) -> int:
    note(folder, name or os.environ["RANK"])
    wait_for(lambda: len(list(folder.glob("[01].pid"))) == 2, seconds=100)
    return 2


@pytest.mark.slow
def test_chunks_and_ranks_run_where_ray_encrypts(tmp_path: Path) -> None:
    certificate, key = certificate_of_this_machine(tmp_path)
    variables = {"RAY_TLS_SERVER_CERT": certificate, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": certificate}
    assert "[0, 1] 2" in play(run_both, tmp_path, RAY_USE_TLS="1", **variables)


def run_both(folder: Path) -> None:
    """Chunks and ranks on a Ray that is started here, in two processes at the same time."""
    (folder / "chunks").mkdir()
    (folder / "ranks").mkdir()
    engine = tl.Ray(processes=2)
    results = sorted(engine.run_chunks(partial(_meeting, folder / "chunks"), [0, 1]))
    print(results, engine.launch(_meet, folder / "ranks"))


def certificate_of_this_machine(folder: Path) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1 that signs itself, and of its key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
    )
    for extension, critical in (
        (x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False),
        (x509.BasicConstraints(ca=True, path_length=None), True),
    ):
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *private))
    return str(folder / "certificate.pem"), str(folder / "key.pem")


@contextmanager
def growing_cluster(folder: Path) -> Iterator[str]:
    """A head without CPUs, and Ray's autoscaler that adds up to two nodes of one CPU, as processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    worker = {"CPU": 1, "object_store_memory": 80 << 20}
    config = {
        "cluster_name": "growing",
        "max_workers": 2,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
        },
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("initialization_commands", "setup_commands", "head_setup_commands")},
        **{name: [] for name in ("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
    }
    (folder / "growing.json").write_text(json.dumps(config))
    options = ["--num-cpus=0", "--include-dashboard=false", "--object-store-memory=80000000", "--block"]
    head = subprocess.Popen(
        [
            *(Path(sys.executable).with_name("ray"), "start", "--head", f"--autoscaling-config={folder}/growing.json"),
            *(f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1", *options),
        ],
        env={
            **os.environ,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray takes this machine's address in the network
            "RAY_FAKE_CLUSTER": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        below = psutil.Process(head.pid)
        wait_for(lambda: any(process.name() == "raylet" for process in below.children(recursive=True)), seconds=60)
        yield address
    finally:
        for process in [*below.children(recursive=True), below]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("job", ["chunks", "ranks"])
def test_an_interrupt_while_a_job_waits_for_room_leaves_nothing(job: str) -> None:
    holders = [ray_library.remote(num_cpus=1)(_Holder).remote() for _ in range(2)]
    ray_library.get([holder.ready.remote() for holder in holders])
    others = {actor["ActorID"] for actor in actors().values() if actor["State"] != "DEAD"}

    def pending() -> list[str]:
        groups = [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
        new = [one["State"] for one in actors().values() if one["ActorID"] not in others and one["State"] != "DEAD"]
        return groups + new

    def interrupt() -> None:
        wait_for(pending)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        if job == "chunks":
            list(tl.Ray(processes=2).run_chunks(_noting(Path()), [0, 1]))
        else:
            tl.Ray(processes=2).launch(os.getpid)
    thread.join()
    wait_for(lambda: not pending())
    for holder in holders:
        ray_library.kill(holder)
    wait_for(lambda: ray_library.available_resources().get("CPU") == 2)


class _Holder:
    def ready(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("job", ["chunks", "ranks"])
def test_no_child_outlives_a_driver_that_is_killed(tmp_path: Path, job: str) -> None:
    """The cluster stays; its actors of the job end with the driver, and the children with them."""
    address = ray_library.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, __file__, "wait_there", str(tmp_path), job, address])
    children = [pid(tmp_path, "0"), pid(tmp_path, "1")]
    driver.kill()
    driver.wait()
    wait_for(lambda: all(gone(child) for child in children))
    wait_for(lambda: ray_library.available_resources().get("CPU") == 2)


def wait_there(folder: Path, job: str, address: str) -> None:
    """Two processes that leave their pids and wait for ever."""
    ray_constants.ENABLE_RAY_CLUSTER = False
    engine = tl.Ray(address, processes=2)
    if job == "chunks":
        list(engine.run_chunks(partial(_noting, folder), [0, 1]))
    else:
        engine.launch(_wait_as_rank, folder)


def _wait_as_rank(folder: Path) -> None:
    note(folder, os.environ["RANK"])
    threading.Event().wait()


def _noting(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    """A worker that leaves its own pid and its actor's, and waits for ever the first time that it has a chunk."""

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if not (folder / f"{chunk}.pid").exists():
                (folder / f"actor-{chunk}").write_text(str(os.getppid()))
                note(folder, str(chunk))
                threading.Event().wait()
            yield chunk

    return worker


def _first_waits_for_second(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    """A worker whose chunk 0 ends once chunk 1 is in work, which never ends."""

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 1:
                note(folder, "1")
                threading.Event().wait()
            pid(folder, "1")
            yield chunk

    return worker


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_an_actor_killed_with_its_chunk_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "1.pid").touch()  # only chunk 0 waits

    def kill() -> None:
        pid(tmp_path, "0")
        os.kill(int((tmp_path / "actor-0").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with closing(tl.Ray(processes=2).run_chunks(partial(_noting, tmp_path), range(2))) as results:
        assert sorted(results) == [0, 1]
    thread.join()
    assert gone(pid(tmp_path, "0"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_job_that_is_closed_leaves_no_child_and_nothing_pending(tmp_path: Path) -> None:
    with closing(tl.Ray(processes=2).run_chunks(partial(_first_waits_for_second, tmp_path), range(2))) as results:
        assert next(results) == 0
        child = pid(tmp_path, "1")
    assert gone(child), "it ends before the call returns"
    wait_for(lambda: ray_library.available_resources().get("CPU") == 2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_chunk_whose_actors_keep_dying_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_chunks, "MAX_DEATHS", 1)
    with pytest.raises(RankFailed, match=r"2 actors died while working on the chunk 'poison'"):
        list(tl.Ray(processes=1).run_chunks(_kills_its_actor, ["poison"], label=lambda chunk: f"the chunk {chunk!r}"))


def _kills_its_actor() -> Callable[[Iterator[str]], Iterator[str]]:
    def worker(chunks: Iterator[str]) -> Iterator[str]:
        for _ in chunks:
            os.kill(os.getppid(), signal.SIGKILL)
            yield ""

    return worker


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_rank_whose_actor_is_killed_is_named_with_its_node() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 was lost .* on 127\.0\.0\.1"):
        tl.Ray(processes=2).launch(_rank_1_kills_its_actor)


def _rank_1_kills_its_actor() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


if __name__ == "__main__":
    scenario, folder, *arguments = sys.argv[1:]
    globals()[scenario](Path(folder), *arguments)
