"""What `varlen`, `bf16` and `int8` promise beyond agreeing with eager: what is left out, what differs."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from cpus import needs_bf16, needs_int8
from torchlake.data.batching import Ragged, pad
from torchlake.errors import DataError, UsageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import _encoder, _products, _ragged, bf16, int8, varlen
from torchlake.runtimes._padding import remove_padding

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=20)


@given(lengths=LENGTHS, padding_id=st.sampled_from([None, 1]))
def test_laying_rows_end_to_end_loses_no_token(lengths: list[int], padding_id: int | None) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(2, offsets[-1] + 2, dtype=np.int32)
    ids, mask = pad(Ragged(values, offsets), np.arange(len(lengths)), 1)
    rows = remove_padding(padding_id, ids, mask)
    assert rows.ids.tolist() == values.tolist()
    assert rows.lengths.tolist() == lengths
    first = 0 if padding_id is None else padding_id + 1
    assert rows.positions.tolist() == [first + place for length in lengths for place in range(length)]
    assert [length for count, length in rows.length_groups for _ in range(count)] == lengths
    assert all(a[1] != b[1] for a, b in zip(rows.length_groups[:-1], rows.length_groups[1:], strict=True))


def test_the_padding_token_in_a_text_has_no_position(tiny_roberta: Path, tmp_path: Path) -> None:
    """RoBERTa gives a padding token the position of padding wherever it stands; so must we."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_roberta)
    spec, pad_id = load_spec(folder), load.load_tokenizer(folder).pad_token_id
    ids = np.array([[0, 7, pad_id, 9, 2]])
    mask = np.ones_like(ids)
    model = load.load_model(folder, spec, auto_class="AutoModelForSequenceClassification")
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
    np.testing.assert_allclose(
        varlen.load(folder, spec, device="cpu")(input_ids=ids, attention_mask=mask), expected, atol=1e-5
    )


