"""What each class of CPUs can run, and that 8-bit products are right wherever they are not refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import _openvino, _products, eager, varlen

SKYLAKE = "avx avx2 avx512f avx512dq avx512bw avx512vl"
CASCADE_LAKE = f"{SKYLAKE} avx512_vnni"
SAPPHIRE_RAPIDS = f"{CASCADE_LAKE} avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
CPUS = {
    "AMD Zen 2": ("AuthenticAMD", "avx avx2", set()),
    "AMD Zen 4": ("AuthenticAMD", f"{CASCADE_LAKE} avx512_bf16", {"int8", "bf16", "onednn"}),
    "AMD Zen 5": ("AuthenticAMD", f"{CASCADE_LAKE} avx_vnni avx512_bf16", {"int8", "bf16", "onednn"}),
    "Intel Sandy Bridge": ("GenuineIntel", "sse4_2 avx", set()),
    "Intel Haswell": ("GenuineIntel", "avx avx2", set()),
    "Intel Skylake-X": ("GenuineIntel", SKYLAKE, set()),
    "Intel Cascade Lake": ("GenuineIntel", CASCADE_LAKE, {"int8"}),
    "Intel Cooper Lake": ("GenuineIntel", f"{CASCADE_LAKE} avx512_bf16", {"int8", "bf16"}),
    "Intel Alder Lake": ("GenuineIntel", "avx avx2 avx_vnni", {"int8"}),
    "Intel Sapphire Rapids": ("GenuineIntel", SAPPHIRE_RAPIDS, {"int8", "bf16"}),
}
UNDER = {
    "avx2": set(),
    "avx2_vnni": {"int8"},
    "avx512_core": set(),
    "avx512_core_vnni": {"int8"},
    "avx512_core_bf16": {"int8", "bf16"},
}


def found() -> set[str]:
    can = {
        "int8": hardware.int8_refusal() is None,
        "bf16": hardware.bf16_refusal() is None,
        "onednn": hardware.cpu_class().products["many"] == "onednn",
    }
    return {name for name, value in can.items() if value}


def pretend(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    path.write_text(text)
    monkeypatch.setattr(hardware, "CPUINFO", path)
    monkeypatch.delenv(hardware.TEST_CPU, raising=False)


@pytest.mark.parametrize(("maker", "flags", "can"), CPUS.values(), ids=CPUS)
def test_classes_of_cpus(
    maker: str, flags: str, can: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second processor's flags, and other lines of the first, do not count.
    second = "processor\t: 1\nflags\t\t: avx512_bf16 avx512_vnni\n"
    pretend(
        monkeypatch, tmp_path / "cpuinfo", f"vendor_id\t: {maker}\nflags\t\t: fpu {flags}\nbugs\t: amx_bf16\n\n{second}"
    )
    assert found() == can
    for name, most in UNDER.items():
        monkeypatch.setenv(hardware.TEST_CPU, name)
        assert found() - {"onednn"} <= can & most, "it only takes away"
        if {"avx_vnni", "avx512_bf16"} <= set(flags.split()):
            assert found() - {"onednn"} == most, "a CPU that has everything can be each of the others"
        assert ("onednn" in found()) == ("onednn" in can and name.startswith("avx512"))


@pytest.mark.parametrize(
    "text", ["processor\t: 0\nFeatures\t: fp asimd asimddp bf16 i8mm\n", None], ids=["ARM", "none"]
)
def test_where_nothing_is_known_of_x86(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path / "cpuinfo", text or "")
    if text is None:
        monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    assert hardware.cpu_features() == frozenset()
    assert found() == {"int8"}
    assert hardware.cpu_class().name == ("unknown" if text is None else "Arm")


def test_the_table_of_classes_is_whole() -> None:
    """Every row can be the class of a CPU; what is in it is known to the code."""
    rows = hardware._cpu_classes()
    assert {row.maker for row in rows} == {"AuthenticAMD", "GenuineIntel", "Arm"}
    for number, row in enumerate(rows):
        assert row.products.keys() == {"few", "many"}
        assert set(row.products.values()) <= {"torch", "onednn"}
        assert row.rates.keys() <= set(plugins.names("runtimes"))
        assert set(row.needs) <= hardware.CPU_FEATURES.keys()
        earlier = [one for one in rows[:number] if one.maker == row.maker]
        assert not any(set(one.needs) <= set(row.needs) for one in earlier), f"{row.name} is never chosen"
        assert row.source.startswith(("measured", "rates measured", "not measured"))


@pytest.mark.parametrize("maker", ["AuthenticAMD", "CentaurHauls"])
def test_an_unknown_cpu_takes_torchs_default(maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "sse4_2 avx" if maker == "AuthenticAMD" else "avx2 avx512f avx512_vnni"
    pretend(monkeypatch, tmp_path / "cpuinfo", f"vendor_id\t: {maker}\nflags\t\t: fpu {flags}\n")
    assert hardware.cpu_class() == hardware.CpuClass()
    assert _products.libraries() == ("torch", "torch")


def test_where_8_bits_gain_little_the_refusal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path / "cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t\t: avx avx2\n")
    rates = hardware.cpu_class().rates
    gain = f"'openvino_int8' is {rates['openvino_int8'] / rates['openvino']:.2f} times as fast as 'openvino'"
    assert gain in (hardware.int8_refusal() or "")


MULTIPLIED = [{"few": few, "many": many} for few in ("torch", "onednn") for many in ("torch", "onednn")]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="there is one library to choose")
@pytest.mark.parametrize("products", MULTIPLIED, ids=str)
def test_libraries_are_chosen_by_the_number_of_rows(
    products: dict[str, str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries that a job began with multiply in `varlen` and `eager`, on a CPU of any class."""
    used: list[tuple[str, int]] = []
    onednn, of_torch = _products.product, torch.nn.functional.linear

    def product(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        used.append(("onednn", x[..., 0].numel()))
        return onednn(x, *others, **options)

    def linear(x: torch.Tensor, *others: Any) -> torch.Tensor:
        used.append(("torch", x[..., 0].numel()))
        return of_torch(x, *others)

    monkeypatch.setattr(_products, "product", product)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    spec = load_spec(tiny_model)
    for runtime in (varlen, eager):
        with _products.keeping(products):
            forward = runtime.load(tiny_model, spec, device="cpu")
        for rows, length in ((1, 4), (16, 20)):
            used.clear()
            ids = np.full((rows, length), 5, np.int64)
            forward(input_ids=ids, attention_mask=np.ones_like(ids))
            kind = "few" if rows * length <= _products.FEW else "many"
            assert {name for name, number in used if number == rows * length} == {products[kind]}


@pytest.mark.parametrize("library", ["onednn", "torch"])
def test_tokens_are_padded_once_for_all_layers(library: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each layer copies its input to add the rows."""
    copied: list[int] = []
    add_rows = _products.padded_rows

    def padded_rows(x: torch.Tensor) -> torch.Tensor:
        rows = add_rows(x)
        copied.extend([len(x)] if len(rows) > len(x) else [])
        return rows

    monkeypatch.setattr(_products, "padded_rows", padded_rows)
    spec, lengths = load_spec(tiny_model), [30, 30, 21, 9, 1]
    ids = np.full((len(lengths), max(lengths)), 5, np.int64)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    with _products.keeping({"few": library, "many": library}):
        found = varlen.load(tiny_model, spec, device="cpu")(input_ids=ids, attention_mask=mask)
    assert [rows for rows in copied if rows > len(lengths)] == ([sum(lengths)] if library == "onednn" else [])
    expected = eager.load(tiny_model, spec, device="cpu")(input_ids=ids, attention_mask=mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_class_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.TEST_CPU, "avx1024")
    with pytest.raises(UsageError, match="TORCHLAKE_TEST_CPU is 'avx1024'; it has to be one of avx2, avx2_vnni"):
        hardware.int8_refusal()


def test_child_processes_have_the_class_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.TEST_CPU, "avx2")
    code = "from torchlake.processes import hardware; print(*hardware.cpu_features(), hardware.bf16_refusal())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.removeprefix("avx2 ").startswith("this CPU has no product of bf16 numbers")


TERMS = 64
EXACT = TERMS * 255 * 127
"A sum of the largest products of 8 bits; two of them are more than 16 bits hold."


def by_torch() -> float:
    weight = torch.full((TERMS, TERMS), 127, dtype=torch.int8)
    x, ones, zeros = (
        torch.full((32, TERMS), 255, dtype=torch.uint8),
        torch.ones(TERMS),
        torch.zeros(TERMS, dtype=torch.int64),
    )
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    after = (None, 1.0, 0, torch.float32, "none", [], "")
    return float(torch.ops.onednn.qlinear_pointwise(x, 1.0, 0, packed, ones, zeros, *after)[0, 0])


def graph_of_the_product(path: Path) -> Path:
    """An ONNX graph as `_onnx_int8` makes it: x (B, 64), rounded to 8 bits, times a matrix of 127s."""
    import onnx
    from onnx import helper, numpy_helper

    constants = {
        "scale": np.float32(1),
        "zero": np.uint8(0),
        "weight": np.full((TERMS, TERMS), 127, np.int8),
        "weight.scale": np.ones(TERMS, np.float32),
        "weight.zero": np.zeros(TERMS, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x.int8"]),
        helper.make_node("DequantizeLinear", ["x.int8", "scale", "zero"], ["x.rounded"]),
        helper.make_node("DequantizeLinear", ["weight", "weight.scale", "weight.zero"], ["weight.rounded"], axis=1),
        helper.make_node("MatMul", ["x.rounded", "weight.rounded"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", TERMS])] for name in ("x", "y")]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "product", *ends, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return path


def by_openvino(folder: Path) -> float:
    _openvino.write(graph_of_the_product(folder / "product.onnx"), folder)
    core = _openvino.library().Core()
    compiled = core.compile_model(str(folder / _openvino.GRAPH), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return float(compiled.create_infer_request().infer([np.full((32, TERMS), 255, np.float32)])[0][0, 0])


def by_onnxruntime(folder: Path) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(graph_of_the_product(folder / "product.onnx")), options, providers=["CPUExecutionProvider"]
    )
    return float(session.run(None, {"x": np.full((32, TERMS), 255, np.float32)})[0][0, 0])


@pytest.mark.skipif("flags" not in hardware.cpu_facts(), reason="VNNI is a feature of x86 CPUs")
def test_8_bit_products_are_refused_where_they_overflow_and_nowhere_else(tmp_path: Path) -> None:
    """Measured: under `make test-avx2` torch and OpenVINO are limited to the class, ONNX Runtime cannot be."""
    right = hardware.int8_refusal() is None
    assert (by_torch() == EXACT) == right
    assert (by_openvino(tmp_path) == EXACT) == right
    assert by_onnxruntime(tmp_path) == EXACT or not right
