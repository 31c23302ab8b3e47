"""`plan`: memory, time and cost of a training job before it starts.

    sample of the table -> tokens, padding ┐
    model on the meta device -> parameters ┴-> memory, traffic and time of each strategy -> the recommended one

No weights are loaded and no step is run. The formulas are in `costs.py`; `bench/planning.py` compares their memory with
measured peaks. The batch size is the job's at any number of ranks (strong scaling).
Cost: importing torch and transformers, tokenizing 2,000 rows, and half a second of matrix products unless the speed is
given.
"""

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from torchlake import plugins
from torchlake.amounts import operations, size_in_bytes
from torchlake.config.arguments import check_arguments
from torchlake.config.job import Job
from torchlake.config.sections.data import Fold, Fraction
from torchlake.display import Shown, count, shown
from torchlake.engines import process_bounds
from torchlake.errors import UsageError
from torchlake.models.folders import base_folder
from torchlake.optim.optimizers import moment_bytes
from torchlake.planning import workload
from torchlake.planning.cluster import describe_cluster, device, size
from torchlake.planning.model_survey import survey_model
from torchlake.planning.strategies import (
    RANKS,
    PlanContext,
    StrategyPlan,
    best_of,
    fastest,
    plan_strategies,
    reason_for,
    remedies_for,
)
from torchlake.planning.survey import TableSurvey, survey_table
from torchlake.planning.terms import Cluster, ComputeSettings, Parameters, Shape
from torchlake.planning.workload import Padding, Workload, longest_row
from torchlake.preparation.checks import check_metric, check_tables
from torchlake.processes import hardware
from torchlake.runs.arguments import Sections
from torchlake.runs.tables import load_with_frames
from torchlake.tables.sources import streams
from torchlake.tasks import Task

ALLOCATOR = (
    "the memory of tensors: what glibc kept beside it made up to 1.2 times as much resident, under fsdp 1.9 times "
    "(less with MALLOC_MMAP_THRESHOLD_=65536)"
)
QUANTIZED_BYTES = {"nf4": 0.516, "int8": 1.0}
"Bytes of a weight of model.quantize, its share of the scales included."


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of the training rows in one epoch, with special tokens, without padding."""

    total: float
    error: float
    "Standard error of `total`; 0 if all rows were read."
    mean: float
    "Tokens per row."
    longest: int
    "Tokens of the longest row; an estimate if not all rows were read."
    truncated: float
    "Share of rows that are truncated."
    cut: float
    "Share of tokens that they lose."


@shown
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`."""

    rows: int
    "The number of rows of the training table."
    sampled: int
    "Rows read."
    unusable: int
    "The number of these rows that lack text or label."
    training_rows: int
    "The estimated number of training rows, without unusable and validation rows."
    blocks: int | None
    "Blocks that these rows are packed into, an estimate unless all rows were read; None for a task that does not pack."
    batch_size: int
    steps: int
    tokens: Tokens
    padding: Padding
    shape: Shape
    parameters: Parameters
    setting: ComputeSettings
    processes: int
    micro_batch: tuple[int, int]
    "Rows, and tokens per row, of the largest micro-batch."
    memory_limit: float
    "Bytes of memory per rank."
    cluster: Cluster
    assumptions: tuple[str, ...]
    strategies: tuple[StrategyPlan, ...]
    "Every strategy on `processes` ranks."
    scaling: tuple[StrategyPlan, ...]
    "The plan for 1, 8, 64 and 512 ranks: the fastest strategy that fits, else the one that needs the least memory."
    choice: str | None
    "The recommended strategy; None: none fits."
    reason: str
    remedies: tuple[str, ...]
    "Changes that would make the job fit, each by itself."

    def _shown(self) -> Shown:
        head = ("strategy", "memory per rank", "s/step", "hours", "")
        rows = [
            (
                one.strategy,
                size(one.memory.peak),
                f"{one.time.overlapped:.3g}",
                f"{one.hours:.3g}",
                "taken" if one.strategy == self.choice else one.state,
            )
            for one in self.strategies
        ]
        best = self.choice or "nothing fits"
        line = (
            f"{best}, {count(self.processes, 'rank')}, {count(self.training_rows, 'row')}, {count(self.steps, 'step')}"
        )
        return line, [[head, *rows]]


