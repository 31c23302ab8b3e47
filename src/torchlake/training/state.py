"""What the training loop works with: the model and what moves it, and how far it is.

    base model or checkpoint -> wrap -> optimizer = Learner

`rows.py` says which rows make the batch of every step, `Learner.cut` how the ranks share them (batching.py);
each rank computes both.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import atomic_io, optim, plugins
from torchlake.checkpoints import format
from torchlake.checkpoints.shards import Pieces
from torchlake.checkpoints.store import STATE
from torchlake.data import batching, bins, packing
from torchlake.distributed import Group
from torchlake.errors import OutOfMemory, UsageError, ran_out_of_memory
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models import probes
from torchlake.models.load import TaskSpec, base_model, load_tokenizer, model_folder
from torchlake.training import lora
from torchlake.training.rows import RankSettings, Rows

log = logging.getLogger(__name__)

MICRO_BATCH = "micro_batch.json"


@dataclass(kw_only=True)
class TrainProgress:
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
class TrainState:
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
    requested_tokens: int
    "Tokens, padding counted, that this rank may hold at once, as the job says."
    micro_batch_tokens: int
    "The same, as far as memory has shown to reach."
    limit_file: Path
    "Where it is noted, so that a run that goes on does not have to find it again."
    filler: np.ndarray
    "(L,) int64, a row for ranks that have none."
    objective: Objective = UNWEIGHTED
    "How the loss weighs classes."
    isolates: bool
    "Whether the model keeps rows apart whose positions begin again; a block's rows are lines of their own otherwise."
    equal_lengths: bool
    "Whether rows of one length alone go through the model together, because padding would change their logits."

    def forward(self, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, C), or (B, L, V), of the rows at `positions` (B,) of `rows`, and the sum of their losses, fp32.

        A rank without rows runs the filler, so that it takes part in every collective; it adds nothing.
        """
        device = self.group.device
        numbers, tokens = rows.numbers[positions], rows.table.tokens
        places: dict[str, torch.Tensor] = {}
        if not len(numbers):
            ids, mask = self.filler[None], np.ones((1, len(self.filler)), dtype=np.int64)
        elif isinstance(tokens, bins.Bins) and not self.isolates:
            ids, mask = tokens.unpacked(numbers, self.tokenizer.pad_token_id)
        else:
            ids, mask = tokens.padded(numbers, self.tokenizer.pad_token_id)
        seen = mask
        if isinstance(tokens, bins.Bins) and self.isolates and len(numbers):
            # Positions that begin again keep rows apart, padding too; a mask beside them would not.
            places["position_ids"] = torch.from_numpy(tokens.positions_of(numbers)).to(device)
            seen = np.ones_like(mask)
        with torch.autocast(device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            logits = self.module(
                input_ids=torch.from_numpy(packing.input_ids_of(ids)).to(device),
                attention_mask=None if seen.all() else torch.from_numpy(seen).to(device),
                **places,
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
        """What the summed loss of the rows, over all ranks, is divided by: their targets, or the weights of these."""
        labels = rows.table.targets
        if labels is not None:
            divisor: float = self.task.divisor(labels[rows.numbers], self.spec, self.objective)
            return divisor
        if self.spec.problem == "next_answer_token":
            tokens = rows.table.tokens
            assert isinstance(tokens, bins.Bins), "conversations are packed whole"
            # A batch may hold nothing but questions: its loss is 0 then, of one target.
            return max(1, int(tokens.target_counts(rows.numbers).sum()))
        number: int = self.task.num_targets(rows.lengths, self.spec)
        return number

    def model_shard(self) -> Pieces:
        """What this rank stores of the model; every rank calls it."""
        pieces: Pieces = self.strategy.model_shard(self.model, self.stored, self.group)
        return pieces

    def optimizer_shard(self) -> Pieces:
        """What this rank stores of its optimizer; every rank calls it."""
        pieces: Pieces = self.strategy.optimizer_shard(self.model, self.optimizer, self.names, self.group)
        return pieces

    def shrink_micro_batches(self, error: Exception, rows: Rows, doing: str, *, repeatable: bool = True) -> None:
        """Halve the micro-batches when `error` says that memory ran out over `rows`; any other error is raised again.

        Raises OutOfMemory when ranks have to begin again at the last checkpoint: several of them, and one that cannot
        repeat what it was `doing`. Raises UsageError when micro-batches of one row are too much.
        """
        if not ran_out_of_memory(error):
            raise error
        lengths, share = rows.lengths, self.micro_batches(rows)[0]
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
        atomic_io.write_json(
            self.limit_file, {"asked": self.requested_tokens, "tokens": self.micro_batch_tokens}, site="run.micro_batch"
        )
        if self.group.world_size > 1 or not repeatable:
            raise OutOfMemory(
                f"memory ran out over {largest:,} tokens, padding counted, while {doing}; half as many are tried next"
            ) from error

    @contextmanager
    def restart_on_out_of_memory(self, rows: Rows, doing: str) -> Iterator[None]:
        """Raise OutOfMemory, for a start from the last checkpoint, when memory runs out inside; as `take_less` does."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.shrink_micro_batches(error, rows, doing, repeatable=False)

    def release_memory(self) -> None:
        """Give the device's memory that no tensor holds back, so that it can be cut in another way."""
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()

    def micro_batches(self, rows: Rows) -> tuple[list[np.ndarray], int]:
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


def make_train_state(settings: RankSettings, group: Group) -> tuple[TrainState, TrainProgress]:
    """The model, from the base or the checkpoint, wrapped by the strategy, with its optimizer."""
    job, spec, train = settings.job, settings.spec, settings.job.train
    task, strategy = plugins.load("tasks", spec.task), plugins.load("strategies", settings.strategy)
    torch.manual_seed(train.seed)
    base = base_model(job.model.base, spec, task.AUTO_CLASS)
    tokenizer = load_tokenizer(model_folder(job.model.base))
    model = base if job.model.lora is None else lora.add_adapters(base, job.model.lora)
    probe = probes.rows(task, tokenizer, spec)
    probes.freeze_unreached(model, probe[1], task.FORWARD)
    names = optim.trainable_names(model)
    weights = model.state_dict()
    kept = weights if job.model.lora is None else {name: weights[name] for name in names}
    wanted = format.untied(kept)
    # Noted now: a strategy may leave nothing of a tensor in its place.
    stored = {name: tensor.to("meta") for name, tensor in wanted.items()}
    progress = TrainProgress()
    saved = None if settings.checkpoint is None else Path(settings.checkpoint)
    if saved is not None:
        for name, tensor in format.load_model(saved, wanted).items():
            weights[name].copy_(tensor)
        progress = TrainProgress(**atomic_io.read_json(saved / STATE)["position"])
    equal_lengths = not task.PACKED and probes.padding_matters(model, probe, tokenizer.pad_token_id)
    isolates = spec.problem == "next_answer_token" and probes.isolates(model, probe, task.FORWARD)
    if train.activation_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if train.compile:
        # In place: a wrapper would give the tensors other names.
        model.compile(dynamic=True)
    try:
        module, optimizer = strategy.wrap(
            model, lambda shared: optim.make_optimizer(shared, train), group=group, train=train
        )
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise UsageError(
            f"the model alone does not fit into the memory of {group.device}. Share it out (train.strategy=fsdp, or "
            "deepspeed with stage 3), train it in part (model.lora), or take a smaller one."
        ) from error
    if saved is not None:
        with format.open_tensors(saved, format.OPTIMIZER) as tensors:
            strategy.restore(optimizer, names, tensors)
        log.info("continuing after step %d from %s", progress.step, saved)
    return TrainState(
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
        dtype=optim.autocast_dtype(train.precision, group.device),
        requested_tokens=train.micro_batch_tokens,
        micro_batch_tokens=_tokens_that_fit(Path(settings.run) / MICRO_BATCH, train.micro_batch_tokens),
        limit_file=Path(settings.run) / MICRO_BATCH,
        filler=probe[0],
        isolates=isolates,
        equal_lengths=equal_lengths,
    ), progress


def _tokens_that_fit(limit_file: Path, requested_tokens: int) -> int:
    """`asked`, or what an earlier attempt that asked for as much found to fit."""
    noted = atomic_io.read_json(limit_file) if limit_file.exists() else {}
    return min(requested_tokens, int(noted["tokens"])) if noted.get("asked") == requested_tokens else requested_tokens
