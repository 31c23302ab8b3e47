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
            return _average_parts(buffer, [*zip(rows, indices, strict=True), *((each, ...) for each in whole)])
    buffer.div_(dist.get_world_size())
    sent = cast(Any, dist.all_reduce(buffer, async_op=True)).get_future()
    return cast(torch.futures.Future[torch.Tensor], sent.then(lambda future: future.value()[0]))


def _used(gradient: torch.Tensor) -> torch.Tensor:
    """Return which rows (N, width) are not all zeros: by their bits: torch's norm takes ten times as long."""
    bits = gradient.view(BITS[gradient.element_size()])
    return (bits.amax(1) != 0) | (bits.amin(1) != 0)


def _average_parts(buffer: torch.Tensor, parts: list[tuple[torch.Tensor, Any]]) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in `buffer` at an index each, such as some rows."""
    found = [gradient[index] for gradient, index in parts]
    packed = torch.cat([each.flatten() for each in found]).div_(dist.get_world_size())
    if packed.numel():
        dist.all_reduce(packed)
    means = packed.split([each.numel() for each in found])
    for (gradient, index), each, mean in zip(parts, found, means, strict=True):
        gradient[index] = mean.view_as(each)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
