"""Write an adapter as peft and vLLM load it."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.models.adapters.base import TENSORS, Base

if TYPE_CHECKING:
    import torch

NAME = ".default"
"What peft puts into the names of tensors while a model has several adapters."
FIRST_A, FIRST_B = "pissa_A", "pissa_B"
"Buffers of a layer beside `lora_A` and `lora_B`: PiSSA's first values, which the frozen weights lack."
TASK_TYPES = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
"peft's names of the kinds of models, by transformers' Auto classes."


def write_adapter(
    folder: Path, config: Any, trained: "Mapping[str, torch.Tensor]", *, base: Base | None, auto_class: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    `config` is the peft.LoraConfig of the training, `trained` the tensors by their names in peft's model. An adapter of
    PiSSA is converted to one for the unchanged base (see `_on_unchanged_base`).
    """
    from safetensors.torch import save_file

    own = copy.copy(config)
    tensors = {_stored_name(name): tensor.detach().cpu() for name, tensor in trained.items()}
    if any(name.endswith(FIRST_A) for name in tensors):
        tensors = _on_unchanged_base(tensors)
        # The scale stays the same: alpha / rank, or alpha / sqrt(rank).
        own.r, own.lora_alpha = 2 * config.r, config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
    own.init_lora_weights, own.inference_mode = True, True
    own.task_type = TASK_TYPES.get(auto_class)
    own.base_model_name_or_path = None if base is None else base.name
    own.revision = None if base is None else base.revision
    folder.mkdir(exist_ok=True)
    own.save_pretrained(str(folder))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / TENSORS, metadata={"format": "pt"})


def _stored_name(name: str) -> str:
    """Return a tensor's name in an adapter's file."""
    plain = name.replace(f".modules_to_save{NAME}", "").replace(NAME, "")
    return plain.removesuffix(".weight") if ".lora_magnitude_vector" in plain else plain


def _on_unchanged_base(tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return an adapter of twice the rank for the base as it is in its folder.

    PiSSA trains B A beside W - B0 A0, so W changes by B A - B0 A0, the product of [B, -B0] and [A; A0] (as peft
    converts it).
    """
    import torch

    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((FIRST_A, FIRST_B))}
    for name, tensor in tensors.items():
        if name.endswith(FIRST_A):
            layer = name.removesuffix(FIRST_A)
            a, b = f"{layer}lora_A.weight", f"{layer}lora_B.weight"
            found[a] = torch.cat([tensors[a], tensor])
            found[b] = torch.cat([tensors[b], -tensors[f"{layer}{FIRST_B}"]], dim=1)
    return found
