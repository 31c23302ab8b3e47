"""The state of a training: the model, its optimizer and the progress. `setup.py` makes it.

`rows.py` gives the rows of every batch, `TrainState.micro_batches` divides them among the ranks; each rank computes
both.
"""

import logging
import time
from collections.abc import Iterator
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
from torchlake.data import batching, bins, packing
from torchlake.distributed import Group, to_device
from torchlake.errors import OutOfMemory, UsageError, ran_out_of_memory
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models.load import TaskSpec
from torchlake.optim.precision import Precision
from torchlake.runs.speed import Speed
from torchlake.training.model import kernels
from torchlake.training.rows import Rows

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainProgress:
    """The progress of a run: what a checkpoint stores beside tensors. Its field names are stored."""

    step: int = 0
    "Optimizer steps done."
    validated: int = 0
    "The step of the last validation."
    best: dict[str, Any] | None = None
    "The best validation so far: its step and metrics. The earlier of equals."
    stale: int = 0
    "Validations since the best."
    non_finite: int = 0
    "Steps in a row that were not applied."
    loss: float | None = None
    "Of the last applied step."
    loss_scale: float = 65536.0
    "Factor of the loss in fp16, so that small gradients are not rounded to zero."
    calm: int = 0
    "Steps in a row with finite gradients at this loss scale."
    seconds: float = 0.0
    "Time in the training loop, over all restarts."


