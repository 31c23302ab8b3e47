"""Compiled layers and implementations of attention: the same losses, few graphs, and clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import families
import tiny
import training_runs as runs
from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.errors import UsageError
from torchlake.models import probes
from torchlake.training.model import kernels
from torchlake.training.model.traits import find_traits

CPU = torch.device("cpu")
SHAPES = [(4, 16), (4, 16), (3, 16), (1, 9), (4, 16)]
FEW_GRAPHS = 8


def model_of(folder: Path, name: str, kind: Any = "writer") -> Any:
    families.build(folder, name, kind=kind, dropout=False)
    auto = transformers.AutoModelForCausalLM if kind == "writer" else transformers.AutoModelForSequenceClassification
    return auto.from_pretrained(folder, dtype=torch.float32).train()


def losses(model: Any) -> list[float]:
    found = []
    for shape in SHAPES:
        ids = torch.randint(5, 250, shape, generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum()
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False, "selective"])
def test_compiled_layers_share_few_graphs(static: bool, checkpointing: bool | str, tmp_path: Path) -> None:
    """One for each shape and kind of pass at most, however many layers there are; no break inside a layer."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = model_of(tmp_path / "model", "llama")
    names = list(model.state_dict())
    plain = losses(model)
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    kernels.recompute_activations(model, checkpointing)
    kernels.compile_layers(model, static=static)
    assert losses(model) == pytest.approx(plain, rel=1e-5)
    assert torch.allclose(model.model.embed_tokens.weight.grad, gradient, atol=1e-4 * float(gradient.abs().max()))
    assert list(model.state_dict()) == names
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= FEW_GRAPHS
    assert not counters["graph_break"]
    losses(model)
    assert counters["stats"]["unique_graphs"] == graphs, "known shapes are not compiled again"


class Products(TorchDispatchMode):
    """Counts the matrix products that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_selective_backward_pass_repeats_no_matrix_product(wrapped: bool, tmp_path: Path) -> None:
    """Also if the layer has another class than when it was set up, as FSDP gives it one."""
    counts = {}
    for how in (False, True, "selective"):
        model = model_of(tmp_path / f"model-{how}", "llama")
        kernels.recompute_activations(model, how)
        if wrapped:
            for layer in model.model.layers:
                layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
        with Products() as products:
            losses(model)
        counts[how] = products.count
    assert counts["selective"] == counts[False]
    assert counts[True] > counts[False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_keep_what_is_selected(tmp_path: Path) -> None:
    """The layer is wrapped first and compiled then: compiled first, it would be one operator that is not in `KEPT`."""
    counts = {}
    for how in (False, True, "selective"):
        torch._dynamo.reset()
        model = model_of(tmp_path / f"model-{how}", "llama")
        kernels.recompute_activations(model, how)
        kernels.compile_layers(model, static=True)
        losses(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            losses(model)
        events = {event.key: event.count for event in profiled.key_averages()}
        counts[how] = events.get("aten::mm", 0) + events.get("aten::addmm", 0)
    assert counts["selective"] == counts[False]
    assert counts[True] > counts[False]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, "selective"])
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_compiled_run_has_the_losses_of_a_plain_one(
    strategy: str, ranks: int, checkpointing: bool | str, tmp_path: Path, tiny_llama: Path
) -> None:
    sections = runs.job(tmp_path, tiny_llama, rows=24, epochs=1, strategy="single")
    sections["model"] |= {"task": "text_generation", "max_length": 24}
    runs.succeed(tmp_path / "plain", sections)
    sections["train"] |= {"compile": True, "strategy": strategy, "activation_checkpointing": checkpointing}
    runs.succeed(tmp_path / "compiled", sections, ranks=ranks)
    assert runs.losses(tmp_path / "compiled") == pytest.approx(runs.losses(tmp_path / "plain"), abs=2e-5)


@pytest.mark.parametrize("attention", [pytest.param("sdpa", marks=pytest.mark.slow), "eager"])
def test_implementations_of_attention_agree_on_packed_rows(attention: str, tmp_path: Path, tiny_llama: Path) -> None:
    sections = runs.job(tmp_path, tiny_llama, rows=40, epochs=1)
    sections["model"] |= {"task": "text_generation", "max_length": 24}
    runs.succeed(tmp_path / "auto", sections)
    sections["model"]["attention"] = attention
    runs.succeed(tmp_path / "run", sections)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "auto"), abs=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_keeps_packed_texts_apart_like_sdpa(tmp_path: Path) -> None:
    """Forward only: torch has no backward pass for it on CPUs."""
    model = model_of(tmp_path / "model", "llama").eval()
    ids = torch.randint(5, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.from_numpy(np.concatenate([np.arange(13), np.arange(20), np.arange(7)]))[None].expand(2, -1)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:, 13:33], use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    assert torch.allclose(found[:, 13:33], alone, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("attention", "why"), [("flash", "needs a GPU"), ("flex", "needs a GPU")])
def test_a_machine_without_a_gpu_refuses(attention: str, why: str, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "llama")
    with pytest.raises(UsageError, match=f"model.attention={attention}.*{why}.*Use sdpa"):
        kernels.set_attention(model, attention, device=CPU, dtype=None)


def test_refusals_for_a_gpu(tmp_path: Path) -> None:
    """Decided before anything moves to the device, so that they can be tested without one."""
    gpu = torch.device("cuda")
    llama = model_of(tmp_path / "llama", "llama")
    with pytest.raises(UsageError, match="16 bits only"):
        kernels.set_attention(llama, "flash", device=gpu, dtype=None)
    if not transformers.utils.is_flash_attn_2_available():
        with pytest.raises(UsageError, match="flash-attn is not installed"):
            kernels.set_attention(llama, "flash", device=gpu, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="heads of 16 numbers or more, and the model's have 8"):
        kernels.set_attention(llama, "flex", device=gpu, dtype=None)
    llama.config.head_dim = 16
    kernels.set_attention(llama, "flex", device=gpu, dtype=None)
    assert llama.config._attn_implementation == "flex_attention"
    llama.config.attention_dropout = 0.1
    with pytest.raises(UsageError, match="no dropout"):
        kernels.set_attention(llama, "flex", device=gpu, dtype=None)
    bloom = model_of(tmp_path / "bloom", "bloom")
    with pytest.raises(UsageError, match="no such attention for BloomForCausalLM"):
        kernels.set_attention(bloom, "flash", device=gpu, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_flash_attention_gets_the_positions_of_packed_texts(name: str, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", name)
    row = torch.arange(5, 20)[None]
    assert kernels.passes_positions(model, row, {"use_cache": False})
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    own = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, position_ids=None, **options: own(*args, **options)
    assert not kernels.passes_positions(model, row, {"use_cache": False})


def rows(*lengths: int) -> dict[str, np.ndarray]:
    """A padded batch of random ids."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": np.random.default_rng(0).integers(5, 60, mask.shape) * mask, "attention_mask": mask}


