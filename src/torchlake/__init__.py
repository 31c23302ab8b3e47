"""torchlake: fine-tune and score Hugging Face and PyTorch models where your tables live.

    import torchlake as tl

    run = tl.train("job.yaml")
    scored = tl.predict(run.model, "reviews.parquet", "scored/", key="id")

Names are imported when they are first used: `import torchlake` alone loads neither torch nor anything else that is
slow to load.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlake import errors
    from torchlake.config import Job
    from torchlake.diagnosing import doctor
    from torchlake.engines.local import Local
    from torchlake.engines.ray import Ray
    from torchlake.engines.spark import Spark
    from torchlake.errors import TorchlakeError
    from torchlake.evaluating import evaluate
    from torchlake.launching import launch
    from torchlake.mapping import ray_stages, spark_udf
    from torchlake.optimizing import optimize
    from torchlake.planning import plan
    from torchlake.predicting import predict
    from torchlake.reporting import report
    from torchlake.training import train
    from torchlake.tuning import tune
    from torchlake.verifying import verify

    __version__: str

__all__ = [
    "Job",
    "Local",
    "Ray",
    "Spark",
    "TorchlakeError",
    "__version__",
    "doctor",
    "errors",
    "evaluate",
    "launch",
    "optimize",
    "plan",
    "predict",
    "ray_stages",
    "report",
    "spark_udf",
    "train",
    "tune",
    "verify",
]

_HOMES = {
    "Job": "config",
    "Local": "engines.local",
    "Ray": "engines.ray",
    "Spark": "engines.spark",
    "TorchlakeError": "errors",
    "doctor": "diagnosing",
    "evaluate": "evaluating",
    "launch": "launching",
    "optimize": "optimizing",
    "plan": "planning",
    "predict": "predicting",
    "ray_stages": "mapping",
    "report": "reporting",
    "spark_udf": "mapping",
    "train": "training",
    "tune": "tuning",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("torchlake")
    elif name == "errors":
        value = import_module("torchlake.errors")
    elif _HOMES.get(name, "").startswith("engines."):
        from torchlake import plugins

        value = getattr(plugins.load("engines", name.lower()), name)  # which says what to install
    elif name in _HOMES:
        value = getattr(import_module(f"torchlake.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'torchlake' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
