"""How a model's layers compute: precision, recomputed activations, compiled layers, attention and its masks.

Layers are compiled one by one, in place. All layers of one kind share the code, so the compiler sees one layer instead
of the whole model, and FSDP's hooks, which it cannot follow, stay outside. Blocks of packed text have one size: their
graphs are static, one for each shape of a micro-batch (full, last of a step, last of an epoch). After eight graphs
torch runs other shapes uncompiled. Padded batches have one graph for all shapes.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import masking_utils

from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError, UsageError, pip_install
from torchlake.models import probes
from torchlake.models.config import head_width
from torchlake.optim.depth import layers
from torchlake.optim.precision import find_precision

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "flex": "flex_attention"}
"transformers' names of the values of model.attention."
FLEX_WIDTH = 16
"The least numbers of a head that torch's flex attention computes on GPUs."
PROBE = "torchlake_probe"
aten = torch.ops.aten
KEPT = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"Operators whose outputs selective activation checkpointing keeps: nearly all of the work is in them."


def usable_precision(train: TrainConfig, model: nn.Module, task: Any, batch: probes.Batch, device: torch.device) -> str:
    """Return train.precision, or "bf16" for "auto" if the model cannot compute with 16-bit weights.

    Raises ConfigError if train.precision names 16-bit weights.
    """
    precision = find_precision(train.precision, device)
    if precision.dtype is None or not precision.weights:
        return train.precision
    obstacle = probes.obstacle_in(precision.dtype, model, task, batch)
    if obstacle is None:
        return train.precision
    if train.precision != "auto":
        raise ConfigError(
            f"train.precision=bf16_weights: {type(model).__name__} cannot compute with weights in bf16 ({obstacle}). "
            "Use train.precision=bf16, which converts the operands of each operation."
        )
    log.info("precision bf16 (autocast), because the model cannot compute with weights in bf16: %s", obstacle)
    return "bf16"


def convert_frozen(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert frozen weights, which checkpoints do not store, one by one; no fp32 copy of them is kept."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():  # else its bits are those of several weights
            parameter.data = parameter.data.to(dtype)


def drop_nothing(model: nn.Module) -> None:
    """Turn off dropout: it would hide the small differences between two answers, and from the reference."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def recompute_activations(model: nn.Module, how: bool | str) -> None:
    """Let every transformer layer recompute its activations in the backward pass, if `how` says so.

    "selective": the outputs of the operators in `KEPT` are kept. Call it before `compile_layers`: then the compiler
    is recomputed. transformers has a switch for the same, but it reads a layer's class, which FSDP changes: under FSDP
    a compiled layer would keep everything.
    """
    if how:
        selected = {"context_fn": partial(create_selective_checkpoint_contexts, list(KEPT))}
        for layer in layers(model):
            layer.forward = _recomputed(layer, selected if how == "selective" else {})


