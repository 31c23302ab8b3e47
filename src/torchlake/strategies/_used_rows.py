"""Average gradients among CPUs; of embeddings, only the rows that a rank has used in this step.

Half of a small encoder's gradient, and most of a multilingual one's, are rows of words that no rank has seen: zeros.
Cost: one pass over the gradient of each embedding, and one collective with a byte per word.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LARGE = 4 << 20
"Bytes of a gradient. A smaller one is sent whole sooner than its rows are found."
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"By bytes of a number."


def send_used_rows(module: DistributedDataParallel) -> None:
    """Have DDP send the used rows of large embeddings, if the model has such. All other gradients stay as they are.

    An embedding that is also the output's matrix (tied weights) has no rows without a gradient.
    """
    embeddings, elsewhere = set[nn.Parameter](), set[nn.Parameter]()
    for part in module.modules():
        (embeddings if isinstance(part, nn.Embedding) else elsewhere).update(part.parameters(recurse=False))
    tables = {each for each in embeddings - elsewhere if each.requires_grad and each.nbytes >= LARGE}
    if tables:
        module.register_comm_hook(tables, _average)


def _average(
    tables: set[nn.Parameter],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket. Ranks have the same buckets in the same order, so their collectives meet."""
    buffer: torch.Tensor = bucket.buffer()
    rows, whole = list[torch.Tensor](), list[torch.Tensor]()
    for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        (rows if weight in tables else whole).append(gradient)
    if rows:
        used = torch.cat([_used(each) for each in rows]).to(torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        indices = [each.nonzero().flatten() for each in used.split([len(each) for each in rows])]
        if 2 * sum(map(len, indices)) < len(used):
            return _average_rows(buffer, rows, indices, whole)
    buffer.div_(dist.get_world_size())
    sent = cast(Any, dist.all_reduce(buffer, async_op=True)).get_future()
    return cast(torch.futures.Future[torch.Tensor], sent.then(lambda future: future.value()[0]))


def _used(gradient: torch.Tensor) -> torch.Tensor:
    """Return which rows (N, width) are not all zeros: by their bits, which takes a tenth of the time of numbers."""
    bits = gradient.view(BITS[gradient.element_size()])
    return (bits.amax(1) != 0) | (bits.amin(1) != 0)


def _average_rows(
    buffer: torch.Tensor, rows: list[torch.Tensor], indices: list[torch.Tensor], whole: list[torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Average the rows (N, width) at `indices` of some gradients, and all of the others, which are all in `buffer`."""
    parts = [*(each[index] for each, index in zip(rows, indices, strict=True)), *whole]
    packed = torch.cat([each.flatten() for each in parts]).div_(dist.get_world_size())
    if packed.numel():
        dist.all_reduce(packed)
    means = [
        flat.view_as(part) for flat, part in zip(packed.split([part.numel() for part in parts]), parts, strict=True)
    ]
    for gradient, index, mean in zip(rows, indices, means, strict=False):
        gradient[index] = mean
    for gradient, mean in zip(whole, means[len(rows) :], strict=True):
        gradient.copy_(mean)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