@dataclass(kw_only=True)
class TrainState:
    """The model and everything that updates it, on this rank."""

    group: Group
    task: ModuleType
    strategy: ModuleType
    spec: TaskSpec
    model: nn.Module
    "Its tensors may be sharded; their names are the unwrapped ones."
    module: nn.Module
    "The model as the strategy wrapped it."
    config: Any
    "The model's configuration, for the model folder."
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    names: list[str]
    "Names of the optimizer's parameters."
    stored: dict[str, torch.Tensor]
    "The tensors that a checkpoint stores (all, or of a partly frozen model the trained ones), on the meta device."
    precision: Precision
    requested_tokens: int
    "train.micro_batch_tokens: tokens, padding included, that this rank may process at once."
    micro_batch_tokens: int
    "The same, lowered after running out of memory."
    limit_file: Path
    "Where it is stored, so that a restarted run uses it at once."
    filler: np.ndarray
    "(L,) int64, the row that ranks without rows process."
    speed: Speed
    data_seconds: float = 0.0
    "Time spent on reading and padding rows, so far."
    objective: Objective = UNWEIGHTED
    "Class weights and label smoothing of the loss."
    isolates: bool
    "Whether attention stays within rows whose position ids restart; else the rows of a block are unpacked."
    one_line: bool
    "Whether packed blocks are joined to one line, in which flash attention finds restarting positions."
    chunked: bool
    "Whether the model computes the loss in chunks, and returns it in place of the logits."
    equal_lengths: bool
    "Whether a micro-batch may hold only rows of equal length, because padding would change the logits."

    def forward(self, rows: Rows, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, C) or (B, L, V) of the rows at `positions` (B,) of `rows`, and the sum of their losses, fp32.

        A rank without rows processes the filler, to take part in every collective; its loss is 0. A model that computes
        the loss in chunks returns no logits; the loss is there twice.
        """
        device, began = self.group.device, time.perf_counter()
        numbers, tokens = rows.numbers[positions], rows.table.tokens
        options: dict[str, torch.Tensor] = {}
        if not len(numbers):
            ids, mask = self.filler[None], np.ones((1, len(self.filler)), dtype=np.int64)
        elif isinstance(tokens, bins.Bins) and not self.isolates:
            ids, mask = tokens.unpacked(numbers, self.tokenizer.pad_token_id)
        else:
            ids, mask = tokens.padded(numbers, self.tokenizer.pad_token_id)
        seen = mask
        if isinstance(tokens, bins.Bins) and self.isolates and len(numbers):
            # Restarting position ids keep rows (and padding) apart; together with a mask they would not.
            options["position_ids"] = to_device(tokens.positions_of(numbers), device)
            seen = np.ones_like(mask)
            if self.one_line:
                ids, mask, seen = ids.reshape(1, -1), mask.reshape(1, -1), seen.reshape(1, -1)
                options["position_ids"] = options["position_ids"].reshape(1, -1)
        packed = bool(options)
        if self.chunked and len(numbers):
            options["targets"] = to_device(self.task.targets(ids, mask), device)
        self.data_seconds += time.perf_counter() - began
        precision = self.precision
        with (
            torch.autocast(device.type, precision.dtype or torch.bfloat16, enabled=precision.autocast),
            kernels.masks_known(packed=packed),
        ):
            answer = self.module(
                input_ids=to_device(packing.input_ids_of(ids), device),
                attention_mask=None if seen.all() else to_device(seen, device),
                **options,
                **self.task.FORWARD,
            )
        if isinstance(answer, torch.Tensor):
            return answer, answer
        logits = answer.logits
        if not len(numbers):
            return logits[:0], logits.float().sum() * 0
        labels = rows.table.targets
        if labels is not None:
            targets = to_device(labels[numbers], device)
            return logits, self.task.loss_sum(logits, targets, self.spec, self.objective)
        following = to_device(self.task.targets(ids, mask), device)
        return logits, self.task.loss_sum(logits, following, self.spec)

    def num_targets(self, rows: Rows) -> float:
        """The divisor of the loss summed over the rows of all ranks: their targets, or the sum of their weights."""
        labels = rows.table.targets
        if labels is not None:
            divisor: float = self.task.divisor(labels[rows.numbers], self.spec, self.objective)
            return divisor
        if self.spec.problem == "next_answer_token":
            tokens = rows.table.tokens
            assert isinstance(tokens, bins.Bins), "conversations are packed whole"
            # A batch may hold questions only: its loss is then 0 of one target.
            return max(1, int(packing.target_counts(tokens, rows.numbers).sum()))
        number: int = self.task.num_targets(rows.lengths, self.spec)
        return number

    def model_shard(self) -> Pieces:
        """What this rank stores of the model; every rank calls it."""
        pieces: Pieces = self.strategy.model_shard(self.model, self.stored, self.group)
        return pieces

    def optimizer_shard(self) -> Pieces:
        """What this rank stores of the optimizer; every rank calls it."""
        pieces: Pieces = self.strategy.optimizer_shard(self.model, self.optimizer, self.names, self.group)
        return pieces

    def shrink_micro_batches(self, error: Exception, rows: Rows, doing: str, *, repeatable: bool = True) -> None:
        """Halve the micro-batches when `error` means that memory ran out over `rows`; re-raise any other error.

        Raises OutOfMemory when ranks have to restart from the last checkpoint: if there are several, or if the work
        (`doing`) is not `repeatable`. Raises UsageError when micro-batches have one row already.
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
        self.micro_batch_tokens = max(1, largest // 2)
        log.warning(
            "memory ran out over %d tokens while %s; micro-batches are limited to %d", largest, doing, largest // 2
        )
        atomic_io.write_json(
            self.limit_file, {"asked": self.requested_tokens, "tokens": self.micro_batch_tokens}, site="run.micro_batch"
        )
        if self.group.world_size > 1 or not repeatable:
            raise OutOfMemory(
                f"memory ran out over {largest:,} tokens, padding counted, while {doing}; restarting with half as many"
            ) from error

    @contextmanager
    def restart_on_out_of_memory(self, rows: Rows, doing: str) -> Iterator[None]:
        """When memory runs out inside, raise OutOfMemory for a restart from the last checkpoint."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.shrink_micro_batches(error, rows, doing, repeatable=False)

    def release_memory(self) -> None:
        """Return the device's cached memory, so that it can be divided differently."""
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()

    def micro_batches(self, rows: Rows) -> tuple[list[np.ndarray], int]:
        """This rank's micro-batches, as positions in `rows`, and the tokens that all ranks compute, padding included.

        Every rank has the same number; the last ones may be empty.
        """
        lengths = rows.lengths
        shares = batching.micro_batches(
            lengths,
            world_size=self.group.data_ranks,
            micro_batch_tokens=self.micro_batch_tokens,
            equal_lengths=self.equal_lengths,
        )
        padded = sum(len(each) * int(lengths[each].max(initial=0)) for share in shares for each in share)
        return shares[self.group.data_rank], padded
