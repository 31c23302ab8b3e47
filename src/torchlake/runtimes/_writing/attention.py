"""Attention to a beginning that rows share: its keys and values are there once, whatever the number of rows.

    queries of all rows x keys of the beginning: one product -.
                                                              softmax over both -> values of both
    each row's query x the keys of its own slot --------------'

transformers calls `_attend` in place of its own `sdpa`, and it computes what `sdpa` does where nothing is shared.
"""

from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "torchlake_shared"
"In transformers' table."
reading: ContextVar[tuple[torch.Tensor, ...]] = ContextVar("what the layer that is computed shares", default=())
"""Keys (K, P, D) and values (K, P, V) of K heads and P tokens, and the mask (B, P + W): which of these and of the W in
its slot each row reads. Nothing if no beginning is shared."""


def share_attention(model: Any) -> bool:
    """Let the model read a shared beginning; return whether its attention is the one that can be replaced."""
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it: query (B, H, T, D); return (B, T, H, V)."""
    if not (shared := reading.get()):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    reading.set(())
    if given.get("position_bias") is not None:
        raise ValueError("its attention adds a bias to the scores")
    (keys, values, mask), (rows, heads, _, size), scaling = shared, query.shape, given.get("scaling")
    groups, tokens, _ = keys.shape

    def together(each: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return (B, K, G, N) times (K, N, M)."""
        flat = each.transpose(0, 1).reshape(groups, -1, each.shape[-1])
        return (flat @ times).view(groups, rows, -1, times.shape[-1]).transpose(0, 1)

    own = query.reshape(rows, groups, heads // groups, size) * (size**-0.5 if scaling is None else scaling)
    scores = torch.cat([together(own, keys.mT), own @ key.mT], -1)
    weights = scores.masked_fill_(~mask[:, None, None], -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    mixed = together(weights[..., :tokens], values) + weights[..., tokens:] @ value
    return mixed.reshape(rows, 1, heads, -1), None
