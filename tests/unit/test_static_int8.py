"""`static_int8`: its product, its ranges, what it says. That it agrees with `eager` is asked in tests/conformance."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import tiny
from torchlake import durable, exports, models
from torchlake.errors import DataError, UsageError
from torchlake.runtimes import _cpu, _encoder, _ragged, static_int8
from torchlake.runtimes.static_int8 import _feed_forward, _Product, _Range

pytestmark = pytest.mark.skipif(_cpu.overflow() is not None, reason="this CPU's 8-bit products overflow")


def range_of(x: torch.Tensor, *, smooth: torch.Tensor | None = None, loud: tuple[int, ...] = ()) -> _Range:
    """The range that holds x."""
    smooth = torch.ones(x.shape[1]) if smooth is None else smooth.clone()
    smooth[list(loud)] = torch.inf
    seen = x / smooth
    low, high = min(0.0, seen.min().item()), max(0.0, seen.max().item())
    scale = (high - low) / 255
    return _Range(smooth.numpy().astype(np.float32), scale, round(-low / scale))


def linear(inputs: int, outputs: int) -> _encoder.Linear:
    return _encoder.Linear(torch.randn(outputs, inputs), torch.randn(outputs))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("loud", [(), (3, 17)])
@pytest.mark.parametrize("smooth", [None, torch.linspace(0.5, 2.0, 64)])
def test_a_product_is_off_by_its_rounding_only(loud: tuple[int, ...], smooth: torch.Tensor | None) -> None:
    """Each number is off by at most half a step, a product by half a step per term of its sum."""
    x, layer, residual = torch.randn(5, 64), linear(64, 32), torch.randn(5, 32)
    x[:, list(loud)] *= 100
    kept = range_of(x, smooth=smooth, loud=loud)
    product = _Product(layer, kept)
    result = product(x, residual.clone(), out=torch.float32)
    quiet = np.flatnonzero(np.isfinite(kept.smooth)).tolist()
    divided = torch.from_numpy(kept.smooth)[quiet].double()
    weight = layer.weight[:, quiet].double() * divided
    step_w = weight.abs().amax(1) / 127
    reach = (x[:, quiet].double() / divided).abs()
    bound = kept.scale / 2 * weight.abs().sum(1) + step_w / 2 * (reach + kept.scale).sum(1, keepdim=True)
    exact = x.double() @ layer.weight.double().T + layer.bias + residual
    assert ((result - exact).abs() <= bound * 1.01 + 1e-3).all()
    assert ((result - exact).abs() > 0).any()
    torch.testing.assert_close(product(x, None, out=torch.float32) + residual, result, atol=1e-3, rtol=1e-4)


def test_what_is_out_of_range_is_clipped() -> None:
    layer = linear(64, 32)
    x = torch.rand(5, 64)
    product = _Product(layer, range_of(x))
    largest = torch.full((1, 64), x.max().item())
    torch.testing.assert_close(
        product(largest * 1000, None, out=torch.float32), product(largest, None, out=torch.float32)
    )


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_eight_bits_between_two_products_cost_one_rounding(activation: str) -> None:
    x, up_layer, down_layer = torch.randn(9, 64), linear(64, 128), linear(128, 64)
    activate = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[activation]
    inner = activate(torch.nn.functional.linear(x, up_layer.weight, up_layer.bias))
    up = _Product(up_layer, range_of(x))
    plain = _Product(down_layer, range_of(inner))
    almost_plain = _Range(
        np.where(np.arange(128) == 0, np.float32(1.001), np.float32(1)), plain.range.scale, plain.range.zero
    )
    assert plain.range.plain
    assert not almost_plain.plain
    fused = _feed_forward(up, plain, activation=activation)(x.clone())
    apart = _feed_forward(up, _Product(down_layer, almost_plain), activation=activation)(x.clone())
    step = plain.range.scale * down_layer.weight.abs().max().item()
    assert (fused - apart).abs().max() <= 12 * step
    exact = torch.nn.functional.linear(inner, down_layer.weight, down_layer.bias) + x
    assert (fused - exact).abs().mean() <= 0.02 * exact.abs().mean()


@pytest.mark.parametrize("length", [1, 15, 31, 64])
def test_short_rows_in_bf16_mix_as_torch_does(length: int) -> None:
    q, k, v = torch.randn(3, 2, 4, length, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mixed = _ragged._mix_short(*(part.bfloat16() for part in (q, k, v)))
    assert mixed.dtype == torch.bfloat16
    assert (mixed.float() - expected).abs().max() <= 0.03 * v.abs().max()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tiny.build_model(tmp_path_factory.mktemp("static") / "model", encoder=tiny_bert)
    static_int8.prepare(folder, models.load_spec(folder), [batch(8, 20)])
    return folder


def batch(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(5, 60, (rows, length))
    return ids, np.ones_like(ids)


def test_ranges_are_all_that_is_kept(calibrated: Path) -> None:
    export = calibrated / "runtimes" / "static_int8"
    assert {path.name for path in export.iterdir()} == {static_int8.RANGES, durable.MANIFEST}
    layers = len(_encoder.read(calibrated, models.load_spec(calibrated)).layers)
    # The last layer's queries are a product of their own.
    assert len(load_file(export / static_int8.RANGES)) == 3 * (4 * layers + 1)


def test_the_same_rows_give_the_same_ranges(calibrated: Path) -> None:
    before = (calibrated / "runtimes" / "static_int8" / static_int8.RANGES).read_bytes()
    static_int8.prepare(calibrated, models.load_spec(calibrated), [batch(8, 20)])
    assert (calibrated / "runtimes" / "static_int8" / static_int8.RANGES).read_bytes() == before


def test_ranges_need_rows(calibrated: Path) -> None:
    with pytest.raises(UsageError, match="--sample TABLE"):
        static_int8.prepare(calibrated, models.load_spec(calibrated), [])


def test_without_ranges_the_remedy_is_said(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=rf"calibrated on rows like those to score.*optimize {tiny_model}"):
        static_int8.load(tiny_model, models.load_spec(tiny_model), device="cpu")


def test_a_gpu_is_refused(calibrated: Path) -> None:
    with pytest.raises(UsageError, match=r"static_int8.*CPUs only"):
        static_int8.load(calibrated, models.load_spec(calibrated), device="cuda")


def test_too_few_ranges_are_an_error_that_says_so(calibrated: Path) -> None:
    spec = models.load_spec(calibrated)
    kept = load_file(exports.current(calibrated, "static_int8") / static_int8.RANGES)  # type: ignore[operator]
    with exports.making(calibrated, "static_int8", rows=1, versions={}) as place:
        save_file(
            {name: value for name, value in kept.items() if not name.startswith("8.")}, place / static_int8.RANGES
        )
    with pytest.raises(DataError, match="fewer ranges than the model has products"):
        static_int8.load(calibrated, spec, device="cpu")
    static_int8.prepare(calibrated, spec, [batch(8, 20)])
