"""DeepSpeed's ZeRO (Rajbhandari et al. 2020) shards the moments (stage 1), gradients too (2), weights too (3).

In bf16_weights, bf16 and fp16 the model computes with 16-bit weights, on GPUs without torch's autocast, and gradients
are reduced in 16 bits; the trained weights are an fp32 copy, sharded like the moments.
`train.deepspeed.offload_optimizer` and `.offload_parameters` keep moments and weights in main memory, on machines with
GPUs. `train.deepspeed.config` is a DeepSpeed JSON file; `_deepspeed_config.py` describes what it may contain.

The training loop stays torchlake's: optimizer, learning rate, fp16 loss scale and micro-batches come from the job.
DeepSpeed's checkpoints are pickles and are not used: tensors are gathered one at a time, and one rank keeps each, so
checkpoints have the usual format.

From stage 2 on, each micro-batch's gradients are reduced, because no rank has room for a whole gradient. Frozen weights
in a checkpoint are stored as they compute, in 16 bits rounded. No DeepSpeed kernel is compiled: that would need a
compiler and a minute at the first start on a machine.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from torchlake.checkpoints.format import OPTIMIZER
from torchlake.checkpoints.shards import Pieces, Shards
from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.errors import ConfigError, DataError, pip_install
from torchlake.optim.precision import find_precision
from torchlake.strategies import _deepspeed_config, _native, _weights
from torchlake.strategies._deepspeed_tensors import put_part, untied, whole_frozen, whole_shape

MAX_RANKS: int | None = None
never: dict[str, str] = {}
reduces_in_main_memory, model_ranks = _native.reduces_in_main_memory, _native.model_ranks

STEP = "step"
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "lion": ("exp_avg",)}
"""What optimizers keep for each weight, if they work on a flat part of all weights. adafactor needs whole matrices,
adamw_8bit the blocks of one tensor."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def refusal(train: TrainConfig) -> str | None:
    """Return why it cannot run here. Raises DataError and ConfigError for a DeepSpeed file that does not fit the
    job."""
    if find_spec("deepspeed") is None:
        return f"the library 'deepspeed' is not installed: {pip_install('torchlake[deepspeed]')}"
    if not torch.cuda.is_available():
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(train.deepspeed, name):
                return f"train.deepspeed.{name} moves tensors from a GPU to main memory, and there is no GPU here"
        if train.precision == "fp16":
            return "DeepSpeed computes in fp16 on GPUs only, and there is none here. Use train.precision=bf16 or fp32"
    if train.optimizer not in MOMENTS:
        return f"train.optimizer={train.optimizer} cannot step on parts of tensors. Use adamw, lion or sgd"
    if train.momentum == 0:
        return "train.momentum=0: DeepSpeed needs an optimizer with a state"
    if train.ema is not None:
        return "train.ema: DeepSpeed does not support averaged weights. Use fsdp or ddp"
    if train.compile and train.deepspeed.stage == 3:
        return "train.compile and stage 3 cannot be combined: its hooks split the compiled graph. Use stage 2, or fsdp"
    _deepspeed_config.check(train)
    return None


def receives(train: TrainConfig, group: Group) -> bool:
    """Return whether it is stage 3, where DeepSpeed shards what rank 0 broadcasts; else each rank sets its fp32
    weights."""
    return train.deepspeed.stage == 3


