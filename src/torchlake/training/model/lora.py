"""Low-rank adaptation with peft: small matrices are trained beside the frozen ones of the base (Hu et al. 2021).

Every linear layer of the transformer's layers gets a pair of them, or the layers in `model.lora.targets`. A new head is
trained in full, a language model's head stays frozen unless `also_train` names it. Gradients, moments and checkpoints
hold only the small matrices and what is trained in full; the base's weights stay memory-mapped and shared by the
processes until a device needs them.

PiSSA takes its first B A out of the frozen weights. Checkpoints hold that first pair, too: a run that continues takes
out the same, on any machine.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.config.job import Job
from torchlake.config.sections.strategies import LoraOptions
from torchlake.errors import ConfigError, need_library
from torchlake.models.adapters import files, merging
from torchlake.models.adapters.base import Base, describe_base
from torchlake.optim.depth import head_modules, layers

if TYPE_CHECKING:
    import torch
    from torch import nn


def check_lora(job: Job, task: Any) -> None:
    """Raise MissingExtra for a library that the job needs and that is not installed, UsageError for a task whose folder
    cannot hold an adapter."""
    options = job.model.lora
    if options is None:
        return
    need_library("peft", "lora", "model.lora")
    if job.model.quantize is not None:
        need_library("bitsandbytes", "8bit", f"model.quantize={job.model.quantize}")
        if job.train.strategy == "deepspeed":
            raise ConfigError(
                "model.quantize cannot be combined with train.strategy=deepspeed, which would convert the quantized "
                "weights. Use ddp or fsdp."
            )
    if not options.merge and (not task.auto_class or job.model.base is None):
        raise ConfigError(
            f"model.lora.merge=false: the model of {task.name} is not one of transformers' Auto classes, for which "
            "adapters are loaded. Leave it out: the whole model is written."
        )


def add_adapters(model: "nn.Module", options: LoraOptions, *, draw: bool = True) -> "nn.Module":
    """Return the model with adapters beside its linear layers; everything else but the head is frozen.

    torch's global generator initializes A; B starts at zero. `draw=False`: the values will be loaded; for PiSSA, call
    `take_out` then. Raises MissingExtra without peft, ConfigError if `targets` or `also_train` matches nothing.
    """
    need_library("peft", "lora", "model.lora")
    import peft

    config = lora_config(model, options)
    if options.init == "pissa" and not draw:
        config.init_lora_weights = True
    with merging.quiet_peft():
        wrapped: nn.Module = peft.get_peft_model(model, config)
    if options.init == "pissa":
        for layer in _adapted(wrapped):
            for name, first in ((files.FIRST_A, layer.lora_A), (files.FIRST_B, layer.lora_B)):
                layer.register_buffer(name, first["default"].weight.detach().clone())
    return wrapped


def take_out(model: "nn.Module") -> None:
    """Take PiSSA's first B A, which were loaded, out of the frozen weights, as peft does it when it draws them."""
    for layer in _adapted(model):
        base = layer.get_base_layer()
        change = layer.scaling["default"] * getattr(layer, files.FIRST_B) @ getattr(layer, files.FIRST_A)
        base.weight.data = base.weight.data - (change.T if layer.fan_in_fan_out else change)


def lora_config(model: "nn.Module", options: LoraOptions) -> Any:
    """Return peft's configuration for a model that has no adapters yet."""
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = _targets(model, options.targets)
    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        modules_to_save=[*head_modules(model), *_trained_whole(model, options.also_train or ())],
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        use_rslora=options.rslora,
        use_dora=options.dora,
        init_lora_weights=True if options.init == "default" else options.init,
    )


def rate_scales(model: "nn.Module", options: LoraOptions | None, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the learning rate by parameter, `scales`, with those of every B times the ratio (LoRA+)."""
    if options is None or options.learning_rate_ratio == 1:
        return dict(scales)
    ratio = options.learning_rate_ratio
    every = {name: ratio * scales.get(name, 1.0) for name, _ in model.named_parameters() if ".lora_B." in name}
    return {**scales, **every}


def write_adapter(
    job: Job, model: "nn.Module", trained: "Mapping[str, torch.Tensor]", folder: Path, auto_class: str
) -> Base | None:
    """Write the trained adapter alone into `folder`; return what base.json says about its base.

    `model` is the base with a head, `trained` the trained tensors of `add_adapters(model, ...)`, by name.
    """
    assert job.model.lora is not None, "else it would have no adapters"
    base = None if job.model.base is None else describe_base(job.model.base, quantize=job.model.quantize)
    config = lora_config(model, job.model.lora)
    # What no row reaches, such as the pooler below a mean of token states, was frozen: the adapter lacks it.
    config.modules_to_save = [
        name for name in config.modules_to_save or () if any(f".{name}.modules_to_save." in each for each in trained)
    ]
    files.write_adapter(folder, config, trained, base=base, auto_class=auto_class)
    return base


def _adapted(model: "nn.Module") -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "get_base_layer")]


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


def _trained_whole(model: Any, wanted: tuple[str, ...]) -> list[str]:
    """Return the full names of the modules that `also_train` names. Raises ConfigError for unknown and tied ones."""
    names = {id(module): name for name, module in model.named_modules()}
    ends = {
        "embed_tokens": getattr(model, "get_input_embeddings", lambda: None)(),
        "lm_head": getattr(model, "get_output_embeddings", lambda: None)(),
    }
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(name)
    found: list[str] = []
    for each in wanted:
        own = [names[id(ends[each])]] if ends.get(each) is not None else []
        own = own or [name for name in names.values() if name.rpartition(".")[2] == each]
        own = [name for name in own if any(True for _ in model.get_submodule(name).parameters())]
        if not own:
            raise ConfigError(f"model.lora.also_train: no module with weights of this model is called {each}")
        for name in own:
            held = (holders[id(parameter)] for parameter in model.get_submodule(name).parameters(recurse=False))
            if others := sorted({*chain.from_iterable(held)} - {name}):
                raise ConfigError(
                    f"model.lora.also_train: {each} shares its weights with {', '.join(others)} (they are "
                    "tied); an adapter would train a second copy. Leave it out, or train all weights, without lora."
                )
        found += own
    return found
