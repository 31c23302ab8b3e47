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

_Places = tuple["torch.Tensor", slice]
"For each two tokens of a row, (L, L), the place of their distance in this part of a table."


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

    def places(*_: Any) -> "list[tuple[_Places, _Places]]":
        half = 0 if embeddings is None else len(embeddings) // 2
        return [_places(length, half, module) for _, length in rows.get().length_groups]

    # Each layer is given the places. transformers' own, and its mask, are as large as the square of the batch's tokens.
    encoder.get_rel_pos = places
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


def _places(length: int, half: int, module: Any) -> "tuple[_Places, _Places]":
    """Return where tables of 2 S = 2 `half` distances, from -S to S - 1, have those of the tokens of a row: i - j and
    j - i. Those beyond are as far as these.
    """
    import torch
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    at = torch.arange(length)
    distances, buckets = at[:, None] - at, getattr(module, "position_buckets", -1)
    if buckets > 0:
        distances = make_log_bucket_position(distances, buckets, module.max_relative_positions).long()

    def places(signed: torch.Tensor) -> _Places:
        found = (signed + half).clamp(0, 2 * half - 1)
        first, last = int(found.min()), int(found.max())
        return found - first, slice(first, last + 1)

    return places(distances), places(-distances)


def _attend(
    module: Any,
    rows: ContextVar[PackedRows],
    by_query: "torch.Tensor | None",
    by_key: "torch.Tensor | None",
    hidden_states: "torch.Tensor",
    *_: Any,
    relative_pos: "list[tuple[_Places, _Places]]",
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
    context, at = torch.empty_like(query), 0
    for (count, length), (ahead, back) in zip(rows.get().length_groups, relative_pos, strict=True):
        end = at + count * length
        q, k, v = (part[0, at:end].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
        added = None if by_query is None else _by_distance(q, by_query, ahead)
        if by_key is not None:
            others = _by_distance(k, by_key, back).transpose(-1, -2)
            added = others if added is None else added.add_(others)
        added = None if added is None else added.mul_(scale)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
        context[0, at:end].unflatten(0, (count, length)).copy_(mixed.transpose(1, 2))
        at = end
    return context.flatten(2), None


def _by_distance(x: "torch.Tensor", table: "torch.Tensor", places: "_Places") -> "torch.Tensor":
    """Return x_a T_(d_ab) as (B, heads, L, L), of x (B, heads, L, D) and the table T (heads, distances, D)."""
    at, part = places
    # One product for each head, with the tokens of all rows: else the table would be copied for each row.
    products = x.transpose(0, 1).flatten(1, 2) @ table[:, part].to(x.dtype).transpose(-1, -2)
    by_row: torch.Tensor = products.unflatten(1, (x.shape[0], x.shape[2]))
    return by_row.gather(-1, at.expand(*by_row.shape[:2], -1, -1)).transpose(0, 1)
