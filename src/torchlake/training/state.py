"""The state of a training: the model, its optimizer and the progress. `setup.py` makes it.

`rows.py` yields the rows of every batch, `TrainState.micro_batches` divides them among the ranks; each rank computes
both.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from torchlake.errors import OutOfMemory, UsageError, ran_out_of_memory
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models.load import TaskSpec
from torchlake.optim.noise import EmbeddingNoise, Text, texts_of
from torchlake.optim.precision import Precision
from torchlake.runs.speed import Speed
from torchlake.tasks import NO_TARGET
from torchlake.training.model import kernels
from torchlake.training.rows import Rows

log = logging.getLogger(__name__)

MASK = "attention_mask"


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
    filler: dict[str, np.ndarray]
    "The batch of one row that ranks without rows process."
    speed: Speed
    batch_size: int
    "Rows of one optimizer step over all ranks."
    collating: ThreadPoolExecutor | None = None
    "The threads that make batches ahead."
    collated: dict[Any, Future[Any]] = field(default_factory=dict)
    "The batches that these threads make, by their rows."
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

    def targets_of(self, rows: Rows, positions: np.ndarray) -> np.ndarray | None:
        """Return the targets of the rows at `positions` (B,); None without labels."""
        labels = rows.table.targets
        if labels is None:
            return None
        targets: np.ndarray = self.task.collate_targets(labels, rows.numbers[positions], self.spec)
        return targets

    def _answer(self, rows: Rows, positions: np.ndarray) -> tuple[Any, np.ndarray | None, dict[str, np.ndarray]]:
        """Return what the model returns for some rows, their targets and their batch."""
        began = time.perf_counter()
        batch, targets, packed = self._ready_batch(rows, rows.numbers[positions])
        self.data_seconds += time.perf_counter() - began
        self.task.before_forward(len(positions))
        if self.noise is not None:
            self.noise.texts = self._texts(rows, positions)
        return self._compute(batch, packed=packed), targets, batch

    def _texts(self, rows: Rows, positions: np.ndarray) -> list[Text]:
        """Return the texts of a micro-batch of blocks, for their noise; `positions` (B,) are those of the blocks in the
        batch of the step."""
        tokens, numbers = rows.table.tokens, rows.numbers[positions]
        if isinstance(tokens, bins.Bins):
            starts, lengths = tokens.positions_of(numbers), tokens.lengths_of(numbers)
            texts = texts_of(starts, lengths, positions, unpacked=not self.isolates)
        else:
            assert isinstance(tokens, packing.Blocks), "rows are packed"
            lengths = tokens.lengths_of(numbers)
            starts = np.tile(np.arange(lengths.max(initial=0)), (len(lengths), 1))
            texts = texts_of(starts, lengths, positions, unpacked=False)
        joined = self.one_line and self.isolates and isinstance(tokens, bins.Bins)
        width = int(lengths.max(initial=0))
        return [(0, line * width + first, length, key) for line, first, length, key in texts] if joined else texts

    def collate_ahead(self, steps: Sequence[Rows]) -> None:
        """Begin to make the micro-batches of the next steps in threads, if that takes long for the task."""
        if not self.task.collates_ahead:
            return
        if self.collating is None:
            self.collating = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="collate")
        # Which micro-batches these are may change (memory runs out). Then the key finds no batch, and it is made in
        # place.
        wanted = [(rows, rows.numbers[positions]) for rows in steps for positions in self.micro_batches(rows)[0]]
        self.collated = {_key(*each): self.collating.submit(self._batch, *each) for each in wanted}

    def _ready_batch(self, rows: Rows, numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None, bool]:
        ready = self.collated.pop(_key(rows, numbers), None)
        return self._batch(rows, numbers) if ready is None else ready.result()

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

    def _batch(self, rows: Rows, numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None, bool]:
        """Return the model's inputs for rows of a table, their targets, and whether the inputs are packed rows."""
        if not len(numbers):
            return self.filler, None, False
        if self.task.packs:
            return self._packed_batch(rows, numbers)
        if self.task.pairs:
            return self._paired_batch(rows, numbers)
        table = rows.table
        batch = self.task.checked_batch(table.arrays, numbers, self.processor, self.spec, seed=rows.seed)
        labels = table.targets
        return batch, None if labels is None else self.task.collate_targets(labels, numbers, self.spec), False

    def _packed_batch(self, rows: Rows, numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None, bool]:
        tokens, pad_id = rows.table.tokens, self.processor.pad_token_id
        assert isinstance(tokens, packing.Blocks | bins.Bins), "rows are packed"
        whole = tokens if isinstance(tokens, bins.Bins) else None
        if whole is not None and not self.isolates:
            ids, mask = whole.unpacked(numbers, pad_id)
        else:
            ids, mask = tokens.padded(numbers, pad_id)
        seen = mask
        options: dict[str, np.ndarray] = {}
        if whole is not None and self.isolates:
            # Restarting position ids keep rows (and padding) apart; together with a mask they would not.
            options["position_ids"] = whole.positions_of(numbers)
            seen = np.ones_like(mask)
            if self.one_line:
                ids, mask, seen = ids.reshape(1, -1), mask.reshape(1, -1), seen.reshape(1, -1)
                options["position_ids"] = options["position_ids"].reshape(1, -1)
        targets = self.task.targets(ids, mask)
        batch = {"input_ids": packing.input_ids_of(ids), MASK: seen, **options}
        if self.chunked:  # found here, where it does not make the host wait for the device
            places = np.flatnonzero(targets != NO_TARGET)
            batch |= {"places": places, "targets": targets.ravel()[places]}
        return batch, targets, bool(options)

    def _paired_batch(self, rows: Rows, numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, bool]:
        arrays, with_prompts = rows.table.arrays, self.spec.preference["loss"] == "orpo"
        made = pairs.pair_batch(self._lines(rows, numbers), self.processor.pad_token_id, with_prompts=with_prompts)
        batch = {"input_ids": made.ids, MASK: made.mask}
        if self.isolates:
            batch |= {"position_ids": made.positions, MASK: np.ones_like(made.mask)}
            batch = {name: array.reshape(1, -1) for name, array in batch.items()} if self.one_line else batch
        targets: np.ndarray = self.task.pair_targets(arrays, rows.numbers, numbers, self.spec)
        layout = (made.places, made.targets, made.slots, made.columns, targets)
        batch |= dict(zip(self.task.kept_back, layout, strict=True))
        batch |= {"places": made.places, "targets": made.targets} if self.chunked else {}
        return batch, targets, self.isolates

    def _lines(self, rows: Rows, numbers: np.ndarray) -> bins.Bins:
        """Return the lines of the pairs `numbers` (B,)."""
        arrays = rows.table.arrays
        some = take(arrays["input_ids"], numbers)
        assert isinstance(some, batching.Ragged), "answers have tokens"
        answers = pairs.answers_of(some, np.asarray(arrays["split"])[numbers])
        return pairs.lines_of(answers, self.spec.max_length, isolates=self.isolates)

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
        if self.task.pairs and not self.isolates:  # each answer has a line of its own, as long as the longest
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
            every = (positions for share in shares for positions in share if len(positions))
            padded = sum(pairs.padded_tokens(self._lines(rows, rows.numbers[positions])) for positions in every)
        else:
            padded = sum(batching.padded_tokens(lengths, share) for share in shares)
        return shares[self.group.data_rank], padded


def _key(rows: Rows, numbers: np.ndarray) -> tuple[int, int | None, bytes]:
    """Return a key that identifies the batch of these rows."""
    return id(rows.table), rows.seed, numbers.tobytes()
