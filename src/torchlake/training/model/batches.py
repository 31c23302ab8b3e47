"""What the model gets for some rows: inputs and targets, made ahead in threads if that takes long for the task.

rows of a table      padded rows
blocks of text       padded blocks
rows packed whole    blocks with positions that restart; where attention would cross rows, a line for each row
pairs of answers     lines of answers, in the same two ways
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlake.config.task_spec import TaskSpec
from torchlake.data import batching, bins, packing, pairs
from torchlake.data.features import take
from torchlake.optim.noise import Text, texts_of
from torchlake.tasks import NO_TARGET
from torchlake.training.rows import Rows

MASK = "attention_mask"


class ModelBatch(NamedTuple):
    """A micro-batch as arrays."""

    inputs: dict[str, np.ndarray]
    targets: np.ndarray | None = None
    packed: bool = False
    "Whether positions restart with each row of a block."


@dataclass(kw_only=True)
class BatchMaker:
    """Makes micro-batches for one model."""

    task: Any
    spec: TaskSpec
    processor: Any
    filler: dict[str, np.ndarray]
    "The batch of one row that ranks without rows process."
    isolates: bool
    "Whether attention stays within rows whose position ids restart; else the rows of a block are unpacked."
    one_line: bool
    "Whether packed blocks are joined to one line, in which flash attention finds restarting positions."
    chunked: bool
    "Whether the model computes the loss itself, and needs the places of the targets."
    collating: ThreadPoolExecutor | None = None
    "The threads that make batches ahead."
    collated: dict[Any, Future[ModelBatch]] = field(default_factory=dict)
    "The batches that these threads make, by their rows."

    def begin(self, wanted: Sequence[tuple[Rows, np.ndarray]]) -> None:
        """Begin to make the batches of some rows and numbers (B,) in threads.

        Which ones are asked for may change (memory runs out). Then the key finds no batch, and it is made in place.
        """
        if self.collating is None:
            self.collating = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="collate")
        self.collated = {_key(*each): self.collating.submit(self._make, *each) for each in wanted}

    def ready(self, rows: Rows, numbers: np.ndarray) -> ModelBatch:
        """Return the batch of the rows `numbers` (B,) of a table; the filler for none."""
        begun = self.collated.pop(_key(rows, numbers), None)
        return self._make(rows, numbers) if begun is None else begun.result()

    def targets_of(self, rows: Rows, numbers: np.ndarray) -> np.ndarray | None:
        """Return the targets of the rows `numbers` (B,) of a table; None without labels."""
        labels = rows.table.targets
        return None if labels is None else self.task.collate_targets(labels, numbers, self.spec)

    def lines_of(self, rows: Rows, numbers: np.ndarray) -> bins.Bins:
        """Return the lines of the pairs `numbers` (B,)."""
        arrays = rows.table.arrays
        some = take(arrays["input_ids"], numbers)
        assert isinstance(some, batching.Ragged), "answers have tokens"
        answers = pairs.answers_of(some, np.asarray(arrays["split"])[numbers])
        return pairs.lines_of(answers, self.spec.max_length, isolates=self.isolates)

    def texts_of(self, rows: Rows, positions: np.ndarray) -> list[Text]:
        """Return the texts of a micro-batch of blocks, for their noise; `positions` (B,) are those of the blocks in the
        batch of the step."""
        tokens, numbers = rows.table.tokens, rows.numbers[positions]
        assert isinstance(tokens, packing.Blocks | bins.Bins), "rows are packed"
        lengths = tokens.lengths_of(numbers)
        width = int(lengths.max(initial=0))
        whole = tokens.positions_of(numbers) if isinstance(tokens, bins.Bins) else None
        starts = np.tile(np.arange(width), (len(lengths), 1)) if whole is None else whole
        texts = texts_of(starts, lengths, positions, unpacked=whole is not None and not self.isolates)
        joined = whole is not None and self.isolates and self.one_line
        return [(0, line * width + first, length, key) for line, first, length, key in texts] if joined else texts

    def _make(self, rows: Rows, numbers: np.ndarray) -> ModelBatch:
        if not len(numbers):
            return ModelBatch(self.filler)
        if self.task.packs:
            return self._packed(rows, numbers)
        if self.task.pairs:
            return self._paired(rows, numbers)
        batch = self.task.checked_batch(rows.table.arrays, numbers, self.processor, self.spec, seed=rows.seed)
        return ModelBatch(batch, self.targets_of(rows, numbers))

    def _packed(self, rows: Rows, numbers: np.ndarray) -> ModelBatch:
        tokens, pad_id = rows.table.tokens, self.processor.pad_token_id
        assert isinstance(tokens, packing.Blocks | bins.Bins), "rows are packed"
        if isinstance(tokens, bins.Bins) and not self.isolates:
            ids, mask = tokens.unpacked(numbers, pad_id)
        else:
            ids, mask = tokens.padded(numbers, pad_id)
        packed = tokens.positions_of(numbers) if isinstance(tokens, bins.Bins) and self.isolates else None
        inputs = self._inputs(packing.input_ids_of(ids), mask, packed)
        targets = self.task.targets(ids, mask).reshape(inputs["input_ids"].shape)
        if self.chunked:  # found here, where it does not make the host wait for the device
            places = np.flatnonzero(targets != NO_TARGET)
            inputs |= {"places": places, "targets": targets.ravel()[places]}
        return ModelBatch(inputs, targets, packed is not None)

    def _paired(self, rows: Rows, numbers: np.ndarray) -> ModelBatch:
        with_prompts = self.spec.preference["loss"] == "orpo"
        made = pairs.pair_batch(self.lines_of(rows, numbers), self.processor.pad_token_id, with_prompts=with_prompts)
        inputs = self._inputs(made.ids, made.mask, made.positions if self.isolates else None)
        targets = self.task.pair_targets(rows.table.arrays, rows.numbers, numbers, self.spec)
        layout = (made.places, made.targets, made.slots, made.columns, targets)
        inputs |= dict(zip(self.task.kept_back, layout, strict=True))
        inputs |= {"places": made.places, "targets": made.targets} if self.chunked else {}
        return ModelBatch(inputs, targets, self.isolates)

    def _inputs(self, ids: np.ndarray, mask: np.ndarray, positions: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return the model's inputs. Restarting `positions` keep rows (and padding) apart; with a mask they would
        not."""
        if positions is None:
            return {"input_ids": ids, MASK: mask}
        inputs = {"input_ids": ids, MASK: np.ones_like(mask), "position_ids": positions}
        return {name: array.reshape(1, -1) for name, array in inputs.items()} if self.one_line else inputs


def _key(rows: Rows, numbers: np.ndarray) -> tuple[int, int | None, bytes]:
    """Return a key that identifies the batch of these rows."""
    return id(rows.table), rows.seed, numbers.tobytes()
