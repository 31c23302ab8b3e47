"""Models over several devices: in parts of every layer (tensor parallelism), or layer after layer.

    tensor parallel   each of N ranks has 1/N of the heads and of the feed-forward width; two all_reduces per layer
    layers            one process, each device has some whole layers; the devices compute one after another

transformers has plans for tensor parallelism of most decoders (Llama, Qwen, Gemma, Mistral, ...) and few encoders: a
plan says which linear layers are split by columns and which by rows (Shoeybi et al. 2019). N must divide the numbers of
heads, because attention is computed per head. Every rank reads only its parts from the file.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchlake.errors import MissingExtra, UsageError
from torchlake.models.config import load_config
from torchlake.models.load import layers

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_parallel_refusal(folder: Path, ranks: int) -> str | None:
    """Return why the model of a folder, which has passed `check_folder`, cannot be split over `ranks`, or None."""
    return plan_refusal(load_config(folder), ranks)


def plan_refusal(config: "PretrainedConfig", ranks: int) -> str | None:
    """Return why a model of this configuration cannot be split over `ranks` by tensor parallelism, or None."""
    body: Any = config.get_text_config()
    if not getattr(body, "base_model_tp_plan", None):
        return f"transformers has no plan for tensor parallelism of models of type {config.model_type!r}"
    for name in HEADS:
        heads = getattr(body, name, None)
        several = heads if isinstance(heads, list) else [heads]  # some models have other numbers in each layer
        uneven = next((each for each in several if isinstance(each, int) and each % ranks), None)
        if uneven is not None:
            return f"its {uneven} {name.removeprefix('num_').replace('_', ' ')} cannot be divided among {ranks} ranks"
    return None


def tensor_parallel(ranks: int) -> Mapping[str, Any]:
    """Return what `load_model` passes to transformers to load the parts of this rank; needs a process group."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        raise MissingExtra("Tensor parallelism needs a newer transformers: pip install 'torchlake[large]'") from error

    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}


def split_layers(model: "torch.nn.Module", mesh: "DeviceMesh") -> None:
    """Split the layers of a loaded model over a mesh of one dimension, in place, for training.

    Embeddings and the head stay whole: the loss in chunks reads the head's weight, and strategies shard both.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan: Mapping[str, str] = cast(Any, model).tp_plan
    inside = {id(module) for layer in layers(model) for module in layer.modules()}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if id(module) not in inside:
            continue
        rule = re.sub(r"\d+", "*", name)
        own = {name: plan.get(rule)}
        own |= {
            f"{name}.{key}": plan.get(f"{rule}.{key}", plan.get(rule))
            for key, _ in module.named_parameters(recurse=False)
        }
        styles |= {key: style for key, style in own.items() if style is not None}
    apply_tensor_parallelism(model, mesh, styles)


def layer_by_layer() -> Mapping[str, Any]:
    """Return what `load_model` passes to transformers to place layers over the GPUs of this process.

    Raises MissingExtra without accelerate, which moves activations from one GPU to the next.
    """
    if find_spec("accelerate") is None:
        raise MissingExtra(
            "Placing layers over several GPUs needs the library 'accelerate', which is not installed: "
            "pip install 'torchlake[large]'"
        )
    return {"device_map": "balanced"}


def check_on_gpus(model: "torch.nn.Module", folder: Path, gpus: int) -> None:
    """Raise UsageError if a part is in main memory or, as "meta", on disk: accelerate places there what GPUs lack."""
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        raise UsageError(
            f"{folder}: the model does not fit into the memory of {gpus} GPUs: a part is in main memory or on disk, and "
            "every batch would wait for it. Give each process more GPUs."
        )