def plan(
    job: str | Path | Job | None = None,
    *,
    processes: int | None = None,
    gpu_memory: str | float | None = None,
    overrides: Sequence[str] = (),
    bandwidth: str | float | None = None,
    latency: float | None = None,
    flops: str | float | None = None,
    sample_rows: int = 2000,
    task: Task | None = None,
    **sections: Unpack[Sections],
) -> Plan:
    """Estimate what training `job` needs; job, `overrides`, `task` and sections are as in `train`.

    `processes` are the ranks (default: the job's, else 1). `gpu_memory` per rank, in bytes or as "80GiB", means ranks
    have GPUs; by default it is this machine's GPU memory or an equal part of its free memory. `flops` are the training
    operations per second of one rank ("120T"), `bandwidth` the bytes per second that a rank sends ("12.5GB"), and
    `latency` the seconds of a message. What is not given is measured or assumed, and listed in `assumptions`.

    Raises ConfigError for an invalid job, UsageError for an invalid argument, TableError and DataError for a table,
    labels or a model that cannot be used.
    """
    check_arguments({"processes": processes, "latency": latency, "sample_rows": sample_rows}, plan.__annotations__)
    if sample_rows < 1 or (processes is not None and processes < 1) or (latency is not None and not latency > 0):
        raise UsageError(
            "sample_rows and processes must be 1 or more, and latency must be a number of seconds above 0."
        )
    limit = None if gpu_memory is None else size_in_bytes(gpu_memory, "gpu_memory")
    bytes_s = None if bandwidth is None else size_in_bytes(bandwidth, "bandwidth")
    flops_s = None if flops is None else operations(flops, "flops")
    overrides = (*overrides, *([] if task is None else [f"model.task={plugins.give(task)}"]))
    with tempfile.TemporaryDirectory(prefix="torchlake-plan-") as folder:
        frames, wanted = load_with_frames(job, overrides, sections, Path(folder))
        for path, frame in frames.items():
            streams.store(frame, path)
        check_metric(wanted)
        check_tables(wanted)
        base = base_folder(wanted.model.base)
        table = survey_table(wanted, base, sample_rows)
    ranks = int(processes or process_bounds(wanted.engine.processes or 1)[1])
    gpu, memory = device(limit, ranks)
    case = _case(wanted, base, table, gpu=gpu)
    cluster, assumptions = describe_cluster(case, ranks, flops=flops_s, bandwidth=bytes_s, latency=latency)
    rows, examples = _training_rows(wanted, table), _examples(wanted, table)
    per_epoch = math.ceil(examples / wanted.train.batch_size)
    steps = min(wanted.train.epochs * per_epoch, wanted.train.max_steps or wanted.train.epochs * per_epoch)
    context = PlanContext(job=wanted, case=case, cluster=cluster, steps=steps, memory=memory, here=limit is None)
    found = plan_strategies(context, ranks)
    best = fastest(found)
    most = table.spec.max_length or int(table.lengths.max())  # images have no limit
    return Plan(
        rows=table.rows,
        sampled=table.sampled,
        unusable=table.unusable,
        training_rows=rows,
        blocks=None if table.blocks is None else examples,
        batch_size=wanted.train.batch_size,
        steps=steps,
        tokens=_tokens(table, rows, case.longest),
        padding=workload.padding(case, np.minimum(table.lengths, most), ranks=ranks, max_length=most),
        shape=case.shape,
        parameters=case.parameters,
        setting=case.setting,
        processes=ranks,
        micro_batch=workload.largest_micro_batch(case, ranks),
        memory_limit=memory,
        cluster=cluster,
        assumptions=(*assumptions, *(() if gpu else (ALLOCATOR,)), *_left_out(wanted)),
        strategies=found,
        scaling=tuple(best_of(plan_strategies(context, number)) for number in RANKS),
        choice=best.strategy if best else None,
        reason=reason_for(best, found, context),
        remedies=() if best else remedies_for(context, base, table, ranks),
    )


