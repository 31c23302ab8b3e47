"""The section `engine` of a job: where it runs."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from torchlake.config.types import STRICT, Bool, EngineName, Float, Int, Name, Ranks


class SparkOptions(BaseModel):
    """Options of `engine: spark`."""

    model_config = STRICT

    master: Name | None = None
    """Master of a new session; null: the running session, else a new one on this machine's cores."""
    conf: dict[str, str] = {}
    """Spark configuration of a new session."""
    local_mode: Bool = False
    """Launch ranks on the driver's machine instead of on executors."""
    launcher: Literal["barrier", "torch_distributor"] = "barrier"
    """What starts ranks: a barrier stage, or pyspark's TorchDistributor."""


class RayOptions(BaseModel):
    """Options of `engine: ray`."""

    model_config = STRICT

    address: Name | None = None
    """Cluster to join, "auto" for this machine's; null: the one already joined, else RAY_ADDRESS, else a new one on
    this machine's cores."""
    gpus_per_process: Float | None = Field(default=None, ge=0)
    """GPUs of each process; null: one if the cluster has GPUs."""
    cpus_per_process: Float | None = Field(default=None, gt=0)
    """CPUs that each process reserves, and its threads; null: as many as the job needs, or an even share of the
    cluster if the number of processes is given."""
    memory: Int | None = Field(default=None, gt=0)
    """Bytes of Ray's memory resource that each process reserves."""
    resources: dict[str, Float] = {}
    """Custom resources that each process reserves."""
    placement_strategy: Literal["DEFAULT", "SPREAD", "PACK", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """How Ray spreads processes over nodes: DEFAULT or SPREAD for scoring, PACK, SPREAD or STRICT_... for ranks."""
    launcher: Literal["placement_group", "torch_trainer"] = "placement_group"
    """What starts ranks: a placement group, or TorchTrainer of Ray Train."""
    autoscaling: dict[str, Any] = {}
    """Settings of Ray Serve for the replicas of `serve`, such as `max_replicas: 4`; empty: `processes` replicas."""


class EngineConfig(BaseModel):
    """Where the job runs."""

    model_config = STRICT

    name: EngineName = "local"
    """Where Python runs: local, spark or ray; a file in torchlake/engines."""
    processes: Ranks | None = None
    """Number of processes; null: chosen by the engine for scoring, and for training 1, or one per GPU with the local
    engine. [2, 8]: training runs on as many as fit, within this range, and scoring on up to the larger number."""
    spark: SparkOptions = SparkOptions()
    """Options of the engine spark."""
    ray: RayOptions = RayOptions()
    """Options of the engine ray."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the engine, besides its name and number of processes."""
        section = getattr(self, self.name) if self.name in ("spark", "ray") else None
        return {} if section is None else dict(section)
