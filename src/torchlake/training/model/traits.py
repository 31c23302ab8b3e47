"""What a model is like, found on a few short rows by the one rank that always has weights, and sent to the others.

Ranks whose weights are on the meta device cannot compute. Besides, the answers decide which collectives a step has, so
they have to be equal on all ranks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import plugins
from torchlake.checkpoints import format
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.models import probes
from torchlake.optim.optimizers import trainable_names
from torchlake.optim.precision import find_precision
from torchlake.training.model import kernels


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a model is like; plain values, which ranks send as JSON."""

    unreached: list[str]
    "Names of the parameters that the loss does not depend on."
    stored: list[str]
    "Names of the tensors that a checkpoint stores: all, or of a partly frozen model the trained ones; tied ones once."
    precision: str
    "train.precision, or what stands in for it because the model cannot compute in it."
    equal_lengths: bool
    "Whether a micro-batch may hold only rows of equal length, because padding would change the logits."
    isolates: bool
    "Whether attention stays within rows whose position ids restart."
    after_head: dict[str, Any] | None
    "How the model can compute its loss in chunks (the task's `find_chunks`); None: it cannot."


def stores_all(job: Job) -> bool:
    """Whether checkpoints hold the whole model; else the trained part, beside which the base's files have the rest."""
    return job.model.lora is None and job.model.freeze is None


def find_traits(
    model: nn.Module, base: Any, rows: list[np.ndarray], job: Job, spec: TaskSpec, pad_id: int, device: torch.device
) -> Traits:
    """Test `model`, which is `base` with or without adapters, on two `rows`, each (L,) int64.

    The parameters that are not reached are frozen; the model is in training mode afterwards. Raises DataError if it
    cannot process the rows, ConfigError if it cannot compute in a precision that was asked for by name.
    """
    task, train, row = plugins.load("tasks", spec.task), job.train, rows[1]
    unreached = probes.find_unreached(model, row, task.FORWARD)
    probes.freeze(model, unreached)
    weights = model.state_dict()
    if not stores_all(job):
        weights = {name: weights[name] for name in trainable_names(model, train)}
    isolates = spec.problem == "next_answer_token" and probes.isolates(model, rows, task.FORWARD)
    precision = kernels.usable_precision(train, model, row, task, device)
    # In fp16 small gradients vanish, unless the loss is scaled up before them.
    chunked = task.PACKED and find_precision(precision, device).dtype is not torch.float16
    if isolates and job.model.attention == "flash":
        isolates = kernels.passes_positions(base, torch.from_numpy(row)[None], task.FORWARD)
    return Traits(
        unreached=unreached,
        stored=list(format.untied(weights)),
        precision=precision,
        equal_lengths=not task.PACKED and probes.padding_matters(model, rows, pad_id),
        isolates=isolates,
        after_head=task.find_chunks(base, row, tokens=train.micro_batch_tokens) if chunked else None,
    )