def _case(job: Job, base: Path | None, table: TableSurvey, *, gpu: bool) -> Workload:
    train, examples = job.train, _examples(job, table)
    lengths = table.lengths if table.blocks is None else table.blocks
    shape, parameters = survey_model(job, base, table.spec)
    setting = ComputeSettings(
        bf16=train.precision in ("bf16_weights", "bf16", "fp16")
        or (train.precision == "auto" and (gpu or hardware.supports_bf16())),
        gpu=gpu,
        weights=train.precision == "bf16_weights" or (train.precision == "auto" and gpu),
        checkpointing=train.activation_checkpointing is not False,
        selective=train.activation_checkpointing == "selective",
        moment_bytes=moment_bytes(train),
        bucket_bytes=train.ddp.bucket_mib * 2**20,
        sent_bytes=2 if train.ddp.compress in ("fp16", "bf16") else 4,
    )
    if job.model.quantize is not None:
        inside = parameters.layers / parameters.total  # embeddings and heads are not quantized
        outside = (1 - inside) * (2 if setting.weights else 4)
        setting = replace(setting, frozen_bytes=inside * QUANTIZED_BYTES[job.model.quantize] + outside)
    return Workload(
        shape=shape,
        parameters=parameters,
        setting=setting,
        lengths=workload.representative_lengths(lengths, rows=examples, batch_size=train.batch_size, seed=train.seed),
        longest=longest_row(lengths, rows=examples, limit=table.spec.max_length),
        batch_size=train.batch_size,
        micro_batch_tokens=train.micro_batch_tokens,
        seed=train.seed,
        by_length=not plugins.load("tasks", job.task).couples(table.spec),
    )


def _left_out(job: Job) -> tuple[str, ...]:
    """Return sentences on options of the job that the formulas do not cover."""
    train = job.train
    options = {
        "train.fsdp.shard_ranks (counted as all ranks)": train.fsdp.shard_ranks is not None,
        "train.fsdp.tensor_parallel (counted as 1)": train.fsdp.tensor_parallel > 1,
        "train.precision=fp16, in which a language model's logits stay whole": train.precision == "fp16"
        and plugins.load("tasks", job.task).packs,
        "train.fsdp.cpu_offload": train.fsdp.cpu_offload,
        "train.deepspeed.offload_optimizer": train.deepspeed.offload_optimizer,
        "train.deepspeed.offload_parameters": train.deepspeed.offload_parameters,
        "train.deepspeed.config": train.deepspeed.config is not None,
    }
    return tuple(f"not in the figures: {name}" for name, used in options.items() if used)


def _training_rows(job: Job, table: TableSurvey) -> int:
    usable = max(1, round(table.rows * (1 - table.unusable / table.sampled)))
    share = job.data.validation
    if not isinstance(share, Fraction | Fold):
        return usable
    part = share.fraction if isinstance(share, Fraction) else 1 / share.folds
    return usable - min(max(1, round(usable * part)), usable - 1)


def _examples(job: Job, table: TableSurvey) -> int:
    """Return the examples of an epoch: the training rows, or the blocks that they are packed into."""
    rows = _training_rows(job, table)
    return rows if table.blocks is None else max(1, round(len(table.blocks) * rows / len(table.lengths)))


def _tokens(table: TableSurvey, rows: int, longest: int) -> Tokens:
    lengths = table.lengths
    if table.blocks is not None:  # the longest text, which may continue in further blocks
        longest = longest_row(lengths, rows=rows, limit=sys.maxsize)
    mean, spread = float(lengths.mean()), float(lengths.std(ddof=1)) if len(lengths) > 1 else 0.0
    # Drawn without replacement, so only the rows that were not read add to the error.
    error = spread / math.sqrt(len(lengths)) * math.sqrt(max(0.0, 1 - table.sampled / table.rows))
    return Tokens(
        total=mean * rows,
        error=error * rows,
        mean=mean,
        longest=longest,
        truncated=table.truncated / len(lengths),
        cut=table.cut / max(1, table.cut + int(lengths.sum())),
    )
