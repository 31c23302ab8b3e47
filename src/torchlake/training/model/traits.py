"""Properties of a model, found on a few short rows by the one rank that always has weights, and sent to the others.

Ranks whose weights are on the meta device cannot compute. Besides, the answers decide which collectives a step has, so
they must be equal on all ranks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake.checkpoints import format
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import Features
from torchlake.errors import ConfigError, TaskError
from torchlake.models import probes
from torchlake.models.adapters import files
from torchlake.optim.optimizers import trainable_names
from torchlake.optim.precision import find_precision
from torchlake.training.model import kernels


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a model; plain values, which ranks send as JSON."""

    unreached: list[str]
    "Names of the parameters that the loss does not depend on."
    stored: list[str]
    "Names of the tensors that a checkpoint stores: all, or the trained ones of a partly frozen model; tied ones once."
    precision: str
    "train.precision, or its substitute if the model cannot compute in it."
    equal_lengths: bool
    "Whether a micro-batch may hold only rows of equal length, because padding would change the logits."
    isolates: bool
    "Whether attention stays within rows whose position ids restart."
    first_token_part: str | None
    "The module from which on the last layer computes the first token of each row only; None: all tokens to its end."
    after_head: dict[str, Any] | None
    "How the model can compute its loss in chunks (the task's `find_chunks`); None: it cannot."


def stores_all(job: Job) -> bool:
    """Return whether checkpoints hold the whole model; else they hold the trained part, and the base's files have the
    rest."""
    return job.model.lora is None and job.model.freeze is None


def find_traits(
    model: nn.Module,
    base: Any,
    task: Any,
    made: Features,
    processor: Any,
    job: Job,
    spec: TaskSpec,
    device: torch.device,
) -> Traits:
    """Test `model`, which is `base` with or without adapters, on the two rows `made`.

    The parameters that are not reached are frozen; the model is in training mode afterwards. Raises DataError if it
    cannot process the rows, ConfigError if it cannot compute in the precision that the job names, TaskError if
    the outputs of a task's own module do not fit the task.
    """
    train, batches = job.train, probes.batches(task, made, processor, spec)
    batch = batches[1]
    unreached = probes.find_unreached(model, task, batch)
    probes.freeze(model, unreached)
    if not task.auto_class:
        try_task(model, task, batch, processor, spec)
    equal_lengths = (
        task.checks_padding
        and not (task.packs or task.pairs)
        and "attention_mask" in batch
        and probes.padding_matters(model, task, made, processor, spec)
    )
    if equal_lengths and sum(name in batch for name in task.token_arrays) > 1:
        raise ConfigError(
            f"{job.model.base}: padding changes the vectors of a model of type {base.config.model_type!r}, and texts "
            "of a pair are padded to the longest of their batch. Use another encoder; this one can only score."
        )
    weights = model.state_dict()
    if not stores_all(job):
        first = [name for name in weights if name.endswith((files.FIRST_A, files.FIRST_B))]
        weights = {name: weights[name] for name in [*trainable_names(model, train), *first]}
    rows = [each["input_ids"][0] for each in batches] if task.packs or task.pairs else []
    isolates = (spec.whole or task.pairs) and probes.isolates(model, rows, dict(task.forward_options))
    precision = kernels.usable_precision(train, model, task, batch, device)
    # In fp16 small gradients vanish, unless the loss is scaled up before them.
    chunked = (task.packs or task.pairs) and find_precision(precision, device).dtype is not torch.float16
    if isolates and job.model.attention == "flash":
        isolates = kernels.passes_positions(base, torch.from_numpy(rows[1])[None], dict(task.forward_options))
    return Traits(
        unreached=unreached,
        stored=list(format.untied(weights)),
        precision=precision,
        equal_lengths=equal_lengths,
        isolates=isolates,
        first_token_part=None
        if task.packs or "input_ids" not in batch
        else _first_token_part(model, task, batches, made, processor, spec),
        after_head=task.find_chunks(base, rows[1], tokens=train.micro_batch_tokens) if chunked else None,
    )


def _first_token_part(
    model: nn.Module, task: Any, alone: list[probes.Batch], made: Features, processor: Any, spec: TaskSpec
) -> str | None:
    """Return what `kernels.find_first_token_part` finds with each row alone and both, and if that is a module, also
    with the longer row without its second token.

    Longformer adds padding to its window and removes it after the last layer, which rows of whole windows do not show.
    """
    both = task.checked_batch(made.arrays, np.arange(len(made)), processor, spec)
    if kernels.find_first_token_part(model, task, [*alone, both]) is None:
        return None
    tokens = probes.padded_arrays(task, made, processor, spec)
    shorter = {name: np.delete(each, 1, axis=1) if name in tokens else each for name, each in alone[1].items()}
    return kernels.find_first_token_part(model, task, [both, shorter])


def try_task(model: nn.Module, task: Any, batch: probes.Batch, processor: Any, spec: TaskSpec) -> None:
    """Pass one row through all methods of a task that training and scoring call. Raises their TaskErrors."""
    with torch.no_grad(), probes.evaluating(model):
        outputs = task.checked_outputs(probes.run(model, task, batch), 1)
    kept = task.reduce_outputs(outputs.float().cpu().numpy(), batch, spec)
    table = task.output_columns(task.answers(kept, spec), processor, spec)
    if table.schema != task.output_schema(spec) or len(table) != 1:
        raise TaskError(
            f"the task {task.name!r}: output_columns returned {len(table)} rows of {table.schema.to_string()!r} for "
            f"one row; output_schema is {task.output_schema(spec).to_string()!r}"
        )
