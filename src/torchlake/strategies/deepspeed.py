"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): ranks share the moments (stage 1), gradients too (2), weights too (3).

In bf16 and fp16 the model computes with 16-bit weights, on GPUs without torch's autocast, and gradients travel in 16
bits; the weights that learn are an fp32 copy, shared out with the moments. `train.deepspeed.offload_optimizer` and
`.offload_parameters` keep moments and weights in the main memory of a machine with GPUs. `train.deepspeed.config` is a
JSON file of DeepSpeed's own; what it may say is told in `_deepspeed_config.py`.

The loop stays the one of this package: AdamW, its learning rate, the scale of an fp16 loss and the cutting into
micro-batches are the job's. DeepSpeed holds the tensors and moves them. Its checkpoints are pickles and are not used:
each tensor is gathered, one at a time, and the rank that it is dealt to keeps it, so a checkpoint is like any other.

Each micro-batch's gradients are sent from stage 2 on: no rank has room for a whole gradient. Frozen weights that
a checkpoint holds are stored as they compute, which in 16 bits is rounded. No kernel of DeepSpeed's is compiled:
that would take a minute, and a compiler, at the first start on a machine.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from torchlake import optim
from torchlake.checkpoints import shards
from torchlake.checkpoints.format import OPTIMIZER
from torchlake.checkpoints.shards import Piece, Pieces, Shards
from torchlake.config.job import TrainConfig
from torchlake.distributed import Group
from torchlake.errors import ConfigError, DataError
from torchlake.strategies import _deepspeed_config

MIN_RANKS = 2
MAX_RANKS: int | None = None
never: dict[str, str] = {}

STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def refusal(train: TrainConfig) -> str | None:
    """Why it cannot run here as asked. Raises DataError, ConfigError for a DeepSpeed file that does not fit the job."""
    if find_spec("deepspeed") is None:
        return "the library 'deepspeed' is not installed: pip install 'torchlake[deepspeed]'"
    if not torch.cuda.is_available():
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(train.deepspeed, name):
                return f"train.deepspeed.{name} moves tensors from a GPU to main memory, and there is no GPU here"
        if train.precision == "fp16":
            return "DeepSpeed computes in fp16 on GPUs only, and there is none here. Take train.precision=bf16 or fp32"
    if train.compile and train.deepspeed.stage == 3:
        return (
            "train.compile and stage 3 do not go together: its hooks cut the model into pieces. Take stage 2, or fsdp"
        )
    _deepspeed_config.check(train)
    return None


def wrap(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], *, group: Group, train: TrainConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """DeepSpeed's engine around the model, and its optimizer, which steps the job's AdamW; needs a process group.

    At stage 3 the weights are shared out in main memory first: no more of them is whole on the device than computes.
    Raises ConfigError when DeepSpeed does not accept the user's file.
    """
    library = _library(group.device)
    dtype = optim.autocast_dtype(train.precision, group.device)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    config = _deepspeed_config.build(
        train, ranks=group.world_size, dtype=None if dtype is None else NAMES[dtype], hidden=hidden
    )
    # Made first: shared out, a matrix has no rows and columns any more, by which AdamW's groups are told apart.
    optimizer = make_optimizer(model)
    # DeepSpeed makes the fp32 copy from what it has rounded to 16 bits.
    exact = {each: each.detach() for each in model.parameters() if dtype is not None and each.requires_grad}
    try:
        if train.deepspeed.stage == 3:
            _share_weights(library, model, config, dtype, group.device)
        engine, zero, _, _ = library.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # pydantic's are ValueErrors
        if train.deepspeed.config is None:
            raise
        raise ConfigError(f"{train.deepspeed.config}: DeepSpeed does not accept it: {error}") from error
    engine.set_gradient_accumulation_boundary(True)
    _make_moments(zero)
    for parameter, weight in exact.items():
        _set(parameter, weight)
    return engine, cast(torch.optim.Optimizer, zero)


@contextmanager
def _without_step(engine: Any) -> Iterator[None]:
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Gradients add up: on each rank, whole (stage 1), or sent and shared out (stages 2 and 3)."""
    return _without_step(module)


def backward(module: nn.Module, loss: torch.Tensor) -> None:
    """Add the gradients of `loss`."""
    cast(Any, module).backward(loss)


def clip_norm(module: nn.Module, max_norm: float, scale: float) -> float:
    """Note `scale` and `max_norm`, by which DeepSpeed divides and clips the gradients as it steps; their norm between
    the two, equal on all ranks; infinite where it is not finite.
    """
    zero = cast(Any, module).optimizer
    zero.clip_grad = 0.0 if max_norm == math.inf else max_norm
    if scale != 1:
        zero.override_loss_scale(scale)
    groups = zero._get_norm_groups() if _shares_weights(zero) else [zero.scaled_global_norm()]
    # What is not finite has the norm -1 in one of DeepSpeed's stages.
    norms = [float(norm) if norm >= 0 else math.inf for norm in groups]
    return math.hypot(*norms) / scale


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step; then the gradients are gone."""
    cast(Any, module).step()
    _unscale(optimizer)


