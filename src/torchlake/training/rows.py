"""The rows that ranks train on: read from prepared storage, packed if the task packs, in the batch of each step.

    prepared tokens -> Rows -> planned batches

A task that packs trains on blocks: texts concatenated (packing.py), or rows packed whole (bins.py), such as
conversations, in a new order each epoch. A "row" below is then a block.

Every rank computes the rows of every batch (order.py). They are read from the memory map when needed, without a
prefetch thread: a batch of 64 rows takes 0.03 ms, a step of the smallest model about 10 ms.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from torchlake import distributed, plugins
from torchlake.config.job import Job
from torchlake.config.sections.train import TrainConfig
from torchlake.data import batching, bins, loading, order, packing
from torchlake.data.copies import divide
from torchlake.distributed import Group
from torchlake.models.load import TaskSpec
from torchlake.runs.metrics_log import OnStep


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of every rank; plain values, so that any engine can send them."""

    job: Job
    spec: TaskSpec
    run: str
    "The run folder."
    tokens: str
    "Token Parquet of the training table."
    validation_tokens: str | None
    "Token Parquet of the validation table; None: the validation is a share of `tokens`, or there is none."
    strategy: str
    metric: str
    "The validation metric that chooses the best model."
    checkpoint: str | None
    "The checkpoint to continue from; None: start from the base model."
    attempt: str
    "Unique name of this launch."
    lease: tuple[str, str]
    "The folder of the run's lease, and the token that it contains while this run may write."
    on_step: OnStep | None = None
    "Called by rank 0 with every line of metrics.jsonl."


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a token table."""

    table: loading.TokenTable
    numbers: np.ndarray
    "(N,) int64, rows of the table."
    seed: int | None = None
    "The seed of augmentation, different in each epoch; None: no augmentation."

    @property
    def lengths(self) -> np.ndarray:
        """What each row costs in a batch, its tokens: (N,) int64."""
        return self.table.lengths_of(self.numbers)


def load_rows(settings: RankSettings, group: Group) -> tuple[Rows, Rows | None]:
    """Return the training and the validation rows, memory-mapped; one rank of each machine builds the caches.

    None is packed yet.
    """
    folders = [Path(folder) for folder in (settings.tokens, settings.validation_tokens) if folder is not None]
    caches = [Path(settings.run) / "cache" / folder.name for folder in folders]
    if group.local_rank == 0:
        for folder, cache in zip(folders, caches, strict=True):
            loading.build_cache(folder, cache)
    distributed.barrier(group, "waiting for the token cache")
    tables = [loading.open_tokens(cache) for cache in caches]
    spec = settings.spec
    classes, hashes = tables[0].targets if spec.problem == "single_label" else None, tables[0].hashes
    assert classes is None or isinstance(classes, np.ndarray), "one class for each row"
    assert hashes is not None, "prepared with the rows"
    kept, held_out = divide(settings.job, classes, hashes)
    if len(tables) == 2:
        return Rows(tables[0], kept), Rows(tables[1], np.arange(len(tables[1])))
    return Rows(tables[0], kept), None if held_out is None else Rows(tables[0], held_out)


def pack_rows(rows: Rows, spec: TaskSpec) -> Rows:
    """Return the rows packed into blocks, in their order; unchanged for a task that does not pack."""
    if not plugins.load("tasks", spec.task).packs:
        return rows
    tokens = rows.table.tokens
    assert isinstance(tokens, batching.Ragged), "these are blocks already, or not texts"
    if spec.whole:
        tokens, numbers = bins.sequences_of(tokens, rows.table.others, rows.numbers)
        blocks: bins.Bins | packing.Blocks = bins.pack_whole(tokens, numbers, spec.max_length)
    else:
        blocks = packing.pack(tokens, rows.numbers, spec.max_length)
    return Rows(loading.TokenTable(blocks, None), np.arange(len(blocks)))


def planned_batches(training: Rows, train: TrainConfig, steps: range, spec: TaskSpec) -> Iterator[tuple[int, Rows]]:
    """Yield the epoch and the rows of each of `steps`, in order."""
    per_epoch, task = steps_per_epoch(training, train, spec), plugins.load("tasks", spec.task)
    draw = partial(order.epoch_batches, batch_size=train.batch_size, seed=train.seed, by_length=not task.couples(spec))
    epoch, batches, rows = -1, list[np.ndarray](), training
    for step in steps:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            if task.packs:
                shuffled = order.shuffled(training.numbers, seed=train.seed, epoch=epoch)
                rows = pack_rows(Rows(training.table, shuffled), spec)
            batches = draw(rows.lengths, epoch=epoch)
        yield epoch, Rows(rows.table, rows.numbers[batches[step % per_epoch]], seed=epoch_seed(train.seed, epoch))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for the augmentation of one epoch's rows."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def steps_per_epoch(training: Rows, train: TrainConfig, spec: TaskSpec) -> int:
    """Return the optimizer steps of one pass over the rows, the short last one included; equal in all epochs."""
    return math.ceil(len(pack_rows(training, spec).numbers) / train.batch_size)


def total_steps(train: TrainConfig, per_epoch: int) -> int:
    """Return the optimizer steps of the whole run."""
    return min(train.epochs * per_epoch, train.max_steps or train.epochs * per_epoch)
