"""An `Encoder` as a torch module over padded rows, for export: `input_ids`, `attention_mask` to logits or vectors.

It computes what the model does with less overhead than transformers' modules: no other kinds of masks, no NaN checks,
query scaling folded into the weights. For a classifier, the last layer is computed for first tokens only, the ones that
it reads: a fourteenth of RoBERTa-base's work, a seventh of MiniLM's.
"""

from typing import TYPE_CHECKING, Any

from torchlake.runtimes._encoder import Apply, Encoder, Layer, Linear, Norm, linear_module

if TYPE_CHECKING:
    import torch

HIDDEN_KEY = -10_000.0
"Added to the scores of padding: its exp is 0, and a row of only padding does not become NaN."


def make_module(encoder: Encoder) -> "torch.nn.Module":
    """Return the module in evaluation mode, with separate weights for queries, keys and values."""
    import torch

    functions = torch.nn.functional
    heads, width = encoder.heads, encoder.width
    activate: Apply = functions.gelu if encoder.activation == "gelu" else functions.relu

    class Block(torch.nn.Module):
        def __init__(self, layer: Layer, *, first_only: bool) -> None:
            super().__init__()
            self.first_only = first_only
            scale = (width // heads) ** -0.5
            queries, keys, values = (
                Linear(layer.qkv.weight[at : at + width], layer.qkv.bias[at : at + width])
                for at in range(0, 3 * width, width)
            )
            self.queries = linear_module(Linear(queries.weight * scale, queries.bias * scale))
            self.keys, self.values = linear_module(keys), linear_module(values)
            self.out, self.up, self.down = linear_module(layer.out), linear_module(layer.up), linear_module(layer.down)
            self.norm, self.last_norm = _norm(layer.norm), _norm(layer.last_norm)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            selected = x[:, :1] if self.first_only else x
            hidden = hidden[:, :, :1] if self.first_only else hidden
            scores = _by_head(self.queries(selected)) @ _by_head(self.keys(x)).transpose(2, 3)
            mixed = torch.softmax(scores + hidden, dim=-1) @ _by_head(self.values(x))
            x = self.norm(self.out(mixed.transpose(1, 2).flatten(2)) + selected)
            result: torch.Tensor = self.last_norm(self.down(activate(self.up(x))) + x)
            return result

    def _by_head(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, heads, width // heads).transpose(1, 2)

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding.from_pretrained(encoder.words)
            self.positions = torch.nn.Embedding.from_pretrained(encoder.positions)
            self.norm, self.head = _norm(encoder.norm), encoder.head
            self.distances: torch.Tensor | None
            self.register_buffer("distances", encoder.distances)
            final = encoder.layers[-1] if encoder.pools is None else None
            self.blocks = torch.nn.ModuleList(Block(layer, first_only=layer is final) for layer in encoder.layers)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            x = self.norm(self.words(input_ids) + self.positions(_positions(input_ids)))
            hidden = torch.where(attention_mask.to(torch.bool), 0.0, HIDDEN_KEY)[:, None, None, :]
            if self.distances is not None:
                hidden = hidden + self.distances[None, :, : x.shape[1], : x.shape[1]]
            for block in self.blocks:
                x = block(x, hidden)
            return self.head(x[:, 0] if encoder.pools is None else encoder.pools(x, attention_mask))

    def _positions(input_ids: torch.Tensor) -> torch.Tensor:
        if encoder.padding_id is None:
            return torch.arange(input_ids.shape[1])[None]
        counted = (input_ids != encoder.padding_id).to(input_ids.dtype)
        return torch.cumsum(counted, 1) * counted + encoder.padding_id

    return Exported().eval()


def _norm(norm: Norm) -> "torch.nn.Module":
    import torch

    module = torch.nn.LayerNorm(norm.weight.shape[0], norm.eps, device="meta")
    module.load_state_dict({"weight": norm.weight, "bias": norm.bias}, assign=True)
    return module
