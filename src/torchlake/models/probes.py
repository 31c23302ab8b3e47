"""Test a model on a few short rows before it trains or scores.

Architectures differ in ways that no configuration shows: which parameters a loss depends on, whether padding changes a
result, whether restarted positions separate texts. A forward pass over two rows shows it, in milliseconds. The rows
come from the model's tokenizer because models rely on its special tokens: BART and T5 classify at the end token.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, pad
from torchlake.errors import DataError, ran_out_of_memory
from torchlake.models.config import in_words
from torchlake.optim.precision import ComputeWeights

# Funnel computes no row of 4 tokens or fewer.
TEXTS = ("some words of a row", "all of this is a row, and there are some more words in it than in the other one.")
AGREEMENT = 1e-4
"Relative to the largest logit: far above rounding, far below the effect of padding or of another text."


def rows(task: ModuleType, tokenizer: Any, spec: TaskSpec) -> list[np.ndarray]:
    """Return a short and a longer row of token ids, each (L,) int64, tokenized by the task."""
    made = (task.documents if task.PACKED else task.tokenize)(tokenizer, TEXTS, spec)
    values, offsets = made[0].astype(np.int64), made[1]
    return [values[first:last][: spec.max_length] for first, last in pairwise(offsets)]


def find_unreached(model: nn.Module, row: np.ndarray, forward: dict[str, Any]) -> list[str]:
    """Return the names of the parameters that the loss does not depend on, such as a pooler that the head ignores.

    They have no gradient, and DDP would wait for it. A forward pass over one row (L,) builds autograd's graph, and the
    parameters it does not lead to are the ones: no gradient is computed, which would take the memory of a second model.
    `forward` are the task's arguments. The model is in training mode afterwards. Raises DataError if the model cannot
    process a row of its tokenizer.
    """
    model.eval()
    ids = torch.from_numpy(row)[None]
    try:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **forward).logits
    except (RuntimeError, ValueError, IndexError, AttributeError, TypeError, AssertionError) as error:
        if ran_out_of_memory(error):
            raise
        raise DataError(
            f"{type(model).__name__} cannot process a row of {len(row)} tokens of its tokenizer "
            f"({in_words(error)}). config.json and the tokenizer may not belong together: compare their special tokens."
        ) from error
    model.train()
    reached, seen, nodes = set(), set(), [logits.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))  # a node without a function adds to a parameter's gradient
        nodes += [source for source, _ in node.next_functions]
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in reached]


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Let gradients be computed for the parameters that have them already, but not for those in `names`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)


def padding_matters(model: nn.Module, wanted: Sequence[np.ndarray], pad_id: int) -> bool:
    """Return whether padding changes a classifier's result for a row, despite the attention mask.

    XLNet uses the last position of a row, Funnel averages neighbors: their batches have rows of one length only. The
    model's mode is restored.
    """
    lengths = [len(row) for row in wanted]
    tokens = Ragged(np.concatenate(wanted).astype(np.int32), np.concatenate([[0], np.cumsum(lengths)]))
    ids, mask = (torch.from_numpy(array) for array in pad(tokens, np.arange(len(wanted)), pad_id))
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad():
            together = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            alone = [model(input_ids=torch.from_numpy(row)[None].to(device)).logits for row in wanted]
    finally:
        model.train(training)
    return not _agree(together, torch.cat(alone))


def isolates(model: nn.Module, wanted: Sequence[np.ndarray], forward: dict[str, Any]) -> bool:
    """Return whether concatenated rows with restarted positions have the same logits as separate rows.

    transformers masks such rows from one another in most architectures, but not in those with other positions (BLOOM,
    MPT) or a state carried from token to token (Mamba). The model's mode is restored.
    """
    ids = torch.from_numpy(np.concatenate(wanted))[None]
    positions = torch.from_numpy(np.concatenate([np.arange(len(row)) for row in wanted]))[None]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            together = model(input_ids=ids, position_ids=positions, **forward).logits
            alone = [model(input_ids=torch.from_numpy(row)[None], **forward).logits for row in wanted]
    except TypeError:  # it has no argument for positions
        return False
    finally:
        model.train(training)
    return _agree(together, torch.cat(alone, dim=1))


def obstacle_in(dtype: torch.dtype, model: nn.Module, row: np.ndarray, forward: dict[str, Any]) -> str | None:
    """Return why the model cannot compute with weights in `dtype`, found by a forward pass over one row (L,); or None.

    A few architectures mix their activations with fp32 constants (OpenAI GPT), or have operations that bf16 lacks
    (FNet). Cost: a copy of the weights in `dtype`, for that pass.
    """
    ids = torch.from_numpy(row)[None]
    try:
        with torch.no_grad():
            ComputeWeights(model, dtype)(input_ids=ids, attention_mask=torch.ones_like(ids), **forward)
    except (RuntimeError, TypeError) as error:
        if ran_out_of_memory(error):
            raise
        return in_words(error)
    return None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= AGREEMENT * max(1.0, float(other.abs().max())))