def encoder(kind: str, head: str) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.CONFIG_MAPPING[kind](vocab_size=64, num_labels=3, pad_token_id=0, **sizes, **drops)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"AutoModelFor{head}Classification").from_config(config)
        for each in model.parameters():
            each.data.normal_(0, 0.2)
    return model.train()


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "deberta-v2"])
def test_the_last_layer_of_a_classifier_computes_its_first_token(kind: str) -> None:
    """The loss and all gradients stay as they are; a hook before the layer's output sees one token."""
    task, model, seen = plugins.load("tasks", "text_classification"), encoder(kind, "Sequence"), list[int]()
    name = kernels.find_first_token_part(model, task, [rows(7), rows(7, 3)])
    assert name is not None
    assert name.endswith("layer.1.attention.output")
    assert model.training
    made = []
    for _ in range(2):
        model.zero_grad()
        loss = probes.run(model, task, rows(7, 3, 9)).logits.square().sum()
        loss.backward()
        made.append([loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)])
        kernels.keep_first_token(model, name)
        last = model.get_submodule(name.removesuffix(".attention.output"))
        last.output.register_forward_hook(lambda _module, _given, output: seen.append(output.shape[1]))
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    assert seen == [1]


@pytest.mark.parametrize(("kind", "head"), [("bert", "Token"), ("distilbert", "Sequence"), ("modernbert", "Sequence")])
def test_layers_stay_whole_where_more_is_read_or_nothing_can_be_cut(kind: str, head: str) -> None:
    task = plugins.load("tasks", "text_classification")
    assert kernels.find_first_token_part(encoder(kind, head), task, [rows(7), rows(7, 3)]) is None


def test_the_last_layer_of_a_longformer_stays_whole(tmp_path: Path) -> None:
    """It removes the padding to its window after the last layer: also if the sample rows need none."""
    task, model = plugins.load("tasks", "text_classification"), model_of(tmp_path / "base", "longformer", "classifier")
    processor = task.load_processor(tmp_path / "base", tiny.SPEC, scoring=False)
    made, job = probes.features(task, processor, tiny.SPEC), load_job(None, data={"train": "t"}, model={"base": "b"})
    assert made is not None
    assert not (made.lengths % 16).any()
    assert find_traits(model, model, task, made, processor, job, tiny.SPEC, CPU).first_token_part is None
