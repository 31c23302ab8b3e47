"""The strategy ddp on CPUs sends the rows of embeddings that are used: the same averages, of fewer numbers."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchlake import distributed
from torchlake.config.sections.train import TrainConfig
from torchlake.launching.launch import launch
from torchlake.strategies import ddp

WORDS, WIDTH = 6_000, 192
PLACES = 16
OTHERS = PLACES * WIDTH + WIDTH * WIDTH + WIDTH
"The numbers of the other weights."


class Reader(nn.Module):
    """Words and places in, one number for each word out: by the words' own vectors if the weights are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if tied else None
        if self.head is not None:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return found if self.head is None else self.head(found)


def gradients(whole: bool, tied: bool, bucket_mib: float) -> tuple[list[list[Any]], list[int]]:
    """Rank 0's gradients of four steps, and how many numbers the hook sent in each; `whole`: without the hook."""
    sent = list[int]()
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent[-1] += tensor.numel()
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    if whole:
        ddp.send_used_rows = lambda module: None
    found = []
    train = TrainConfig.model_validate({"strategy": "ddp", "precision": "fp32", "ddp": {"bucket_mib": bucket_mib}})
    with distributed.process_group(60) as group:
        torch.manual_seed(0)
        sent.append(0)
        module, _ = ddp.wrap(Reader(tied), lambda each: torch.optim.SGD(each.parameters()), group=group, train=train)
        for step in range(4):
            module.zero_grad()
            sent.append(0)
            ids = torch.randint(WORDS, (4, PLACES), generator=torch.Generator().manual_seed(group.rank + 9 * step))
            ids = {1: torch.full_like(ids, 7), 2: torch.arange(WORDS).view(-1, PLACES)}.get(step, ids)
            with ddp.no_sync(module):
                module(ids[:1]).square().mean().backward()
            # A word that one rank alone has used gets a gradient that is not finite, on every rank.
            factor = torch.inf if step == 3 and group.rank == group.world_size - 1 else 1.0
            (factor * module(ids[1:]).square().mean()).backward()
            found.append([np.array(each.grad) for each in module.parameters()])
        del module
    return found, sent[1:]


# In one bucket with the other weights, and in one of its own.
@pytest.mark.parametrize(("ranks", "bucket_mib"), [(2, 25.0), (3, 1.0)])
def test_averages_are_those_of_whole_gradients(ranks: int, bucket_mib: float) -> None:
    found, sent = launch(partial(gradients, False, False, bucket_mib), processes=ranks)
    whole, none = launch(partial(gradients, True, False, bucket_mib), processes=ranks)
    # The sum of two numbers has no order.
    tolerance = 0 if ranks == 2 else 1e-5
    for step, (ours, theirs) in enumerate(zip(found, whole, strict=True)):
        for mine, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=tolerance, atol=tolerance / 100, err_msg=f"step {step}")
    assert not np.isfinite(found[3][0]).all()
    assert none == [0, 0, 0, 0]
    most = WORDS + 4 * PLACES * ranks * WIDTH + OTHERS
    assert WORDS + WIDTH + OTHERS < sent[0] <= most
    assert sent[1] == WORDS + WIDTH + OTHERS, "one word"
    assert sent[2] == WORDS + WORDS * WIDTH + OTHERS, "every word, so the bucket is sent whole"


def test_tied_weights_are_sent_whole() -> None:
    assert launch(partial(gradients, False, True, 25.0), processes=2)[1] == [0, 0, 0, 0]
