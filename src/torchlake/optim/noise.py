"""NEFTune: noise on the word embeddings in training (train.neftune; Jain et al. 2023).

    embeddings + alpha / sqrt(L d) * u,   u uniform in [-1, 1)

L is the number of tokens of the text itself, without padding and without its neighbors in a packed block; d is the
width. The numbers of each text are drawn by a generator whose seed is (seed, step, position in the batch, text in the
block). So a run that continues, other micro-batches and another number of ranks add the same noise.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

Text = tuple[int, int, int, tuple[int, ...]]
"The line of a micro-batch, the first token of one of its texts and its length there, and what seeds its noise."


class EmbeddingNoise:
    """Adds noise to what a model's word embeddings return while it is training; `step` and `texts` say which."""

    def __init__(self, model: Any, *, alpha: float, seed: int) -> None:
        self.alpha, self.seed = alpha, seed
        self.step = 0
        self.texts: list[Text] = []
        "The texts of the micro-batch that is computed next; none: no noise."
        model.get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training or not self.texts:
            return embedded
        noise = torch.zeros(embedded.shape, dtype=torch.float32, device=embedded.device)
        generator = torch.Generator(embedded.device)
        for line, first, length, key in self.texts:
            seeds = np.random.SeedSequence([self.seed, self.step, *key])
            generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
            size = self.alpha / math.sqrt(length * embedded.shape[-1])
            noise[line, first : first + length].uniform_(-size, size, generator=generator)
        return embedded + noise.to(embedded.dtype)


def texts_of(positions: np.ndarray, lengths: np.ndarray, places: np.ndarray, *, unpacked: bool) -> list[Text]:
    """Return the texts in packed blocks.

    `positions` (B, L) are those of the tokens in their texts, `lengths` (B,) the tokens of the blocks, `places` (B,)
    the positions of the blocks in the batch of the step; `unpacked`: each text is a line of the micro-batch.
    """
    texts: list[Text] = []
    for line, (length, place) in enumerate(zip(lengths.tolist(), places.tolist(), strict=True)):
        firsts = np.flatnonzero(positions[line, :length] == 0).tolist()
        for number, (first, end) in enumerate(zip(firsts, [*firsts[1:], length], strict=True)):
            at = (len(texts), 0) if unpacked else (line, first)
            texts.append((*at, end - first, (place, number)))
    return texts
