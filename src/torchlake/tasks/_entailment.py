"""A classifier of pairs of texts that reads several pairs for each row."""

from typing import Any

import torch
from torch import nn


class Entailment(nn.Module):
    """A model of transformers for (B, K, L) tokens, with the logits of two of its classes."""

    def __init__(self, model: Any, classes: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.config, self.classes = model, model.config, list(classes)

    def forward(self, **batch: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (B, K, 2) of the classes."""
        ids = batch["input_ids"]
        assert ids is not None, "pairs have tokens"
        flat = {name: None if each is None else each.flatten(0, 1) for name, each in batch.items()}
        chosen: torch.Tensor = self.model(**flat).logits[:, self.classes]
        return chosen.reshape(*ids.shape[:2], len(self.classes))
