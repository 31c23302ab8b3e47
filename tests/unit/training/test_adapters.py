"""Adapters: peft's options, adapters beside their base, quantized bases."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.config.sections.strategies import LoraOptions
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError, DataError, FingerprintError, UnsafeError, UsageError
from torchlake.models import folders, load
from torchlake.models.adapters import base as bases
from torchlake.models.adapters import quantized
from torchlake.optim.optimizers import make_optimizer
from torchlake.processes import hardware
from torchlake.training.model import lora

peft = pytest.importorskip("peft")
SLOW = pytest.mark.slow
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"rank": 4},
    "rslora": {"rank": 4, "rslora": True, "init": "gaussian"},
    "dora": {"rank": 4, "dora": True},
    "pissa": {"rank": 4, "init": "pissa"},
    "pissa_rslora": {"rank": 3, "init": "pissa", "rslora": True},
    "pissa_dora": {"rank": 4, "init": "pissa", "dora": True},
    "head": {"rank": 2, "also_train": ["embed_tokens", "lm_head", "norm"], "learning_rate_ratio": 16},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute"),
]


def job(folder: Path, base: Path, kind: str, options: dict[str, Any], **train: Any) -> dict[str, Any]:
    recipe = {"epochs": 1, "batch_size": 5, "learning_rate": 1e-2, "checkpoint_every": "1steps", **train}
    sections = runs.job(folder, base, rows=24, **recipe)
    sections["model"] |= {"lora": options}
    if kind == "writer":
        sections["model"] |= {"task": "text_generation", "max_length": 24}
        pq.write_table(tiny.reviews(24).select(["id", "text"]), sections["data"]["train"])
    return sections


def logits(model: Any, size: int = 100) -> torch.Tensor:
    ids = (torch.arange(24).reshape(2, 12) * 7 + 5) % size
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found


CASES = [
    ("gpt2", "default", False),
    *[(model, name, True) for model in ("gpt2", "llama", "bert") for name in OPTIONS],
]


@pytest.mark.parametrize(
    ("model", "name"), [pytest.param(model, name, marks=[SLOW] * slow) for model, name, slow in CASES]
)
def test_alone_an_adapter_gives_what_the_merged_model_gives_and_peft_loads_it(
    tmp_path: Path, tiny_bert: Path, tiny_gpt2: Path, tiny_llama: Path, model: str, name: str
) -> None:
    if name == "head" and model != "llama":
        pytest.skip("its embeddings are tied, or it has none of these modules")
    base = {"bert": tiny_bert, "gpt2": tiny_gpt2, "llama": tiny_llama}[model]
    kind = "classifier" if model == "bert" else "writer"
    sections = job(tmp_path, base, kind, OPTIONS[name], max_steps=2, checkpoint_every="epoch")
    runs.succeed(tmp_path / "merged", sections)
    sections["model"]["lora"] = {**OPTIONS[name], "merge": False}
    runs.succeed(tmp_path / "alone", sections)
    whole, alone = tmp_path / "merged" / "model", tmp_path / "alone" / "model"
    assert not (alone / "model.safetensors").exists()
    auto: Any = AutoModelForCausalLM if kind == "writer" else AutoModelForSequenceClassification
    one, other = (load.load_model(folder, auto_class=auto.__name__) for folder in (whole, alone))
    for (key, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key
    expected = logits(one.double())  # each CPU rounds fp32 in its own way
    own = (
        auto.from_pretrained(base, num_labels=one.config.num_labels) if kind != "writer" else auto.from_pretrained(base)
    )
    for folder in (alone, whole / "adapter"):
        adapted = peft.PeftModel.from_pretrained(own, folder)
        torch.testing.assert_close(logits(adapted.double()), expected, atol=2e-5, rtol=1e-5)
        own = adapted.unload()
        if name != "default":
            break  # it trains whole modules, or others
    assert not torch.equal(logits(one), logits(auto.from_pretrained(base, num_labels=one.config.num_labels)))
    table = pa.table({"text": ["a good film", "what"]})
    options = {"max_new_tokens": 3} if kind == "writer" else {}
    first, second = (tl.predict(each, table, engine=tiny.Here(), **options) for each in (whole, alone))
    assert first.equals(second)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "dora", "pissa", "head"])
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_killed_run_goes_on_with_the_same_bytes(
    tmp_path: Path, tiny_llama: Path, name: str, strategy: str, ranks: int
) -> None:
    # A rate with which the last digits of two ranks stay the last ones.
    recipe: dict[str, Any] = {"strategy": strategy, "epochs": 2, "learning_rate": 1e-4}
    sections = job(tmp_path, tiny_llama, "writer", {**OPTIONS[name], "merge": False}, **recipe)
    runs.succeed(tmp_path / "whole", sections, ranks=ranks)
    stopped = runs.attempt(tmp_path / "run", sections, ranks=ranks, failpoint="rank0.step:4:kill9")
    assert stopped.exit_code in (0, -9)
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    one, other = ((tmp_path / run / "model" / folders.ADAPTER_TENSORS).read_bytes() for run in ("run", "whole"))
    assert one == other
    sections["train"]["strategy"] = "single"
    runs.succeed(tmp_path / "single", sections)
    assert runs.losses(tmp_path / "single") == pytest.approx(runs.losses(tmp_path / "run"), abs=1e-4)


def test_b_learns_at_its_own_rate(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    options = LoraOptions(rank=2, learning_rate_ratio=16.0)
    wrapped = lora.add_adapters(model, options)
    train = TrainConfig(learning_rate=1e-3)
    scales = lora.rate_scales(wrapped, options, {})
    names = {id(parameter): name for name, parameter in wrapped.named_parameters()}
    optimizer = make_optimizer(wrapped, train, scales)
    rates = {names[id(each)]: group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert {"lora_A" in name for name in rates} == {True, False}
    for name, rate in rates.items():
        assert rate == pytest.approx(16e-3 if "lora_B" in name else 1e-3)


def test_layers_compute_as_those_of_peft(tiny_gpt2: Path, tiny_llama: Path) -> None:
    """Scales, norms and first values: the same options in peft's own words."""
    for base, names in ((tiny_llama, ("rslora", "dora", "pissa")), (tiny_gpt2, ("rslora", "dora", "pissa"))):
        for name in names:
            options = LoraOptions(**OPTIONS[name])
            torch.manual_seed(3)
            ours = lora.add_adapters(AutoModelForCausalLM.from_pretrained(base), options)
            config = peft.LoraConfig(
                r=4,
                lora_alpha=32,
                target_modules="all-linear",
                use_rslora=name == "rslora",
                use_dora=name == "dora",
                init_lora_weights={"rslora": "gaussian", "pissa": "pissa"}.get(name, True),
                fan_in_fan_out=base == tiny_gpt2,
            )
            torch.manual_seed(3)
            theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
            for model in (ours, theirs):
                for each, parameter in model.named_parameters():
                    if "lora_B" in each and name != "pissa":
                        torch.manual_seed(parameter.numel())
                        torch.nn.init.normal_(parameter, std=0.1)
            torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=1e-6)


