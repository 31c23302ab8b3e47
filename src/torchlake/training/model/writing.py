"""Validations that write: the model in training answers the prompts of some validation rows (train.validate_writing).

    validation rows -> prompt | answer -> each rank writes a share -> texts of all ranks -> metric

A row's last learned answer is expected, and what is before it is the prompt, the tokens that `predict` reads. The most
probable token is taken each time, so the texts depend on the weights alone. The weights are those of the validation:
16-bit copies, gathered shards, or averages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchlake import atomic_io, distributed
from torchlake.config.job import Job
from torchlake.config.sections.train import WritingConfig
from torchlake.config.task_spec import TaskSpec
from torchlake.data import bins
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS
from torchlake.data.packing import input_ids_of
from torchlake.errors import DataError
from torchlake.evaluation.writing import measure
from torchlake.models.folders import base_folder
from torchlake.models.generation import GenerationOptions, decoded
from torchlake.models.load import load_tokenizer, positions
from torchlake.optim.precision import ComputeWeights
from torchlake.runs.folder import WRITTEN
from torchlake.runtimes import write_all
from torchlake.training.rows import Rows
from torchlake.training.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts (token ids), shortest first, and the texts that are expected."""

    options: WritingConfig
    folder: Path
    "The base model's."
    tokenizer: Any
    prompts: list[np.ndarray]
    expected: list[str]


def choose_prompts(job: Job, spec: TaskSpec, rows: Rows) -> Prompts | None:
    """Return what the model answers at each validation, from `rows`, which are not packed; None if it does not write.

    Rows without an answer, or without space for one after the prompt, are left out. Raises DataError if none is left.
    """
    options, folder = job.train.validate_writing, base_folder(job.model.base)
    if options is None:
        return None
    assert folder is not None, "models that write have a base"
    tokenizer, limit = load_tokenizer(folder), positions(folder)
    pairs = []
    # Spread over the table, which may be sorted; the rows in between fill up for those without an answer.
    spread = np.linspace(0, len(rows.numbers) - 1, min(options.rows, len(rows.numbers))).astype(np.int64)
    others = np.setdiff1d(np.arange(len(rows.numbers)), spread)
    for row in rows.numbers[[*spread, *others]].tolist():
        prompt, answer = _divided(rows, row, spec)
        fits = spec.problem == "text" or limit is None or len(prompt) + options.max_new_tokens <= limit
        if len(prompt) and len(answer) and fits:
            pairs.append((prompt, decoded(tokenizer, answer)))
        if len(pairs) == options.rows:
            break
    if not pairs:
        raise DataError(
            "train.validate_writing: no validation row has an answer and a prompt that leaves space for "
            f"{options.max_new_tokens} tokens. Lower train.validate_writing.max_new_tokens, or leave it out."
        )
    pairs.sort(key=lambda pair: len(pair[0]))
    return Prompts(
        options=options,
        folder=folder,
        tokenizer=tokenizer,
        prompts=[pair[0] for pair in pairs],
        expected=[pair[1] for pair in pairs],
    )


