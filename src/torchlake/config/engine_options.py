"""What a job may say about where it runs."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from torchlake.config.types import STRICT, EngineName, Float, Int, Name, Ranks


class SparkOptions(BaseModel):
    """Options of `engine: spark`."""

    model_config = STRICT

    master: Name | None = None
    """Master of a session that is made; null: the session that runs, else one on this machine's cores."""
    conf: dict[str, str] = {}
    """Spark configuration of a session that is made."""
    local_mode: bool = False
    """Launch ranks on the driver's machine instead of the executors."""
    launcher: Literal["barrier", "torch_distributor"] = "barrier"
    """What starts ranks: a barrier stage, or pyspark's TorchDistributor."""


class RayOptions(BaseModel):
    """Options of `engine: ray`."""

    model_config = STRICT

    address: Name | None = None
    """Cluster to join, "auto" for this machine's; null: the one joined already or that RAY_ADDRESS names, else one on
    this machine's cores."""
    gpus_per_process: Float | None = Field(default=None, ge=0)
    """GPUs of each process; null: one where there are any."""
    cpus_per_process: Float | None = Field(default=None, gt=0)
    """CPUs that each process reserves, and its threads; null: as many as the job asks for, or an even part of the
    cluster where the number of processes is given."""
    memory: Int | None = Field(default=None, gt=0)
    """Bytes of memory that each process reserves by Ray's count."""
    resources: dict[str, Float] = {}
    """Custom resources that each process reserves."""
    placement_strategy: Literal["DEFAULT", "SPREAD", "PACK", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """How Ray spreads processes over nodes: DEFAULT or SPREAD for scoring, PACK, SPREAD or STRICT_... for ranks."""
    launcher: Literal["placement_group", "torch_trainer"] = "placement_group"
    """What starts ranks: a placement group, or TorchTrainer of Ray Train."""


class EngineConfig(BaseModel):
    """Where the job runs."""

    model_config = STRICT

    name: EngineName = "local"
    """Where Python runs: local, spark or ray; a file in torchlake/engines."""
    processes: Ranks | None = None
    """Processes started; null: the engine's choice for scoring, and for training 1, or with the local engine one for
    each GPU of the machine. [2, 8]: training goes on with as many of them as there is room for, and scoring takes up
    to the most."""
    spark: SparkOptions = SparkOptions()
    ray: RayOptions = RayOptions()

    @property
    def options(self) -> dict[str, Any]:
        """What the engine of that name is made with, besides its number of processes."""
        section = getattr(self, self.name) if self.name in ("spark", "ray") else None
        return {} if section is None else dict(section)
