"""torchlake: fine-tune and score Hugging Face and PyTorch models where your tables live.

    import torchlake as tl

    run = tl.train("job.yaml")
    scored = tl.predict(run.model, "reviews.parquet", "scored/", key="id")

Names are imported on first use, so `import torchlake` alone does not load torch or other slow libraries.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlake import errors, serving
    from torchlake.config.job import Job
    from torchlake.engines import Engine
    from torchlake.engines.local import Local
    from torchlake.engines.ray import Ray
    from torchlake.engines.spark import Spark
    from torchlake.errors import TorchlakeError
    from torchlake.evaluation.compare import Comparison, compare
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.evaluation.result import Evaluation
    from torchlake.exporting.export import export
    from torchlake.exporting.mlflow_model import log_model
    from torchlake.jobs.map import Mapped, map
    from torchlake.launching.launch import launch
    from torchlake.metrics import Metric
    from torchlake.optimization.optimize import Optimized, optimize
    from torchlake.outputs.find import open
    from torchlake.planning.plan import Plan, plan
    from torchlake.preparation.findings import Finding
    from torchlake.reporting.doctor import Diagnosis, doctor
    from torchlake.reporting.report import report
    from torchlake.scoring.batches import for_each_batch
    from torchlake.scoring.frames import ray_stages, spark_udf
    from torchlake.scoring.in_process import load
    from torchlake.scoring.predict import Scored, predict
    from torchlake.scoring.rank import rank
    from torchlake.serving.process import serve
    from torchlake.tables.verification.verify import Verification, verify
    from torchlake.tasks import Task
    from torchlake.training.folds import Folds
    from torchlake.training.run import Run
    from torchlake.training.train import train
    from torchlake.tuning.study import Trial
    from torchlake.tuning.tune import Tuning, tune

    __version__: str

__all__ = [
    "Comparison",
    "Diagnosis",
    "Engine",
    "Evaluation",
    "Finding",
    "Folds",
    "Job",
    "Local",
    "Mapped",
    "Metric",
    "Optimized",
    "Plan",
    "Ray",
    "Run",
    "Scored",
    "Spark",
    "Task",
    "TorchlakeError",
    "Trial",
    "Tuning",
    "Verification",
    "__version__",
    "compare",
    "doctor",
    "errors",
    "evaluate",
    "export",
    "for_each_batch",
    "launch",
    "load",
    "log_model",
    "map",
    "open",
    "optimize",
    "plan",
    "predict",
    "rank",
    "ray_stages",
    "report",
    "serve",
    "serving",
    "spark_udf",
    "train",
    "tune",
    "verify",
]

_MODULES = {
    "Comparison": "evaluation.compare",
    "Diagnosis": "reporting.doctor",
    "Engine": "engines",
    "Evaluation": "evaluation.evaluate",
    "Finding": "preparation.findings",
    "Folds": "training.folds",
    "Job": "config.job",
    "Local": "engines.local",
    "Mapped": "jobs.map",
    "Metric": "metrics",
    "Optimized": "optimization.optimize",
    "Plan": "planning.plan",
    "Ray": "engines.ray",
    "Run": "training.run",
    "Scored": "scoring.predict",
    "Spark": "engines.spark",
    "Task": "tasks",
    "TorchlakeError": "errors",
    "Trial": "tuning.study",
    "Tuning": "tuning.tune",
    "Verification": "tables.verification.verify",
    "compare": "evaluation.compare",
    "doctor": "reporting.doctor",
    "evaluate": "evaluation.evaluate",
    "export": "exporting.export",
    "for_each_batch": "scoring.batches",
    "launch": "launching.launch",
    "load": "scoring.in_process",
    "log_model": "exporting.mlflow_model",
    "map": "jobs.map",
    "open": "outputs.find",
    "optimize": "optimization.optimize",
    "plan": "planning.plan",
    "predict": "scoring.predict",
    "rank": "scoring.rank",
    "ray_stages": "scoring.frames",
    "report": "reporting.report",
    "serve": "serving.process",
    "spark_udf": "scoring.frames",
    "train": "training.train",
    "tune": "tuning.tune",
    "verify": "tables.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("torchlake")
    elif name in ("errors", "serving"):
        value = import_module(f"torchlake.{name}")
    elif _MODULES.get(name, "").startswith("engines."):
        from torchlake import plugins

        value = getattr(plugins.load("engines", name.lower()), name)  # names the extra to install
    elif name in _MODULES:
        value = getattr(import_module(f"torchlake.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'torchlake' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
