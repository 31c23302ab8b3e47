"""The state of a training: the model, its optimizer and the progress. `setup.py` makes it.

`rows.py` yields the rows of every batch, `TrainState.micro_batches` divides them among the ranks; each rank computes
both.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import atomic_io
from torchlake.checkpoints.shards import Pieces
from torchlake.data import batching, bins, packing, pairs
from torchlake.data.features import take
from torchlake.distributed import Group, to_device
from torchlake.errors import Diverged, OutOfMemory, UsageError, ran_out_of_memory
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models.load import TaskSpec
from torchlake.optim.noise import EmbeddingNoise
from torchlake.optim.precision import Precision
from torchlake.runs.speed import Speed
from torchlake.training.model import kernels
from torchlake.training.model.batches import MASK, BatchMaker
from torchlake.training.rows import Rows

log = logging.getLogger(__name__)

MAX_NON_FINITE_STEPS = 3
LOSS_SCALE_GROWTH_INTERVAL = 2_000
"Steps with finite gradients after which the fp16 loss scale doubles (Micikevicius et al. 2018)."


@dataclass(kw_only=True)
class TrainProgress:
    """The progress of a run: what a checkpoint stores beside tensors. Its field names are stored."""

    step: int = 0
    "Optimizer steps done."
    validated: int = 0
    "The step of the last validation."
    best: dict[str, Any] | None = None
    "The best validation so far: its step and metrics. Of equal ones, the earlier."
    stale: int = 0
    "Validations since the best."
    non_finite: int = 0
    "Steps in a row that were not applied."
    loss: float | None = None
    "The loss of the last applied step."
    loss_scale: float = 65536.0
    "Factor of the loss in fp16, so that small gradients are not rounded to zero."
    calm: int = 0
    "Steps in a row with finite gradients at this loss scale."
    seconds: float = 0.0
    "Seconds in the training loop, over all restarts."

    def record(self, step: int, loss: float, norm: float, *, scaled: bool) -> None:
        """Take in the outcome of a step; `scaled`: its loss was scaled up for fp16.

        Overflowing fp16 gradients are expected: the scale is halved, and the step does not count as non-finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.non_finite, self.loss = 0, loss
            self.calm += 1
            if self.calm % LOSS_SCALE_GROWTH_INTERVAL == 0:
                self.loss_scale *= 2
        elif scaled and math.isfinite(loss):
            self.loss_scale, self.calm = self.loss_scale / 2, 0
            log.info("step %d is not applied: gradients overflow at a loss scale above %g", step, self.loss_scale)
        else:
            self.non_finite += 1
            log.warning("step %d is not applied: loss %s, gradient norm %s", step, loss, norm)

    def check(self, step: int, checkpoints: Callable[[], Any]) -> None:
        """Raise Diverged if none of the last steps had a finite gradient; `checkpoints` returns where others are."""
        if self.non_finite == MAX_NON_FINITE_STEPS:
            raise Diverged(
                f"step {step:,}: the loss or its gradient was not finite in {MAX_NON_FINITE_STEPS} steps in a row, "
                f"each on other rows. The weights from before are in {checkpoints()}. Lower train.learning_rate, "
                "lengthen train.warmup, or use train.precision=fp32, in a new run folder."
            )


