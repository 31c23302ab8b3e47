"""What counts as a transformer layer, for LoRA and for FSDP: every list of layers of every architecture."""

import re
from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import families
from torchlake.optim import depth
from torchlake.training.model import lora

QUICK = ("albert", "bart", "bert", "funnel", "gpt2", "jamba", "mt5", "xlnet", "xmod")
CLASSIFIERS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in families.classifiers()]


def shape_of(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(
            families.config_of(name, vocab_size=200, pad_token_id=0)
        )
    return model


def numbered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers that are in a list, at a number in their name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and re.search(r"\.\d+\.", name):
            yield name, module


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_layer_of_every_list_is_found_once(name: str) -> None:
    model = shape_of(name)
    layers = depth.layers(model)
    held = [id(module) for layer in layers for module in layer.modules() if any(True for _ in module.parameters())]
    assert len(held) == len(set(held)), "a layer inside another one"
    assert not any(isinstance(layer, nn.ModuleList) for layer in layers), "a list is never called"
    assert layers
    missing = [name for name, module in numbered(model) if id(module) not in held]
    assert not missing


def test_lora_reaches_encoder_and_decoder() -> None:
    targets = lora._targets(shape_of("bart"), None)
    assert {name.split(".")[1] for name in targets} == {"encoder", "decoder"}
    assert len(targets) == 2 * 6 + 2 * 10
