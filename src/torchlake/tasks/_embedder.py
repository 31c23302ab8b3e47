"""The module of `feature_extraction`: an encoder, and the layers that make one vector of its token states.

    input_ids, attention_mask (B, L) -> encoder -> states (B, L, H) -> pooling -> Dense ... -> truncate -> normalize

Pooling and what follows are in fp32, and no row reads another one's states.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from torchlake.config.model_files.embedding import Dense, Embedding
from torchlake.errors import DataError
from torchlake.tasks._contrastive import FURTHER


class Embedder(nn.Module):
    """Token ids (B, L) to vectors (B, D); of rows with V texts to (B, V, D)."""

    base_model_prefix = "encoder"

    def __init__(self, encoder: nn.Module, vectors: "Vectors") -> None:
        super().__init__()
        self.encoder = encoder
        self.vectors = vectors
        self.config = encoder.config

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
        """Return the vectors; without a mask the texts have no padding.

        `others` may have further texts of the rows, such as `pair_ids` and `pair_mask`.
        """
        texts = [(input_ids, attention_mask)]
        for ids, mask in FURTHER.values():
            if ids in others:
                texts.append((others.pop(ids), others.pop(mask)))
        vectors = [self.embed(*text, **others) for text in texts]
        return vectors[0] if len(vectors) == 1 else torch.stack(vectors, dim=1)

    def embed(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **others: Any) -> torch.Tensor:
        """Return the vectors (B, D) of one text of each row."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **others).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors: torch.Tensor = self.vectors(self.vectors.pool(states, mask))
        return vectors


class Vectors(nn.Module):
    """Pooled states (B, P) to vectors (B, D), in fp32. `pool` makes them of states (B, L, H); runtimes call both."""

    def __init__(self, how: Embedding, folder: Path) -> None:
        super().__init__()
        self.how = how
        self.dense = nn.Sequential(*(DenseLayer(each, folder) for each in how.dense))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        vectors = self.dense(pooled.float())[:, : self.how.dimensions]
        return nn.functional.normalize(vectors, dim=-1) if self.how.normalize else vectors

    def pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return pooled states (B, P) of states (B, L, H), padded on the right, and their mask (B, L)."""
        states, real = states.float(), mask.unsqueeze(-1)
        parts = [_pooled(name, states, real) for name in self.how.poolings]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _pooled(name: str, states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return (B, H), pooled from those of the states (B, L, H) for which `real` (B, L, 1) is true."""
    counted = real.to(states.dtype)
    count = counted.sum(dim=1)
    if name == "cls":
        return states[:, 0]
    if name == "lasttoken":
        last = real.sum(dim=1, keepdim=True).long().clamp(min=1) - 1
        return states.gather(1, last.expand(-1, -1, states.shape[-1]))[:, 0]
    if name == "max":
        return states.masked_fill(real == 0, -torch.inf).amax(dim=1)
    if name == "weightedmean":
        counted = counted * torch.arange(1, states.shape[1] + 1, device=states.device)[None, :, None]
        count = counted.sum(dim=1)
    total = (states * counted).sum(dim=1)
    return total / (count.sqrt() if name == "mean_sqrt_len_tokens" else count).clamp(min=1e-9)


class DenseLayer(nn.Module):
    """A Dense module with its weights: x (B, I) -> (B, O); its tensors have the names in their file."""

    def __init__(self, dense: Dense, folder: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.inputs, dense.outputs, bias=dense.bias)
        self.activation = getattr(nn, dense.activation)()
        self.residual: nn.Module | None = None
        if dense.residual:
            same = dense.inputs == dense.outputs
            self.residual = nn.Identity() if same else nn.Linear(dense.inputs, dense.outputs, bias=False)
        file = folder / dense.folder / "model.safetensors"
        try:
            self.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
        except (SafetensorError, OSError, RuntimeError) as error:
            said = " ".join(str(error).split())[:300]
            raise DataError(f"{file}: does not hold the weights of this Dense module: {said}") from error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(x))
        return out if self.residual is None else out + self.residual(x)