def discard_gradients(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The gradients are gone: what DeepSpeed does itself where it finds an overflow."""
    zero: Any = optimizer
    zero.zero_grad(set_to_none=True)
    if _shares_weights(zero):
        zero._overflow_clean_up(zero.loss_scale)
    else:
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
    _unscale(optimizer)


def model_shard(model: nn.Module, wanted: Collection[str], group: Group) -> Pieces:
    """Whole tensors, dealt out between the ranks; each is gathered in fp32 and dropped again where it is not kept."""
    from deepspeed.utils import safe_get_full_fp32_param

    held = {name: each for name, each in _untied(model).items() if name in wanted}

    def weight(name: str) -> torch.Tensor:
        tensor = held[name]
        if not isinstance(tensor, nn.Parameter):
            return tensor
        if tensor.requires_grad:
            return cast(torch.Tensor, safe_get_full_fp32_param(tensor))
        return _frozen(tensor)

    return _gather_shard({name: _like(each) for name, each in held.items()}, weight, group)


def optimizer_shard(model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str], group: Group) -> Pieces:
    """The moments, dealt out in the same way."""
    from deepspeed.utils import safe_get_full_optimizer_state

    held = _untied(model)
    steps = next(iter(cast(Any, optimizer).state.values()))[STEP]

    def moment(key: str) -> torch.Tensor:
        name, _, field = key.rpartition("|")
        if field == STEP:
            return cast(torch.Tensor, steps)
        return cast(torch.Tensor, safe_get_full_optimizer_state(held[name], field))

    like = {f"{name}|{field}": _like(held[name]) for name in names for field in MOMENTS}
    like |= {f"{name}|{STEP}": torch.empty((), device="meta") for name in names}
    return _gather_shard(like, moment, group)


def restore(optimizer: torch.optim.Optimizer, names: list[str], stored: Shards) -> None:
    """Put the moments back, on this rank its part of them. Raises DataError for another model's."""
    if not stored.shapes:
        return
    zero: Any = optimizer
    parameters = {name: each for each, name in zero.param_names.items()}
    unknown = sorted({key.rpartition("|")[0] for key in stored.shapes} - set(names))
    if unknown:
        raise DataError(f"{OPTIMIZER}*.safetensors: the model has no parameter {unknown[0]!r}")
    for state in zero.state.values():  # of several parameters each, which are stepped together
        state[STEP].copy_(stored.read(f"{names[0]}|{STEP}"))
    for name in names:
        for field in MOMENTS:
            _set(parameters[name], stored.read(f"{name}|{field}"), field)


def _make_moments(zero: Any) -> None:
    """Make what AdamW would make at its first step: DeepSpeed finds a parameter's part of it only when all is there."""
    stage3 = _shares_weights(zero)
    for flat in zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups:
        steps = torch.zeros((), dtype=torch.float32, device=flat.device)
        zero.state[flat] = {STEP: steps, **{field: torch.zeros_like(flat) for field in MOMENTS}}
    if not stage3:
        zero._lazy_init_hp_params_optimizer_state()


def _library(device: torch.device) -> ModuleType:
    """DeepSpeed, on the device and the process group that there are, silent but for warnings.

    It speaks on stdout otherwise, imports MLflow where that is installed, and on CPUs compiles a way through shared
    memory that training does not take.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.parent, logger.propagate = logging.getLogger("torchlake"), True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls torch by names that torch 2.13 has replaced.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed.init_distributed()
    return cast(ModuleType, deepspeed)


def _share_weights(
    library: ModuleType, model: nn.Module, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Move the weights to the device one after the other, each leaving there what this rank holds of it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    library.zero.Init(module=model, config_dict_or_path=config, dtype=dtype or torch.float32)


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by name; tied weights, which are stored once, under the first of theirs."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    first = {id(each): name for name, each in reversed(state.items())}
    return {name: each for name, each in state.items() if first[id(each)] == name}


def _gather_shard(like: dict[str, torch.Tensor], gather: Callable[[str], torch.Tensor], group: Group) -> Pieces:
    """Of the tensors that `like` describes those that fall to this rank; all ranks gather all of them, in one order."""
    mine = shards.local_shard(like, rank=group.rank, world_size=group.world_size)
    pieces = {}
    for name in like:
        tensor = gather(name)
        if name in mine:
            pieces[name] = Piece(tensor.detach().to("cpu", copy=True), 0, tuple(tensor.shape))
    return pieces


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole shape, without memory."""
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), device="meta")


def _frozen(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter that does not learn, whole, in fp32."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        whole: torch.Tensor = parameter.detach().to(torch.float32, copy=True)
    return whole


def _set(parameter: nn.Parameter, value: torch.Tensor, field: str | None = None) -> None:
    """Put into the fp32 copy of a parameter, or into one of its moments, what this rank holds of `value`."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if field is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, field)
        return
    # The local functions, because the others cut the last rank's part without the zeros that fill it up.
    held = cast(Any, parameter).ds_tensor.numel()
    local = torch.zeros(held, dtype=torch.float32)
    part = value.flatten()[held * torch.distributed.get_rank() :][:held]
    local[: len(part)] = part
    if field is None:
        utils.safe_set_local_fp32_param(parameter, local)
    else:
        utils.safe_set_local_optimizer_state(parameter, local, field)


def _shares_weights(zero: Any) -> bool:
    """Whether this is the optimizer of stage 3."""
    return hasattr(zero, "fp16_groups")


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Forget the scale of the step's loss: the loop applies it, and DeepSpeed would do so again."""
    zero: Any = optimizer
    if zero.custom_loss_scaler:
        zero.override_loss_scale(1.0)
