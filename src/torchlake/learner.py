"""What the training loop works with: rows, the model and what moves it, and how far it is.

    prepared tokens -> Rows -> planned batches          base model or checkpoint -> wrap -> optimizer = Learner

`planned` is the plan of every step, for every rank, computed by each of them: order.py says which rows make a batch,
batching.py how the ranks share it. Rows are cut out of the memory map when the model wants them, without a thread that
would fetch them ahead: a batch of 64 rows takes 0.03 ms, a step of the smallest model some 10 ms.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import checkpoint, distributed, durable, models, plugins, recipe
from torchlake.config import Job, TrainConfig
from torchlake.data import batching, loading, order
from torchlake.distributed import Group
from torchlake.models import TaskSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What every rank is told; plain values, so that any engine can carry it."""

    job: Job
    spec: TaskSpec
    run: str
    "The run folder."
    tokens: str
    "Token Parquet of the training table."
    validation_tokens: str | None
    "Token Parquet of the validation table; None where the validation is a share of `tokens`, or there is none."
    strategy: str
    metric: str
    "The validation metric that chooses the best model."
    checkpoint: str | None
    "The checkpoint to continue from; None: from the base model."
    lease: tuple[str, str]
    "Where the run folder's lease lies, and the token that must stand in it while this run may write."


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a token table."""

    table: loading.TokenTable
    numbers: np.ndarray
    "(N,) int64, rows of the table."

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64, tokens of each row."""
        offsets = self.table.tokens.offsets
        lengths: np.ndarray = offsets[self.numbers + 1] - offsets[self.numbers]
        return lengths


@dataclass(kw_only=True)
class Position:
    """How far a run is: what a checkpoint stores beside its tensors."""

    step: int = 0
    "Optimizer steps done."
    validated: int = 0
    "The step of the last validation."
    best: dict[str, Any] | None = None
    "The best validation so far: its step and metrics. Of equals the earlier."
    stale: int = 0
    "Validations since then."
    non_finite: int = 0
    "Steps in a row that were not applied."
    loss: float | None = None
    "Of the last step that was applied."
    seconds: float = 0.0
    "Spent in this loop, over all its interruptions."


@dataclass(kw_only=True)
class Learner:
    """The model and what moves it, on this rank."""

    group: Group
    task: ModuleType
    strategy: ModuleType
    spec: TaskSpec
    module: nn.Module
    "The model as the strategy wrapped it."
    config: Any
    "The model's own configuration, for its folder."
    tokenizer: Any
    optimizer: torch.optim.AdamW
    names: list[str]
    "The optimizer's parameters."
    bf16: bool

    def forward(self, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, C) of the rows at `positions` (B,) of `rows`, and the sum of their losses, fp32.

        A rank without rows runs one row of padding, so that it takes part in every collective; it adds nothing.
        """
        device = self.group.device
        numbers = rows.numbers[positions]
        if len(numbers):
            ids, mask = batching.pad(rows.table.tokens, numbers, self.tokenizer.pad_token_id)
        else:
            ids, mask = np.full((1, 1), self.tokenizer.pad_token_id), np.ones((1, 1), dtype=np.int64)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.module(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=None if mask.all() else torch.from_numpy(mask).to(device),
            ).logits
        if not len(numbers):
            return logits[:0], logits.float().sum() * 0
        targets = torch.from_numpy(rows.table.targets[numbers]).to(device)
        return logits, self.task.loss_sum(logits, targets, self.spec)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one optimizer step, and this rank's share of them."""

    epoch: int
    rows: Rows
    share: list[np.ndarray]
    "Micro-batches: positions in `rows`. Every rank has as many; some of the last may be empty."
    padded_tokens: int
    "What all ranks together compute, padding counted."


