"""The log-probabilities that a reference gives to pairs of answers: columns of the prepared table, computed once.

    tokens of a chunk -> batches of answers of similar length -> the sums of both -> `reference`, beside the tokens

Training then holds one model. The worker of `prepare` computes them, so they are made exactly once, resumed after a
kill and found again on every engine; the fingerprint of the prepared table has the hash of the reference. `evaluate`
computes those of the model to measure in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.data import batching, pairs
from torchlake.data.features import INPUT_IDS, from_arrow, take, to_arrow
from torchlake.engines import Resources
from torchlake.errors import DataError
from torchlake.failpoints import failpoint
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.models import load
from torchlake.models.folders import base_folder, model_hash, tokenizer_hash
from torchlake.scoring.runtime_choice import device, worker_memory
from torchlake.tables.arrays import from_numpy
from torchlake.tables.plan import Chunk

COLUMN = "reference"
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
MOST_PAIRS = 64


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model whose log-probabilities are stored; plain values."""

    folder: str
    precision: str = "fp32"
    "As in `train.precision`."
    quantize: str | None = None
    "As `model.quantize`: its weights are rounded as those of the base are."

    @property
    def identity(self) -> dict[str, str]:
        """What makes its numbers what they are."""
        rounded = {} if self.quantize is None else {"quantize": self.quantize}
        return {"model": model_hash(self.folder), "precision": self.precision, **rounded}

    @property
    def resources(self) -> Resources:
        """What a process needs that computes with it."""
        return Resources(gpus=None, memory=worker_memory(self.folder))


def find_reference(job: Job, base: Path | None, spec: TaskSpec) -> Reference | None:
    """Return the reference of a job's pairs: the named one, or the base; None if the job needs none.

    Raises DataError if its tokenizer is not that of the base.
    """
    folder = base_folder(spec.preference.get("reference"))
    if folder is None or base is None:
        return None
    check_same_vocabulary(folder, base, "train.preference.reference")
    rounded = job.model.quantize if spec.preference["reference"] == job.model.base else None
    return Reference(folder=str(folder), precision=job.train.precision, quantize=rounded)


def check_same_vocabulary(reference: Path, model: Path, where: str) -> None:
    """Raise DataError if a reference does not have the model's tokens."""
    if tokenizer_hash(reference) == tokenizer_hash(model):
        return
    own, other = load.load_tokenizer(model).get_vocab(), load.load_tokenizer(reference).get_vocab()
    if own != other:
        raise DataError(
            f"{where}: {reference} has another tokenizer, with a vocabulary of {len(other):,} tokens, than {model}, "
            f"which has {len(own):,}. Log-probabilities of other tokens cannot be compared; name a reference with the "
            "same tokenizer."
        )


Score = Callable[[Chunk, pa.Table, Attempt], pa.Table]


def make_reference(reference: Reference, spec: TaskSpec, processor: Any) -> Score:
    """Load the model; return a function that fills the column `reference` of a chunk's token Parquet.

    It raises DataError for a log-probability that is not finite. A row that kills the process is found and left out as
    in scoring.
    """
    import torch

    from torchlake.optim.precision import find_precision

    task, where = plugins.load("tasks", spec.task), device()
    model, chunked = _load(reference, spec, processor)
    model.to(where)
    dtype = find_precision(reference.precision, torch.device(where)).dtype

    def sums(tokens: batching.Ragged, split: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the sums (B, 2) of the pairs `rows` (B,)."""
        some = take(tokens, rows)
        assert isinstance(some, batching.Ragged), "answers have tokens"
        lines = pairs.lines_of(pairs.answers_of(some, split[rows]), spec.max_length, isolates=False)
        made = pairs.pair_batch(lines, processor.pad_token_id, with_prompts=False)
        batch = {"input_ids": made.ids, "attention_mask": made.mask}
        batch |= {"targets": made.targets, "places": made.places} if chunked else {}
        sent = {name: torch.from_numpy(array).to(where) for name, array in batch.items()}
        with torch.inference_mode(), torch.autocast(where, dtype or torch.bfloat16, enabled=dtype is not None):
            answer = model(**sent, **task.forward_options)
        layout = dict(zip(task.kept_back, (made.places, made.targets, made.slots, made.columns), strict=False))
        return np.asarray(task.sums(answer, layout, len(rows))[:, :2].cpu().numpy())

    def scored(chunk: Chunk, made: pa.Table, attempt: Attempt) -> pa.Table:
        good = np.flatnonzero(np.asarray(made["error"].is_null()))
        if not len(good):
            return made
        usable = made.take(from_numpy(good)).combine_chunks()
        tokens, split = (from_arrow(usable[name].chunk(0)) for name in (INPUT_IDS, "split"))
        assert isinstance(tokens, batching.Ragged), "answers have tokens"
        assert isinstance(split, np.ndarray), "one number per row"
        found = np.zeros((len(made), 2), np.float32)
        suspected = np.isin(good, list(attempt.suspects["score"]))
        free = np.flatnonzero(~suspected)
        widths = 2 * np.maximum(split, tokens.lengths - split)
        cuts = batching.length_batches(widths[free], batch_tokens=BATCH_TOKENS[where], max_rows=MOST_PAIRS)
        # A suspect may kill the process: alone in its batch it takes no other row with it.
        for batch in [*np.flatnonzero(suspected)[:, None], *(free[cut] for cut in cuts)]:
            with attempt.running("score", good[batch].tolist()):
                failpoint("reference.batch")
                found[good[batch]] = sums(tokens, split, batch)
        attempt.idle()
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
            at = f"{chunk.file} row {chunk.number(row)}"
            raise DataError(f"{at}: the reference {reference.folder} gives it a log-probability that is not finite")
        place = made.schema.get_field_index(COLUMN)
        return made.set_column(place, made.schema.field(place), to_arrow(found, made.schema.field(place).type))

    return scored


def _load(reference: Reference, spec: TaskSpec, processor: Any) -> tuple[Any, bool]:
    """Return the model, and whether it returns the log-probabilities of given tokens in place of all logits."""
    from torchlake.models import probes
    from torchlake.models.adapters import quantized

    task = plugins.load("tasks", spec.task)
    model = task.base_model(Path(reference.folder), spec).eval()
    if reference.quantize is not None:
        quantized.round_weights(model, reference.quantize)
    tried = probes.features(task, processor, spec)
    assert tried is not None, "it reads texts"
    row = probes.batches(task, tried, processor, spec)[1]["input_ids"][0]
    chunks = task.find_chunks(model, row, tokens=0)
    if chunks is not None:
        task.chunk_loss(model, chunks, compiled=False)
    return model, chunks is not None
