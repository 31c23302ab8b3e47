"""Make the state that a training starts from.

    rank 0        base model -> tested on two rows -> checkpoint's weights ┐
                                     | Traits                              ├ strategy.wrap -> optimizer = TrainState
    other ranks   empty model ------------------------------------------> ┘

Where a strategy lets every rank load (`single`, and `ddp` on CPUs), the others load the same weights as rank 0.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlake import atomic_io, distributed, plugins
from torchlake.checkpoints import format
from torchlake.checkpoints.store import STATE
from torchlake.config.job import Job
from torchlake.config.sections.train import TrainConfig
from torchlake.data.features import Features, take
from torchlake.distributed import Group
from torchlake.errors import UsageError, ran_out_of_memory
from torchlake.models import probes
from torchlake.models.adapters import quantized
from torchlake.models.folders import base_folder
from torchlake.models.load import TaskSpec
from torchlake.optim.depth import freeze, layer_scales, layers
from torchlake.optim.noise import EmbeddingNoise
from torchlake.optim.optimizers import make_optimizer, trainable_names
from torchlake.optim.precision import find_precision
from torchlake.runs.speed import measure
from torchlake.tasks import Task
from torchlake.tasks._batch_norm import SharedBatchNorm
from torchlake.training.model import kernels, lora
from torchlake.training.model.batches import BatchMaker
from torchlake.training.model.traits import Traits, find_traits, stores_all
from torchlake.training.rows import RankSettings, Rows
from torchlake.training.state import TrainProgress, TrainState

log = logging.getLogger(__name__)

MICRO_BATCH = "micro_batch.json"


def make_train_state(settings: RankSettings, group: Group, training: Rows) -> tuple[TrainState, TrainProgress]:
    """Load the model from the base or the checkpoint, wrap it with the strategy, and make its optimizer.

    The model is first tried on a short and a long text or, if the task does not read texts, on two `training` rows.
    """
    job, spec = settings.job, settings.spec
    task, strategy = plugins.load("tasks", spec.task), plugins.load("strategies", settings.strategy)
    loads = group.rank == 0 or not strategy.receives(job.train, group)
    saved = None if settings.checkpoint is None else Path(settings.checkpoint)
    base, model = _build(job, spec, task, empty=not loads, draw=loads and saved is None)
    processor = task.load_processor(base_folder(job.model.base), spec, scoring=False)
    made = probes.features(task, processor, spec) or _first_rows(training)
    traits = None
    if group.rank == 0:
        traits = asdict(find_traits(model, base, task, made, processor, job, spec, group.device))
    shared = Traits(**distributed.from_rank_0(group, traits, "waiting for rank 0 to load the model"))
    probes.freeze(model, shared.unreached)
    scales = lora.rate_scales(model, job.model.lora, layer_scales(model, job.train.layer_decay))
    names = trainable_names(model, job.train, scales)
    stored = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in shared.stored}
    if loads and saved is not None:
        _load_trained(saved, model, stored, job)
    train = job.train.model_copy(update={"precision": shared.precision})
    precision = find_precision(train.precision, group.device)
    config = getattr(base, "config", None)
    dtype, per_token = precision.dtype or torch.float32, task.packs or task.pairs
    speed = measure(layers(model), config, per_token=per_token, device=group.device, dtype=dtype)
    _set_up(model, base, shared, job.model_copy(update={"train": train}), spec, task, settings.strategy, group)
    model.train()  # transformers loads models in evaluation mode, and only rank 0 has tried this one
    module, optimizer = _wrap(strategy, model, group, train, scales)
    progress = TrainProgress()
    if saved is not None:
        progress = TrainProgress(**atomic_io.read_json(saved / STATE)["position"])
        with format.open_tensors(saved, format.OPTIMIZER) as tensors:
            strategy.restore(optimizer, names, tensors)
        log.info("continuing after step %d from %s", progress.step, saved)
    limit_file = Path(settings.run) / MICRO_BATCH
    filler = dict(probes.batches(task, made, processor, spec)[0])
    common: Any = {"task": task, "spec": spec, "processor": processor, "chunked": shared.after_head is not None}
    return TrainState(
        **common,
        group=group,
        strategy=strategy,
        model=model,
        module=module,
        config=config,
        optimizer=optimizer,
        names=names,
        stored=stored,
        precision=precision,
        speed=speed,
        batch_size=train.batch_size,
        requested_tokens=train.micro_batch_tokens,
        micro_batch_tokens=_tokens_that_fit(limit_file, train.micro_batch_tokens),
        limit_file=limit_file,
        batches=BatchMaker(**common, filler=filler, isolates=shared.isolates, one_line=job.model.attention == "flash"),
        noise=None if train.neftune is None else EmbeddingNoise(base, alpha=train.neftune, seed=train.seed),
        equal_lengths=shared.equal_lengths,
    ), progress


def _load_trained(saved: Path, model: nn.Module, stored: Mapping[str, Any], job: Job) -> None:
    """Load the tensors that a checkpoint has."""
    format.load_into(saved, {name: tensor for name, tensor in model.state_dict().items() if name in stored})
    if job.model.lora is not None and job.model.lora.init == "pissa":
        lora.take_out(model)


def _first_rows(training: Rows) -> Features:
    """Return the first two training rows, or the first twice."""
    rows, table = training.numbers[[0, min(1, len(training.numbers) - 1)]], training.table
    lengths = table.lengths_of(rows)
    arrays = {name: take(array, rows) for name, array in table.arrays.items()}
    return Features(arrays=arrays, lengths=lengths, cut=np.zeros_like(lengths))


def _build(job: Job, spec: TaskSpec, task: Task, *, empty: bool, draw: bool) -> tuple[Any, nn.Module]:
    """Return the base model, and the model that is trained: the same, or with adapters; `empty`: on the meta device.

    `draw`: the first values of adapters are drawn, else they are loaded or received.
    """
    torch.manual_seed(job.train.seed)
    base = task.base_model(base_folder(job.model.base), spec, empty=empty)
    for layer in base.modules():
        if isinstance(layer, SharedBatchNorm):
            layer.local = job.train.batch_norm == "local"
    freeze(base, job.model.freeze)
    if job.model.lora is None:
        return base, base
    if job.model.quantize is not None:
        quantized.quantize(base, job.model.quantize)
    with torch.device("meta" if empty else "cpu"):
        return base, lora.add_adapters(base, job.model.lora, draw=draw)


def _set_up(
    model: nn.Module,
    base: Any,
    traits: Traits,
    job: Job,
    spec: TaskSpec,
    task: Any,
    strategy: str,
    group: Group,
) -> None:
    """Set how the model computes, after rank 0 has computed with it on the CPU in fp32."""
    train = job.train
    precision = find_precision(train.precision, group.device)
    if traits.after_head is not None:
        task.chunk_loss(base, traits.after_head, compiled=train.compile)
    if precision.weights and not stores_all(job):
        kernels.convert_frozen(model, precision.dtype)
    if traits.first_token_part is not None:
        kernels.keep_first_token(model, traits.first_token_part)
    if job.model.quantize is not None and strategy == "fsdp":
        quantized.store_as(model, precision.dtype or torch.float32)
    kernels.recompute_activations(base, train.activation_checkpointing)
    kernels.set_attention(base, job.model.attention, device=group.device, dtype=precision.dtype)
    if task.pairs:
        kernels.drop_nothing(model)
    if train.compile:
        kernels.compile_layers(base, static=spec.problem == "next_token")


def _wrap(
    strategy: ModuleType, model: nn.Module, group: Group, train: TrainConfig, scales: Mapping[str, float]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped model and its optimizer. Raises UsageError if the model does not fit into the device's
    memory."""
    try:
        wrapped: tuple[nn.Module, torch.optim.Optimizer] = strategy.wrap(
            model, lambda sharded: make_optimizer(sharded, train, scales), group=group, train=train
        )
        return wrapped
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise UsageError(
            f"the model alone does not fit into the memory of {group.device}. Shard it (train.strategy=fsdp, or "
            "deepspeed with stage 3), train part of it (model.lora), or use a smaller one."
        ) from error


def _tokens_that_fit(limit_file: Path, requested_tokens: int) -> int:
    """Return `requested_tokens`, or what an earlier attempt with the same request found to fit."""
    noted = atomic_io.read_json(limit_file) if limit_file.exists() else {}
    return min(requested_tokens, int(noted["tokens"])) if noted.get("asked") == requested_tokens else requested_tokens
