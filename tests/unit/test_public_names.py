"""The public names are a promise: a change here is a change of the package's interface."""

import importlib
import inspect
import pkgutil
from importlib.metadata import version

import pytest

import torchlake

PUBLIC = {
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
}


def test_the_public_names_are_these() -> None:
    assert set(torchlake.__all__) == PUBLIC == set(dir(torchlake))
    assert len(torchlake.__all__) == len(PUBLIC)


def test_every_name_is_there_and_documented() -> None:
    values = {name: getattr(torchlake, name) for name in PUBLIC - {"__version__", "errors", "serving"}}
    assert [name for name, value in values.items() if value.__name__ != name or not inspect.getdoc(value)] == []


def test_the_version_is_the_installed_one() -> None:
    assert torchlake.__version__ == version("torchlake")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        torchlake.trian  # noqa: B018


def test_importing_the_modules_first_hides_no_function() -> None:
    """No package is named like a public function, so `torchlake.train` can only be the function."""
    for module in pkgutil.walk_packages(torchlake.__path__, "torchlake."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("train", "predict", "evaluate", "optimize", "plan", "tune", "launch", "verify", "report", "doctor"):
        assert inspect.isfunction(getattr(torchlake, name))
