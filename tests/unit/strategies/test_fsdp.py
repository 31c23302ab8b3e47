"""The strategy fsdp beyond tests/conformance/test_strategies.py: what is gathered together, and when it is freed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import families
import tiny
from sweeps import sweep
from torchlake import distributed, plugins
from torchlake.config.sections.train import TrainConfig
from torchlake.config.task_spec import TaskSpec
from torchlake.models import load, probes
from torchlake.optim.optimizers import make_optimizer
from torchlake.strategies import fsdp
from torchlake.tasks._pretrained import base_model

WRITER = TaskSpec(task="text_generation", problem="next_token", labels=(), text="text", label=None, max_length=64)
TRAIN = TrainConfig(strategy="fsdp", precision="fp32")
# It calls `layer.forward`, past the hooks that gather a layer.
PAST_HOOKS = {"squeezebert"}
EVERY = [("classifier", name) for name in families.classifiers() if name not in PAST_HOOKS] + [
    ("writer", name) for name in families.writers()
]
# Tied and untied heads, several embeddings with one weight, weights that are used outside their module.
QUICK = [("classifier", "albert"), ("classifier", "bart"), ("writer", "gpt2")]


@pytest.fixture
def group() -> Iterator[distributed.Group]:
    """One rank alone, which shards like any number."""
    with distributed.process_group(60, alone=True) as alone:
        yield alone


def wrapped(folder: Path, name: str, kind: Any, group: distributed.Group) -> nn.Module:
    families.build(folder, name, kind=kind, dropout=False)
    spec = WRITER if kind == "writer" else tiny.SPEC
    model = base_model(folder, spec, plugins.load("tasks", spec.task).auto_class)
    module, _ = fsdp.wrap(model, lambda each: make_optimizer(each, TRAIN), group=group, train=TRAIN)
    return module


def units(model: nn.Module) -> dict[str, tuple[list[str], bool]]:
    """By the name of a unit's first module, the parameters that it gathers and whether it frees them again."""
    found: dict[str, tuple[list[str], bool]] = {}
    seen = set()
    names = {id(each): name for name, each in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and id(module._get_fsdp_state()) not in seen:
            seen.add(id(module._get_fsdp_state()))
            parameters = module._get_fsdp_state()._fsdp_param_group
            held = [] if parameters is None else [each._module_info for each in parameters.fsdp_params]
            weights = [names[id(getattr(each.module, each.param_name))] for each in held]
            found[name] = (weights, parameters is not None and parameters.post_forward_mesh_info is not None)
    return found


def test_embedding_layers_and_head_are_units(tmp_path: Path, group: distributed.Group) -> None:
    found = units(wrapped(tmp_path / "model", "llama", "writer", group))
    assert list(found) == ["", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert found[""] == (["model.norm.weight"], False)
    assert found["model.embed_tokens"] == (["model.embed_tokens.weight"], True)
    assert found["model.layers.0"][1]
    assert found["lm_head"] == (["lm_head.weight"], False), "the backward pass begins with it"


def test_tied_embeddings_and_head_are_one_unit(tmp_path: Path, group: distributed.Group) -> None:
    model: Any = wrapped(tmp_path / "model", "gpt2", "writer", group)
    found = units(model)
    assert list(found) == ["", "transformer.wte", "transformer.h.0", "transformer.h.1"]
    assert model.transformer.wte._get_fsdp_state() is model.lm_head._get_fsdp_state()
    assert model.transformer.wte.weight is model.lm_head.weight
    assert not found["transformer.wte"][1]


def test_a_weight_of_several_embeddings_stays_in_the_rest(tmp_path: Path, group: distributed.Group) -> None:
    """BART's encoder and decoder have their own modules with the same weight."""
    found = units(wrapped(tmp_path / "model", "bart", "classifier", group))
    assert any("embed_tokens" in name or "shared" in name for name in found[""][0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), sweep(EVERY, quick=QUICK))
def test_every_architecture_computes_in_units(kind: Any, name: str, tmp_path: Path, group: distributed.Group) -> None:
    """The loss and the norm of the gradient of the plain model, in training and then in validation."""
    spec = WRITER if kind == "writer" else tiny.SPEC
    task = plugins.load("tasks", spec.task)
    folder = families.build(tmp_path / "base", name, kind=kind, dropout=False)
    torch.manual_seed(0)
    model: Any = base_model(folder, spec, task.auto_class)
    tokenizer = load.load_tokenizer(folder)
    batch = probes.batches(task, probes.features(task, tokenizer, spec), tokenizer, spec)[1]
    probes.freeze(model, probes.find_unreached(model, task, batch))
    ids = torch.from_numpy(batch["input_ids"])

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **task.forward_options).logits
        return logits.float().logsumexp(-1).sum()  # type: ignore[no-any-return]

    plain = loss()
    plain.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    model.zero_grad()
    module, _ = fsdp.wrap(model, lambda each: make_optimizer(each, TRAIN), group=group, train=TRAIN)
    sharded = loss()
    fsdp.backward(module, sharded)
    assert sharded.item() == pytest.approx(plain.item(), rel=1e-4, abs=1e-5)
    assert fsdp.clip_norm(module, 1e9, 1.0).item() == pytest.approx(norm.item(), rel=1e-4, abs=1e-6)
    with torch.no_grad():
        assert loss().item() == pytest.approx(plain.item(), rel=1e-4, abs=1e-5)