def test_weights_that_do_not_fit_are_named(tiny_model: Path, tmp_path: Path) -> None:
    """Both ended in torch's RuntimeError, of the load or of each row."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("manifest.json", "task.json"):
        (folder / name).unlink()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    save_file({**tensors, "classifier.bias": torch.zeros(5)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lack classifier\.bias of the size 2, .* theirs is 5\."):
        varlen.load(folder, load_spec(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3}))
    with pytest.raises(DataError, match=r"its 3 attention heads cannot share states of 32 numbers"):
        varlen.load(folder, load_spec(folder), device="cpu")


@pytest.mark.parametrize("buckets", [31, 32, 64])
def test_mpnet_has_the_buckets_of_distances_of_transformers(tmp_path: Path, buckets: int) -> None:
    """transformers computes with 32 of them, whatever the configuration says."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tokenizer = tiny.wordpiece_tokenizer()
    config = transformers.MPNetConfig(
        vocab_size=len(tokenizer), pad_token_id=0, relative_attention_num_buckets=buckets, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.MPNetForSequenceClassification(config).eval()
        torch.nn.init.normal_(model.mpnet.encoder.relative_attention_bias.weight)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    ids = np.arange(200)[None] % 30 + 5
    if buckets < 32:
        with pytest.raises(DataError, match=r"config\.json: relative_attention_num_buckets is 31, .* with 32"):
            load_spec(tmp_path)
        return
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    ours = varlen.load(tmp_path, load_spec(tmp_path), device="cpu")(input_ids=ids, attention_mask=np.ones_like(ids))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@needs_int8
@pytest.mark.parametrize("shift", [None, 0.17])
def test_an_8_bit_product_is_off_by_its_rounding_only(shift: float | None) -> None:
    """Each number is off by at most half a step, a product by half a step per term of its sum; every token apart."""
    torch.manual_seed(0)
    x = torch.nn.functional.gelu(torch.randn(5, 64) * torch.tensor([[1e-3], [0.1], [1.0], [10.0], [1e3]]))
    layer = _encoder.Linear(torch.randn(32, 64), torch.randn(32))
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    largest = x.abs().amax(1, keepdim=True) if shift is None else x.amax(1, keepdim=True) + shift
    step_x, step_w = largest / (127 if shift is None else 255), layer.weight.abs().amax(1) / 127
    reach = x.abs() if shift is None else x + shift
    bound = step_x / 2 * layer.weight.abs().sum(1) + step_w / 2 * reach.sum(1, keepdim=True) + 64 * step_x * step_w / 4
    product = int8._linear(layer, shift=shift)(x.clone(), None)
    assert ((product - exact).abs() <= bound * 1.01 + 1e-5).all()
    assert ((product - exact).abs() > 0).any()


def test_a_token_of_zeros_is_no_division_by_zero() -> None:
    layer = _encoder.Linear(torch.randn(32, 64), torch.randn(32))
    product = int8._linear(layer)(torch.zeros(3, 64), None)
    torch.testing.assert_close(product, layer.bias.expand(3, 32))


def test_what_is_not_finite_stays_in_its_token() -> None:
    layer = _encoder.Linear(torch.randn(32, 64), torch.randn(32))
    x = torch.randn(3, 64)
    good = int8._linear(layer)(x, None)
    x[1, 5] = float("nan")
    bad = int8._linear(layer)(x, None)
    assert bad[1].isnan().any()
    torch.testing.assert_close(bad[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("runtime", [bf16, int8])
def test_some_are_for_cpus(runtime: ModuleType, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="CPUs only"):
        runtime.load(tiny_model, load_spec(tiny_model), device="cuda")


def test_bf16_is_refused_where_it_would_be_emulated(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.TEST_CPU, "avx512_core_vnni")
    assert "no product of bf16" in (bf16.refusal(tiny_model) or "")
    with pytest.raises(UsageError, match="no product of bf16"):
        bf16.load(tiny_model, load_spec(tiny_model), device="cpu")


@needs_bf16
@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
def test_a_product_in_bf16_is_off_by_the_rounding_of_its_operands(activation: str) -> None:
    """Eight bits of significand: operands, and the result, are off by a part in 256 at most; sums are fp32's."""
    torch.manual_seed(0)
    x, residual = torch.randn(5, 64), torch.randn(5, 32)
    layer = _encoder.Linear(torch.randn(32, 64), torch.randn(32))
    short = _encoder.Linear(layer.weight.bfloat16(), layer.bias.bfloat16())
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    reach = torch.nn.functional.linear(x.abs(), layer.weight.abs(), layer.bias.abs())
    functions = {"none": lambda y: y, "gelu": torch.nn.functional.gelu, "relu": torch.relu}
    product = bf16._linear(short, activation)(x.bfloat16(), None)
    assert product.dtype == torch.bfloat16
    off = (product.float() - functions[activation](exact)).abs()
    assert (off <= 4 / 256 * reach).all()
    assert (off > 0).any()
    if activation == "none":
        total = bf16._linear(short)(x.bfloat16(), residual.bfloat16())
        assert ((total.float() - exact - residual).abs() <= 4 / 256 * (reach + residual.abs())).all()


@pytest.mark.parametrize("length", [1, 15, 31, 64])
def test_short_rows_in_bf16_mix_as_torch_does(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mixed = _ragged._mix_short(*(part.bfloat16() for part in (q, k, v)))
    assert mixed.dtype == torch.bfloat16
    assert (mixed.float() - expected).abs().max() <= 0.03 * v.abs().max()


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch was built without oneDNN")
@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (32,), (33,), (65,), (3, 7), (4, 8), (1, 1), (0, 5)], ids=str)
def test_products_are_compiled_for_few_numbers_of_rows(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 24, generator=random)
    weight, bias = torch.randn(16, 24, generator=random), torch.randn(16, generator=random)
    rows = x[..., 0].numel()
    assert len(_products.padded_rows(x)) % (_products.FEW_STEP if rows <= _products.FEW else _products.STEP) == 0
    assert len(_products.padded_rows(x)) < rows + (4 if rows <= 64 else 32)
    expected = torch.nn.functional.linear(x, weight, bias)
    found = _products.product(x, weight, bias, activation="gelu")
    torch.testing.assert_close(found, torch.nn.functional.gelu(expected), atol=1e-5, rtol=1e-5)
    residual = torch.randn(*shape, 16, generator=random)
    found = _products.product(x, weight, bias, residual=residual)
    torch.testing.assert_close(found, expected + residual, atol=1e-5, rtol=1e-5)
