"""Which kernels a model's layers run: compiled layers, and the implementation of attention.

Layers are compiled one by one, in place. All layers of one kind share the code, so the compiler sees one layer instead
of the whole model, and FSDP's hooks, which it cannot follow, stay outside. Blocks of packed text have one size: their
graphs are static, one for each shape of a micro-batch (full, last of a step, last of an epoch). After eight graphs
torch runs other shapes uncompiled. Padded batches have one graph for all shapes.
"""

from typing import Any

import torch
from torch import nn

from torchlake.errors import UsageError
from torchlake.models.load import layers

IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "flex": "flex_attention"}
"transformers' names of the values of model.attention."
PROBE = "torchlake_probe"


def compile_layers(model: nn.Module, *, static: bool) -> None:
    """Compile the `forward` of every transformer layer; `static`: batches have few shapes, else one graph has all.

    Call it before a strategy wraps the model, and after activation checkpointing is enabled. Names of tensors stay.
    """
    for layer in layers(model):
        # Not layer.compile(): that would trace the hooks that FSDP adds.
        layer.forward = torch.compile(layer.forward, dynamic=not static)


def set_attention(model: Any, attention: str, *, device: torch.device, dtype: torch.dtype | None) -> None:
    """Let a transformers model compute attention as the job says ("auto": as transformers chooses).

    Raises UsageError if the machine or the model cannot. `dtype`: that of autocast, None: fp32.
    """
    if attention == "auto":
        return
    reason = _refusal(model, attention, device, dtype)
    wanted = IMPLEMENTATIONS[attention]
    if reason is None:
        try:
            model.set_attn_implementation(wanted)
        except (ValueError, ImportError) as error:
            reason = str(error).partition("\n")[0]
        else:
            if model.config._attn_implementation != wanted:
                reason = f"{type(model).__name__} has its own attention, which transformers cannot exchange"
    if reason is not None:
        raise UsageError(f"model.attention={attention}: {reason}. Take sdpa, or auto.")


def _refusal(model: Any, attention: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    from transformers.utils.import_utils import is_flash_attn_2_available

    supported = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn", "flex": "_supports_flex_attn"}
    if attention in supported and not getattr(model, supported[attention], False):
        return f"transformers has no such attention for {type(model).__name__}"
    if attention in ("flash", "flex") and device.type != "cuda":
        return "it needs a GPU: on CPUs there is no backward pass for it"
    if attention == "flash" and dtype is None:
        return "it computes in 16 bits only; set train.precision to bf16"
    # Without this check transformers would download a kernel.
    if attention == "flash" and not is_flash_attn_2_available():
        return "the library flash-attn is not installed (pip install flash-attn)"
    if attention == "flex" and _attention_dropout(model.config) > 0:
        return "it has no dropout, and the model's configuration has dropout of the attention"
    return None


def _attention_dropout(config: Any) -> float:
    values = config.get_text_config().to_dict()
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
    return max(float(values.get(name) or 0) for name in names)


def passes_positions(model: Any, row: torch.Tensor, forward: dict[str, Any]) -> bool:
    """Return whether every attention of the model gets the position ids of a row (1, L).

    Flash attention finds the packed texts by them: without them it would mix texts, where sdpa has a mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    passed: list[bool] = []

    def attention(*args: Any, **options: Any) -> Any:
        passed.append(options.get("position_ids") is not None)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **options)

    AttentionInterface.register(PROBE, attention)
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    before, training = model.config._attn_implementation, model.training
    model.eval()
    try:
        model.set_attn_implementation(PROBE)
        with torch.no_grad():
            model(input_ids=row, position_ids=torch.arange(row.shape[1])[None], **forward)
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    return len(passed) >= len(layers(model)) and all(passed)