def _recomputed(layer: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the layer's `forward`, which keeps only its inputs for the backward pass."""
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed


def find_first_token_part(model: nn.Module, task: Any, batches: Sequence[probes.Batch]) -> str | None:
    """Return the name of the module from which on the last layer needs the first token of each row only; None if the
    outputs depend on its other tokens.

    Classifiers of BERT's kind read the first token. There all tokens are needed up to attention; the module that adds
    its result to the layer's input is the first that gets two tensors (B, L, D). Cutting it there has to leave the
    outputs of `batches` as they are.
    """
    names, found = {module: name for name, module in model.named_modules()}, list[str]()

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        shapes = [each.shape for each in given if isinstance(each, torch.Tensor) and each.ndim == 3]
        if len(given) == len(shapes) == 2 and shapes[0] == shapes[1]:
            found.append(names[module])

    hooks = [each.register_forward_pre_hook(note) for layer in layers(model)[-1:] for each in layer.modules()]
    with torch.no_grad(), probes.evaluating(model):
        try:
            expected = [task.outputs(probes.run(model, task, batches[0]))]
        finally:
            for hook in hooks:
                hook.remove()
        if not found:
            return None
        expected += [task.outputs(probes.run(model, task, batch)) for batch in batches[1:]]
        constant = all(probes.agree(each, each[:1].expand_as(each)) for each in expected)
        if constant:  # outputs that depend on nothing cannot show it
            return None
        cut = keep_first_token(model, found[0])
        try:
            made = [task.outputs(probes.run(model, task, batch)) for batch in batches]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
        finally:
            cut.remove()
    same = all(one.shape == other.shape and probes.agree(one, other) for one, other in zip(made, expected, strict=True))
    return found[0] if same else None


def keep_first_token(model: nn.Module, name: str) -> Any:
    """Let the module `name` and what follows it compute the first token of each row; return the hook."""
    return model.get_submodule(name).register_forward_pre_hook(lambda _, given: tuple(each[:, :1] for each in given))


def compile_layers(model: nn.Module, *, static: bool) -> None:
    """Compile the `forward` of every transformer layer; `static`: batches have few shapes, else one graph serves all.

    Call it before a strategy wraps the model. Names of tensors do not change.
    """
    # It advises to compute fp32 in TF32, which train.precision decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
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
                reason = f"{type(model).__name__} has its own attention, which transformers cannot replace"
    if reason is not None:
        raise UsageError(f"model.attention={attention}: {reason}. Use sdpa, or auto.")


def _refusal(model: Any, attention: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    from transformers.utils.import_utils import is_flash_attn_2_available

    supported = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn", "flex": "_supports_flex_attn"}
    if attention in supported and not getattr(model, supported[attention], False):
        return f"transformers has no such attention for {type(model).__name__}"
    if attention in ("flash", "flex") and device.type != "cuda":
        return "it needs a GPU: it has no backward pass on CPUs"
    if attention == "flash" and dtype is None:
        return "it computes in 16 bits only; set train.precision to bf16"
    # Without this check transformers would download a kernel.
    if attention == "flash" and not is_flash_attn_2_available():
        return f"the library flash-attn is not installed ({pip_install('flash-attn')})"
    if attention == "flex" and _attention_dropout(model.config) > 0:
        return "it has no dropout, and the model's configuration has dropout of the attention"
    if attention == "flex" and (width := head_width(model.config.get_text_config())) < FLEX_WIDTH:
        return f"it needs heads of {FLEX_WIDTH} numbers or more, and the model's have {width}"
    return None


def _attention_dropout(config: Any) -> float:
    values = config.get_text_config().to_dict()
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
    return max(float(values.get(name) or 0) for name in names)


def passes_positions(model: Any, row: torch.Tensor, forward: dict[str, Any]) -> bool:
    """Return whether every attention of the model gets the position ids of a row (1, L).

    Flash attention separates packed texts by them, where sdpa has a mask; without them it would mix the texts.
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
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(PROBE)
        with torch.no_grad(), probes.evaluating(model):
            model(input_ids=row, position_ids=torch.arange(row.shape[1])[None], **forward)
    finally:
        model.set_attn_implementation(before)
    return len(passed) >= len(layers(model)) and all(passed)


@contextmanager
def masks_known(*, packed: bool) -> Iterator[None]:
    """Let transformers build attention masks without values from the device; `packed`: positions restart inside rows.

    In each forward pass it checks whether a mask has padding and whether positions restart, and the host waits until
    the device has finished everything before. `forward` knows the answer: it passes a mask only for padding. A version
    of transformers that lacks these functions checks for itself.
    """
    answers = {"is_tracing": _look_at_no_value} | ({} if packed else {"find_packed_sequence_indices": _not_packed})
    before = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name in before:
        setattr(masking_utils, name, answers[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)


def _look_at_no_value(tensor: torch.Tensor | None = None) -> bool:
    """Choose the branch that is right for any values."""
    return True


def _not_packed(position_ids: torch.Tensor) -> None:
    """State that each row is one text."""