def write_answers(
    state: TrainState, prompts: Prompts, stop_requested: Callable[[], bool]
) -> tuple[dict[str, float], list[dict[str, str]]] | None:
    """Return the metric, and prompts with written and expected texts, on every rank; None if one was asked to stop."""
    group, options = state.group, prompts.options
    count, width = len(prompts.prompts), options.max_new_tokens
    whole = np.zeros((count, width), dtype=np.float32)
    doing = "writing for a validation"
    share = np.array_split(np.arange(count), group.data_ranks)
    most = max(map(len, share))
    mine = share[group.data_rank]
    # Every rank answers as many prompts, because sharded weights are gathered by all ranks together.
    padded = np.append(mine, np.full(most - len(mine), count - 1)).astype(np.int64)
    size = max(1, state.micro_batch_tokens // (len(prompts.prompts[-1]) + width))
    tokenizer = prompts.tokenizer
    state.module.eval()
    try:
        with computing(state) as model:
            answer = _answerer(state, model, prompts)
            for first in range(0, most, size):
                chosen = padded[first : first + size]
                with distributed.explain_lost_peers(group, doing):
                    answers = answer([prompts.prompts[row] for row in chosen])
                if group.counts:
                    own = mine[first : first + size]
                    whole[own] = answers[: len(own)]
                if distributed.any_rank(group, stop_requested(), doing):
                    return None
    finally:
        state.module.train()
    whole = distributed.all_sum_array(group, whole, doing).astype(np.int64)
    written = [decoded(tokenizer, row[row >= 0]) for row in whole]  # others are ends, and numbers that are not finite
    value = measure(options.metric, written, prompts.expected)
    texts = [
        {"prompt": tokenizer.decode(prompt), "written": text, "expected": wanted}
        for prompt, text, wanted in zip(prompts.prompts, written, prompts.expected, strict=True)
    ]
    return {options.metric: value}, texts


def store_texts(run: Path, step: int, texts: list[dict[str, str]]) -> None:
    """Write the texts of a validation into the run folder; a run that repeats the step writes the same file."""
    (run / WRITTEN).mkdir(exist_ok=True)
    atomic_io.write_json(run / WRITTEN / f"step_{step:08}.json", {"step": step, "texts": texts}, site="run.written")


@contextmanager
def computing(state: TrainState) -> Iterator[Any]:
    """Yield the transformers model inside the strategy's module, ready to compute outside of the module's forward."""
    module, model = state.module, cast(Any, state.model)
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    device, precision = state.group.device, state.precision
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, precision.dtype or torch.bfloat16, enabled=precision.autocast),
        inner.placed() if isinstance(inner, ComputeWeights) else nullcontext(),
    ):
        if isinstance(inner, FSDPModule):
            inner.unshard()  # what is in no unit; units gather themselves
        try:
            yield model.get_base_model() if hasattr(model, "get_base_model") else model
        finally:
            if isinstance(inner, FSDPModule):
                inner.reshard()


def _answerer(state: TrainState, model: Any, prompts: Prompts) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Return the function from prompts to answers (B, W)."""
    from torchlake.runtimes._writing.static import StaticWriter

    tokenizer = prompts.tokenizer
    options = GenerationOptions(max_new_tokens=prompts.options.max_new_tokens)
    writer = StaticWriter(
        model,
        prompts.folder,
        options,
        ends=state.task.end_tokens(prompts.folder, tokenizer, state.spec),
        while_training=True,
        together=state.group.world_size > 1 and _is_sharded(state.module),
    )

    return lambda some: write_all(writer, some, options)


def _is_sharded(module: Any) -> bool:
    """Return whether ranks gather weights while they compute: then all have to compute as many tokens."""
    partitioned = getattr(module, "zero_optimization_partition_weights", lambda: False)
    return isinstance(module, FSDPModule) or bool(partitioned())


def _divided(rows: Rows, row: int, spec: TaskSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a row's prompt and of its last answer; nothing if it has no answer."""
    if spec.problem == "text":
        read, wanted = rows.table.arrays[INPUT_IDS], rows.table.targets
        assert isinstance(read, Ragged), "texts are tokens"
        assert isinstance(wanted, Ragged), "targets are tokens"
        return _row(read, row), _row(wanted, row)
    tokens = rows.table.tokens
    assert isinstance(tokens, Ragged), "the rows are not packed"
    sequences, numbers = bins.sequences_of(tokens, rows.table.others, np.array([row]))
    ids = _row(sequences, int(numbers[-1])) if len(numbers) else np.zeros(0, np.int64)
    learned = np.flatnonzero(ids >= 0)
    if not len(learned):
        return ids[:0], ids[:0]
    end = int(learned[-1]) + 1
    before = np.flatnonzero(ids[:end] < 0)
    start = int(before[-1]) + 1 if len(before) else 0
    return input_ids_of(ids[:start]), ids[start:end]


def _row(ragged: Ragged, row: int) -> np.ndarray:
    values: np.ndarray = ragged.values[ragged.offsets[row] : ragged.offsets[row + 1]].astype(np.int64)
    return values
