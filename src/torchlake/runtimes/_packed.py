"""Encoders of transformers over concatenated rows: their own modules, with attention within each row.

    ids, mask (B, L) -> tokens (1, T), positions -> the model, with `_attend` in place of its attention -> pooling

For encoders that are not an `Encoder` (`_encoder.py`) but take positions, and whose attention is an entry of
transformers' table: ModernBERT, NomicBERT. Linear layers are the runtime's products, everything else is transformers'.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.runtimes import Forward, _encoder, _ragged
from torchlake.runtimes._encoder import Linear, PackedRows

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("modernbert", "nomic_bert")
ATTENTION = "torchlake_rows"
"The name in transformers' table."


def is_one(folder: Path) -> bool:
    """Return whether the model is one of these encoders, without a head."""
    config = atomic_io.read_json(folder / "config.json")
    head = str((config.get("architectures") or [""])[0])
    return config.get("model_type") in MODEL_TYPES and not head.endswith("ForSequenceClassification")


def refusal(folder: Path) -> str | None:
    """Return why the model is neither one of these nor an `Encoder`, or None."""
    return None if is_one(folder) else _encoder.refusal(folder)


def check_device(runtime: str, folder: Path, device: str) -> None:
    """Raise UsageError on a GPU, for a model whose attention the kernel for rows of any length does not support."""
    if device != "cpu":
        kind = atomic_io.read_json(folder / "config.json").get("model_type")
        raise UsageError(
            f"The runtime {runtime!r} supports models of type {kind!r} on CPUs only; on a GPU use 'eager'."
        )


def make_forward(
    folder: Path,
    spec: TaskSpec,
    *,
    linear: Callable[[Linear], _ragged.Multiply],
    dtype: "torch.dtype | None" = None,
) -> Forward:
    """Return the forward pass of an embedding model on CPUs; the encoder is in `dtype`. Raises the errors of the
    task."""
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    encoder, vectors = model.encoder, model.vectors
    encoder.set_attn_implementation(ATTENTION)
    encoder.to(dtype or torch.float32)
    for module in encoder.modules():
        if type(module) is torch.nn.Linear:
            bias = module.bias if module.bias is not None else module.weight.new_zeros(len(module.weight))
            product = linear(Linear(module.weight.detach(), bias.detach()))
            module.forward = partial(_multiply, product)  # type: ignore[method-assign]

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        rows = _encoder.remove_padding(None, input_ids, attention_mask)
        tokens, positions = (torch.from_numpy(each)[None] for each in (rows.ids, rows.positions))
        with torch.inference_mode():
            states = encoder(input_ids=tokens, position_ids=positions, packed_rows=rows).last_hidden_state[0]
            found: np.ndarray = vectors(_ragged.pool(states, rows, vectors.pool)).numpy()
        return found

    return forward


def _multiply(product: _ragged.Multiply, x: "torch.Tensor") -> "torch.Tensor":
    return product(x.flatten(0, -2), None).view(*x.shape[:-1], -1)


def _attend(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: Any,
    *,
    packed_rows: PackedRows,
    scaling: float,
    sliding_window: int | None = None,
    **others: Any,
) -> "tuple[torch.Tensor, None]":
    """Compute attention within each row, as transformers calls it: all (1, heads, T, D); return (1, T, heads, D).

    With a `sliding_window`, tokens attend to those at a smaller distance.
    """
    import torch

    context, at = torch.empty_like(query.transpose(1, 2)), 0
    for count, length in packed_rows.length_groups():
        end = at + count * length
        q, k, v = (part[0, :, at:end].unflatten(1, (count, length)).transpose(0, 1) for part in (query, key, value))
        near = None
        if sliding_window is not None and length > sliding_window:
            places = torch.arange(length)
            near = (places[:, None] - places[None]).abs() < sliding_window
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scaling)
        context[0, at:end].unflatten(0, (count, length)).copy_(mixed.transpose(1, 2))
        at = end
    return context, None
