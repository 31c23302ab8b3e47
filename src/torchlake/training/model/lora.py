"""Low-rank adaptation with peft: small matrices are trained beside the frozen ones of the base (Hu et al. 2021).

Every linear layer of the transformer's layers gets a pair of them, or the layers in `model.lora.targets`. A new head is
trained in full, a language model's head stays frozen. Gradients, moments and checkpoints hold only the small matrices
and the head; the base's weights stay memory-mapped and shared by the processes until a device needs them.
"""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.config.sections.strategies import LoraOptions
from torchlake.errors import ConfigError, MissingExtra, pip_install
from torchlake.optim.parameters import head_modules, layers

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER = "adapter"
"The folder in the model folder that holds the adapter alone, as peft loads it."


def check_installed() -> None:
    """Raise MissingExtra with the pip command if peft is not installed."""
    if find_spec("peft") is None:
        raise MissingExtra(
            f"model.lora needs the library 'peft', which is not installed: {pip_install('torchlake[lora]')}"
        )


def add_adapters(model: "nn.Module", options: LoraOptions) -> "nn.Module":
    """Return the model with adapters beside its linear layers; everything else but the head is frozen.

    torch's global generator initializes A; B starts at zero. Raises MissingExtra without peft, ConfigError if
    `targets` matches no layer.
    """
    check_installed()
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = _targets(model, options.targets)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        modules_to_save=head_modules(model),
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    with warnings.catch_warnings():
        # peft uses a deprecated name of a transformers property.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def merge_adapters(
    model: "nn.Module", options: LoraOptions, trained: "Mapping[str, torch.Tensor]", folder: Path
) -> "dict[str, torch.Tensor]":
    """Return the base's state with the trained adapters merged in; the adapter alone is written to `folder`.

    `model` is the base with a head, `trained` the trained tensors of `add_adapters(model, options)`, by name.
    """
    wrapped: Any = add_adapters(model, options)
    state = wrapped.state_dict()
    for name, tensor in trained.items():
        state[name].copy_(tensor)
    wrapped.save_pretrained(str(folder), safe_serialization=True)
    plain: nn.Module = wrapped.merge_and_unload()
    return dict(plain.state_dict())


def _targets(model: "nn.Module", wanted: tuple[str, ...] | None) -> list[str]:
    """Return the full names of the linear layers inside the transformer's layers, or of the ones that `wanted`
    names."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its matrix transposed

    inside = {id(module) for layer in layers(model) for module in layer.modules()}
    every = [(name, module) for name, module in model.named_modules() if id(module) in inside]
    linear = [name for name, module in every if isinstance(module, nn.Linear | Conv1D)]
    chosen = [name for name in linear if wanted is None or name.rpartition(".")[2] in wanted]
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"model.lora.targets: no linear layer of this model is called {', '.join(wanted or ())}; its layers have "
            f"{', '.join(known)}"
        )
    return chosen
