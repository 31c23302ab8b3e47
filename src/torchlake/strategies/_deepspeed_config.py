"""DeepSpeed's configuration: the user's JSON (`train.deepspeed.config`) combined with the job's settings.

Files for the Hugging Face Trainer work unchanged: "auto" means the job's value, or DeepSpeed's default. A value that
contradicts the job is an error that names the job's field. Other settings (buckets, overlap, the communication logger,
the profiler, monitors) are passed through. The keys: https://www.deepspeed.ai/docs/config-json/
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError
from torchlake.optim.optimizers import BETAS, MOMENTUM

AUTO = "auto"
EPS = 1e-8  # torch's default, which the job's AdamW uses
OPTIMIZERS = {"adamw": ("adamw", "adam"), "sgd": ("sgd",), "lion": ("lion",)}
"The job's optimizers by DeepSpeed's names. DeepSpeed's Adam is AdamW by default."
SCHEDULERS = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR", "constant": "WarmupLR"}
"The job's schedules by DeepSpeed's names; DeepSpeed has no others."
# They would change the meaning of the job's fields.
UNSUPPORTED = {
    "amp": "the precision is set by train.precision",
    "torch_autocast": "the precision is set by train.precision",
    "autotuning": "it restarts the script it runs in; measure with separate jobs instead",
    "elasticity": "the batch is train.batch_size on any number of processes",
    "curriculum_learning": "the order of rows is the job's (train.seed)",
    "data_efficiency": "the order of rows is the job's (train.seed)",
    "compression_training": "it trains a different model",
    "progressive_layer_drop": "it trains a different model",
    "tensor_parallel": "ranks share rows, not the inside of a layer",
    "sequence_parallel_size": "ranks share rows, not the inside of a layer",
    "data_parallel_size": "every process is a rank (engine.processes)",
    "hybrid_engine": "it generates text while it trains",
    "zero_force_ds_cpu_optimizer": "the optimizer is the job's (train.optimizer)",
}
SCALING = ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale")
"Loss scaling for fp16, which the training loop does itself: accepted and ignored."


def build(train: TrainConfig, *, ranks: int, dtype: str | None, hidden: int | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a job on `ranks` ranks that computes in `dtype` ("bf16", "fp16", None:
    fp32).

    `hidden` is the model's width, for the sizes of "auto" buckets. Raises the errors of `check`.
    """
    options = train.deepspeed
    given = check(train)
    zero = _without_auto(_sized(given.get("zero_optimization", {}), hidden))
    zero["stage"] = options.stage
    places = {"offload_optimizer": options.offload_optimizer, "offload_param": options.offload_parameters}
    for name, wanted in places.items():
        if wanted:
            zero[name] = {"pin_memory": True, **zero.get(name, {}), "device": "cpu"}
    # The loop counts and weights micro-batches: DeepSpeed sees each as a batch.
    counts = {"train_batch_size": ranks, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    decided = ("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", *counts)
    passed = _without_auto({key: value for key, value in given.items() if key not in decided})
    # The job's optimizer, also in main memory: DeepSpeed's own one needs a compiler.
    allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": None}
    config = {**allowed, **passed, **counts, "gradient_clipping": train.clip_norm or 0.0, "zero_optimization": zero}
    if dtype is not None:
        # The loop scales the loss. bf16 gradients are summed in fp32, except at stage 1, where DeepSpeed would switch
        # to an optimizer that has no norm before the step.
        config[dtype] = {"enabled": True, **({"loss_scale": 1.0} if dtype == "fp16" else {})}
        sums = "bf16" if dtype == "bf16" and options.stage == 1 else "fp32"
        config["data_types"] = {"grad_accum_dtype": sums, **config.get("data_types", {})}
    return config


def check(train: TrainConfig) -> dict[str, Any]:
    """Return the user's JSON, empty if the job has none. Raises DataError for a file that cannot be read, ConfigError
    listing every key that contradicts the job.
    """
    if train.deepspeed.config is None:
        return {}
    path = Path(train.deepspeed.config).expanduser()
    given = atomic_io.read_json(path)
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: DeepSpeed's configuration must be a JSON object, not a {type(given).__name__}")
    problems = list(_problems(given, train))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return given


def _problems(given: dict[str, Any], train: TrainConfig) -> Iterator[str]:
    """Yield a message for each key that contradicts the job."""
    sections = ("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", "data_types")
    for key in sections:
        if not isinstance(given.get(key, {}), dict):
            yield f"{key}: must be a JSON object, not {given[key]!r}"
            return
    for key, why in UNSUPPORTED.items():
        if _enabled(given.get(key)):
            yield f"{key}: cannot be used here, {why}. Delete it."
    yield from _conflict(given, "train_batch_size", train.batch_size, "train.batch_size")
    yield from _conflict(given, "gradient_clipping", train.clip_norm or 0.0, "train.clip_norm")
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if given.get(key, AUTO) != AUTO:
            yield (
                f"{key}={given[key]!r}: micro-batches are cut by their tokens, train.micro_batch_tokens="
                f'{train.micro_batch_tokens}. Write "auto", or delete it.'
            )
    yield from _conflict(given, "gradient_allreduce_op", "mean", None)
    yield from _conflict(given, "managed_gradient_accumulation", True, None)
    yield from _optimizer(given.get("optimizer", {}), train)
    yield from _scheduler(given.get("scheduler", {}), train)
    yield from _precision(given, train)
    yield from _zero(given.get("zero_optimization", {}), train)


def _optimizer(section: dict[str, Any], train: TrainConfig) -> Iterator[str]:
    kind, parameters = section.get("type", AUTO), section.get("params", {})
    names = OPTIMIZERS[train.optimizer]
    if str(kind).lower() not in (*names, AUTO) or parameters.get("adam_w_mode", True) is False:
        yield f"optimizer.type={kind!r}: the job has train.optimizer={train.optimizer}. Delete the section."
        return
    yield from _conflict(parameters, "lr", train.learning_rate, "train.learning_rate", "optimizer.params.")
    yield from _conflict(parameters, "weight_decay", train.weight_decay, "train.weight_decay", "optimizer.params.")
    betas = train.betas or BETAS.get(train.optimizer)
    if betas is not None:
        yield from _conflict(parameters, "betas", list(betas), "train.betas", "optimizer.params.")
    else:
        momentum = MOMENTUM if train.momentum is None else train.momentum
        yield from _conflict(parameters, "momentum", momentum, "train.momentum", "optimizer.params.")
    yield from _conflict(parameters, "eps", EPS, None, "optimizer.params.")


def _scheduler(section: dict[str, Any], train: TrainConfig) -> Iterator[str]:
    kind = section.get("type", AUTO)
    name = SCHEDULERS.get(train.schedule)
    if kind not in (AUTO, name):
        called = "has not" if name is None else f"calls {name}"
        yield (
            f"scheduler.type={kind!r}: the job has train.schedule={train.schedule}, which DeepSpeed {called}. "
            "Change one of them, or delete the section."
        )
    for key, value in section.get("params", {}).items():
        if value != AUTO:
            yield (
                f"scheduler.params.{key}={value!r}: the learning rate follows train.learning_rate, train.warmup and "
                'train.schedule. Write "auto", or delete the section.'
            )


def _precision(given: dict[str, Any], train: TrainConfig) -> Iterator[str]:
    """Yield conflicts with train.precision, a fixed loss scale, and gradient dtypes that could not be clipped."""
    wanted = "bf16" if train.precision == "bf16_weights" else train.precision
    for key, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        enabled = given.get(key, {}).get("enabled", AUTO)
        # Only the ranks know whether precision "auto" means bf16, so an explicit value here conflicts with it.
        undecided = train.precision == "auto" and precision == "bf16"
        if enabled != AUTO and (undecided or enabled is not (wanted == precision)):
            yield (
                f"{key}.enabled={enabled!r}: the job has train.precision={train.precision}. Set train.precision to "
                f'{precision if enabled is True else "fp32"}, or write "auto".'
            )
        for name, value in given.get(key, {}).items():
            if name not in ("enabled", *SCALING) and value not in (AUTO, None, False):
                yield f"{key}.{name}={value!r}: how weights, moments and inputs are kept cannot be chosen. Delete it."
    scaling = given.get("fp16", {})
    if train.precision == "fp16" and scaling.get("loss_scale", AUTO) not in (AUTO, 0):
        yield (f'fp16.loss_scale={scaling["loss_scale"]!r}: the loss scale is adjusted dynamically. Write 0 or "auto".')
    sums = given.get("data_types", {}).get("grad_accum_dtype", AUTO)
    if (
        train.deepspeed.stage == 1
        and sums not in (AUTO, None, "bf16")
        and train.precision in ("auto", "bf16_weights", "bf16")
    ):
        yield (
            f"data_types.grad_accum_dtype={sums!r}: at stage 1 gradients of bf16 add up in bf16. Use "
            "train.deepspeed.stage=2, or delete it."
        )


def _zero(section: dict[str, Any], train: TrainConfig) -> Iterator[str]:
    options = train.deepspeed
    yield from _conflict(section, "stage", options.stage, "train.deepspeed.stage", "zero_optimization.")
    if section.get("compute_grad_norm", True) is False:
        yield "zero_optimization.compute_grad_norm=false: the norm decides whether a step is applied. Delete it."
    if _enabled(section.get("zenflow")):
        yield "zero_optimization.zenflow: is a different optimizer than train.optimizer. Delete it."
    for key, field, wanted in (
        ("offload_optimizer", "offload_optimizer", options.offload_optimizer),
        ("offload_param", "offload_parameters", options.offload_parameters),
    ):
        inner = section.get(key)
        inner = inner if isinstance(inner, dict) else {}
        device = inner.get("device", AUTO)
        yield from _conflict(inner, "ratio", 1.0, None, f"zero_optimization.{key}.")
        yield from _conflict(inner, "super_offload", False, None, f"zero_optimization.{key}.")
        if device == "nvme":
            yield f"zero_optimization.{key}.device='nvme': main memory (cpu) is the only place to offload to"
        elif device != AUTO and (device == "cpu") is not wanted:
            yield (
                f"zero_optimization.{key}.device={device!r}: the job has train.deepspeed.{field}="
                f"{str(wanted).lower()}. Change one of them."
            )


def _conflict(given: dict[str, Any], key: str, wanted: Any, field: str | None, prefix: str = "") -> Iterator[str]:
    """Yield a message if the key has another value; `field` None: no field of the job can change it."""
    value = given.get(key, AUTO)
    if value not in (AUTO, wanted):
        job = f"{field}={wanted!r}. Change one of them" if field else f"{wanted!r}, always. Delete it"
        yield f'{prefix}{key}={value!r}: the job has {job}, or write "auto".'


def _enabled(section: Any) -> bool:
    """Return whether a section is present and not disabled."""
    return section not in (None, False, AUTO) and not (
        isinstance(section, dict) and section.get("enabled", True) in (False, AUTO)
    )


def _sized(zero: dict[str, Any], hidden: int | None) -> dict[str, Any]:
    """Replace "auto" sizes by multiples of the model's width, as the Hugging Face Trainer does."""
    if hidden is None:
        return zero
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    return {key: sizes.get(key, value) if value == AUTO else value for key, value in zero.items()}


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """Return `section` without "auto" values, at any depth, so that DeepSpeed uses its defaults."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != AUTO
    }
