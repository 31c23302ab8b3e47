"""What the training loop works with: rows, the model and what moves it, and how far it is.

    prepared tokens -> Rows -> planned batches          base model or checkpoint -> wrap -> optimizer = Learner

A task that packs has blocks (packing.py) where another has rows: the rows are laid end to end anew for every epoch, in
an order of its own, and a "row" of what follows is a block.

`planned` says which rows make the batch of every step (order.py), `Learner.cut` how the ranks share them (batching.py);
each rank computes both. Rows are cut out of the memory map when the model wants them, without a thread that
would fetch them ahead: a batch of 64 rows takes 0.03 ms, a step of the smallest model some 10 ms.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import checkpoint, distributed, durable, lora, memory, models, plugins, probes, recipe
from torchlake.checkpoint_folder import STATE
from torchlake.config import Job, TrainConfig
from torchlake.data import batching, loading, order, packing
from torchlake.distributed import Group
from torchlake.errors import OutOfMemory, UsageError
from torchlake.models import TaskSpec
from torchlake.objective import PLAIN, Objective
from torchlake.sharding import Pieces

log = logging.getLogger(__name__)

MICRO_BATCH = "micro_batch.json"


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
    attempt: str
    "The name of this launch, which no other one has."
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
        return self.table.tokens.lengths_of(self.numbers)


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
    loss_scale: float = 65536.0
    "What the loss is multiplied by in fp16, so that small gradients are not rounded to zero."
    calm: int = 0
    "Steps in a row whose gradients were finite at this scale."
    seconds: float = 0.0
    "Spent in this loop, over all its interruptions."


@dataclass(kw_only=True)
class Learner:
    """The model and what moves it, on this rank."""

    group: Group
    task: ModuleType
    strategy: ModuleType
    spec: TaskSpec
    model: nn.Module
    "Its tensors may be shared out, their names are its own."
    module: nn.Module
    "The model as the strategy wrapped it."
    config: Any
    "The model's own configuration, for its folder."
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    names: list[str]
    "The optimizer's parameters."
    stored: dict[str, torch.Tensor]
    "The model's tensors that a checkpoint holds, all or those that LoRA trains: their shapes, on the device meta."
    dtype: torch.dtype | None
    "What the forward pass computes in beside fp32."
    asked: int
    "Tokens, padding counted, that this rank may hold at once, as the job says."
    micro_batch_tokens: int
    "The same, as far as memory has shown to reach."
    limit: Path
    "Where it is noted, so that a run that goes on does not have to find it again."
    filler: np.ndarray
    "(L,) int64, a row for ranks that have none."
    objective: Objective = PLAIN
    "How the loss weighs classes."
    equal_lengths: bool
    "Whether rows of one length alone go through the model together, because padding would change their logits."

    def forward(self, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, C), or (B, L, V), of the rows at `positions` (B,) of `rows`, and the sum of their losses, fp32.

        A rank without rows runs the filler, so that it takes part in every collective; it adds nothing.
        """
        device = self.group.device
        numbers = rows.numbers[positions]
        if len(numbers):
            ids, mask = rows.table.tokens.padded(numbers, self.tokenizer.pad_token_id)
        else:
            ids, mask = self.filler[None], np.ones((1, len(self.filler)), dtype=np.int64)
        with torch.autocast(device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            logits = self.module(
                input_ids=torch.from_numpy(packing.as_read(ids)).to(device),
                attention_mask=None if mask.all() else torch.from_numpy(mask).to(device),
                **self.task.FORWARD,
            ).logits
        if not len(numbers):
            return logits[:0], logits.float().sum() * 0
        labels = rows.table.targets
        if labels is not None:
            targets = torch.from_numpy(labels[numbers]).to(device)
            return logits, self.task.loss_sum(logits, targets, self.spec, self.objective)
        following = torch.from_numpy(self.task.targets(ids, mask)).to(device)
        return logits, self.task.loss_sum(logits, following, self.spec)

    def num_targets(self, rows: Rows) -> float:
        """What the summed loss of the rows, over all ranks, is divided by: their targets, or the sum of their weights."""
        labels = rows.table.targets
        if labels is not None:
            divisor: float = self.task.divisor(labels[rows.numbers], self.spec, self.objective)
            return divisor
        if self.spec.problem == "next_answer_token":
            tokens = rows.table.tokens
            assert isinstance(tokens, packing.Blocks), "what is learned is packed"
            # A batch may hold nothing but questions: its loss is 0 then, of one target.
            return max(1, int(tokens.learned_of(rows.numbers).sum()))
        number: int = self.task.num_targets(rows.lengths, self.spec)
        return number

    def model_share(self) -> Pieces:
        """What this rank stores of the model; every rank calls it."""
        pieces: Pieces = self.strategy.model_share(self.model, self.stored, self.group)
        return pieces

    def optimizer_share(self) -> Pieces:
        """What this rank stores of its optimizer; every rank calls it."""
        pieces: Pieces = self.strategy.optimizer_share(self.model, self.optimizer, self.names, self.group)
        return pieces

    def take_less(self, error: Exception, rows: Rows, doing: str, *, repeatable: bool = True) -> None:
        """Halve the micro-batches when `error` says that memory ran out over `rows`; any other error is raised again.

        Raises OutOfMemory when ranks have to begin again at the last checkpoint: several of them, and one that cannot
        repeat what it was `doing`. Raises UsageError when micro-batches of one row are too much.
        """
        if not memory.ran_out(error):
            raise error
        lengths, share = rows.lengths, self.cut(rows)[0]
        if max(map(len, share)) <= 1:
            raise UsageError(
                f"the memory of {self.group.device} ran out while {doing} with a single row at a time, of "
                f"{int(lengths.max()):,} tokens at most. Lower model.max_length, set "
                "train.activation_checkpointing=true, train fewer parameters (model.lora), or share the model out: "
                "train.strategy=fsdp."
            ) from error
        largest = max(len(each) * int(lengths[each].max(initial=0)) for each in share)
        self.micro_batch_tokens = max(1, largest // 2)
        log.warning("memory ran out over %d tokens while %s; micro-batches are cut to %d", largest, doing, largest // 2)
        durable.write_json(self.limit, {"asked": self.asked, "tokens": self.micro_batch_tokens}, site="run.micro_batch")
        if self.group.world_size > 1 or not repeatable:
            raise OutOfMemory(
                f"memory ran out over {largest:,} tokens, padding counted, while {doing}; half as many are tried next"
            ) from error

    @contextmanager
    def beginning_again(self, rows: Rows, doing: str) -> Iterator[None]:
        """Raise OutOfMemory, for a start from the last checkpoint, when memory runs out inside; as `take_less` does."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.take_less(error, rows, doing, repeatable=False)

    def give_back_memory(self) -> None:
        """Give the device's memory that no tensor holds back, so that it can be cut in another way."""
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()

    def cut(self, rows: Rows) -> tuple[list[np.ndarray], int]:
        """This rank's micro-batches of the rows, as positions among them, and the tokens that all ranks compute.

        Every rank has as many; some of the last may be empty. Padding is counted.
        """
        lengths = rows.lengths
        shares = batching.micro_batches(
            lengths,
            world_size=self.group.world_size,
            micro_batch_tokens=self.micro_batch_tokens,
            equal_lengths=self.equal_lengths,
        )
        padded = sum(len(each) * int(lengths[each].max(initial=0)) for share in shares for each in share)
        return shares[self.group.rank], padded


def load_rows(settings: RankSettings, group: Group) -> tuple[Rows, Rows | None]:
    """The rows to train on and those to validate on, mapped into memory; one rank of each machine builds the caches.

    Where rows are packed, those to validate on are blocks already, in the order of the table.
    """
    folders = [Path(folder) for folder in (settings.tokens, settings.validation_tokens) if folder is not None]
    caches = [Path(settings.run) / "cache" / folder.name for folder in folders]
    if group.local_rank == 0:
        for folder, cache in zip(folders, caches, strict=True):
            loading.build_cache(folder, cache)
    distributed.barrier(group, "waiting for the token cache")
    tables = [loading.open_tokens(cache) for cache in caches]
    every = [np.arange(len(table)) for table in tables]
    block = block_length(settings.spec)
    if len(tables) == 2:
        return Rows(tables[0], every[0]), _in_blocks(Rows(tables[1], every[1]), block)
    share = settings.job.data.validation
    if share is None:
        return Rows(tables[0], every[0]), None
    assert not isinstance(share, str | tuple), "a validation table has a folder of its own"
    classes = tables[0].targets if settings.spec.problem == "single_label" else None
    kept, held_out = order.split(len(tables[0]), share.fraction, settings.job.train.seed, classes)
    return Rows(tables[0], kept), _in_blocks(Rows(tables[0], held_out), block)


def block_length(spec: TaskSpec) -> int | None:
    """Tokens of the blocks that rows are packed into; None for a task that does not pack."""
    return spec.max_length if plugins.load("tasks", spec.task).PACKED else None


def _in_blocks(rows: Rows, length: int | None) -> Rows:
    """The rows laid end to end in their order, as blocks of `length` tokens; None: the rows as they are."""
    if length is None:
        return rows
    assert isinstance(rows.table.tokens, batching.Ragged), "these are blocks already"
    blocks = packing.pack(rows.table.tokens, rows.numbers, length)
    return Rows(loading.TokenTable(blocks, None), np.arange(len(blocks)))


def make_learner(settings: RankSettings, group: Group) -> tuple[Learner, Position]:
    """The model, from the base or the checkpoint, wrapped by the strategy, with its optimizer."""
    job, spec, train = settings.job, settings.spec, settings.job.train
    task, strategy = plugins.load("tasks", spec.task), plugins.load("strategies", settings.strategy)
    torch.manual_seed(train.seed)
    base = models.base_model(job.model.base, spec, task.AUTO_CLASS)
    tokenizer = models.load_tokenizer(models.model_folder(job.model.base))
    model = base if job.model.lora is None else lora.adapted(base, job.model.lora)
    probe = probes.rows(task, tokenizer, spec)
    probes.freeze_unreached(model, probe[1], task.FORWARD)
    names = recipe.names(model)
    state = model.state_dict()
    kept = state if job.model.lora is None else {name: state[name] for name in names}
    wanted = checkpoint.untied(kept)
    # Noted now: a strategy may leave nothing of a tensor in its place.
    stored = {name: tensor.to("meta") for name, tensor in wanted.items()}
    position = Position()
    saved = None if settings.checkpoint is None else Path(settings.checkpoint)
    if saved is not None:
        for name, tensor in checkpoint.load_model(saved, wanted).items():
            state[name].copy_(tensor)
        position = Position(**durable.read_json(saved / STATE)["position"])
    equal_lengths = not task.PACKED and probes.padding_matters(model, probe, tokenizer.pad_token_id)
    if train.activation_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if train.compile:
        # In place: a wrapper would give the tensors other names.
        model.compile(dynamic=True)
    try:
        module, optimizer = strategy.wrap(
            model, lambda shared: recipe.make_optimizer(shared, train), group=group, train=train
        )
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        raise UsageError(
            f"the model alone does not fit into the memory of {group.device}. Share it out (train.strategy=fsdp, or "
            "deepspeed with stage 3), train it in part (model.lora), or take a smaller one."
        ) from error
    if saved is not None:
        with checkpoint.opened(saved, checkpoint.OPTIMIZER) as tensors:
            strategy.restore(optimizer, names, tensors)
        log.info("continuing after step %d from %s", position.step, saved)
    return Learner(
        group=group,
        task=task,
        strategy=strategy,
        spec=spec,
        model=model,
        module=module,
        config=base.config,
        tokenizer=tokenizer,
        optimizer=optimizer,
        names=names,
        stored=stored,
        dtype=recipe.autocast_dtype(train.precision, group.device),
        asked=train.micro_batch_tokens,
        micro_batch_tokens=_tokens_that_fit(Path(settings.run) / MICRO_BATCH, train.micro_batch_tokens),
        limit=Path(settings.run) / MICRO_BATCH,
        filler=probe[0],
        equal_lengths=equal_lengths,
    ), position


def planned(training: Rows, train: TrainConfig, steps: range, block: int | None) -> Iterator[tuple[int, Rows]]:
    """The epoch and the rows of each of `steps`, in order; `block` is the `block_length`."""
    per_epoch = steps_per_epoch(training, train, block)
    epoch, batches, rows = -1, list[np.ndarray](), training
    for step in steps:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            if block is not None:
                laid = order.laid(training.numbers, seed=train.seed, epoch=epoch)
                rows = _in_blocks(Rows(training.table, laid), block)
            batches = order.epoch_batches(rows.lengths, batch_size=train.batch_size, seed=train.seed, epoch=epoch)
        yield epoch, Rows(rows.table, rows.numbers[batches[step % per_epoch]])


def steps_per_epoch(training: Rows, train: TrainConfig, block: int | None) -> int:
    """Optimizer steps of one pass over the rows, the short one counted; `block` is the `block_length`."""
    return math.ceil(len(_in_blocks(training, block).numbers) / train.batch_size)


def _tokens_that_fit(limit: Path, asked: int) -> int:
    """`asked`, or what an earlier attempt that asked for as much found to fit."""
    noted = durable.read_json(limit) if limit.exists() else {}
    return min(asked, int(noted["tokens"])) if noted.get("asked") == asked else asked
