"""DeBERTa's attention within each of concatenated rows.

    score of tokens i and j = (q_i k_j + q_i P_(i-j) + k_j R_(i-j)) / sqrt(3 D)

(He et al. 2021, DeBERTa.) P and R are projections of the embeddings of distances, the same for every batch: they are
computed once. transformers computes them, and products with all of them, in each layer of each batch; here a row of L
tokens is multiplied with those of its own 2 L - 1 distances.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from torchlake.runtimes._padding import PackedRows

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("deberta", "deberta-v2")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return why a model of these types, with this config.json, cannot be computed, or None."""
    if config.get("conv_kernel_size"):
        return "its convolution reads the neighbors of a token (conv_kernel_size)"
    if config.get("talking_head"):
        return "its attention mixes heads (talking_head)"
    return None


def attach(body: Any, rows: ContextVar[PackedRows]) -> None:
    """Replace the attention of a model's body by that within each of the `rows`."""
    import torch

    encoder = body.encoder
    with torch.inference_mode():
        embeddings = encoder.get_rel_embedding()
        for layer in encoder.layer:
            module = layer.attention.self
            module.forward = partial(_attend, module, rows, *_tables(module, embeddings))
    # Neither is read: both would be as large as the square of the batch's tokens.
    encoder.get_rel_pos = lambda *_: None
    encoder.get_attention_mask = lambda mask: mask


def _tables(module: Any, embeddings: "torch.Tensor | None") -> "tuple[torch.Tensor | None, torch.Tensor | None]":
    """Return P and R (heads, distances, D) of a layer; None for a part that its attention does not have."""
    if embeddings is None:
        return None, None
    shared, kinds = getattr(module, "share_att_key", False), module.pos_att_type
    names = {
        "c2p": ("key_proj",) if shared else ("pos_key_proj", "pos_proj"),
        "p2c": ("query_proj",) if shared else ("pos_query_proj", "pos_q_proj"),
    }
    found = []
    for kind, choices in names.items():
        projections = [getattr(module, name) for name in choices if hasattr(module, name)]
        table = projections[0](embeddings) if kind in kinds else None
        heads = module.num_attention_heads
        found.append(None if table is None else table.unflatten(1, (heads, -1)).transpose(0, 1).contiguous())
    return found[0], found[1]


def _attend(
    module: Any,
    rows: ContextVar[PackedRows],
    by_query: "torch.Tensor | None",
    by_key: "torch.Tensor | None",
    hidden_states: "torch.Tensor",
    *_: Any,
    **__: Any,
) -> "tuple[torch.Tensor, None]":
    """Return the contexts (1, T, H) of the states (1, T, H), as the module's own forward pass does."""
    import torch

    heads = module.num_attention_heads
    if hasattr(module, "in_proj"):
        query, key, value = module.in_proj(hidden_states).unflatten(-1, (heads, -1)).chunk(3, dim=-1)
        query, value = query + module.q_bias.view(heads, -1), value + module.v_bias.view(heads, -1)
    else:
        projections = (module.query_proj, module.key_proj, module.value_proj)
        query, key, value = (each(hidden_states).unflatten(-1, (heads, -1)) for each in projections)
    scale = (query.shape[-1] * (1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type))) ** -0.5
    query, context, at = query * scale, torch.empty_like(query), 0
    for count, length in rows.get().length_groups:
        end = at + count * length
        q, k, v = (part[0, at:end].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
        scores = q @ k.transpose(-1, -2)
        places = torch.arange(length)
        distances = places[:, None] - places
        if by_query is not None:
            scores += _by_distance(q, by_query, distances, module)
        if by_key is not None:
            scores += _by_distance(k * scale, by_key, -distances, module).transpose(-1, -2)
        mixed = torch.softmax(scores, dim=-1) @ v
        context[0, at:end].unflatten(0, (count, length)).copy_(mixed.transpose(1, 2))
        at = end
    return context.flatten(2), None


def _by_distance(x: "torch.Tensor", table: "torch.Tensor", distances: "torch.Tensor", module: Any) -> "torch.Tensor":
    """Return x_a T_(d_ab) as (B, heads, L, L), of x (B, heads, L, D), the table T (heads, 2 S, D) and distances (L, L).

    The table has the distances from -S to S - 1; those beyond are as far as these.
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    half, buckets = table.shape[1] // 2, getattr(module, "position_buckets", -1)
    if buckets > 0:
        distances = make_log_bucket_position(distances, buckets, module.max_relative_positions).long()
    places = (distances + half).clamp(0, 2 * half - 1)
    first, last = int(places.min()), int(places.max())
    products = x @ table[:, first : last + 1].to(x.dtype).transpose(-1, -2)
    return products.gather(-1, (places - first).expand(*x.shape[:2], -1, -1))
