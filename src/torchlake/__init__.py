"""torchlake: fine-tune and score Hugging Face and PyTorch models where your tables live.

    import torchlake as tl

    run = tl.train("job.yaml")
    scored = tl.predict(run.model, "reviews.parquet", "scored/", key="id")

Names are imported on first use, so `import torchlake` alone does not load torch or other slow libraries.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlake import errors as errors
    from torchlake import serving as serving
    from torchlake.config.job import Job as Job
    from torchlake.engines import Engine as Engine
    from torchlake.engines.local import Local as Local
    from torchlake.engines.ray import Ray as Ray
    from torchlake.engines.spark import Spark as Spark
    from torchlake.errors import TorchlakeError as TorchlakeError
    from torchlake.evaluation.compare import Comparison as Comparison
    from torchlake.evaluation.compare import compare as compare
    from torchlake.evaluation.evaluate import evaluate as evaluate
    from torchlake.evaluation.result import Evaluation as Evaluation
    from torchlake.exporting.export import export as export
    from torchlake.exporting.mlflow_model import log_model as log_model
    from torchlake.jobs.map import Mapped as Mapped
    from torchlake.jobs.map import map as map
    from torchlake.launching.launch import launch as launch
    from torchlake.metrics import Metric as Metric
    from torchlake.optimization.optimize import Optimized as Optimized
    from torchlake.optimization.optimize import optimize as optimize
    from torchlake.outputs.find import open as open
    from torchlake.planning.plan import Plan as Plan
    from torchlake.planning.plan import plan as plan
    from torchlake.preparation.findings import Finding as Finding
    from torchlake.reporting.doctor import Diagnosis as Diagnosis
    from torchlake.reporting.doctor import doctor as doctor
    from torchlake.reporting.report import report as report
    from torchlake.scoring.batches import for_each_batch as for_each_batch
    from torchlake.scoring.frames import ray_stages as ray_stages
    from torchlake.scoring.frames import spark_udf as spark_udf
    from torchlake.scoring.in_process import load as load
    from torchlake.scoring.predict import Scored as Scored
    from torchlake.scoring.predict import predict as predict
    from torchlake.scoring.rank import rank as rank
    from torchlake.serving.process import serve as serve
    from torchlake.tables.verification.verify import Verification as Verification
    from torchlake.tables.verification.verify import verify as verify
    from torchlake.tasks import Task as Task
    from torchlake.training.folds import Folds as Folds
    from torchlake.training.run import Run as Run
    from torchlake.training.train import train as train
    from torchlake.tuning.study import Trial as Trial
    from torchlake.tuning.tune import Tuning as Tuning
    from torchlake.tuning.tune import tune as tune

    __version__: str

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
__all__ = [*_MODULES, "__version__", "errors", "serving"]  # noqa: PLE0604  its keys are strings


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
