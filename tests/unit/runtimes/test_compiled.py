"""What `compiled` and `zentorch` promise beyond agreeing with eager: one compilation, and no other model's weights."""

import gc
import weakref
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from torchlake import plugins
from torchlake.errors import UsageError, pip_install
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import _compiler, compiled, eager, zentorch

runs_zentorch = pytest.mark.skipif(
    find_spec("zentorch") is None or not hardware.supports_bf16(),
    reason="needs zentorch, and a CPU that multiplies bf16",
)
with_zentorch = pytest.param(zentorch, marks=runs_zentorch)
IDS = np.random.default_rng(0).integers(5, 60, (4, 12))
BATCH = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}


@pytest.mark.parametrize(
    ("runtime", "generates"),
    [
        (compiled, False),
        pytest.param(compiled, True, marks=pytest.mark.slow),
        pytest.param(zentorch, True, marks=[runs_zentorch, pytest.mark.slow]),
    ],
)
def test_one_compilation_serves_all_shapes(
    runtime: ModuleType, generates: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing decides that; generating code takes ten seconds."""
    from torch._dynamo.utils import counters

    if not generates:
        monkeypatch.setattr(_compiler, "compile_outputs", partial(_compiler.compile_outputs, backend="eager"))
    torch._dynamo.reset()  # what other tests compiled
    counters.clear()
    spec = load_spec(tiny_model)
    forward = runtime.load(tiny_model, spec, device="cpu")
    for rows, length in [(1, 1), (3, 5), (8, 40), (2, 64), (1, 17), (40, 8)]:
        ids = np.full((rows, length), 5)
        assert forward(input_ids=ids, attention_mask=np.ones_like(ids)).shape == (rows, 2)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("runtime", [compiled, with_zentorch])
def test_compiling_needs_a_compiler(runtime: ModuleType, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_compiler, "find_spec", lambda name: None)
    assert "C++ compiler" in (runtime.refusal(tiny_model) or "")


@pytest.mark.slow
@runs_zentorch
def test_a_model_never_gets_the_weights_of_one_that_was_freed(tmp_path: Path) -> None:
    """zentorch finds rearranged weights by their address, which the next model's may have."""
    torch._dynamo.reset()
    for seed in range(6):
        encoder = tiny.build_encoder(tmp_path / f"encoder-{seed}", seed=seed)
        model = tiny.build_model(tmp_path / f"model-{seed}", encoder=encoder)
        spec = load_spec(model)
        expected = eager.load(model, spec, device="cpu")(**BATCH)
        outputs = zentorch.load(model, spec, device="cpu")(**BATCH)
        assert np.abs(outputs - expected).max() <= zentorch.AGREEMENT * np.abs(expected).max(), seed
        gc.collect()


@runs_zentorch
def test_models_in_use_keep_their_weights_when_another_one_is_loaded(tmp_path: Path) -> None:
    """As when a server reloads: zentorch computed something else for the older model when its store was emptied."""
    torch._dynamo.reset()
    folders = [
        tiny.build_model(
            tmp_path / f"model-{seed}", encoder=tiny.build_encoder(tmp_path / f"encoder-{seed}", seed=seed)
        )
        for seed in range(3)
    ]
    expected = [eager.load(folder, load_spec(folder), device="cpu")(**BATCH) for folder in folders]
    used = {}
    # Each one's number, after the numbers of those that are freed before it is loaded.
    for freed, number in [([], 0), ([], 1), ([0], 2), ([1, 2], 0)]:
        for each in freed:
            del used[each]
        gc.collect()
        used[number] = zentorch.load(folders[number], load_spec(folders[number]), device="cpu")
        for each, forward in used.items():
            difference = np.abs(forward(**BATCH) - expected[each]).max()
            assert difference <= zentorch.AGREEMENT * np.abs(expected[each]).max(), (number, each)
    used.clear()
    del forward
    gc.collect()
    assert not len(zentorch._in_use), "the next model empties the store"


@pytest.mark.slow
def test_any_number_of_models_is_compiled_and_none_is_kept(tiny_model: Path) -> None:
    """torch counts compilations by the code of a function, and ends with an error at the ninth."""
    spec = load_spec(tiny_model)
    task = plugins.load("tasks", spec.task)
    inputs = {name: torch.from_numpy(array) for name, array in BATCH.items()}
    models = weakref.WeakSet[Any]()
    for _ in range(10):
        model = task.load_model(tiny_model, spec)
        models.add(model)
        compute = _compiler.compile_outputs(model, task, backend="eager")
        with torch.inference_mode(), _compiler.without_warnings():
            torch.testing.assert_close(compute(inputs), task.outputs(model(**inputs)))
    del model, compute
    gc.collect()
    assert not models


@runs_zentorch
def test_outputs_of_other_weights_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_other_weights(model: Any, task: Any) -> _compiler.Compute:
        for parameter in model.parameters():
            parameter.data = parameter.data.roll(1, -1)
        return lambda inputs: task.outputs(model(**inputs))

    monkeypatch.setattr(zentorch, "_compile", of_other_weights)
    with pytest.raises(UsageError, match="outputs differ by .*% from those of the unchanged one"):
        zentorch.load(tiny_model, load_spec(tiny_model), device="cpu")


@pytest.mark.slow
@runs_zentorch
def test_it_leaves_the_settings_of_the_compiler_alone(tiny_model: Path) -> None:
    import torch._inductor.config

    zentorch.load(tiny_model, load_spec(tiny_model), device="cpu")(**BATCH)
    assert torch._inductor.config.joint_custom_post_pass is None


def test_zentorch_says_what_is_missing(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.1+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(zentorch, "version", version)
    (tmp_path / "cpuinfo").write_text("flags : avx2 avx512f avx512_bf16\n")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv(hardware.TEST_CPU, raising=False)
    assert f"not installed: {pip_install('zentorch==2.13.*')}" in (zentorch.refusal(tiny_model) or "")
    with pytest.raises(UsageError, match="the library 'zentorch' is not installed"):
        zentorch.load(tiny_model, load_spec(tiny_model), device="cpu")
    versions["zentorch"] = "2.14.0.1"
    assert f"is made for torch 2.14, but this is 2.13: {pip_install('zentorch==2.13.*')}" in zentorch.refusal(
        tiny_model
    )
    monkeypatch.setattr(zentorch, "version", lambda name: "2.13.0")
    monkeypatch.setenv(hardware.TEST_CPU, "avx2")
    assert "no product of bf16" in (zentorch.refusal(tiny_model) or "")
    with pytest.raises(UsageError, match="CPUs only"):
        zentorch.load(tiny_model, load_spec(tiny_model), device="cuda")
