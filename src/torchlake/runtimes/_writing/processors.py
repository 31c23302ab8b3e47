"""What `static.py` puts into transformers' `generate`: the choice of each token, the end of rows, scores of NaN."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from torchlake.runtimes._writing.choosing import choose, look_ahead
from torchlake.runtimes._writing.row import Row


class Choosing(LogitsProcessor):
    """Masks all tokens of a row except the chosen one; `chosen` (B,) are those of the last step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.chosen = np.zeros(len(rows), np.int64)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        running = [place for place, row in enumerate(self.rows) if row.reason is None]
        if len(running) == len(self.rows):
            self.chosen = choose(scores, self.rows)
        elif running:
            self.chosen[running] = choose(scores[running], [self.rows[place] for place in running])
        places = torch.from_numpy(self.chosen.clip(min=0)).to(scores.device)[:, None]
        alone: Any = torch.full_like(scores, -torch.inf).scatter_(1, places, 0.0)
        return alone  # type: ignore[no-any-return]


class Stopping(StoppingCriteria):
    """Gives each row its token, ends it, and reports."""

    def __init__(self, choosing: Choosing, tell: Callable[[], None]) -> None:
        self.choosing, self.tell = choosing, tell

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.Tensor:
        rows = self.choosing.rows
        for row, token in zip(rows, self.choosing.chosen.tolist(), strict=True):
            if row.reason is None:
                row.take(token)
        look_ahead(rows)
        self.tell()
        return torch.tensor([row.reason is not None for row in rows], device=input_ids.device)


class Finite(LogitsProcessor):
    """Ends the beams whose scores are not finite, so that no other one is compared to them."""

    def __init__(self, rows: int, beams: int, end: int) -> None:
        self.bad = np.zeros(rows, bool)
        "(B,), the rows that had such scores."
        self._beams, self._end = beams, end

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        nan = scores.amax(-1).isnan()  # they are logarithms: NaN if any logit is NaN or infinity
        if nan.any():
            self.bad |= nan.view(-1, self._beams).any(1).cpu().numpy()
            scores[nan] = -torch.inf
            scores[nan, self._end] = 0.0
        return scores
