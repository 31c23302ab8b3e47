"""Test a model on a few short rows before it trains or scores.

Architectures differ in ways that no configuration shows: which parameters a loss depends on, whether padding changes a
result, whether restarted positions separate texts. A forward pass over two rows shows it, in milliseconds. The rows
come from the model's tokenizer because models rely on its special tokens: BART and T5 classify at the end token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS, Features
from torchlake.errors import DataError, TorchlakeError, ran_out_of_memory
from torchlake.models.config import in_words
from torchlake.optim.precision import ComputeWeights

Batch = Mapping[str, np.ndarray]
"The model's keyword arguments for some rows."

# Funnel computes no row of 4 tokens or fewer.
TEXTS = ("some words of a row", "all of this is a row, and there are some more words in it than in the other one.")
MASK = "attention_mask"
AGREEMENT = 1e-4
"Relative to the largest logit: far above rounding, far below the effect of padding or of another text."


def features(task: Any, processor: Any, spec: TaskSpec) -> Features | None:
    """Return a short and a longer row, made by the task as in training; None if the task does not read texts."""
    inputs = task.sample_inputs(spec, TEXTS)
    if inputs is None:
        return None
    found: Features = task.examples(inputs, None, processor, spec)[0]
    return found


def batches(task: Any, made: Features, processor: Any, spec: TaskSpec) -> list[Batch]:
    """Return each row of `made` as a separate batch, without padding."""
    ids = made.arrays.get(INPUT_IDS)
    if isinstance(ids, Ragged) and (task.packs or task.pairs):
        rows = (row[: spec.max_length].astype(np.int64)[None] for row in np.split(ids.values, ids.offsets[1:-1]))
        return [{INPUT_IDS: row, MASK: np.ones_like(row)} for row in rows]
    return [task.checked_batch(made.arrays, np.array([row]), processor, spec) for row in range(len(made))]


def run(model: nn.Module, task: Any, batch: Batch) -> Any:
    """Return what the model returns for a batch in main memory, on the model's device."""
    device = next(model.parameters()).device
    inputs = {name: torch.from_numpy(each).to(device) for name, each in batch.items() if name not in task.kept_back}
    return model(**inputs, **task.forward_options)


def find_unreached(model: nn.Module, task: Any, batch: Batch) -> list[str]:
    """Return the names of the parameters that the loss does not depend on, such as a pooler that the head ignores.

    They have no gradient, and DDP would wait for it. A forward pass over one row builds autograd's graph, and the
    parameters it does not lead to are the ones: no gradient is computed, which would take the memory of a second model.
    The model is in training mode afterwards. Raises DataError if the model cannot process a row of its tokenizer.
    """
    model.eval()
    with _explained(model, task, batch):
        outputs = task.checked_outputs(run(model, task, batch), 1)
    model.train()
    reached, seen, nodes = set(), set(), [outputs.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))  # a node without a function adds to a parameter's gradient
        nodes += [source for source, _ in node.next_functions]
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in reached]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and afterwards each of its modules into the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _explained(model: nn.Module, task: Any, batch: Batch) -> Iterator[None]:
    """Raise DataError in place of the model's error if it cannot process the rows of its tokenizer."""
    try:
        yield
    except TorchlakeError:
        raise
    except (RuntimeError, ValueError, IndexError, AttributeError, TypeError, AssertionError) as error:
        if ran_out_of_memory(error):
            raise
        raise DataError(_cannot_process(model, task, batch, error)) from error


def _cannot_process(model: Any, task: Any, batch: Batch, error: Exception) -> str:
    if not task.checks_padding or INPUT_IDS not in batch:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in batch.items())
        return f"the task {task.name!r}: the model cannot compute a batch of one row ({shapes}): {in_words(error)}"
    return (
        f"{type(model).__name__} of the type {model.config.model_type!r} cannot process rows from its tokenizer, of up "
        f"to {batch[INPUT_IDS].shape[-1]} tokens ({in_words(error)}). It may need other inputs as well, or "
        "config.json and the tokenizer may not belong together: compare their special tokens."
    )


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Let gradients be computed for the parameters that have them already, but not for those in `names`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)


def padding_matters(model: nn.Module, task: Any, made: Features, processor: Any, spec: TaskSpec) -> bool:
    """Return whether padding changes the outputs for a row, or for its tokens, despite the attention mask.

    XLNet uses the last position of a row, Funnel averages neighbors: their batches have rows of one length only. The
    model's mode is restored. Raises DataError if the model cannot process the rows.
    """
    together_in = task.checked_batch(made.arrays, np.arange(len(made)), processor, spec)
    with torch.no_grad(), evaluating(model), _explained(model, task, together_in):
        together = task.outputs(run(model, task, together_in))
        alone = [task.outputs(run(model, task, one)) for one in batches(task, made, processor, spec)]
    pairs = ((both[tuple(map(slice, one.shape[1:]))], one[0]) for both, one in zip(together, alone, strict=True))
    return not all(_agree(both, one) for both, one in pairs)


def mask_matters(model: nn.Module, task: Any, made: Features, processor: Any, spec: TaskSpec) -> bool:
    """Return whether a mask changes the outputs for a row without padding, as in T5Gemma. The mode is restored."""
    [batch, *_] = batches(task, made, processor, spec)
    without = {name: each for name, each in batch.items() if name != MASK or not each.all()}
    with torch.no_grad(), evaluating(model), _explained(model, task, batch):
        masked, unmasked = (task.outputs(run(model, task, one)) for one in (batch, without))
    return not _agree(unmasked, masked)


def padded_arrays(task: Any, made: Features, processor: Any, spec: TaskSpec) -> list[str]:
    """Return the arrays of a batch that are as long as its longest text, found by their shapes with and without it."""
    together = task.checked_batch(made.arrays, np.arange(len(made)), processor, spec)
    [short, *_] = batches(task, made, processor, spec)
    return [name for name, array in together.items() if array.shape[1:] != short[name].shape[1:]]


def isolates(model: nn.Module, wanted: Sequence[np.ndarray], forward: dict[str, Any]) -> bool:
    """Return whether concatenated rows with restarted positions have the same logits as separate rows.

    transformers masks such rows from one another in most architectures, but not in those with other positions (BLOOM,
    MPT) or a state carried from token to token (Mamba). The model's mode is restored.
    """
    ids = torch.from_numpy(np.concatenate(wanted))[None]
    positions = torch.from_numpy(np.concatenate([np.arange(len(row)) for row in wanted]))[None]
    try:
        with torch.no_grad(), evaluating(model):
            together = model(input_ids=ids, position_ids=positions, **forward).logits
            alone = [model(input_ids=torch.from_numpy(row)[None], **forward).logits for row in wanted]
    except TypeError:  # the model has no argument for positions
        return False
    return _agree(together, torch.cat(alone, dim=1))


def obstacle_in(dtype: torch.dtype, model: nn.Module, task: Any, batch: Batch) -> str | None:
    """Return why the model cannot compute with weights in `dtype`, found by a forward pass over one row; or None.

    A few architectures mix their activations with fp32 constants (OpenAI GPT), or have operations that bf16 lacks
    (FNet). Cost: a copy of the weights in `dtype`, for that pass.
    """
    try:
        with torch.no_grad():
            run(ComputeWeights(model, dtype), task, batch)
    except (RuntimeError, TypeError) as error:
        if ran_out_of_memory(error):
            raise
        return in_words(error)
    return None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= AGREEMENT * max(1.0, float(other.abs().max())))