def load_rows(settings: RankSettings, group: Group) -> tuple[Rows, Rows | None]:
    """The rows to train on and those to validate on, mapped into memory; one rank of each machine builds the caches."""
    folders = [Path(folder) for folder in (settings.tokens, settings.validation_tokens) if folder is not None]
    caches = [Path(settings.run) / "cache" / folder.name for folder in folders]
    if group.local_rank == 0:
        for folder, cache in zip(folders, caches, strict=True):
            loading.build_cache(folder, cache)
    distributed.barrier(group, "waiting for the token cache")
    tables = [loading.open_tokens(cache) for cache in caches]
    every = [np.arange(len(table)) for table in tables]
    if len(tables) == 2:
        return Rows(tables[0], every[0]), Rows(tables[1], every[1])
    share = settings.job.data.validation
    if share is None:
        return Rows(tables[0], every[0]), None
    assert not isinstance(share, str | tuple), "a validation table has a folder of its own"
    kept, held_out = order.split(len(tables[0]), share.fraction, settings.job.train.seed)
    return Rows(tables[0], kept), Rows(tables[0], held_out)


def make_learner(settings: RankSettings, group: Group) -> tuple[Learner, Position]:
    """The model, from the base or the checkpoint, wrapped by the strategy, with its optimizer."""
    job, spec = settings.job, settings.spec
    task, strategy = plugins.load("tasks", spec.task), plugins.load("strategies", settings.strategy)
    torch.manual_seed(job.train.seed)
    model = models.base_model(job.model.base, spec, task.AUTO_CLASS)
    tokenizer = models.load_tokenizer(models.model_folder(job.model.base))
    _freeze_unreached(model, tokenizer.pad_token_id)
    position = Position()
    saved = None if settings.checkpoint is None else Path(settings.checkpoint)
    if saved is not None:
        state = model.state_dict()
        tensors = checkpoint.load_tensors(saved / checkpoint.MODEL, checkpoint.untied(state))
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
        stored = durable.read_json(saved / checkpoint.STATE)
        position = Position(**stored["position"])
    nn.Module.to(model, group.device)
    module = strategy.wrap(model, device=group.device)
    # The strategy shares the model's parameters; their names, without its prefix, fit any other strategy.
    optimizer, names = recipe.make_optimizer(model, job.train)
    if saved is not None:
        checkpoint.restore_optimizer(optimizer, names, checkpoint.load_tensors(saved / checkpoint.OPTIMIZER))
        log.info("continuing after step %d from %s", position.step, saved)
    return Learner(
        group=group,
        task=task,
        strategy=strategy,
        spec=spec,
        module=module,
        config=model.config,
        tokenizer=tokenizer,
        optimizer=optimizer,
        names=names,
        bf16=recipe.uses_bf16(job.train.precision, group.device),
    ), position


def planned(training: Rows, train: TrainConfig, group: Group, steps: range) -> Iterator[Batch]:
    """The batches of `steps`, in order, with this rank's share of each."""
    per_epoch = steps_per_epoch(training, train)
    epoch, batches = -1, list[np.ndarray]()
    for step in steps:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            batches = order.epoch_batches(training.lengths, batch_size=train.batch_size, seed=train.seed, epoch=epoch)
        rows = Rows(training.table, training.numbers[batches[step % per_epoch]])
        lengths = rows.lengths
        shares = batching.micro_batches(
            lengths, world_size=group.world_size, micro_batch_tokens=train.micro_batch_tokens
        )
        padded = sum(len(each) * int(lengths[each].max(initial=0)) for share in shares for each in share)
        yield Batch(epoch, rows, shares[group.rank], padded)


def steps_per_epoch(training: Rows, train: TrainConfig) -> int:
    """Optimizer steps of one pass over the rows, the short one counted."""
    return math.ceil(len(training.numbers) / train.batch_size)


def _freeze_unreached(model: nn.Module, pad_id: int) -> None:
    """Freeze the parameters that the loss does not depend on, found by one backward pass over one row.

    A pooler that a head ignores has no gradient: the optimizer skips it, and ranks would wait for it in vain. The model
    is in training mode afterwards.
    """
    model.eval()
    ids = torch.full((1, 1), pad_id)
    model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    model.train()