@dataclass(kw_only=True)
class TrainState:
    """The model and everything that updates it, on this rank."""

    group: Group
    task: Any
    "A `torchlake.tasks.Task`."
    strategy: ModuleType
    spec: TaskSpec
    model: nn.Module
    "The model, whose tensors may be sharded; their names are the unwrapped ones."
    module: nn.Module
    "The model as the strategy wrapped it."
    config: Any
    "The model's configuration, for the model folder."
    processor: Any
    "The task's processor, such as a tokenizer."
    optimizer: torch.optim.Optimizer
    names: list[str]
    "Names of the optimizer's parameters."
    stored: dict[str, torch.Tensor]
    "The tensors that a checkpoint stores (all, or of a partly frozen model the trained ones), on the meta device."
    precision: Precision
    requested_tokens: int
    "train.micro_batch_tokens: tokens, padding included, that this rank may process at once."
    micro_batch_tokens: int
    "The same limit, lowered after memory ran out."
    limit_file: Path
    "The file that stores the lowered limit, so that a restarted run uses it at once."
    batches: BatchMaker
    speed: Speed
    batch_size: int
    "Rows of one optimizer step over all ranks."
    data_seconds: float = 0.0
    "Time spent on reading and padding rows, so far."
    objective: Objective = UNWEIGHTED
    "Class weights and label smoothing of the loss."
    chunked: bool
    "Whether the model computes the loss in chunks, and returns it in place of the logits."
    noise: EmbeddingNoise | None = None
    "Noise on the word embeddings in training."
    equal_lengths: bool
    "Whether a micro-batch may hold only rows of equal length, because padding would change the logits."

    def forward(self, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, dict[str, np.ndarray]]:
        """Return outputs (B, ...) of the rows at `positions` (B,) of `rows`, the sum of their losses, fp32, and their
        batch.

        A rank without rows processes the filler, to take part in every collective; its loss is 0. A model that computes
        the loss in chunks returns the loss also in place of the outputs.
        """
        answer, targets, batch = self._answer(rows, positions)
        if self.task.pairs and len(positions):
            outputs = self.task.sums(answer, batch, len(positions))
            return outputs, self.loss_of(outputs, targets), batch
        if self.chunked and isinstance(answer, torch.Tensor):
            return answer, answer, batch
        outputs = self.task.checked_outputs(answer, len(next(iter(batch.values()))))
        if not len(positions):
            # Times 0 instead of a constant: the loss must depend on the weights, or the backward pass would skip the
            # collectives that the other ranks wait in.
            return outputs[:0], outputs.float().sum() * 0, batch
        if self.task.couples(self.spec):  # its loss is of the whole batch
            return outputs, torch.zeros((), device=outputs.device), batch
        return outputs, self.loss_of(outputs, targets), batch

    def loss_of(self, outputs: torch.Tensor, targets: np.ndarray | None) -> torch.Tensor:
        """Return the sum of the losses of outputs (B, ...), fp32."""
        wanted = None if targets is None else to_device(targets, self.group.device)
        loss: torch.Tensor = self.task.checked_loss(outputs, wanted, self.spec, self.objective)
        return loss

    def _answer(self, rows: Rows, positions: np.ndarray) -> tuple[Any, np.ndarray | None, dict[str, np.ndarray]]:
        """Return what the model returns for some rows, their targets and their batch."""
        began = time.perf_counter()
        batch, targets, packed = self.batches.ready(rows, rows.numbers[positions])
        self.data_seconds += time.perf_counter() - began
        self.task.before_forward(len(positions))
        if self.noise is not None:
            self.noise.texts = self.batches.texts_of(rows, positions)
        return self._compute(batch, packed=packed), targets, batch

    def collate_ahead(self, steps: Sequence[Rows]) -> None:
        """Begin to make the micro-batches of the next steps in threads, if that takes long for the task."""
        if self.task.collates_ahead:
            shares = ((rows, positions) for rows in steps for positions in self.micro_batches(rows)[0])
            self.batches.begin([(rows, rows.numbers[positions]) for rows, positions in shares])

    def _compute(self, batch: Mapping[str, np.ndarray], *, packed: bool) -> Any:
        """Return what the model returns for a batch."""
        device, precision = self.group.device, self.precision
        inputs: dict[str, torch.Tensor | None] = {
            name: to_device(array, device)
            for name, array in batch.items()
            if name != MASK and name not in self.task.kept_back
        }
        if MASK in batch:
            # Without padding transformers' models are faster without a mask; another module may need it.
            unmasked = self.task.checks_padding and batch[MASK].all()
            inputs[MASK] = None if unmasked else to_device(batch[MASK], device)
        with (
            torch.autocast(device.type, precision.dtype or torch.bfloat16, enabled=precision.autocast),
            kernels.masks_known(packed=packed),
        ):
            return self.module(**inputs, **self.task.forward_options)

    def num_targets(self, rows: Rows) -> float:
        """Return the divisor of the loss summed over the rows of all ranks: their targets, or the sum of their
        weights."""
        labels = rows.table.targets
        if labels is not None:
            divisor: float = self.task.divisor(take(labels, rows.numbers), self.spec, self.objective)
            return divisor
        if not self.task.packs:
            return len(rows.numbers)
        if self.spec.whole:
            tokens = rows.table.tokens
            assert isinstance(tokens, bins.Bins), "rows are packed whole"
            # A batch may hold questions only: its loss is then 0 of one target.
            return max(1, int(packing.target_counts(tokens, rows.numbers).sum()))
        number: int = self.task.num_targets(rows.lengths, self.spec)
        return number

    def model_shard(self) -> Pieces:
        """Return what this rank stores of the model; every rank calls it."""
        pieces: Pieces = self.strategy.model_shard(self.model, self.stored, self.group)
        return pieces

    def optimizer_shard(self) -> Pieces:
        """Return what this rank stores of the optimizer; every rank calls it."""
        pieces: Pieces = self.strategy.optimizer_shard(self.model, self.optimizer, self.names, self.group)
        return pieces

    def shrink_micro_batches(self, error: Exception, rows: Rows, doing: str, *, repeatable: bool = True) -> None:
        """Halve the micro-batches if `error` means that memory ran out over `rows`; re-raise any other error.

        Raises OutOfMemory if ranks have to restart from the last checkpoint: if there are several, or if the work
        (`doing`) is not `repeatable`. Raises UsageError if micro-batches have only one row.
        """
        if not ran_out_of_memory(error):
            raise error
        lengths, share = rows.lengths, self.micro_batches(rows)[0]
        if max(map(len, share)) <= 1:
            raise UsageError(
                f"the memory of {self.group.device} ran out while {doing} with a single row at a time, of "
                f"{int(lengths.max()):,} tokens at most. Lower model.max_length, set "
                "train.activation_checkpointing=true, train fewer parameters (model.lora), or shard the model: "
                "train.strategy=fsdp."
            ) from error
        largest = max(len(each) * int(lengths[each].max(initial=0)) for each in share)
        # Half of what was computed, not half of the limit: the limit may be far above any batch of these rows.
        self.micro_batch_tokens = max(1, largest // 2)
        log.warning(
            "memory ran out over %d tokens while %s; micro-batches are limited to %d", largest, doing, largest // 2
        )
        # Stored before the restart that `OutOfMemory` causes; the next attempt would otherwise fail in the same place.
        atomic_io.write_json(
            self.limit_file, {"asked": self.requested_tokens, "tokens": self.micro_batch_tokens}, site="run.micro_batch"
        )
        # A rank that shrinks its micro-batches alone would run more collectives than the others, which then hang.
        if self.group.world_size > 1 or not repeatable:
            raise OutOfMemory(
                f"memory ran out over {largest:,} tokens, including padding, while {doing}; restarting with half as "
                "many"
            ) from error

    @contextmanager
    def restart_on_out_of_memory(self, rows: Rows, doing: str) -> Iterator[None]:
        """Raise OutOfMemory, for a restart from the last checkpoint, if memory runs out inside the block."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.shrink_micro_batches(error, rows, doing, repeatable=False)

    def release_memory(self) -> None:
        """Return the device's cached memory, so that it can be divided differently."""
        if self.group.device.type == "cuda":
            # Blocks of the old sizes stay reserved: a smaller batch could fail beside gigabytes that nothing uses.
            torch.cuda.empty_cache()

    def micro_batches(self, rows: Rows) -> tuple[list[np.ndarray], int]:
        """Return this rank's micro-batches, as positions in `rows`, and the tokens that all ranks compute, padding
        included.

        Every rank has the same number; the last ones may be empty. A batch of coupled rows has all lengths, and CPUs
        gain little from large products, so there it is cut further to save padding.
        """
        lengths = rows.lengths
        if self.task.pairs and not self.batches.isolates:  # each answer has a line of its own, as long as the longest
            split = np.asarray(rows.table.others["split"])[rows.numbers]
            lengths = 2 * np.maximum(split, lengths - split)
        shares = batching.micro_batches(
            lengths,
            world_size=self.group.data_ranks,
            micro_batch_tokens=self.micro_batch_tokens,
            equal_lengths=self.equal_lengths,
            save_padding=self.group.device.type == "cpu" and self.task.couples(self.spec),
        )
        if self.task.pairs:
            every = (rows.numbers[positions] for share in shares for positions in share if len(positions))
            padded = sum(pairs.padded_tokens(self.batches.lines_of(rows, numbers)) for numbers in every)
        else:
            padded = sum(batching.padded_tokens(lengths, share) for share in shares)
        return shares[self.group.data_rank], padded
