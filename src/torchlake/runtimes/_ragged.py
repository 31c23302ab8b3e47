"""The forward pass of an `Encoder` over concatenated rows; each runtime supplies the matrix products.

    linear(Linear) -> (x, residual) -> x weight^T + bias [+ residual]
    feed_forward(Layer) -> x -> x + down(activation(up(x)))

If only first tokens are read, so is the last layer: their queries, with the keys and values of every token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchlake.runtimes import Forward
from torchlake.runtimes._encoder import Apply, Encoder, Layer, Linear, Norm
from torchlake.runtimes._padding import PackedRows, remove_padding

if TYPE_CHECKING:
    import torch

SHORT = 64
"Row length up to which attention in bf16 is two batched products."

Multiply = Callable[["torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer's products. With `first`, which computes the queries of first tokens, `inner` has keys and values."""

    inner: Multiply
    out: Multiply
    norm: Norm
    feed_forward: Apply
    last_norm: Norm
    first: Multiply | None = None


def make_forward(
    encoder: Encoder,
    *,
    linear: Callable[[Linear], Multiply],
    feed_forward: Callable[[Layer], Apply],
    pad: Apply = lambda x: x,
) -> Forward:
    """Return the encoder's forward pass on the device of its tensors.

    `pad` adds the rows to the tokens (T, H) that the products want: else each of them adds these to a copy of its own.
    """
    import torch

    functions = torch.nn.functional

    width, heads, padding_id, head = encoder.width, encoder.heads, encoder.padding_id, encoder.head
    words, positions, norm = encoder.words, encoder.positions, encoder.norm
    device = words.device
    attend = partial(_attend, distances=encoder.distances) if device.type == "cpu" else _attend_flash
    blocks = []
    for layer in encoder.layers:
        queries, inner = (None, layer.qkv)
        if layer is encoder.layers[-1] and encoder.pools is None:
            queries, inner = _split(layer.qkv, width)
        first = None if queries is None else linear(queries)
        out, up_and_down = linear(layer.out), feed_forward(layer)
        blocks.append(_Block(linear(inner), out, layer.norm, up_and_down, layer.last_norm, first))

    def forward(
        input_ids: np.ndarray, attention_mask: np.ndarray, token_type_ids: np.ndarray | None = None
    ) -> np.ndarray:
        rows = remove_padding(padding_id, input_ids, attention_mask)
        starts = torch.from_numpy(rows.starts).to(device)
        with torch.inference_mode():
            x = functions.embedding(torch.from_numpy(rows.ids).to(device), words)
            x += functions.embedding(torch.from_numpy(rows.positions).to(device), positions)
            if token_type_ids is not None and encoder.second is not None:
                x[torch.from_numpy(token_type_ids[attention_mask != 0] == 1).to(device)] += encoder.second
            x = pad(_normalize(x, norm))
            for block in blocks:
                inner = block.inner(x, None)
                if block.first is None:
                    queries, keys, values = inner.view(-1, 3, heads, width // heads).unbind(1)
                    context = attend(queries, keys, values, rows, first=False)
                else:
                    x = x[starts]
                    queries = block.first(x, None).view(-1, heads, width // heads)
                    keys, values = inner.view(-1, 2, heads, width // heads).unbind(1)
                    context = attend(queries, keys, values, rows, first=True)
                x = _normalize(block.out(context, x), block.norm)
                x = _normalize(block.feed_forward(x), block.last_norm)
            read = x if encoder.pools is None else pool(x, rows, encoder.pools)
            outputs: np.ndarray = head(read).float().cpu().numpy()
        return outputs

    return forward


def fused(encoder: Encoder, linear: Callable[..., Multiply]) -> Callable[[Layer], Apply]:
    """Return `feed_forward` of a `linear` that also takes an activation, which it computes with the product."""

    def feed_forward(layer: Layer) -> Apply:
        up, down = linear(layer.up, encoder.activation), linear(layer.down)
        return lambda x: down(up(x, None), x)

    return feed_forward


def _split(qkv: Linear, width: int) -> tuple[Linear, Linear]:
    """Separate queries from keys and values."""
    return Linear(qkv.weight[:width], qkv.bias[:width]), Linear(qkv.weight[width:], qkv.bias[width:])


def pool(x: "torch.Tensor", rows: PackedRows, pools: Callable[..., "torch.Tensor"]) -> "torch.Tensor":
    """Return (B, P) of states (T, H): rows of equal length are pooled together, without a mask."""
    import torch

    found, at = [], 0
    for count, length in rows.length_groups:
        states = x[at : at + count * length].view(count, length, -1)
        found.append(pools(states, states.new_ones((count, length))))
        at += count * length
    return torch.cat(found)


def _normalize(x: "torch.Tensor", norm: Norm) -> "torch.Tensor":
    import torch

    return torch.nn.functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)


def _attend(
    queries: "torch.Tensor",
    keys: "torch.Tensor",
    values: "torch.Tensor",
    rows: PackedRows,
    *,
    first: bool,
    distances: "torch.Tensor | None",
) -> "torch.Tensor":
    """Compute attention within each row: keys and values (T, heads, D); queries (T, heads, D), or first
    tokens' (B, heads, D). T may have rows of padding at its end.

    `distances` as in `Encoder`. Returns (T, H) or (B, H).
    """
    import torch

    heads, depth = keys.shape[1:]
    context = keys.new_empty(len(queries), heads, depth)
    at = begin = 0
    for count, length in rows.length_groups:
        end, num_queries = at + count * length, 1 if first else length
        k, v = (part[at:end].view(count, length, heads, depth).transpose(1, 2) for part in (keys, values))
        place = slice(begin, begin + count * num_queries)
        q = queries[place].view(count, num_queries, heads, depth).transpose(1, 2)
        added = None if distances is None else distances[None, :, :num_queries, :length]
        if length <= SHORT and values.dtype == torch.bfloat16 and added is None:
            mixed = _mix_short(q, k, v)
        else:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
        context[place].view(count, num_queries, heads, depth).copy_(mixed.transpose(1, 2))
        at, begin = end, begin + count * num_queries
    context[begin:] = 0  # else padding has what was there before, and computing with some numbers is slow
    return context.view(-1, heads * depth)


def _mix_short(queries: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor") -> "torch.Tensor":
    """Return softmax(Q K^T / sqrt(D)) V with the softmax in fp32; all (B, heads, L, D).

    torch's attention multiplies each head in blocks of 16 tokens. In bf16 that takes 1.2 to 1.6 times as long for rows
    of 20 to 31 or 36 to 47 tokens; just above a multiple of 16 it is as much faster.
    """
    import torch

    scores = (queries @ keys.transpose(-1, -2)).float().mul_(queries.shape[-1] ** -0.5)
    return torch.softmax(scores, -1).to(values.dtype) @ values


def _attend_flash(
    queries: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", rows: PackedRows, *, first: bool
) -> "torch.Tensor":
    """Compute `_attend` on a GPU, by one kernel for rows of any length."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    longest = int(rows.lengths.max())
    edges = torch.from_numpy(np.append(rows.starts, rows.lengths.sum()).astype(np.int32)).to(keys.device)
    query_edges = torch.arange(len(rows.lengths) + 1, dtype=torch.int32, device=keys.device) if first else edges
    mixed = varlen_attn(
        queries.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        query_edges,
        edges,
        1 if first else longest,
        longest,
    )
    assert isinstance(mixed, torch.Tensor)
    return mixed.flatten(1)
