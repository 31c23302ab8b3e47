"""The Spark session that an engine works in: the running one or a new one, and what it has room for."""

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from torchlake.engines._machine import cores, gpus, share_gpus
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOTS_S = 20.0  # for executors that are just starting to appear
# A session that torchlake makes on this machine listens to nobody else, retries lost tasks and says little.
_ON_THIS_MACHINE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Session:
    """A Spark session, made when it is first needed."""

    def __init__(
        self, given: "SparkSession | None", *, master: str | None, conf: dict[str, str], processes: int | None
    ) -> None:
        if given is not None and (master is not None or conf):
            raise UsageError("A session that runs has its master and conf already; give the session, or those.")
        self._session = given
        self._master, self._conf = master, conf
        self._slots_here = max(cores(), processes or 1)

    def get(self) -> "SparkSession":
        """The session given, the running one, or a new one. Raises UsageError for one of Spark Connect."""
        if self._session is None:
            self._session = self._running() or self._made()
        if not hasattr(self._session, "_jsc"):
            raise UsageError(
                "This session is one of Spark Connect, which starts no processes for others. Use a session of the "
                "cluster itself (on Databricks: a dedicated, also called single-user, cluster). "
                "Predicting a DataFrame lazily works on Spark Connect too."
            )
        return self._session

    @property
    def context(self) -> Any:
        return self.get().sparkContext

    def conf(self, name: str, default: str) -> str:
        return str(self.context.getConf().get(name, default))

    @property
    def on_this_machine(self) -> bool:
        """Whether processes share this machine with the driver, inside one JVM."""
        return str(self.context.master).split("[")[0] == "local"

    @property
    def host(self) -> str:
        """The address at which executors reach the driver."""
        return "127.0.0.1" if self.on_this_machine else self.conf("spark.driver.host", "127.0.0.1")

    @property
    def listen_on(self) -> str:
        return self.host if self.on_this_machine else self.conf("spark.driver.bindAddress", self.host)

    @property
    def cores_per_slot(self) -> int:
        return int(self.conf("spark.task.cpus", "1"))

    @property
    def grows(self) -> bool:
        """Whether Spark adds executors as they are asked for."""
        return self.conf("spark.dynamicAllocation.enabled", "false") == "true"

    def slots(self, wanted: int | None) -> int:
        """Tasks that can run at the same time, waiting a while for executors that are still to come.

        `wanted` are enough; None: all that were asked for when the session was started.
        """
        if self.grows:
            executors = self.conf("spark.dynamicAllocation.maxExecutors", "")
            most = int(executors) * self._executor_cores // self.cores_per_slot if executors.isdigit() else None
            return wanted or most or int(self.context.defaultParallelism)
        scheduler, executors_wanted = self.context._jsc.sc(), self._executors_wanted()
        profile = scheduler.resourceProfileManager().defaultResourceProfile()
        deadline = time.monotonic() + SLOTS_S
        while True:
            found = int(scheduler.maxNumConcurrentTasks(profile))
            here = int(scheduler.getExecutorMemoryStatus().size()) - 1  # the driver is one of those that it names
            all_here = here >= executors_wanted if executors_wanted is not None else found > 0 and wanted is None
            enough = wanted is not None and found >= wanted
            if self.on_this_machine or enough or all_here or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _executors_wanted(self) -> int | None:
        """Executors that the session was started with; None where that is not known."""
        master = str(self.context.master)
        if master.startswith("local-cluster["):
            return int(master.split("[")[1].split(",")[0])
        instances = self.conf("spark.executor.instances", "")
        return int(instances) if instances.isdigit() else None

    @property
    def _executor_cores(self) -> int:
        return int(self.conf("spark.executor.cores", str(self.cores_per_slot)))

    def threads(self, processes: int, slots: int) -> int:
        """Cores for each of `processes` that share all task slots, no more than one executor has."""
        cores = slots * self.cores_per_slot
        most = cores if self.on_this_machine else self._executor_cores
        return max(1, min(cores // processes, most))

    def gpu_shares(self, processes: int, gpus_per_process: int | None) -> list[list[str] | None]:
        """Each process's GPUs; None where Spark itself grants them, or where none are wanted or found.

        There are fewer processes than asked for where `gpus_per_process` is None and this machine has fewer GPUs.
        Raises UsageError when Spark grants fewer than asked for.
        """
        granted = int(float(self.conf("spark.task.resource.gpu.amount", "0")))
        if gpus_per_process == 0 or (gpus_per_process is None and (granted or not self.on_this_machine)):
            return [None] * processes
        if gpus_per_process is None:
            found = len(gpus())
            shares = share_gpus(min(processes, found), 1) if found else None
            return [None] * processes if shares is None else list(shares)
        if self.on_this_machine and not granted:
            return list(share_gpus(processes, gpus_per_process) or [])
        if granted < gpus_per_process:
            raise UsageError(
                f"{gpus_per_process} GPUs for each process were asked for, and Spark grants {granted} to a task: start "
                f"the session with spark.task.resource.gpu.amount={gpus_per_process} (and executors that have GPUs)."
            )
        return [None] * processes

    def _running(self) -> "SparkSession | None":
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        # Not getActiveSession: that one knows the session of the calling thread only.
        if SparkContext._active_spark_context is None:
            return SparkSession.getActiveSession()  # Spark Connect has no context
        running: SparkSession = SparkSession.builder.getOrCreate()
        if self._master is not None and running.sparkContext.master != self._master:
            raise UsageError(
                f"A Spark session with master {running.sparkContext.master} is running, and {self._master} was asked "
                "for. Stop that session first, or leave out the master."
            )
        return running

    def _made(self) -> "SparkSession":
        from pyspark.sql import SparkSession

        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            os.environ.setdefault(name, sys.executable)
        conf = dict(self._conf)
        if self._master is not None:
            conf["spark.master"] = self._master
        elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit has settled where to run
            # The second number: a task that holds a process may be lost three times, and comes back.
            conf.setdefault("spark.master", f"local[{self._slots_here},4]")
        if conf.get("spark.master", "").startswith("local["):
            conf = {**_ON_THIS_MACHINE, **conf}
        builder = SparkSession.builder.appName("torchlake")
        for name, value in conf.items():
            builder = builder.config(name, value)
        session: SparkSession = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        return session
