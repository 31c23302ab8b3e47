"""`evaluate` for a language model: the loss and the perplexity of a table's texts, with intervals.

    prepare into a temporary folder -> blocks in the table's order -> the engine's workers -> the loss of each block

The blocks are those of validation during training, so both give the same number: readable rows, concatenated and cut
into blocks of the length that the model was trained with; of rows that are packed whole, one per block. A report adds
up the same losses by text and by position in the text.
Intervals are a bootstrap over blocks. Neighboring blocks are not independent, so the intervals are somewhat too narrow.
Cost: the table's tokens on disk until the end, and the logits of a batch, 4 bytes per token and vocabulary entry.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data import loading
from torchlake.data.batching import Ragged, length_batches
from torchlake.data.bins import Bins, one_per_block, sequences_of
from torchlake.data.loading import HASHES
from torchlake.data.packing import Blocks, input_ids_of, pack
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.evaluation.labeled import Measuring
from torchlake.evaluation.report import FACTS, ReportRequest, evaluating, publish
from torchlake.evaluation.result import Evaluation
from torchlake.evaluation.sections.label_hints import inputs_of, trained_on, training_hashes
from torchlake.evaluation.sections.labels import prompt_columns
from torchlake.evaluation.sections.rows import FILE as ROWS
from torchlake.evaluation.sections.rows import FIXED, among_all, is_content, stored_name, write_rows
from torchlake.evaluation.sections.slices import refuse_slices
from torchlake.loss import UNWEIGHTED
from torchlake.metrics import bootstrapped
from torchlake.models.load import load_tokenizer
from torchlake.outputs.staging.spool import spooled
from torchlake.preparation.prepare import prepare
from torchlake.progress import progress
from torchlake.scoring.rows import Runtime
from torchlake.scoring.runtime_choice import REFERENCE, device, requested, worker_memory
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import count_reasons
from torchlake.tables.keys import check_key
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import committed_files
from torchlake.tables.table import Table

RESAMPLES = 1000
BLOCKS_AT_ONCE = 64
"Blocks per work item of an engine."
BLOCK_TOKENS = {"cpu": 1024, "cuda": 8192}
"Tokens of a batch: fewer than in `scoring`, because each has a logit for every word of the vocabulary."
POSITIONS = (1, 9, 33, 129, 513, 2049)
"The first tokens, counted from 1, of the parts of texts whose losses are shown."


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a worker; plain values."""

    model: str
    runtime: Runtime
    spec: TaskSpec
    cache: str
    "The folder of the token cache."
    parts: bool
    "Whether to measure parts of blocks too, for a report."


@dataclass(frozen=True)
class TokenLosses:
    """Losses of tokens, summed in three ways; each (2, ...): the sums, and the numbers of tokens that are predicted."""

    blocks: np.ndarray
    texts: np.ndarray
    "Of the readable rows, in the table's order; of these and of positions only for a report."
    positions: np.ndarray


def measure_texts(job: Measuring, spec: TaskSpec, request: ReportRequest | None) -> Evaluation:
    """Measure the loss of a model over the texts of a stored table or a frame, and write the report if it is asked for.

    Raises DataError if no row is usable, UsageError for an unsuitable runtime, and the errors of `prepare`.
    """
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as scratch:
        if request is None:
            return _measured(job, spec, Path(scratch), None)[0]
        if request.label_hints:
            raise UsageError(f"label_hints: {spec.task} is measured on the texts only; there are no labels.")
        with evaluating(request, job.identity(spec)):
            found, losses = _measured(job, spec, Path(scratch), request)
            ends = [f"{stop - 1:,}" for stop in POSITIONS[1:]]
            names = [*map("{:,} to {}".format, POSITIONS, ends), f"{POSITIONS[-1]:,} and more"]
            parts = zip(names, *losses.positions.tolist(), strict=True)
            by_position = [{"tokens": name, "predicted": int(n), "loss": loss / n} for name, loss, n in parts if n]
            slices = [stored_name(name) for name in request.slices]
            about: dict[str, Any] = {"identity": job.identity(spec), "made": job.made(spec), "slices": slices}
            publish(request.folder, found.to_json(), kind="language", sections={"positions": by_position}, **about)
    return replace(found, report=request.folder)


