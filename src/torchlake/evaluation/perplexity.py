"""`evaluate` for a language model: the loss and the perplexity of a table's texts, with intervals.

    prepare into a temporary folder -> blocks in the table's order -> the engine's workers -> the loss of each block

The blocks are those of validation during training, so both give the same number: readable rows, concatenated and cut
into blocks of the length that the model was trained with; of rows that are packed whole, one per block.
Intervals are a bootstrap over blocks. Neighboring blocks are not independent, so the intervals are somewhat too narrow.
Cost: the table's tokens on disk until the end, and the logits of a batch, 4 bytes per token and vocabulary entry.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data import loading
from torchlake.data.batching import Ragged, length_batches
from torchlake.data.bins import Bins, one_per_block, sequences_of
from torchlake.data.packing import Blocks, input_ids_of, pack, target_counts
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.evaluation.result import Evaluation
from torchlake.metrics import bootstrapped
from torchlake.models.load import load_tokenizer
from torchlake.outputs.staging.spool import spooled
from torchlake.preparation.prepare import prepare
from torchlake.progress import progress
from torchlake.scoring.rows import Runtime
from torchlake.scoring.runtime_choice import REFERENCE, requested
from torchlake.scoring.scorer import device, worker_memory
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import ReadOptions

RESAMPLES = 1000
BLOCKS_AT_ONCE = 64
"Blocks per work item of an engine."
BLOCK_TOKENS = {"cpu": 1024, "cuda": 8192}
"Tokens of a batch: fewer than in `scoring`, because each has a logit for every word of the vocabulary."


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a worker; plain values."""

    model: str
    runtime: Runtime
    spec: TaskSpec
    cache: str
    "The folder of the token cache."


def measure_texts(
    folder: Path,
    table: Any,
    spec: TaskSpec,
    *,
    engine: Engine | None,
    runtime: Runtime | None,
    options: ReadOptions,
) -> Evaluation:
    """Measure the loss of a model over the texts of a stored table or a frame.

    Raises DataError if no row is usable, UsageError for an unsuitable runtime, and the errors of `prepare`.
    """
    engine = engine or Local()
    choice = requested(folder, spec.task, runtime or REFERENCE)
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as scratch:
        prepared, cache = Path(scratch, "tokens"), Path(scratch, "cache")
        with spooled(table, prepared) as rows:
            record = prepare(
                rows, prepared, tokenizer=folder, spec=spec, engine=engine, bad_rows="drop", options=options
            )
        loading.build_cache(prepared, cache)
        settings = LossSettings(model=str(folder), runtime=choice.runtime, spec=spec, cache=str(cache))
        losses, targets = _losses(settings, engine)
        errors = errors_of(committed_files(prepared))
    derived = plugins.load("tasks", spec.task).loss_metrics

    def estimate(blocks: np.ndarray) -> dict[str, float]:
        loss = float(losses[blocks].sum() / targets[blocks].sum())
        return {"loss": loss, **derived(loss)}

    return Evaluation(
        rows=record["rows"],
        failed=sum(errors.values()),
        errors=errors,
        tokens=int(targets.sum()),
        metrics=bootstrapped(estimate, len(losses), resamples=RESAMPLES),
        resamples=RESAMPLES,
    )


def make_loss_worker(settings: LossSettings) -> Callable[[Iterator[range]], Iterator[tuple[range, list[float]]]]:
    """Load the model once. The returned worker yields the summed loss of each block, for ranges of block numbers."""
    import torch

    folder, spec, runtime, where = Path(settings.model), settings.spec, settings.runtime, device()
    task = plugins.load("tasks", spec.task)
    load: Any = plugins.load("runtimes", runtime).load if isinstance(runtime, str) else runtime
    forward = load(folder, spec, device=where)
    pad_id = load_tokenizer(folder).pad_token_id
    blocks = _blocks(settings)

    def losses(numbers: np.ndarray) -> np.ndarray:
        ids, mask = blocks.padded(numbers, pad_id)
        logits = torch.from_numpy(forward(input_ids=input_ids_of(ids), attention_mask=mask))
        targets = torch.from_numpy(task.targets(ids, mask))
        rows = zip(logits.split(1), targets.split(1), strict=True)
        return np.array([task.loss_sum(one, wanted, spec).item() for one, wanted in rows])

    def worker(ranges: Iterator[range]) -> Iterator[tuple[range, list[float]]]:
        for numbers in ranges:
            every, found = np.array(numbers), np.zeros(len(numbers))
            lengths = blocks.lengths_of(every)
            for batch in length_batches(lengths, batch_tokens=BLOCK_TOKENS[where], max_rows=BLOCKS_AT_ONCE):
                found[batch] = losses(every[batch])
            yield numbers, found.tolist()

    return worker


def _losses(settings: LossSettings, engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed loss of every block (M,), and the number of its target tokens (M,)."""
    blocks = _blocks(settings)
    found = np.zeros(len(blocks))
    pieces = [range(first, min(first + BLOCKS_AT_ONCE, len(found))) for first in range(0, len(found), BLOCKS_AT_ONCE)]
    made = engine.run_chunks(
        plugins.carried(settings.spec.task, partial(make_loss_worker, settings)),
        pieces,
        resources=Resources(gpus=None, memory=worker_memory(settings.model)),
    )
    with closing(made), progress("evaluate", len(found), "blocks") as advance:
        for numbers, losses in made:
            found[numbers.start : numbers.stop] = losses
            advance(len(numbers))
    every = np.arange(len(found))
    return found, target_counts(blocks, every) if settings.spec.whole else blocks.lengths_of(every) - 1


def _blocks(settings: LossSettings) -> Blocks | Bins:
    table = loading.open_tokens(Path(settings.cache))
    tokens = table.tokens
    assert isinstance(tokens, Ragged), "a table on disk has rows"
    if settings.spec.whole:
        return one_per_block(sequences_of(tokens, table.others, np.arange(len(tokens)))[0], settings.spec.max_length)
    return pack(tokens, np.arange(len(tokens)), settings.spec.max_length)


def errors_of(files: Sequence[Path]) -> dict[str, int]:
    """Return how many rows of token Parquet were left out, by reason."""
    reasons: Counter[str] = Counter()
    for file in files:
        errors = pq.read_table(file, columns=["error"])["error"].drop_null()
        reasons += count_reasons(errors)
    return dict(reasons.most_common())
