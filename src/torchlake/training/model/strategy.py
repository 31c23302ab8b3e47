"""The strategy of a run: chosen by the number of ranks, and refused before the ranks start if it cannot run the job."""

import logging
from pathlib import Path

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.sections.train import TrainConfig
from torchlake.engines import ProcessRange, process_bounds
from torchlake.errors import UsageError
from torchlake.models.config import load_config, tensor_parallel_refusal
from torchlake.models.load import check_folder

log = logging.getLogger(__name__)


def check_strategy(job: Job, processes: ProcessRange) -> None:
    """Raise UsageError when the strategy cannot run the fewest or the most ranks; this may import torch.

    Options that have no effect are logged.
    """
    for number in process_bounds(processes):
        choose_strategy(job, number)
    _warn_of_unused(job.train)


def choose_strategy(job: Job, processes: int) -> str:
    """Return the strategy's name, "auto" resolved. Raises UsageError if it cannot run the task or that number of
    ranks."""
    name = job.train.strategy
    if name == "auto":
        return "single" if processes == 1 else "ddp"
    strategy = plugins.load("strategies", name)
    if strategy.MAX_RANKS is not None and processes > strategy.MAX_RANKS:
        raise UsageError(
            f"train.strategy {name!r} runs on {strategy.MAX_RANKS} process, and {processes} were requested. "
            "Use strategy auto or ddp, or engine.processes=1."
        )
    if processes % strategy.model_ranks(job.train):
        raise UsageError(
            f"train.fsdp.tensor_parallel={job.train.fsdp.tensor_parallel}: {processes} ranks cannot be divided into "
            "groups of that size. Choose a divisor of engine.processes."
        )
    reason = strategy.refusal(job.train)
    if reason is not None:
        raise UsageError(f"train.strategy {name!r} cannot run here: {reason}.")
    if job.task in strategy.never:
        raise UsageError(f"train.strategy {name!r} cannot train {job.model.task}: {strategy.never[job.task]}.")
    return name


def _warn_of_unused(train: TrainConfig) -> None:
    """Log the options of torchlake's other strategies, which this one does not read."""
    if train.strategy not in ("auto", "single", "ddp", "fsdp", "deepspeed"):
        return  # a strategy of the user's, which may read any of them
    for name, options in {"ddp": train.ddp, "fsdp": train.fsdp, "deepspeed": train.deepspeed}.items():
        used = train.strategy == name or (name, train.strategy) == ("ddp", "auto")
        for key in [] if used else options.model_dump(exclude_defaults=True):
            log.warning(
                "train.%s.%s has no effect: it is of train.strategy=%s, not %s", name, key, name, train.strategy
            )


def check_tensor_parallel(job: Job, base: Path | None, processes: ProcessRange) -> None:
    """Raise UsageError if layers should be split over ranks and the job or the model does not allow it."""
    number, strategy = job.train.fsdp.tensor_parallel, job.train.strategy
    if number == 1:
        return
    name = f"train.fsdp.tensor_parallel={number}"
    if strategy == "auto" or plugins.load("strategies", strategy).model_ranks(job.train) != number:
        raise UsageError(f"{name} is an option of train.strategy=fsdp; the strategy is {strategy!r}.")
    fewest, most = process_bounds(processes)
    if fewest != most:
        raise UsageError(f"{name} needs a fixed number of ranks, and engine.processes is [{fewest}, {most}].")
    for option, used in {"model.lora": job.model.lora is not None, "train.compile": job.train.compile}.items():
        if used:
            raise UsageError(f"{name} cannot be combined with {option}. Remove one of them.")
    if base is None:
        raise UsageError(f"{name} splits the layers of a transformers model; model.base is null.")
    check_folder(base)
    reason = tensor_parallel_refusal(load_config(base), number)
    if reason is not None:
        raise UsageError(
            f"{name}: {base}: {reason}. Remove the setting: train.strategy=fsdp shards every model without it."
        )