def _measured(
    job: Measuring, spec: TaskSpec, scratch: Path, request: ReportRequest | None
) -> tuple[Evaluation, TokenLosses]:
    """Return the result and the losses behind it; with a report, write its rows."""
    engine, tokenizer = job.engine or Local(), job.folder
    choice = requested(job.folder, spec.task, job.runtime or REFERENCE)
    prepared, cache = scratch / "tokens", scratch / "cache"
    with spooled(job.table, prepared) as stored:
        source = None if request is None else _source(job, spec, request, stored)
        chosen: dict[str, Any] = {"bad_rows": "drop", "options": job.options}
        record = prepare(stored, prepared, tokenizer=tokenizer, spec=spec, engine=engine, **chosen)
        loading.build_cache(prepared, cache)
        plain: dict[str, Any] = {"model": str(job.folder), "cache": str(cache), "parts": request is not None}
        losses = _losses(LossSettings(runtime=choice.runtime, spec=spec, **plain), engine)
        if request is not None:
            atomic_io.remove([request.folder / FACTS])
            write_rows(request.folder / ROWS, _rows(job, source, request, committed_files(prepared), losses.texts))
        errors = errors_of(committed_files(prepared))
    derived, (sums, targets) = plugins.load("tasks", spec.task).loss_metrics, losses.blocks

    def estimate(blocks: np.ndarray) -> dict[str, float]:
        loss = float(sums[blocks].sum() / targets[blocks].sum())
        return {"loss": loss, **derived(loss)}

    found = Evaluation(
        rows=record["rows"],
        failed=sum(errors.values()),
        errors=errors,
        tokens=int(targets.sum()),
        metrics=bootstrapped(estimate, len(sums), resamples=RESAMPLES),
        resamples=RESAMPLES,
    )
    return found, losses


def _source(job: Measuring, spec: TaskSpec, request: ReportRequest, stored: Any) -> Table | None:
    """Return the table with the columns of the report: the key, slices and texts; None if it has none of them."""
    schema = job.open(stored, ()).schema
    texts = [] if request.no_texts else prompt_columns(spec, None, schema)
    shown = [name for name in texts if not is_content(schema.field(name).type)]
    named = [*([] if request.key is None else [request.key]), *request.slices, *shown]
    if not named:
        return None
    source = job.open(stored, tuple(dict.fromkeys(named)))
    refuse_slices(source.schema, request.slices)
    return source


def _rows(
    job: Measuring, source: Table | None, request: ReportRequest, prepared: Sequence[Path], losses: np.ndarray
) -> Iterator[pa.Table]:
    """Yield the rows of rows.parquet: `loss` is the mean over the `tokens` of the row that are predicted."""
    about = pa.concat_tables(pq.read_table(file, columns=["row_id", "cut", "error", HASHES]) for file in prepared)
    usable, (sums, counts) = about["error"].combine_chunks().is_null(), losses
    made = {name: pa.nulls(len(about), pa.bool_() if name == "right" else pa.float64()) for name in FIXED}
    made["loss"] = among_all(pa.array(sums / np.maximum(counts, 1), mask=counts == 0), usable)
    made["tokens"] = among_all(counts.astype(np.int32), usable)
    made |= {"truncated": pc.greater(about["cut"], 0), "error": about["error"]}
    if job.validation_of is None and (trained := training_hashes(job.folder)):
        known = trained_on(trained, inputs_of(about[HASHES].combine_chunks()))
        made["trained_on"] = pc.and_(pa.array(known), usable)
    fixed = pa.table({"row_id": about["row_id"], **made})
    if source is None:
        yield fixed
        return
    columns, first = tuple(source.schema.names), 0
    plan = plan_chunks(source, columns=columns, hashed=False, spread=job.spread)
    if request.key is not None:
        check_key(source, plan, request.key, spread=job.spread)
    with closing(ChunkReader(columns)) as reader:
        for chunk in plan.chunks:
            rows, part = reader.read(chunk)[0], fixed.slice(first, chunk.rows)
            first += chunk.rows
            if request.key is not None:
                part = part.set_column(0, stored_name(request.key), rows[request.key])
            for name in columns:
                if name != (request.key or "row_id"):
                    part = part.append_column(stored_name(name), rows[name])
            yield part