def test_a_base_that_changed_or_is_gone_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_llama, base)
    runs.succeed(tmp_path / "run", job(tmp_path, base, "writer", {"rank": 2, "merge": False}))
    model = tmp_path / "run" / "model"
    record = json.loads((model / "base.json").read_text())
    assert record == {"name": str(base), "revision": None, "hash": folders.model_hash(base), "quantize": None}
    written = tl.predict(model, pa.table({"text": ["good"]}), engine=tiny.Here(), max_new_tokens=2)
    assert written["error"].to_pylist() == [None]
    tl.export(model, tmp_path / "whole", format="transformers")
    assert tl.predict(tmp_path / "whole", pa.table({"text": ["good"]}), engine=tiny.Here(), max_new_tokens=2).equals(
        written
    )
    one, other = (load.load_weights(each) for each in (model, tmp_path / "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    known = folders.model_hash(model)
    base = base.rename(tmp_path / "moved")
    (model / "base.json").write_text(json.dumps({**record, "name": str(base)}))
    assert folders.model_hash(model) == known, "a base that moved is the same one"
    load.check_files(model)
    assert tl.predict(model, pa.table({"text": ["good"]}), engine=tiny.Here(), max_new_tokens=2).equals(written)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    with pytest.raises(FingerprintError, match="have changed, and with them all predictions"):
        load.load_model(model, auto_class="AutoModelForCausalLM")
    shutil.rmtree(base)
    with pytest.raises(DataError, match="its base cannot be opened"):
        load.load_model(model, auto_class="AutoModelForCausalLM")
    (model / "manifest.json").unlink()
    config = json.loads((model / "adapter_config.json").read_text())
    (model / "adapter_config.json").write_text(json.dumps({**config, "auto_mapping": {"parent_library": "os"}}))
    with pytest.raises(DataError, match="auto_mapping"):
        load.check_folder(model)
    (model / "base.json").unlink()
    with pytest.raises((DataError, UnsafeError), match="refers to another model"):
        load.check_folder(model)


def test_a_base_that_is_written_over_in_place_is_noticed(tmp_path: Path, tiny_bert: Path) -> None:
    """Its weights may be mapped: a loaded model keeps its own, and a job ends."""
    base = shutil.copytree(tiny_bert, tmp_path / "base")
    sections = job(tmp_path, base, "classifier", {"rank": 2, "merge": False}, max_steps=1, checkpoint_every="epoch")
    runs.succeed(tmp_path / "run", sections)
    model, weights = tmp_path / "run" / "model", base / "model.safetensors"
    texts = ["a good film", "what", "bad"]
    for runtime in ("varlen", "eager"):
        with tl.load(model, runtime=runtime, all_probabilities=True) as classify:
            before, content = classify(texts), weights.read_bytes()
            files = folders.mapped_files(model)
            with weights.open("r+b") as file:
                file.write(bytes(len(content)))
            assert classify(texts) == before
        with pytest.raises(FingerprintError, match="base/model.safetensors was written over"):
            folders.check_in_place(files)
        weights.write_bytes(content)


def test_a_base_of_the_hub_is_named_with_its_commit(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_llama, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("someone/tiny", "someone/tiny@main", f"someone/tiny@{commit}"):
        base = bases.describe_base(name, quantize=None)
        assert (base.name, base.revision) == ("someone/tiny", commit)
    bases.write_base(tmp_path, base)
    assert bases.read_base(tmp_path) == base
    assert bases.find_base(tmp_path) == cache / "snapshots" / commit
    (cache / "snapshots" / commit / "config.json").write_text("{}")
    with pytest.raises(FingerprintError, match="someone/tiny"):
        bases.find_base(tmp_path)


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        ("gpt2", ("embed_tokens",), "tied"),
        ("gpt2", ("lm_head",), "tied"),
        ("llama", ("nothing",), "no module with weights"),
    ],
)
def test_modules_that_cannot_be_trained_whole(
    tiny_gpt2: Path, tiny_llama: Path, model: str, names: tuple[str, ...], message: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained({"gpt2": tiny_gpt2, "llama": tiny_llama}[model])
    with pytest.raises(ConfigError, match=message):
        lora.add_adapters(base, LoraOptions(also_train=names))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"quantize": "nf4"}, "model.quantize needs model.lora"),
        ({"quantize": "nf4", "lora": {"init": "pissa"}}, "model.lora.init=pissa"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    sections = {"data": {"train": "no.parquet"}, "model": {"base": "none", "task": "text_generation", **model}}
    with pytest.raises(UsageError, match=message):
        tl.train(run=tmp_path / "run", **sections)
    assert not (tmp_path / "run").exists()


def unpacked(layer: quantized.QuantizedLinear) -> torch.Tensor:
    """The weights that the packed ones stand for, by the definition of the format."""
    shape = (layer.out_features, layer.in_features)
    if layer.kind == "int8":
        return layer.weight * (layer.scales[:, None] / 127)
    packed = layer.weight.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[: shape[0] * shape[1]].long()
    numbers = pytest.importorskip("bitsandbytes").functional.get_4bit_type("nf4", device="cpu")[codes]
    wide = layer.scales_of_scales.repeat_interleave(quantized.BLOCK_OF_SCALES)[: len(layer.scales)]
    scales = layer.codes[layer.scales.long()] * wide + layer.offset
    return (numbers * scales.repeat_interleave(quantized.BLOCK)[: len(numbers)]).reshape(shape)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_layer_computes_with_the_weights_it_stands_for(kind: str) -> None:
    bits = pytest.importorskip("bitsandbytes")
    for outputs, inputs in ((96, 64), (30, 31), (16, 32), (5, 48), (128, 96), (11, 160)):
        linear = torch.nn.Linear(inputs, outputs)
        made, empty = (
            quantized._quantized(each, kind) for each in (linear, torch.nn.Linear(inputs, outputs, device="meta"))
        )
        assert {name: (each.shape, each.dtype) for name, each in made.state_dict().items()} == {
            name: (each.shape, each.dtype) for name, each in empty.state_dict().items()
        }
        x = torch.randn(3, inputs, requires_grad=True)
        answer = made(x)
        weights = made.dequantize()
        torch.testing.assert_close(weights, unpacked(made))
        torch.testing.assert_close(answer, torch.nn.functional.linear(x, weights, linear.bias))
        (gradient,) = torch.autograd.grad(answer.square().sum(), x)
        (expected,) = torch.autograd.grad((x @ weights.T + linear.bias).square().sum(), x)
        torch.testing.assert_close(gradient, expected)
        worst = (weights - linear.weight).abs().max() / linear.weight.abs().max()
        assert worst < (0.2 if kind == "nf4" else 0.01)
        for dtype in (torch.float32, torch.bfloat16):
            holder = torch.nn.Sequential(made)
            quantized.store_as(holder, dtype)
            assert made.weight.dtype is dtype
            assert torch.equal(made.dequantize(), weights)
        if kind == "nf4" and inputs % 64 == 0:  # else the library's own answer is wrong on CPUs
            theirs = bits.nn.Linear4bit(inputs, outputs, quant_type="nf4", compress_statistics=True)
            theirs.load_state_dict(linear.state_dict())
            torch.testing.assert_close(theirs.to("cpu")(x), answer, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "strategy", "ranks", "options"),
    [
        ("nf4", "single", 1, {}),
        ("int8", "single", 1, {}),
        ("nf4", "single", 1, {"dora": True}),
        ("nf4", "ddp", 2, {}),
        ("nf4", "fsdp", 2, {}),
        ("int8", "fsdp", 2, {}),
    ],
)
def test_a_quantized_base_learns_and_is_scored_as_it_was_trained(
    tmp_path: Path, tiny_gpt2: Path, tiny_llama: Path, model: str, kind: str, strategy: str, ranks: int, options: Any
) -> None:
    pytest.importorskip("bitsandbytes")
    base = {"gpt2": tiny_gpt2, "llama": tiny_llama}[model]
    sections = job(tmp_path, base, "writer", {"rank": 4, **options}, strategy=strategy, epochs=2)
    sections["model"]["quantize"] = kind
    runs.succeed(tmp_path / "whole", sections, ranks=ranks)
    sections["model"]["lora"]["merge"] = False
    stopped = runs.attempt(tmp_path / "run", sections, ranks=ranks, failpoint="rank0.step:5:kill9")
    assert stopped.exit_code in (0, -9)
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    losses = runs.losses(tmp_path / "run")
    assert losses == runs.losses(tmp_path / "whole")
    assert losses[-1] < losses[0]
    sections["train"]["strategy"] = "single"
    runs.succeed(tmp_path / "single", sections)
    assert losses == pytest.approx(runs.losses(tmp_path / "single"), abs=1e-4)
    one, other = (
        load.load_model(tmp_path / run / "model", auto_class="AutoModelForCausalLM") for run in ("whole", "run")
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))
    assert bases.read_base(tmp_path / "run" / "model").quantize == kind
    stored = load_file(tmp_path / "run" / "model" / folders.ADAPTER_TENSORS)
    assert all(tensor.dtype is torch.float32 for tensor in stored.values())


@pytest.mark.slow
def test_every_runtime_and_another_training_read_an_adapter(tmp_path: Path, tiny_bert: Path) -> None:
    here = {"varlen": True, "bf16": hardware.supports_bf16(), "int8": hardware.int8_refusal() is None}
    sections = job(tmp_path, tiny_bert, "classifier", {"rank": 2, "merge": False})
    runs.succeed(tmp_path / "run", sections)
    model = tmp_path / "run" / "model"
    table = pa.table({"text": ["a good film", "a bad film", "what"]})
    expected = tl.predict(model, table, engine=tiny.Here())
    for runtime in [name for name, can in here.items() if can]:
        found = tl.predict(model, table, engine=tiny.Here(), runtime=runtime)
        assert found["score"].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=2e-2)
    tl.evaluate(model, tiny.reviews(20), engine=tiny.Here())
    # Its adapter is the base of the next one.
    sections["model"] |= {"base": str(model)}
    runs.succeed(tmp_path / "next", sections)
    assert bases.find_base(tmp_path / "next" / "model") == model
    again = tl.predict(tmp_path / "next" / "model", table, engine=tiny.Here())
    assert again["error"].to_pylist() == [None] * 3
    assert again["score"].to_pylist() != expected["score"].to_pylist()