def wrap(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    group: Group,
    train: TrainConfig,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return DeepSpeed's engine around the model, and its optimizer, which steps the job's; needs a process group.

    At stage 3, rank 0's weights are sharded one by one, so at most the computing layers are whole on the device.
    Raises ConfigError if DeepSpeed rejects the user's file.
    """
    library = _library(group.device)
    dtype = find_precision(train.precision, group.device).dtype
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    config = _deepspeed_config.build(
        train, ranks=group.world_size, dtype=None if dtype is None else NAMES[dtype], hidden=hidden
    )
    # DeepSpeed would make the fp32 copy from weights rounded to 16 bits.
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    exact = {} if dtype is None else {name: each.detach() for name, each in learning.items()}
    sharded = receives(train, group)
    if sharded:
        _reserve_weights(model, dtype, group)
    # Before sharding, which flattens matrices: the groups depend on the number of dimensions.
    optimizer = make_optimizer(model)
    try:
        if sharded:
            library.zero.Init(module=model, config_dict_or_path=config, dtype=dtype or torch.float32)
        engine, zero, _, _ = library.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # pydantic's are ValueErrors
        if train.deepspeed.config is None:
            raise
        raise ConfigError(f"{train.deepspeed.config}: DeepSpeed does not accept it: {error}") from error
    engine.set_gradient_accumulation_boundary(True)
    _make_moments(zero, MOMENTS[train.optimizer], counted=train.optimizer == "adamw")
    parameters = dict(model.named_parameters())
    for name, weight in exact.items():
        put_part(parameters[name], _weights.sent(weight, group) if sharded else weight)
    return engine, cast(torch.optim.Optimizer, zero)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients: on each rank, whole (stage 1), or reduced and sharded (stages 2 and 3)."""
    engine = cast(Any, module)
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


def backward(module: nn.Module, loss: torch.Tensor) -> None:
    """Add the gradients of `loss`."""
    cast(Any, module).backward(loss)


def clip_norm(module: nn.Module, max_norm: float, scale: float) -> torch.Tensor:
    """Set `scale` and `max_norm`, by which DeepSpeed divides and clips the gradients in its step.

    Return their norm () before clipping, equal on all ranks; infinite if not finite. Waits for the device.
    """
    zero = cast(Any, module).optimizer
    zero.clip_grad = 0.0 if max_norm == math.inf else max_norm
    if scale != 1:
        zero.override_loss_scale(scale)
    groups = zero._get_norm_groups() if _is_stage3(zero) else [zero.scaled_global_norm()]
    # One of DeepSpeed's stages reports a non-finite norm as -1.
    norms = [float(norm) if norm >= 0 else math.inf for norm in groups]
    return torch.tensor(math.hypot(*norms) / scale, dtype=torch.float64)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Take one optimizer step if `finite`, and clear the gradients. Waits for the device."""
    if not finite.item():
        discard_gradients(module, optimizer)
        return
    cast(Any, module).step()
    _unscale(optimizer)


def discard_gradients(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clear the gradients, as DeepSpeed does after an overflow."""
    zero: Any = optimizer
    zero.zero_grad(set_to_none=True)
    if _is_stage3(zero):
        zero._overflow_clean_up(zero.loss_scale)
    else:
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
    _unscale(optimizer)


def model_shard(model: nn.Module, wanted: Collection[str], group: Group) -> Pieces:
    """Return whole tensors, divided among the ranks; each is gathered in fp32, and freed on the ranks that do not store
    it."""
    from deepspeed.utils import safe_get_full_fp32_param

    held = {name: each for name, each in untied(model).items() if name in wanted}

    def weight(name: str) -> torch.Tensor:
        tensor = held[name]
        if not isinstance(tensor, nn.Parameter):
            return tensor
        if tensor.requires_grad:
            return cast(torch.Tensor, safe_get_full_fp32_param(tensor))
        return whole_frozen(tensor)

    return _native.gathered_shard({name: whole_shape(each) for name, each in held.items()}, weight, group)


def optimizer_shard(model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str], group: Group) -> Pieces:
    """Return the moments, divided in the same way."""
    from deepspeed.utils import safe_get_full_optimizer_state

    held = untied(model)
    some: dict[str, torch.Tensor] = next(iter(cast(Any, optimizer).state.values()))

    def moment(key: str) -> torch.Tensor:
        name, _, field = key.rpartition("|")
        if field == STEP:
            return some[STEP]
        return cast(torch.Tensor, safe_get_full_optimizer_state(held[name], field))

    like = {f"{name}|{field}": whole_shape(held[name]) for name in names for field in some if field != STEP}
    if STEP in some:
        like |= {f"{name}|{STEP}": torch.empty((), device="meta") for name in names}
    return _native.gathered_shard(like, moment, group)


def restore(optimizer: torch.optim.Optimizer, names: list[str], stored: Shards) -> None:
    """Load the moments, this rank's part of them. Raises DataError for the moments of another model."""
    if not stored.shapes:
        return
    zero: Any = optimizer
    parameters = {name: each for each, name in zero.param_names.items()}
    unknown = sorted({key.rpartition("|")[0] for key in stored.shapes} - set(names))
    if unknown:
        raise DataError(f"{OPTIMIZER}*.safetensors: the model has no parameter {unknown[0]!r}")
    states = list(zero.state.values())  # each covers several parameters
    for state in states:
        if STEP in state:
            state[STEP].copy_(stored.read(f"{names[0]}|{STEP}"))
    for name in names:
        for field in (field for field in states[0] if field != STEP):
            put_part(parameters[name], stored.read(f"{name}|{field}"), field)


def _make_moments(zero: Any, fields: Collection[str], *, counted: bool) -> None:
    """Create the optimizer's state before its first step: DeepSpeed's accessors need all of it.

    `counted`: include a count of the steps.
    """
    stage3 = _is_stage3(zero)
    for flat in zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups:
        steps = {STEP: torch.zeros((), dtype=torch.float32, device=flat.device)} if counted else {}
        zero.state[flat] = {**steps, **{field: torch.zeros_like(flat) for field in fields}}
    if not stage3:
        zero._lazy_init_hp_params_optimizer_state()


def _library(device: torch.device) -> ModuleType:
    """Import DeepSpeed, on the existing device and process group, logging only warnings.

    By default it writes to stdout, imports MLflow if installed, and compiles a shared-memory extension on CPUs that
    training does not use.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("LOCAL_RANK", "0")  # a rank alone may lack it
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.parent, logger.propagate = logging.getLogger("torchlake"), True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It uses names that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed.init_distributed()
    return cast(ModuleType, deepspeed)


def _reserve_weights(model: nn.Module, dtype: torch.dtype | None, group: Group) -> None:
    """Prepare all ranks' parameters, in the dtype that computes, for `zero.Init`: it broadcasts rank 0's one by one,
    and each rank frees all but its shard before the next.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    _weights.reserve(model, group)


def _is_stage3(zero: Any) -> bool:
    """Return whether this is the optimizer of stage 3."""
    return hasattr(zero, "fp16_groups")


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Reset the loss scale after the step: the loop applies it, and DeepSpeed would apply it again."""
    zero: Any = optimizer
    if zero.custom_loss_scaler:
        zero.override_loss_scale(1.0)