def make_loss_worker(settings: LossSettings) -> Callable[[Iterator[range]], Iterator[tuple[np.ndarray, np.ndarray]]]:
    """Load the model once. The returned worker yields the losses of ranges of blocks, as the task computes them.

    Of each block (3, B): its number, its loss as in a validation, and its targets. If `settings.parts`, of each part of
    a block that is in one text and one of POSITIONS (4, P): the text, the position, the loss and the targets.
    """
    import torch

    folder, spec, runtime, where = Path(settings.model), settings.spec, settings.runtime, device()
    task = plugins.load("tasks", spec.task)
    load: Any = plugins.load("runtimes", runtime).load if isinstance(runtime, str) else runtime
    forward = load(folder, spec, device=where)
    pad_id = load_tokenizer(folder).pad_token_id
    blocks, _ = _blocks(settings)

    def losses(numbers: np.ndarray) -> Iterator[tuple[list[float], list[list[float]]]]:
        ids, mask = blocks.padded(numbers, pad_id)
        outputs = torch.from_numpy(forward(input_ids=input_ids_of(ids), attention_mask=mask))
        wanted, counted = torch.from_numpy(task.targets(ids, mask)), mask[:, 1:].astype(bool) & (ids[:, 1:] >= 0)

        def loss(row: int, first: int, stop: int) -> float:
            some = slice(row, row + 1), slice(first, stop)
            return float(task.checked_loss(outputs[some], wanted[some], spec, UNWEIGHTED))

        for row, number in enumerate(numbers.tolist()):
            places = np.flatnonzero(counted[row])
            groups = _groups(blocks, number, places)
            bounds = np.flatnonzero(np.diff(groups, prepend=-1, append=-1).any(axis=0))
            parts = [
                [*groups[:, first].tolist(), loss(row, places[first], places[stop - 1] + 1), stop - first]
                for first, stop in pairwise(bounds[: None if settings.parts else 0])
            ]
            yield [number, loss(row, 0, ids.shape[1]), len(places)], parts

    def worker(ranges: Iterator[range]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for numbers in ranges:
            every = np.array(numbers)
            batches = length_batches(
                blocks.lengths_of(every), batch_tokens=BLOCK_TOKENS[where], max_rows=BLOCKS_AT_ONCE
            )
            found = [one for batch in batches for one in losses(every[batch])]
            parts = [part for _, some in found for part in some]
            yield np.array([whole for whole, _ in found]).T, np.array(parts, dtype=np.float64).reshape(-1, 4).T

    return worker


def _groups(blocks: Blocks | Bins, number: int, places: np.ndarray) -> np.ndarray:
    """Return the text, and the index in POSITIONS, of the target after each of the places (N,) of a block, (2, N)."""
    texts, place, first = np.full(len(places), number), places, np.zeros(1, dtype=np.int64)
    if isinstance(blocks, Blocks):
        place = places + (blocks.length - 1) * number
        texts = np.searchsorted(blocks.starts, place + 1, side="right") - 1
        first = blocks.starts[texts]
    return np.stack([texts, np.searchsorted(POSITIONS, place + 2 - first, side="right") - 1])


def _losses(settings: LossSettings, engine: Engine) -> TokenLosses:
    blocks, rows = _blocks(settings)
    readable = len(loading.open_tokens(Path(settings.cache)))
    found = TokenLosses(*(np.zeros((2, size)) for size in (len(blocks), readable, len(POSITIONS))))
    pieces = [range(first, min(first + BLOCKS_AT_ONCE, len(blocks))) for first in range(0, len(blocks), BLOCKS_AT_ONCE)]
    made = engine.run_chunks(
        plugins.carried(settings.spec.task, partial(make_loss_worker, settings)),
        pieces,
        resources=Resources(gpus=None, memory=worker_memory(settings.model)),
    )
    with closing(made), progress("evaluate", len(blocks), "blocks") as advance:
        for whole, parts in made:
            found.blocks[:, whole[0].astype(np.int64)] = whole[1:]
            texts, positions = parts[:2].astype(np.int64)
            for sums, group in ((found.texts, rows[texts]), (found.positions, positions)):
                for total, each in zip(sums, parts[2:], strict=True):
                    np.add.at(total, group, each)
            advance(whole.shape[1])
    return found


def _blocks(settings: LossSettings) -> tuple[Blocks | Bins, np.ndarray]:
    """Return the blocks, and the row of each text in them."""
    table = loading.open_tokens(Path(settings.cache))
    tokens = table.tokens
    assert isinstance(tokens, Ragged), "a table on disk has rows"
    every = np.arange(len(tokens))
    if not settings.spec.whole:
        return pack(tokens, every, settings.spec.max_length), every
    sizes = table.others.get("sequences")
    texts = one_per_block(sequences_of(tokens, table.others, every)[0], settings.spec.max_length)
    return texts, every if sizes is None else np.repeat(every, sizes.lengths)  # type: ignore[union-attr]


def errors_of(files: Sequence[Path]) -> dict[str, int]:
    """Return how many rows of token Parquet were left out, by reason."""
    reasons: Counter[str] = Counter()
    for file in files:
        errors = pq.read_table(file, columns=["error"])["error"].drop_null()
        reasons += count_reasons(errors)
    return dict(reasons.most_common())
