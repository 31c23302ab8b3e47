"""The runtimes that export a model: what they refuse, what they say, and how the 8-bit ranges are found.

That they agree with `eager` is asked in tests/conformance.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from cpus import needs_int8
from sweeps import sweep
from torchlake import plugins
from torchlake.data.batching import Ragged, pad
from torchlake.errors import UsageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import (
    _calibration,
    _encoder,
    _exports,
    _onnx_export,
    _onnx_int8,
    _openvino,
    deepspeed,
    onnx,
    onnx_int8,
    openvino,
    openvino_int8,
)

RUNTIMES = {"onnx": onnx, "onnx_int8": onnx_int8, "openvino": openvino, "openvino_int8": openvino_int8}
RUN_HERE = [pytest.param(name, marks=needs_int8 if RUNTIMES[name].CALIBRATED else ()) for name in RUNTIMES]
LENGTHS = [[1], [12], [1, 1, 1], [9, 9], [3, 17, 40, 1]]


def batch(lengths: list[int], pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(sum(lengths)).integers(5, 60, sum(lengths)).astype(np.int32)
    return pad(Ragged(values, np.concatenate([[0], np.cumsum(lengths)])), np.arange(len(lengths)), pad_id)


def named(rows: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch as a runtime is called with it."""
    return {"input_ids": rows[0], "attention_mask": rows[1]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A model with all four exports in its folder."""
    folder = tiny.build_model(tmp_path_factory.mktemp("exported") / "model", encoder=tiny_bert)
    rows = [batch([5, 8, 30, 20]), batch([12] * 8)]
    for runtime in RUNTIMES.values():
        runtime.prepare(folder, load_spec(folder), rows if runtime.CALIBRATED else [])
    return folder


@pytest.fixture(scope="module")
def loaded(exported: Path) -> Callable[[str], Any]:
    """The forward pass of a runtime, which is loaded once."""
    return cache(lambda name: plugins.load("runtimes", name).load(exported, load_spec(exported), device="cpu"))


def copy_of(folder: Path, there: Path, *, exports: bool = True) -> Path:
    return shutil.copytree(folder, there, ignore=None if exports else shutil.ignore_patterns("runtimes"))


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rows_of_any_number_and_length(name: str, lengths: list[int], loaded: Callable[[str], Any]) -> None:
    logits = loaded(name)(**named(batch(lengths)))
    expected = loaded("eager")(**named(batch(lengths)))
    np.testing.assert_allclose(logits, expected, atol=0.3 if RUNTIMES[name].CALIBRATED else 1e-5)


@pytest.mark.parametrize(
    ("problem", "labels"),
    [pytest.param("regression", (), marks=pytest.mark.slow), ("multi_label", ("a", "b", "c"))],
)
def test_other_problems(problem: str, labels: tuple[str, ...], tmp_path: Path, tiny_roberta: Path) -> None:
    spec = tiny.spec_for(problem, labels)
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_roberta, spec=spec)
    pad_id = load.load_tokenizer(folder).pad_token_id
    openvino.prepare(folder, spec, [])
    logits = openvino.load(folder, spec, device="cpu")(**named(batch([3, 17], pad_id)))
    assert logits.shape == (2, max(1, len(labels)))
    expected = plugins.load("runtimes", "eager").load(folder, spec, device="cpu")(**named(batch([3, 17], pad_id)))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_gate_lets_exports_pass(exported: Path) -> None:
    load.check_folder(exported)
    load.load_model(exported, auto_class="AutoModelForSequenceClassification")


@pytest.mark.parametrize("name", RUN_HERE)
def test_without_an_export_of_these_weights_the_remedy_is_said(name: str, exported: Path, tmp_path: Path) -> None:
    spec = load_spec(exported)
    bare = copy_of(exported, tmp_path / "bare", exports=False)
    with pytest.raises(UsageError, match=rf"no export.*torchlake optimize {bare} --sample TABLE"):
        RUNTIMES[name].load(bare, spec, device="cpu")
    trained_again = copy_of(exported, tmp_path / "again")
    (trained_again / "manifest.json").unlink()
    (trained_again / "config.json").write_text((exported / "config.json").read_text() + "\n")
    with pytest.raises(UsageError, match="no export of these weights"):
        RUNTIMES[name].load(trained_again, spec, device="cpu")


@pytest.mark.parametrize("name", ["onnx_int8", "openvino", "openvino_int8"])
def test_a_gpu_is_refused(name: str, exported: Path) -> None:
    with pytest.raises(UsageError, match=rf"{name}.*CPUs only.*'varlen'"):
        RUNTIMES[name].load(exported, load_spec(exported), device="cuda")


def test_a_gpu_is_refused_without_its_provider(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(UsageError, match="onnxruntime-gpu"):
        onnx.load(exported, load_spec(exported), device="cuda")


@needs_int8
@pytest.mark.parametrize("name", ["onnx_int8", "openvino_int8"])
def test_ranges_need_rows(name: str, exported: Path) -> None:
    with pytest.raises(UsageError, match="--sample TABLE"):
        RUNTIMES[name].prepare(exported, load_spec(exported), [])
    assert RUNTIMES[name].load(exported, load_spec(exported), device="cpu")(**named(batch([3]))).shape == (1, 2)


@pytest.mark.parametrize("name", [*RUN_HERE, "deepspeed"])
def test_a_missing_library_is_said_with_the_pip_line(
    name: str, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extra = name.removesuffix("_int8")
    monkeypatch.setattr(deepspeed, "DEVICES", (str(tmp_path),))
    for module in (_exports, deepspeed):
        monkeypatch.setattr(module, "find_spec", lambda library: None)
    assert f"pip install 'torchlake[{extra}]'" in plugins.load("runtimes", name).refusal(exported)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_model_too_big_for_the_format_is_refused(name: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUNTIMES[name].refusal(exported) == (hardware.int8_refusal() if RUNTIMES[name].CALIBRATED else None)
    monkeypatch.setattr(_exports, "MAX_WEIGHT_BYTES", 1000)
    for cpu in hardware.CPU_CLASSES:
        monkeypatch.setenv(hardware.TEST_CPU, cpu)
        assert "an ONNX file holds 2 GB" in RUNTIMES[name].refusal(exported)


@pytest.mark.parametrize("name", ["int8", "onnx_int8", "openvino_int8"])
def test_a_cpu_that_overflows_is_refused(name: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.TEST_CPU, "avx512_core")
    runtime = plugins.load("runtimes", name)
    assert "VNNI" in str(runtime.refusal(exported))
    with pytest.raises(UsageError, match="VNNI"):
        runtime.load(exported, load_spec(exported), device="cpu")


def test_nothing_is_printed(exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(exported, tmp_path / "model", exports=False)
    for runtime in RUNTIMES.values():
        runtime.prepare(folder, load_spec(folder), [batch([5, 8])] if runtime.CALIBRATED else [])
        if runtime.refusal(folder) is None:
            runtime.load(folder, load_spec(folder), device="cpu")(**named(batch([3, 9])))
    assert capfd.readouterr() == ("", "")


def test_nobody_is_told_that_openvino_is_used(exported: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom torchlake.models.spec import load_spec\n"
        "from torchlake.runtimes import openvino\n"
        f"folder = Path({str(exported)!r})\nopenvino.load(folder, load_spec(folder), device='cpu')\n"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry')])"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("CI", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not list(tmp_path.rglob("*openvino*"))


def test_a_graph_that_answers_otherwise_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = _onnx_export.forward

    def wrong_for_long_rows(path: Path) -> Any:
        run = right(path)
        return lambda ids, mask: run(ids, mask) + (0.5 if ids.shape[1] > 7 else 0.0)

    monkeypatch.setattr(_onnx_export, "forward", wrong_for_long_rows)
    with pytest.raises(UsageError, match=r"outputs of its ONNX graph and of the model differ.*1 x 9 tokens.*'eager'"):
        onnx.prepare(exported, load_spec(exported), [])


def test_an_architecture_that_cannot_be_exported_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def cannot(*args: Any, **options: Any) -> None:
        raise RuntimeError("Exporting the operator 'aten::odd' is not supported\nmore")

    monkeypatch.setattr(torch.onnx, "export", cannot)
    with pytest.raises(UsageError, match=r"architecture 'bert' cannot be exported.*aten::odd"):
        onnx.prepare(exported, load_spec(exported), [])


def test_linear_layers_are_in_8_bits_and_the_rest_is_not(exported: Path) -> None:
    import onnx as library

    graph = library.load(str(exported / "runtimes" / "onnx_int8" / "model.onnx")).graph
    kinds = {constant.name: constant.data_type for constant in graph.initializer}
    matrices = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in kinds]
    assert len(matrices) == 2 * 6
    assert {kinds[name] for name in matrices} == {library.TensorProto.INT8}
    left = [node for node in graph.node if node.op_type == "Gemm"]
    assert all(kinds[node.input[1]] == library.TensorProto.FLOAT for node in left)


def test_zero_points_are_in_the_biases(exported: Path) -> None:
    """One step less after each product, and none of them in bf16 where OpenVINO computes the rest in it."""
    import onnx as library

    graph = library.load(str(exported / "runtimes" / "onnx_int8" / "model.onnx")).graph
    constants = {constant.name: library.numpy_helper.to_array(constant) for constant in graph.initializer}
    back = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] not in constants]
    assert len(back) == 2 * 4 + 1
    assert {int(constants[node.input[2]]) for node in back} == {0}
    there = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert any(int(constants[node.input[2]]) != 0 for node in there)


def test_one_calibration_serves_both_runtimes(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = copy_of(exported, tmp_path / "model", exports=False), load_spec(exported)
    onnx_int8.prepare(folder, spec, [batch([5, 8])])
    calibrated = []
    observe = _onnx_int8._observe
    monkeypatch.setattr(_onnx_int8, "_observe", lambda *args: calibrated.append(1) or observe(*args))
    openvino_int8.prepare(folder, spec, [batch([5, 8])])
    assert not calibrated
    openvino_int8.prepare(folder, spec, [batch([5, 9])])
    assert calibrated


def ranks_of_products(folder: Path) -> set[int]:
    """The ranks of all products in a graph for OpenVINO: 3 and 4 dimensions, and 5 where attention is not fused."""
    graph = _openvino.library().Core().read_model(str(folder / "model.xml"))
    products = [node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"]
    return {node.get_output_partial_shape(0).rank.get_length() for node in products}


@pytest.mark.parametrize("activation", sweep(["gelu", "gelu_new"], quick={"gelu"}))
def test_attention_in_parts_is_the_same_attention(activation: str, tmp_path: Path, tiny_bert: Path) -> None:
    encoder = copy_of(tiny_bert, tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    # With another activation it is exported as transformers writes it, not as `_encoder_module` does.
    (encoder / "config.json").write_text(json.dumps({**config, "hidden_act": activation}))
    folder = tiny.build_model(tmp_path / "model", encoder=encoder)
    assert (_encoder.refusal(folder) is None) == (activation == "gelu")
    spec, pad_id = load_spec(folder), load.load_tokenizer(folder).pad_token_id
    graph = _onnx_export.graph(folder, spec, tmp_path)
    merged, parts = tmp_path / "merged", tmp_path / "parts"
    for place in (merged, parts):
        place.mkdir()
        _openvino.write(graph, place, attention_in_parts=place is parts)
    assert 5 not in ranks_of_products(merged)
    assert 5 in ranks_of_products(parts)
    eager = plugins.load("runtimes", "eager").load(folder, spec, device="cpu")
    in_parts = _openvino.forward(parts, precision="f32")
    for lengths in LENGTHS:
        rows = batch(lengths, pad_id)
        np.testing.assert_allclose(in_parts(**named(rows)), eager(**named(rows)), atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "short"),
    [
        pytest.param([5, 8, 14], True, marks=pytest.mark.slow),
        ([4, 4, 4, 20], True),
        ([4, 4, 4, 30], False),
        pytest.param([30], False, marks=pytest.mark.slow),
    ],
)
def test_attention_is_laid_out_for_the_rows_of_the_calibration(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], short: bool
) -> None:
    folder, spec = copy_of(exported, tmp_path / "model", exports=False), load_spec(exported)
    monkeypatch.setattr(_openvino, "SHORT", dict.fromkeys(_openvino.SHORT, 15))
    openvino_int8.prepare(folder, spec, [batch(lengths)])
    assert (5 in ranks_of_products(folder / "runtimes" / "openvino_int8")) == short


def quantized_error(smooth: np.ndarray, seen: _calibration.ActivationStats, weight: np.ndarray) -> float:
    sample = np.concatenate(seen.sample)
    loud = np.isinf(smooth)
    scale, zero = _calibration.uint8_grid(seen.low / smooth, seen.high / smooth)
    x = (np.clip(np.rint(sample / smooth / scale) + zero, 0, 255) - zero) * scale
    rounded, scales = _calibration.round_weights(_calibration.scaled(weight, smooth))
    return float(np.abs(x @ (rounded * scales) + sample[:, loud] @ weight[loud] - sample @ weight).mean())


@pytest.mark.parametrize("loud_channels", [0, 1, 10])
def test_loud_channels_do_not_drown_the_others(loud_channels: int) -> None:
    generator = np.random.default_rng(loud_channels)
    x = generator.normal(size=(200, 64)).astype(np.float32)
    x[:, :loud_channels] *= 60
    weight = generator.normal(size=(64, 32)).astype(np.float32)
    seen = _calibration.ActivationStats(x.min(axis=0), x.max(axis=0), [x])
    smooth = _calibration.smoothing(seen, weight)
    plain = quantized_error(np.ones(64, dtype=np.float32), seen, weight)
    error = quantized_error(smooth, seen, weight)
    assert error <= plain
    if loud_channels:
        assert error < plain / 2
    assert np.isinf(smooth).sum() == (_calibration.LOUD_CHANNELS if loud_channels == 1 else 0)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-2.0, -1.0), (0.0, 0.0)])
def test_a_range_holds_zero_exactly(low: float, high: float) -> None:
    scale, zero = _calibration.uint8_grid(np.array([low], np.float32), np.array([high], np.float32))
    assert scale > 0
    assert 0 <= zero <= 255
    for value in (low, high):
        assert abs((np.clip(np.rint(value / scale) + zero, 0, 255) - float(zero)) * scale - value) <= scale


def test_deepspeed_refuses_what_it_cannot_run(exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed, "find_spec", lambda library: object())
    monkeypatch.setattr(deepspeed, "DEVICES", ())
    assert "no GPU here" in str(deepspeed.refusal(exported))
    monkeypatch.setattr(deepspeed, "DEVICES", (str(tmp_path),))
    assert deepspeed.refusal(exported) is None
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    assert "not for 'deberta-v2'" in str(deepspeed.refusal(tmp_path))
    with pytest.raises(UsageError, match=r"CUDA only.*'int8'"):
        deepspeed.load(exported, load_spec(exported), device="cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="sigaltstack as Linux has it")
def test_openvino_leaves_no_stack_for_signals_behind(exported: Path) -> None:
    """It would be gone when the next Ctrl-C comes, and end the process with a segmentation fault."""

    def stack() -> tuple[int | None, int, int]:
        now = _openvino._SignalStack()
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(now))
        return now.pointer, now.flags, now.size

    before = stack()
    forward = openvino.load(exported, load_spec(exported), device="cpu")
    forward(**named(batch([3, 5])))
    assert stack() == before
