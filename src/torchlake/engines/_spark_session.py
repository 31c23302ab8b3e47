"""The Spark session of an engine, an existing or a new one, and its capacity."""

import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from torchlake.errors import UsageError
from torchlake.processes.environment import thread_variables
from torchlake.processes.hardware import cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOTS_OF_CONNECT = 16  # assumed for bundling chunks
SLOTS_S = 20.0  # for executors that are still starting
REACH_S = 5.0  # for each master to accept a connection
# A session created on this machine is reachable only from it and logs little.
_ON_THIS_MACHINE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Session:
    """A Spark session, created on first use."""

    def __init__(
        self, given: "SparkSession | None", *, master: str | None, conf: dict[str, str], processes: int | None
    ) -> None:
        if given is not None and (master is not None or conf):
            raise UsageError("A running session already has a master and conf. Pass the session, or master and conf.")
        self._session = given
        self._master, self._conf = master, conf
        self._slots_here = max(cores(), processes or 1)

    def get(self) -> "SparkSession":
        """Return the given session, the running one, or a new one."""
        if self._session is None:
            self._session = self._running() or self._made()
        return self._session

    @property
    def is_connect(self) -> bool:
        """Whether this is a Spark Connect session, which has no SparkContext."""
        return type(self.get()).__module__.startswith("pyspark.sql.connect")

    @property
    def context(self) -> Any:
        return self.get().sparkContext

    def conf(self, name: str, default: str) -> str:
        if self.is_connect:
            return str(self.get().conf.get(name, default))
        return str(self.context.getConf().get(name, default))

    @property
    def on_this_machine(self) -> bool:
        """Whether tasks run in the driver's JVM (local mode)."""
        return not self.is_connect and str(self.context.master).split("[")[0] == "local"

    @property
    def cores_per_slot(self) -> int:
        return int(self.conf("spark.task.cpus", "1"))

    @property
    def cores_per_executor(self) -> int:
        return int(self.conf("spark.executor.cores", str(self.cores_per_slot)))

    @property
    def grows(self) -> bool:
        """Whether Spark adds executors on demand."""
        return self.conf("spark.dynamicAllocation.enabled", "false") == "true"

    @property
    def slots(self) -> int:
        """Return the tasks that can run at the same time now; an assumption for Spark Connect, which does not report
        it."""
        if self.is_connect:
            return SLOTS_OF_CONNECT
        return max(1, self._concurrent())

    def slots_for(self, wanted: int, gpus_each: int = 0) -> int:
        """Return how many tasks can run at the same time, waiting up to `SLOTS_S` for executors that are starting.

        `gpus_each`: GPUs per task of a ResourceProfile, if the session's own tasks have fewer.
        """
        scheduler = self.context._jsc.sc()
        deadline = time.monotonic() + SLOTS_S
        while True:
            found = self._concurrent()
            here = int(scheduler.getExecutorMemoryStatus().size()) - 1  # without the driver
            if gpus_each > self.gpus_of("task"):
                found = min(found, max(1, here) * int(self.gpus_of("executor") / gpus_each))
            requested = self._requested_executors()
            all_here = requested is not None and here >= requested
            if self.on_this_machine or found >= wanted or all_here or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _concurrent(self) -> int:
        """Return Spark's own limit for barrier stages, for which PySpark has no public API."""
        scheduler = self.context._jsc.sc()
        return int(scheduler.maxNumConcurrentTasks(scheduler.resourceProfileManager().defaultResourceProfile()))

    def _requested_executors(self) -> int | None:
        """Return the number of executors the session was started with, or None if unknown."""
        master = str(self.context.master)
        if master.startswith("local-cluster["):
            return int(master.split("[")[1].split(",")[0])
        instances = self.conf("spark.executor.instances", "")
        return int(instances) if instances.isdigit() else None

    def gpus_of(self, whose: str) -> float:
        """Return the GPUs that Spark grants to each "task" or "executor"."""
        return float(self.conf(f"spark.{whose}.resource.gpu.amount", "0"))

    def thread_variables(self, threads: int) -> dict[str, str]:
        """Return the thread counts of a process with this number of cores, except those that the user set for
        executors.

        Spark itself sets OMP_NUM_THREADS in its Python workers, which therefore does not say what the user wants.
        """
        counts = thread_variables(threads)
        return {name: self.conf(f"spark.executorEnv.{name}", value) for name, value in counts.items()}

    def gpus_needed(self, asked: int | None, several: int = 1) -> int:
        """Return the GPUs that a task has to be granted: by default one, where executors have some that no task is
        granted.

        With `several` devices per process, which share a model, that number where executors have any.
        """
        if asked is not None:
            return asked
        if several > 1:
            return several if self.gpus_of("executor") >= 1 or self.gpus_of("task") >= 1 else 0
        return int(self.gpus_of("task") == 0 and self.gpus_of("executor") >= 1)

    def profile(self, cpus: int, gpus_per_task: int) -> Any:
        """Return a ResourceProfile for tasks with these cores and GPUs, or None if the session's own tasks have them.

        None also for Spark Connect, which has no RDDs. Raises UsageError for GPUs that no executor has.
        """
        has_gpus = self.gpus_of("task") >= gpus_per_task
        if not has_gpus and (self.is_connect or self.gpus_of("executor") < gpus_per_task):
            raise UsageError(
                f"Each process needs {gpus_per_task} GPUs, but a task of this session gets {self.gpus_of('task'):g}. "
                "Start the session with spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount."
            )
        if self.is_connect or (has_gpus and cpus <= self.cores_per_slot):
            return None
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests().cpus(max(cpus, self.cores_per_slot))
        amount = max(float(gpus_per_task), self.gpus_of("task"))
        return ResourceProfileBuilder().require(requests.resource("gpu", amount) if amount else requests).build

    def _running(self) -> "SparkSession | None":
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        # getActiveSession returns the session of the calling thread only.
        if SparkContext._active_spark_context is None:
            return SparkSession.getActiveSession()  # Spark Connect has no context
        running: SparkSession = SparkSession.builder.getOrCreate()
        if self._master is not None and running.sparkContext.master != self._master:
            raise UsageError(
                f"A Spark session with master {running.sparkContext.master} is running, but {self._master} was "
                "requested. Stop that session first, or leave out the master."
            )
        return running

    def _made(self) -> "SparkSession":
        from pyspark.sql import SparkSession

        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            os.environ.setdefault(name, sys.executable)
        conf = dict(self._conf)
        if self._master is not None:
            conf["spark.master"] = self._master
        elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # not under spark-submit, which sets the master
            # The second number is spark.task.maxFailures.
            conf.setdefault("spark.master", f"local[{self._slots_here},4]")
        master = conf.get("spark.master", "")
        if master.startswith("local["):
            conf = {**_ON_THIS_MACHINE, **conf}
        elif master.startswith("spark://"):
            _check_reachable(master)
        builder = SparkSession.builder.appName("torchlake")
        for name, value in conf.items():
            builder = builder.config(name, value)
        session: SparkSession = builder.getOrCreate()
        if master.startswith("local["):
            session.sparkContext.setLogLevel("ERROR")  # on a cluster, warnings about missing resources are useful
        return session


def _check_reachable(master: str) -> None:
    """Raise UsageError unless one of the hosts of spark://HOST:PORT[,HOST:PORT...] accepts a connection.

    Spark itself retries for minutes and logs a stack trace each time.
    """
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"engine.spark.master: {master!r} is not spark://HOST:PORT.")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            return
        except (OSError, OverflowError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
    raise UsageError(
        f"engine.spark.master: the Spark master {master} cannot be reached ({'; '.join(reasons)}). Start it, correct "
        "the address, or leave engine.spark.master out to run Spark on this machine."
    )


def reason_of(error: BaseException) -> str:
    """Return Spark's message for a failed job, without the JVM's stack trace."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error) or type(error).__name__
    return text.split("Driver stacktrace:")[0].split("JVM stacktrace:")[0].strip()
