"""The local engine: what it gives its processes, and what it does with them when a job ends early."""

import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import forked
from pids import gone, note, pid, wait_for
from torchlake.engines import Resources
from torchlake.engines.local import Local
from torchlake.errors import RankFailed, UsageError
from torchlake.processes import chunk_process, environment, hardware, serialization
from torchlake.processes.children import Children
from torchlake.processes.remote import Node, group_variables, reserve_node

ROOT = Path(__file__).parents[3]
Chunks = Iterator[Any]


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    for name in (*names, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    cores = hardware.cores()
    for processes in (1, 2, 100 * cores):
        made = environment.local_environment(processes, None)
        threads = max(1, cores // processes)
        assert {made[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "RAYON")} == {str(threads)}
        assert (made["OMP_WAIT_POLICY"], made["GOMP_SPINCOUNT"]) == ("PASSIVE", "2000")
        assert made["TOKENIZERS_PARALLELISM"] == ("true" if threads > 1 else "false")


@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None), ({"GOMP_SPINCOUNT": "5"}, "PASSIVE", "5")],
)
def test_how_threads_wait_is_the_choice_of_the_user(
    given: dict[str, str], policy: str, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = environment.local_environment(1, None)
    assert (made["OMP_WAIT_POLICY"], made.get("GOMP_SPINCOUNT")) == (policy, spins)


def test_children_keep_freed_memory_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, trimmed = environment.ALLOCATOR
    monkeypatch.delenv(mapped, raising=False)
    monkeypatch.setenv(trimmed, "0")
    made = environment.local_environment(1, None)
    assert (made[mapped], made[trimmed]) == (environment.ALLOCATOR[mapped], "0")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library allocates")
@pytest.mark.parametrize("keep", [True, False])
def test_a_process_keeps_freed_memory(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    code = """
        import resource, sys
        from torchlake.processes.environment import keep_freed_memory
        import numpy as np

        if sys.argv[1] == "True":
            keep_freed_memory()
        np.ones(5_000_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            np.ones(5_000_000)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(keep)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == keep


def test_thread_counts_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    made = environment.local_environment(2, None)
    assert (made["OMP_NUM_THREADS"], made["MKL_NUM_THREADS"]) == ("7", "7")
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    made = environment.local_environment(2, None)
    assert (made["OMP_NUM_THREADS"], made["MKL_NUM_THREADS"]) == ("7", "5")


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("", hardware.cores()), ("0", hardware.cores())])
def test_threads_are_those_of_the_environment(value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert hardware.threads() == expected


def test_a_worker_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not {"RANK", "WORLD_SIZE"} & environment.local_environment(1, None).keys()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("GPU-8d, GPU-9e", ["GPU-8d", "GPU-9e"]),
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(visible: str, found: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == found


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "GPU 0: H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\nGPU 1: H200 (UUID: GPU-2)\n"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.gpus() == ["0", "1"]


def test_each_worker_sees_its_own_gpus_and_each_rank_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    with forked.children_are_forked():
        seen = set(Local().run_chunks(_visible_gpus, range(8), resources=Resources(processes=2, gpus=2)))
        assert seen <= {"4,5", "6,7"}
        assert Local().launch(os.getenv, "CUDA_VISIBLE_DEVICES", processes=2, gpus_per_process=2) == "4,6,5,7"


def test_chunk_jobs_take_a_gpu_each_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with forked.children_are_forked():
        assert set(Local(processes=2).run_chunks(_visible_gpus, range(4), resources=Resources(gpus=None))) == {"4"}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert set(Local(processes=2).run_chunks(_visible_gpus, range(4), resources=Resources(gpus=None))) == {""}


def test_several_gpus_for_each_process_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Resources(gpus=None, devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with forked.children_are_forked():
        assert set(Local().run_chunks(_visible_gpus, range(4), resources=several)) == {"4,5"}
    with pytest.raises(UsageError, match="1 processes with 4 GPUs each need 4 GPUs, but 3 were found"):
        Local().run_chunks(_visible_gpus, range(4), resources=Resources(gpus=None, devices=4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with forked.children_are_forked():
        assert set(Local(processes=1).run_chunks(_visible_gpus, range(4), resources=several)) == {""}


def test_no_more_processes_than_memory_holds() -> None:
    total = psutil.virtual_memory().total
    assert hardware.max_processes(total) == 1
    assert hardware.max_processes(1) == hardware.max_processes(0) == hardware.cores()


V2 = {
    "cpu.max": "{quota} 100000",
    "memory.max": "{limit}",
    "memory.current": "{used}",
    "memory.stat": "anon 5\nactive_file 30\ninactive_file 70",
}
V1 = {
    "cpu/cpu.cfs_quota_us": "{quota}",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "{limit}",
    "memory/memory.usage_in_bytes": "{used}",
    "memory/memory.stat": "active_file 1\ntotal_active_file 30\ntotal_inactive_file 70",
}


def contain(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], **values: Any) -> None:
    """Put this process into a container, as far as it can tell."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content.format(**values) + "\n")
    monkeypatch.setattr(hardware, "CGROUP", folder)


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_a_containers_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    gib = 2**30
    # Of 4 GiB, 3 GiB and 100 bytes are used, and the kernel can give back those 100 of cached files.
    contain(tmp_path, monkeypatch, files, quota=250000, limit=4 * gib, used=3 * gib + 100)
    assert hardware.cores() == 3, "two and a half, rounded up"
    assert hardware.max_processes(gib // 4) == 2, "half of the free GiB, though the machine has more"
    contain(tmp_path, monkeypatch, files, quota=1000, limit=4 * gib, used=5 * gib)
    assert hardware.cores() == 1
    assert hardware.available_memory() == 0
    assert hardware.max_processes(gib) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
@pytest.mark.parametrize(
    ("files", "values"),
    [
        (V2, {"quota": "max", "limit": "max", "used": 1}),
        (V1, {"quota": -1, "limit": 2**63 - 4096, "used": 1}),
        ({}, {}),
    ],
    ids=["v2", "v1", "none"],
)
def test_a_container_without_limits_has_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], values: dict[str, Any]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    contain(tmp_path, monkeypatch, files, **values)
    assert hardware.cores() == 64
    assert hardware.cgroup_cores() is None
    assert hardware.cgroup_memory() is None
    assert hardware.available_memory() > 0


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match=r"2 processes with 1 GPUs each need 2 GPUs, but 1 were found"):
        Local().launch(os.getpid, processes=2, gpus_per_process=1)
    with pytest.raises(UsageError, match="but 1 were found"):
        Local().run_chunks(_visible_gpus, range(8), resources=Resources(processes=2, gpus=1))


def test_the_master_port_is_held_and_rank_0_may_listen_on_it() -> None:
    assert Local().launch(_listen_on_the_reserved_port)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_ranks_may_meet_at_an_address_of_either_kind(address: str) -> None:
    with reserve_node(address, None) as (node, descriptor), socket.socket(fileno=os.dup(descriptor)) as holder:
        holder.listen()
        assert node.address == address
        with socket.create_connection((node.address, node.port), timeout=10):
            pass


def test_two_gpus_for_each_rank_start_with_its_own() -> None:
    def node(*gpus: str) -> Node:
        return Node(address="10.0.0.1", port=9, interface=None, gpus=gpus)

    for rank, variables in enumerate(group_variables([node("0", "1"), node("2", "3")], 1)[1]):
        own = variables["CUDA_VISIBLE_DEVICES"].split(",")[int(variables["LOCAL_RANK"])]
        assert own == ["0", "2"][rank]
    for shared in ([node("0"), node("0")], [node("MIG-1"), node("MIG-2")], [node("MIG-1", "MIG-2")]):
        with pytest.raises(UsageError, match="GPU"):
            group_variables(shared, 1)
    _, (alone,) = group_variables([node("MIG-1")], 1)
    assert alone["CUDA_VISIBLE_DEVICES"] == "MIG-1"


def test_output_whose_reader_has_left_stops_nothing(tmp_path: Path) -> None:
    """As in `torchlake launch ... | head`, where the driver prints what ranks on other machines said."""
    source = """
        import os, sys
        from torchlake.processes.remote import print_output

        read, write = os.pipe()
        os.close(read)
        sys.stdout = open(write, "w")
        for _ in range(3):
            print_output(1, b"a line\\n" * 10_000)
        sys.stdout = None
        print_output(1, b"a line\\n")
        os.write(1, b"went on")
        os._exit(0)
        """
    assert _run_script(tmp_path, source) == "went on"


def test_the_number_of_processes_is_the_engines_own_unless_the_call_says(tmp_path: Path) -> None:
    assert Local().launch(os.getenv, "WORLD_SIZE") == "1"
    assert Local(processes=2).launch(os.getenv, "WORLD_SIZE") == "2"
    assert Local(processes=2).launch(os.getenv, "WORLD_SIZE", processes=1) == "1"


def test_the_main_module_is_not_imported_again(tmp_path: Path) -> None:
    # No `if __name__ == "__main__"`: importing this script in a child would start children without end.
    output = _run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from torchlake.engines.local import Local

        print("began")

        @dataclass
        class Point:
            x: int

        def shift(point, by):
            return Point(point.x + by)

        moved = Local(processes=2).launch(shift, Point(1), 2)
        print(moved, isinstance(moved, Point))
        """,
    )
    assert output == "began\nPoint(x=3) True\n"


def test_modules_loaded_from_elsewhere_travel_by_value(tmp_path: Path) -> None:
    path = tmp_path / "hidden_from_import.py"
    path.write_text("FACTOR = 3\ndef triple(x):\n    return helper(x)\ndef helper(x):\n    return FACTOR * x\n")
    spec = importlib.util.spec_from_file_location("hidden_from_import", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert Local().launch(module.triple, 5) == 15
        assert Local().launch(partial(module.triple, x=6)) == 18
    finally:
        del sys.modules[spec.name]


def test_children_import_what_the_parent_can_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def where():\n    return __name__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    assert Local().launch(only_here.where) == "only_here"


def test_modules_of_python_itself_travel_by_name() -> None:
    for function in (os.getenv, importlib.util.find_spec, textwrap.dedent, len):
        assert len(serialization.pack(function)) < 100


def test_specs_are_found_without_importing(tmp_path: Path) -> None:
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "inner.py").touch()
    path = [str(tmp_path), *sys.path]
    spec = serialization.find_spec("loud_package.inner", path)
    assert spec is not None
    assert spec.origin == str(package / "inner.py")
    assert serialization.find_spec("loud_package.absent", path) is None
    assert serialization.find_spec("loud_package.inner.deeper", path) is None


def test_the_engine_loads_no_torch(tmp_path: Path) -> None:
    output = _run_script(
        tmp_path,
        """
        import sys
        from torchlake.engines.local import Local

        heavy = lambda: sorted({"torch", "transformers", "pyspark", "ray", "pandas"} & set(sys.modules))
        print(heavy(), Local().launch(heavy))
        """,
    )
    assert output == "[] []\n"


def test_stdout_of_children_can_go_to_stderr(tmp_path: Path) -> None:
    source = """
        import sys
        from torchlake.engines.local import Local

        def make():
            print("from a worker")
            return lambda chunks: chunks

        engine = Local(stdout_to_stderr=sys.argv[1] == "yes")
        engine.launch(lambda: print("from a rank"))
        list(engine.run_chunks(make, [1]))
        """
    assert _run_script(tmp_path, source, "yes") == ""
    assert _run_script(tmp_path, source, "no") == "from a rank\nfrom a worker\n"


def test_leaving_with_status_0_is_a_return_and_another_is_not() -> None:
    assert Local().launch(sys.exit) is None
    assert Local().launch(sys.exit, 0) is None
    with pytest.raises(RankFailed, match=r"rank 0 called sys.exit\(3\)"):
        Local().launch(sys.exit, 3)
    with pytest.raises(RankFailed, match=r"rank 0 called sys.exit\(no data\)"):
        Local().launch(sys.exit, "no data")
    with pytest.raises(RankFailed, match="rank 0 ended with exit code 7 before it returned"):
        Local().launch(os._exit, 7)
    with pytest.raises(RankFailed, match="rank 0 ended with exit code 0 before it returned"):
        Local().launch(os._exit, 0)


def test_errors_that_look_like_a_lost_parent_are_reported() -> None:
    for kind in (EOFError, ConnectionResetError, BrokenPipeError, KeyboardInterrupt):
        with forked.children_are_forked(), pytest.raises(RankFailed, match=f"{kind.__name__}: from the user"):
            Local().launch(_raise, kind("from the user"))


def test_values_that_cannot_come_back_are_an_error() -> None:
    with pytest.raises(RankFailed, match=r"cannot pickle .*lock"):
        Local().launch(threading.Lock)


def test_only_the_value_of_rank_0_travels() -> None:
    assert (
        Local(processes=2).launch(lambda: os.environ["RANK"] if os.environ["RANK"] == "0" else threading.Lock()) == "0"
    )


def test_closing_the_iterator_kills_the_workers(tmp_path: Path) -> None:
    results = Local(processes=2).run_chunks(partial(_stuck_after_first, tmp_path), range(4))
    assert next(results) == "first"
    numbers = [pid(tmp_path, "stuck"), pid(tmp_path, "grandchild")]
    results.close()
    wait_for(lambda: all(map(gone, numbers)), seconds=5)


def test_an_exception_in_the_consumer_kills_the_workers(tmp_path: Path) -> None:
    def consume() -> None:
        with closing(Local(processes=2).run_chunks(partial(_stuck_after_first, tmp_path), range(4))) as results:
            for _ in results:
                pid(tmp_path, "stuck")
                raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        consume()
    number = pid(tmp_path, "stuck")
    wait_for(lambda: gone(number), seconds=5)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    assert Local().launch(_start_sleeper, tmp_path) == "left"
    number = pid(tmp_path, "sleeper")
    wait_for(lambda: gone(number), seconds=5)


def test_workers_that_ended_in_order_are_not_counted_as_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_process, "MAX_DEATHS", 1)
    make_worker = partial(_zero_dies_when_others_ended, tmp_path, 2)
    assert sorted(Local(processes=3).run_chunks(make_worker, range(3))) == [0, 1, 2]


def test_a_child_of_a_dead_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    # The forked child holds the rank's end of the socket, so there is no end of file.
    with pytest.raises(RankFailed, match="ended with exit code 9"):
        Local().launch(_fork_and_die, tmp_path)
    number = pid(tmp_path, "forked")
    wait_for(lambda: gone(number), seconds=5)


def test_launch_and_chunks_work_in_any_thread() -> None:
    values: list[Any] = []
    results = Local(processes=2).run_chunks(_visible_gpus, range(4))

    def first_half() -> None:
        values.append(Local(processes=2).launch(os.getenv, "RANK"))
        values.append(next(results))

    thread = threading.Thread(target=first_half)
    thread.start()
    thread.join()
    # The thread that started the workers has ended; they live on.
    assert len(list(results)) == 3
    assert values[0] == "0"


def test_no_process_and_no_open_file_is_left(tmp_path: Path) -> None:
    Local(processes=2).launch(os.getpid)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    Local(processes=2).launch(os.getpid)
    list(Local(processes=2).run_chunks(_visible_gpus, range(3)))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_frame_is_mapped_in_this_process() -> None:
    frame = pa.table({"n": [1, 2, 3]})
    schema = pa.schema([("n", pa.int64()), ("here", pa.int64())])

    def make_worker() -> Callable[[pa.Table], pa.Table]:
        return lambda table: table.append_column("here", pa.array([os.getpid()] * table.num_rows))

    mapped = Local(processes=2).map_frame(frame, make_worker, schema)
    assert mapped.to_pydict() == {"n": [1, 2, 3], "here": [os.getpid()] * 3}


def test_the_error_of_a_peer_is_reported_although_it_comes_later(tmp_path: Path) -> None:
    """A rank that waits in a collective often ends before the one that left it has closed its blocks."""
    with forked.children_are_forked():
        with pytest.raises(RankFailed, match="the cause") as failed:
            Local().launch(_give_up_or_fail_later, tmp_path, processes=2)
        assert failed.value.rank == 1
        (tmp_path / "rank0.pid").unlink()
        with pytest.raises(RankFailed, match="gave up"):
            Local().launch(_give_up_or_fail_later, tmp_path, processes=1)


def _give_up_or_fail_later(folder: Path) -> None:
    from torchlake.distributed import LostPeers

    if os.environ["RANK"] == "0":
        note(folder, "rank0")
        raise LostPeers("rank 0 of 2 gave up")
    wait_for(lambda: gone(pid(folder, "rank0")))
    raise ValueError("the cause")


def _run_script(folder: Path, source: str, *args: str) -> str:
    """What a script prints to stdout."""
    script = folder / "user_script.py"
    script.write_text(textwrap.dedent(source))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script), *args], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _visible_gpus() -> Callable[[Chunks], Iterator[str | None]]:
    return lambda chunks: (os.environ.get("CUDA_VISIBLE_DEVICES") for _ in chunks)


def _listen_on_the_reserved_port() -> bool:
    import socket

    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as named:
        named.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        named.bind(("", port))
        named.listen()
    with socket.socket(fileno=int(os.environ["TORCHLAKE_MASTER_FD"])) as inherited:
        inherited.listen()
        return bool(inherited.getsockname() == ("127.0.0.1", port))


def _raise(error: BaseException) -> None:
    raise error


def _stuck_after_first(folder: Path) -> Callable[[Chunks], Iterator[str]]:
    def worker(chunks: Chunks) -> Iterator[str]:
        for chunk in chunks:
            if chunk == 0:
                wait_for((folder / "stuck.pid").exists)
                yield "first"
            else:
                subprocess.Popen([sys.executable, "-c", _SLEEPER.format(folder=str(folder), name="grandchild")])
                wait_for((folder / "grandchild.pid").exists)
                note(folder, "stuck")
                threading.Event().wait()

    return worker


def _zero_dies_when_others_ended(folder: Path, others: int) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 0 and not (folder / "zero.pid").exists():
                wait_for(lambda: len(list(folder.glob("ended*"))) == others)
                note(folder, "zero")
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk
        if not (folder / "zero.pid").exists():
            (folder / f"ended{os.getpid()}").touch()
            wait_for(lambda: gone(pid(folder, "zero")))

    return worker


_SLEEPER = """
import os, pathlib, threading
path = pathlib.Path({folder!r}) / ".{name}"
path.write_text(str(os.getpid()))
path.rename(path.with_name("{name}.pid"))
threading.Event().wait()
"""


def _start_sleeper(folder: Path) -> str:
    subprocess.Popen([sys.executable, "-c", _SLEEPER.format(folder=str(folder), name="sleeper")])
    wait_for((folder / "sleeper.pid").exists)
    return "left"


def _fork_and_die(folder: Path) -> None:
    if os.fork() == 0:
        note(folder, "forked")
        threading.Event().wait()
    wait_for((folder / "forked.pid").exists)
    os._exit(9)


def test_a_signal_to_a_child_that_is_not_started_yet_reaches_it() -> None:
    with Children() as children:
        children._lock.acquire()  # holds back the thread that starts the process
        children.start(0, "rank", serialization.pack(time.sleep, 60), {**os.environ, "RANK": "0"})
        thread = threading.Thread(target=children.signal, args=(signal.SIGTERM,))
        thread.start()
        children._lock.release()
        thread.join()
        assert children.events.get(timeout=30)[1:] == ("exit", -signal.SIGTERM)
