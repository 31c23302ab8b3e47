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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from torchlake import plugins
from torchlake.amounts import operations, size_in_bytes
from torchlake.config.arguments import check_arguments
from torchlake.config.job import Job
from torchlake.config.sections.data import Fold, Fraction
from torchlake.config.sections.strategies import LoraOptions
from torchlake.display import Shown, count, shown
from torchlake.engines import process_bounds
from torchlake.errors import UsageError
from torchlake.models.folders import base_folder
from torchlake.optim.optimizers import moment_bytes
from torchlake.planning import workload
from torchlake.planning.cluster import describe_cluster, device, size
from torchlake.planning.costs import SHARDINGS, Cluster, ComputeSettings, Memory, Parameters, Shape, Sharding, StepTime
from torchlake.planning.survey import TableSurvey, survey_model, survey_table
from torchlake.planning.workload import Padding, Workload
from torchlake.preparation.checks import check_metric, check_tables
from torchlake.processes import hardware
from torchlake.runs.arguments import Sections
from torchlake.runs.folder import load_with_frames
from torchlake.tables.sources import streams
from torchlake.tasks import Task

RANKS = (1, 8, 64, 512)
MOST_RANKS = 4096
AS_FAST = 1.1
"A more complex strategy must be faster by more than this factor."
ALLOCATOR = (
    "the memory of tensors: what glibc kept beside it made up to 1.2 times as much resident, under fsdp 1.9 times "
    "(less with MALLOC_MMAP_THRESHOLD_=65536)"
)
HEADROOM = 0.9
"Usable share of a device's memory; the rest is allocator overhead."


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
class StrategyPlan:
    """One strategy on `ranks` ranks."""

    strategy: str
    ranks: int
    memory: Memory
    fits: bool
    obstacle: str | None
    "Why it cannot run, or None."
    sent: float
    "Bytes that each rank sends in a step."
    time: StepTime
    hours: float
    "The time of all steps, without validation and checkpoints."
    efficiency: float
    "Speed relative to perfect scaling from one rank."

    def _shown(self) -> Shown:
        state = self.obstacle or ("fits" if self.fits else "too much memory")
        return (
            f"{self.strategy} on {count(self.ranks, 'rank')}, {size(self.memory.peak)}, {self.hours:.3g} h, {state}",
            [],
        )


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
                one.obstacle or ("taken" if one.strategy == self.choice else "fits" if one.fits else "too much memory"),
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
    ranks = processes or process_bounds(wanted.engine.processes or 1)[1]
    gpu, memory = device(limit, ranks)
    case = _case(wanted, base, table, gpu=gpu)
    cluster, assumptions = describe_cluster(case, ranks, flops=flops_s, bandwidth=bytes_s, latency=latency)
    rows, examples = _training_rows(wanted, table), _examples(wanted, table)
    per_epoch = math.ceil(examples / wanted.train.batch_size)
    steps = min(wanted.train.epochs * per_epoch, wanted.train.max_steps or wanted.train.epochs * per_epoch)
    context = _Context(job=wanted, case=case, cluster=cluster, steps=steps, memory=memory, here=limit is None)
    found = _strategies(context, ranks)
    best = _fastest(found)
    most = table.spec.max_length or int(table.lengths.max())  # images have no limit
    return Plan(
        rows=table.rows,
        sampled=table.sampled,
        unusable=table.unusable,
        training_rows=rows,
        blocks=None if table.blocks is None else examples,
        batch_size=wanted.train.batch_size,
        steps=steps,
        tokens=_tokens(table, rows, case.longest if table.blocks is None else _longest_text(table, rows)),
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
        scaling=tuple(_at(_strategies(context, number)) for number in RANKS),
        choice=best.strategy if best else None,
        reason=_reason(best, found, context),
        remedies=() if best else _remedies(context, base, table, ranks),
    )


@dataclass(frozen=True, kw_only=True)
class _Context:
    """The common inputs of all strategies."""

    job: Job
    case: Workload
    cluster: Cluster
    steps: int
    memory: float
    "Bytes of memory per rank."
    here: bool
    "Whether training would run on this machine, not on a GPU elsewhere."

    @property
    def usable_memory(self) -> float:
        """Bytes per rank without headroom."""
        return HEADROOM * self.memory


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
        longest=workload.longest_row(lengths, rows=examples, limit=table.spec.max_length),
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


def _longest_text(table: TableSurvey, rows: int) -> int:
    """Return the tokens of the longest of `rows` texts, which may continue in further blocks."""
    return workload.longest_row(table.lengths, rows=rows, limit=sys.maxsize)


def _tokens(table: TableSurvey, rows: int, longest: int) -> Tokens:
    lengths = table.lengths
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


def _strategies(context: _Context, ranks: int) -> tuple[StrategyPlan, ...]:
    """Evaluate every strategy on `ranks` ranks."""
    alone = workload.time_on(context.case, SHARDINGS[0], 1, context.cluster)[0].overlapped
    found = []
    for sharding in SHARDINGS:
        memory = workload.memory_on(context.case, sharding, ranks)
        spent, exchanged = workload.time_on(context.case, sharding, ranks, context.cluster)
        found.append(
            StrategyPlan(
                strategy=sharding.name,
                ranks=ranks,
                memory=memory,
                fits=memory.peak <= context.usable_memory,
                obstacle=_obstacle(context.job, sharding, ranks, here=context.here),
                sent=exchanged.sent(ranks),
                time=spent,
                hours=spent.overlapped * context.steps / 3600,
                efficiency=alone / (ranks * spent.overlapped),
            )
        )
    return tuple(found)


