"""A launch by TorchTrainer keeps the launch part of the promise of an engine, but for what `_ray_train.NEVER` lists."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchlake as tl
from torchlake.engines._ray_train import NEVER
from torchlake.errors import UsageError

pytestmark = [
    pytest.mark.usefixtures("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # Ray Train sets deprecated options of Ray Data
]
_spec = importlib.util.spec_from_file_location(
    "launch_conformance", Path(__file__).parents[1] / "conformance" / "test_engines.py"
)
assert _spec is not None
assert _spec.loader is not None
_suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_suite)
_tests = {name: test for name, test in vars(_suite).items() if name.startswith("test_")}
LAUNCHES = [test for name, test in _tests.items() if "rank" in name or "launch" in name]


@pytest.mark.parametrize("test", LAUNCHES, ids=lambda test: test.__name__)
def test_the_promise_of_a_launch(test: Callable[..., None], request: pytest.FixtureRequest) -> None:
    fixtures: dict[str, Any] = {
        name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name != "engine"
    }
    test(engine=tl.Ray(processes=2, launcher="torch_trainer"), **fixtures)


def test_what_it_never_does_is_said() -> None:
    assert "several GPUs for a rank" in NEVER
    with pytest.raises(UsageError, match="TorchTrainer gives a rank one GPU"):
        tl.Ray(launcher="torch_trainer", gpus_per_process=2).launch(int)
