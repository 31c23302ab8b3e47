"""Jobs on Spark sessions of their own, each in a process of its own: a JVM has one session, and some have to die.

Run as `python spark_jobs.py NAME OPTIONS`; the last line of stdout is the job's answer as JSON.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from pids import note, wait_for

HERE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}


def start(name: str, **options: Any) -> subprocess.Popen[str]:
    """The job `name`, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, __file__, name, json.dumps(options, default=str)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(name: str, **options: Any) -> Any:
    """What the job answers."""
    with start(name, **options) as job:
        try:
            out, error = job.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
            raise
    assert job.returncode == 0, error[-5000:]
    return json.loads(out.splitlines()[-1])


def session(master: str, **conf: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for key, value in (HERE | conf).items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


@contextmanager
def cluster(folder: Path, worker_options: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    """The URL of a standalone cluster of two machines, so far as Spark can tell, and their workers' pids by address.

    All are on this machine's loopback interface, with one core each; none comes back when it is killed.
    `worker_options` are options of the workers' Java.
    """
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"spark://127.0.0.1:{free.getsockname()[1]}"
    port, log = url.rpartition(":")[2], folder / "cluster.log"
    parts = {"127.0.0.1 master": ["master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0"]}
    for host in ("127.0.0.1", "127.0.0.2"):
        worker = ["worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
        parts[host] = [*worker, "--work-dir", str(folder / host), url]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (main, *words) in parts.items():
            with open(log, "ab") as file:
                command = [spark_class, f"org.apache.spark.deploy.{main}", *words]
                environment = {**os.environ, "SPARK_LOCAL_IP": words[1], "SPARK_WORKER_OPTS": worker_options}
                running[name] = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        wait_for(lambda: log.read_text().count("Successfully registered with master") == 2, seconds=120)
        yield url, {host: process.pid for host, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def spark_engine(made: Any, **options: Any) -> Any:
    from torchlake.engines.spark import Spark

    return Spark(made, **options)


def watched(events: str, looked: str) -> dict[str, Any]:
    """A job of 50 chunks with the caller's pool, description and tag, and what Spark's status API says of it."""
    conf = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": Path(events).as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.scheduler.mode": "FAIR",
    }
    made = session("local[2]", **conf)
    context = made.sparkContext
    context.setLocalProperty("spark.scheduler.pool", "low-priority")
    context.setJobDescription("nightly")
    context.addJobTag("team-a")
    api = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"{api}/{path}", timeout=30) as response:
            return json.load(response)

    during: list[Any] = []
    with closing(
        spark_engine(made).run_chunks(lambda: slow_squares(Path(looked)), range(50), name="predict reviews")
    ) as results:
        found = [next(results)]
        wait_for(lambda: during.extend(ask("jobs?status=running")) or during)
        Path(looked).touch()
        found += list(results)
    (job,) = ask("jobs")
    (stage,) = job["stageIds"]
    tasks = ask(f"stages/{stage}/0/taskList?length=1000")
    context.setJobDescription("of the caller")
    context.parallelize([1], 1).count()
    made.stop()
    return {"results": sorted(found), "during": during[0], "job": job, "tasks": tasks}


def slow_squares(looked: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    import time

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            time.sleep(0.02)  # so that a task has a duration to show
            if chunk >= 10:
                wait_for(looked.exists, seconds=100)
            yield chunk * chunk

    return worker


def resubmitted(folder: str) -> list[int]:
    """Spark gives a task up at its first failure here, and its Python worker is killed in the middle of two."""
    made = session("local[2,1]")
    results = sorted(spark_engine(made).run_chunks(lambda: kills_its_parent(Path(folder), (3, 7)), range(12)))
    made.stop()
    return results


def kills_its_parent(folder: Path | None, doomed: tuple[int, ...]) -> Callable[[Iterator[int]], Iterator[int]]:
    """A worker that kills its Python worker with each of these chunks: once where there is a `folder` to note it."""

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if chunk in doomed and not (folder is not None and (folder / str(chunk)).exists()):
                if folder is not None:
                    (folder / str(chunk)).touch()
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            yield chunk

    return worker


def preempted(folder: str) -> list[int]:
    """Two Python workers are killed while their children load the model."""
    made = session("local[2,4]")
    results = sorted(spark_engine(made).run_chunks(lambda: killed_while_it_loads(Path(folder)), range(8)))
    made.stop()
    return results


def killed_while_it_loads(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    for once in ("first", "second"):
        with suppress(FileExistsError):
            (folder / once).touch(exist_ok=False)
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
    return lambda chunks: chunks


def grown(folder: str) -> dict[str, Any]:
    """A cluster that starts with no executor and adds them as tasks wait."""
    conf = {
        "spark.executor.memory": "512m",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
    }
    with cluster(Path(folder)) as (url, _):
        made = session(url, **conf)
        before = made.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
        results = sorted(spark_engine(made).run_chunks(slow_squares_at_once, range(20)))
        made.stop()
    return {"executors": before, "results": results}


def slow_squares_at_once() -> Callable[[Iterator[int]], Iterator[int]]:
    return slow_squares(Path("/"))


def hopeless(folder: str) -> str:
    """A chunk that ends every Python worker that runs it."""
    from torchlake.errors import RankFailed

    made = session("local[2,1]")
    try:
        list(spark_engine(made).run_chunks(lambda: kills_its_parent(None, (1,)), range(3)))
    except RankFailed as error:
        return str(error)
    return ""


def stuck(folder: str, close: bool = False) -> str:
    """Chunks that never end, in processes that leave their pids in `folder`."""
    from torchlake.errors import Interrupted

    made = session("local[2,4]")
    print("started", flush=True)
    try:
        with closing(spark_engine(made).run_chunks(lambda: sticks(Path(folder)), range(4))) as results:
            assert next(results) == 0
            if not close:
                next(results)
        wait_for(lambda: not made.sparkContext.statusTracker().getActiveJobsIds())
        said = "closed"
    except (KeyboardInterrupt, Interrupted):
        said = "interrupted"
    made.stop()
    return said


def sticks(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if chunk:
                note(folder, f"stuck{chunk}")
                signal.pause()
            wait_for((folder / "stuck1.pid").exists)
            yield chunk

    return worker


def tail(folder: str) -> dict[str, Any]:
    """A machine that is lost for good with the last chunk, when the other one has nothing left to do."""
    with cluster(Path(folder)) as (url, workers):
        made = session(url, **{"spark.executor.memory": "512m"})
        results = []
        with closing(spark_engine(made).run_chunks(lambda: last_is_lost(Path(folder)), range(6))) as found:
            for result in found:
                results.append(result)
                if len(results) == 5:
                    lost = up_to(workers, int((Path(folder) / "last.pid").read_text()))
                    (Path(folder) / "killed").touch()
                    for process in reversed(lost):
                        process.kill()
        made.stop()
    return {"results": sorted(results)}


def up_to(workers: dict[str, int], pid: int) -> list[psutil.Process]:
    """The process and those above it, to the cluster's worker."""
    found = [psutil.Process(pid)]
    while found[-1].pid not in workers.values():
        found.append(found[-1].parent())
    return found


def last_is_lost(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 0 and not (folder / "killed").exists():
                note(folder, "last")
                signal.pause()
            wait_for((folder / "last.pid").exists)
            yield chunk

    return worker


def decommissioned(folder: str) -> dict[str, Any]:
    """A machine that is told to leave while it runs chunk 0; the other one does the rest."""
    log = Path(folder) / "cluster.log"
    with cluster(Path(folder), "-Dspark.decommission.enabled=true") as (url, workers):
        made = session(url, **{"spark.executor.memory": "512m", "spark.decommission.enabled": "true"})
        results = []
        with closing(spark_engine(made).run_chunks(lambda: first_waits(Path(folder)), range(6))) as found:
            for result in found:
                results.append(result)
                if len(results) == 1:
                    leaving = up_to(workers, int((Path(folder) / "chunk0.pid").read_text()))[-1].pid
                    os.kill(leaving, signal.SIGPWR)
                    wait_for(lambda: "Decommission worker" in log.read_text(), seconds=60)
                    (Path(folder) / "asked").touch()
        made.stop()
    by_it = [chunk for chunk in range(6) if (Path(folder) / f"chunk{chunk}.worker").read_text() == str(leaving)]
    return {"results": sorted(results), "before": results[0], "by_it": by_it}


def first_waits(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    """A worker that notes on which machine it runs a chunk; chunk 0 waits for the signal, others for chunk 0."""

    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            parents = psutil.Process().parents()
            place = next(parent.pid for parent in parents if "deploy.worker.Worker" in " ".join(parent.cmdline()))
            (folder / f"chunk{chunk}.worker").write_text(str(place))
            note(folder, f"chunk{chunk}")
            wait_for((folder / ("chunk0.pid" if chunk else "asked")).exists, seconds=100)
            if chunk > 1:
                wait_for((folder / "asked").exists, seconds=100)
            yield chunk

    return worker


def encrypted() -> dict[str, Any]:
    """Two executors, with all that Spark can encrypt encrypted."""
    conf = {
        "spark.executor.memory": "512m",
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(16),
        "spark.network.crypto.enabled": "true",
        "spark.io.encryption.enabled": "true",
    }
    made = session("local-cluster[2,1,1024]", **conf)
    results = sorted(spark_engine(made).run_chunks(slow_squares_at_once, range(6)))
    value = spark_engine(made).launch(sum_of_ranks, processes=2)
    made.stop()
    return {"results": results, "value": value}


def twins(folder: str) -> dict[str, Any]:
    """A chunk that stays in its first attempt and ends in the speculative one, which Spark puts on another machine."""
    conf = {
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.1",
    }
    with cluster(Path(folder)) as (url, _):
        made = session(url, **conf)
        results = sorted(spark_engine(made).run_chunks(lambda: first_attempt_stays(Path(folder)), range(6)))
        made.stop()
    return {"results": results, "attempts": len(list(Path(folder).glob("attempt-*")))}


def first_attempt_stays(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 0:
                first = not list(folder.glob("attempt-*"))
                note(folder, f"attempt-{os.getpid()}")
                if first:
                    signal.pause()
            yield chunk

    return worker


def two_machines(folder: str) -> Any:
    """Ranks in two executors; over the loopback interface Spark knows both under one address."""
    with cluster(Path(folder)) as (url, _):
        made = session(url, **{"spark.executor.memory": "512m"})
        value = spark_engine(made).launch(sum_of_ranks, processes=2)
        made.stop()
    return value


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def ranks(folder: str) -> str:
    """Ranks that never end by themselves, and save when they are asked to stop."""
    from torchlake.errors import Interrupted

    made = session("local[2,4]")
    try:
        spark_engine(made).launch(saves_when_stopped, folder, processes=2)
        said = "ended"
    except Interrupted as error:
        said = f"interrupted: {error}"
    made.stop()
    return said


def saves_when_stopped(folder: str) -> None:
    from torchlake.errors import Interrupted

    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    note(Path(folder), f"rank{os.environ['RANK']}")
    while not asked.wait(0.1):
        pass
    (Path(folder) / f"saved{os.environ['RANK']}").touch()
    raise Interrupted("saved at step 7")


def gpu_session(discovery: str, amount: str) -> Any:
    """One executor of two cores and two (pretended) GPUs, of which a task is granted `amount`."""
    conf = {
        "spark.executor.memory": "512m",
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": discovery,
        "spark.executor.resource.gpu.amount": "2",
        "spark.executor.resource.gpu.discoveryScript": discovery,
        "spark.driver.resource.gpu.amount": "0",
    }
    if amount:
        conf["spark.task.resource.gpu.amount"] = amount
    return session("local-cluster[1,2,1024]", **conf)


def gpus(discovery: str, amount: str, chunk_gpus: int | None, rank_gpus: int | None) -> dict[str, Any]:
    """The devices that each kind of job sees on a session whose tasks are granted `amount` GPUs."""
    from torchlake.engines import Resources
    from torchlake.errors import UsageError

    made = gpu_session(discovery, amount)
    engine = spark_engine(made, processes=2)
    seen: dict[str, Any] = {}
    jobs: dict[str, Callable[[], Any]] = {
        "chunks": lambda: [*engine.run_chunks(devices, range(6), resources=Resources(gpus=chunk_gpus))],
        "several": lambda: [*engine.run_chunks(devices, range(6), resources=Resources(gpus=None, devices=2))],
        "launch": lambda: engine.launch(rank_devices, processes=2, gpus_per_process=rank_gpus),
        "one rank": lambda: engine.launch(rank_devices, processes=1, gpus_per_process=rank_gpus),
        "frame": lambda: [row["seen"] for row in framed(engine, made)],
    }
    for name, job in jobs.items():
        try:
            seen[name] = job()
        except UsageError as error:
            seen[name] = f"refused: {error}"
    made.stop()
    return seen


def devices() -> Callable[[Iterator[int]], Iterator[str | None]]:
    return lambda chunks: (os.environ.get("CUDA_VISIBLE_DEVICES") for _ in chunks)


def rank_devices() -> list[str | None]:
    return [os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]


def framed(engine: Any, made: Any) -> Any:
    schema = pa.schema([("id", pa.int64()), ("seen", pa.string())])
    return engine.map_frame(made.range(2).repartition(2), see_devices, schema).collect()


def see_devices() -> Callable[[pa.Table], pa.Table]:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return lambda table: table.append_column("seen", pa.array([devices] * len(table), pa.string()))


def connected(folder: str, model: str, table: str) -> dict[str, Any]:
    """Chunk jobs and ranks over Spark Connect, its server on this machine."""
    from pyspark.sql import SparkSession

    import torchlake as tl
    from torchlake.errors import RankFailed

    made = SparkSession.builder.remote("local[2]").getOrCreate()
    engine = spark_engine(made)
    scored = tl.predict(model, table, Path(folder) / "out", key="id", chunk_rows=5, engine=engine)
    said: dict[str, Any] = {
        "rows": [scored.rows_in, scored.rows_out],
        "value": engine.launch(rank_devices, processes=2),
    }
    try:
        engine.launch(rank_1_fails, processes=2)
    except RankFailed as error:
        said["error"] = str(error).splitlines()[0]
    frame = made.createDataFrame(pa.table({"text": ["good", "bad"]}))
    said["frame"] = tl.predict(model, frame, engine=engine).count()
    odd = made.sql("select 'a film' text, timestamp'2024-01-02 03:04:05' `at.once`, map('a', interval 3 days) `m x`")
    row = tl.predict(model, odd).collect()[0]
    said["odd"] = [row["at.once"].isoformat(), row["m x"]["a"].days, row["error"]]
    made.stop()
    return said


def rank_1_fails() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("the cause")
    signal.pause()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