def _obstacle(job: Job, sharding: Sharding, ranks: int, *, here: bool) -> str | None:
    """Return why training cannot use a strategy, or None. `here`: on this machine, with the installed libraries."""
    if sharding.plugin not in plugins.names("strategies"):
        return "not in this version"
    strategy = plugins.load("strategies", sharding.plugin)
    if strategy.MAX_RANKS is not None and ranks > strategy.MAX_RANKS:
        return f"runs on {strategy.MAX_RANKS} process"
    never: str | None = strategy.never.get(job.task)
    if never is None and here:
        never = strategy.refusal(job.train)
    return never


def _fastest(found: Sequence[StrategyPlan]) -> StrategyPlan | None:
    """Return the simplest (first) of the strategies that fit and are about as fast as the fastest."""
    usable = [one for one in found if one.fits and one.obstacle is None]
    least = min((one.time.overlapped for one in usable), default=0.0)
    return next((one for one in usable if one.time.overlapped <= AS_FAST * least), None)


def _at(found: Sequence[StrategyPlan]) -> StrategyPlan:
    able = [one for one in found if one.obstacle is None]
    return _fastest(found) or min(able, key=lambda one: one.memory.peak)


def _reason(best: StrategyPlan | None, found: Sequence[StrategyPlan], context: _Context) -> str:
    """Explain in a sentence or two why it is `best`, or why none fits."""
    room = f"{HEADROOM:.0%} of a rank's {size(context.memory)}"
    able = [one for one in found if one.obstacle is None]
    if best is None:
        least = min(able, key=lambda one: one.memory.peak)
        return f"No strategy fits into {room}: {least.strategy} needs least, {size(least.memory.peak)}."
    fitting = sum(one.fits for one in able)
    how = f"the fastest of {fitting} that fit, or within {AS_FAST - 1:.0%} of it and simpler,"
    if fitting == 1:
        how = "the only one that can run" if len(able) == 1 else f"the only one of {len(able)} that fits"
    said = (
        f"{best.strategy} is {how} on {best.ranks} rank{'s' * (best.ranks > 1)}: {best.time.overlapped:.3g} s a step, "
        f"and its {size(best.memory.peak)} are within {room}."
    )
    asked = [one for one in found if one.strategy.split()[0] == context.job.train.strategy]
    if not asked or best in asked:
        return said
    other = min(asked, key=lambda one: one.time.overlapped)
    slower = f"takes {other.time.overlapped / best.time.overlapped:.2f} times as long"
    why = other.obstacle or (slower if other.fits else f"needs {size(other.memory.peak)}")
    return f"{said} The job asks for {context.job.train.strategy}: {why}."


def _remedies(context: _Context, base: Path | None, table: TableSurvey, ranks: int) -> tuple[str, ...]:
    """Return changes that would make a strategy fit, the smallest of each kind, each by itself."""
    job, case = context.job, context.case
    more = (2**power for power in range(1, MOST_RANKS.bit_length()) if 2**power > ranks)
    kinds: list[Iterator[tuple[str, Workload, int]]] = [
        ((f"train.micro_batch_tokens={one.micro_batch_tokens}", one, ranks) for one in _smaller(case)),
        ((f"--processes {number}", case, number) for number in more),
    ]
    kinds.append(
        (f"train.activation_checkpointing={way}", one, ranks) for way, one in _with_more_checkpointing(case).items()
    )
    if job.model.lora is None:
        model = job.model.model_copy(update={"lora": LoraOptions()})
        adapted = survey_model(job.model_copy(update={"model": model}), base, table.spec)[1]
        kinds.append(iter([(f"model.lora={{rank: {LoraOptions().rank}}}", replace(case, parameters=adapted), ranks)]))
    found = []
    for changes in kinds:
        for name, changed, number in changes:
            fits = _simplest(context, changed, number)
            if fits is not None:
                found.append(f"{name}: {fits[0]} then needs {size(fits[1])}")
                break
    return tuple(found) or ("None of smaller micro-batches, more processes, checkpointing and LoRA is enough alone.",)


def _with_more_checkpointing(case: Workload) -> dict[str, Workload]:
    """Return the workload with each kind of activation checkpointing that keeps less than its own, the faster first."""
    selective = replace(case, setting=replace(case.setting, checkpointing=True, selective=True))
    whole = replace(case, setting=replace(case.setting, checkpointing=True, selective=False))
    if not case.setting.checkpointing:
        return {"selective": selective, "true": whole}
    return {"true": whole} if case.setting.selective else {}


def _smaller(case: Workload) -> Iterator[Workload]:
    """Yield the workload with ever smaller micro-batches, down to one row."""
    tokens = case.micro_batch_tokens // 2
    while tokens >= case.longest:
        yield replace(case, micro_batch_tokens=tokens)
        tokens //= 2


def _simplest(context: _Context, case: Workload, ranks: int) -> tuple[str, float] | None:
    """Return the simplest strategy that fits and its memory in bytes, or None."""
    for sharding in SHARDINGS:
        peak = workload.memory_on(case, sharding, ranks).peak
        if peak <= context.usable_memory and _obstacle(context.job, sharding, ranks, here=context.here) is None:
            return sharding.name, peak
    return None
