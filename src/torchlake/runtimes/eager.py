"""The model as transformers or its task loads it, in fp32: the reference for all other runtimes.

If padding changes a row's result (XLNet, FNet; `models/probes.py`), texts of equal length are computed together.

It is fast without changing results: `torch.inference_mode`; no attention mask for batches without padding, so that
scaled dot-product attention can use its unmasked kernel; and, on AMD's CPUs, oneDNN's matrix product in linear layers
(`_products.py`), whose different summation order changes logits by about 1e-6.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import Forward, _products

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.0
tasks: tuple[str, ...] | None = None
never: dict[str, str] = {}
TOKEN_TYPES = True

MASK = "attention_mask"


def refusal(folder: Path) -> str | None:
    """Return None: it runs every model that transformers or the task loads."""
    return None


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model on `device` ("cpu", "cuda"). Raises as `models.load_model`."""
    return forward_of(_loaded(folder, spec, device), folder, spec, device)


def forward_of(model: Any, folder: Path, spec: TaskSpec, device: str) -> Forward:
    """Return the Forward of a model loaded from `folder`; `device` is that of its inputs."""
    # Imported here because the driver reads only this file's declarations.
    import torch

    from torchlake.models import probes

    task = plugins.load("tasks", spec.task)

    def outputs_of(**batch: np.ndarray) -> np.ndarray:
        inputs = {
            name: None if task.wraps_transformers and name == MASK and array.all() else array
            for name, array in batch.items()
            if name not in task.kept_back
        }
        with torch.inference_mode():
            sent = {name: None if one is None else torch.from_numpy(one).to(device) for name, one in inputs.items()}
            answer = model(**sent, **task.forward_options)
            outputs = task.checked_outputs(answer, len(next(iter(batch.values()))))
        scores: np.ndarray = outputs.float().cpu().numpy()
        return scores

    if not task.wraps_transformers or task.packs:
        return outputs_of
    processor = task.load_processor(folder, spec, scoring=False)
    made = probes.features(task, processor, spec)
    if made is None or not probes.padding_matters(model, task, made, processor, spec):
        return outputs_of
    return partial(_length_by_length, outputs_of, spec.max_length)


def _length_by_length(outputs_of: Forward, size: int, /, **batch: np.ndarray) -> np.ndarray:
    """Return the outputs of texts (B, L), or of several for each row (B, K, L), that are computed without padding.

    Outputs of tokens (B, L, ...) are 0 where a text has ended. Rows of several windows of `size` tokens (L > `size`)
    stay as they are: the last window is padded to `size`, whatever is beside it.
    """
    mask = batch[MASK]
    rows, longest = mask.shape[:-1], mask.shape[-1]
    texts = {
        name: array.reshape(-1, *(1,) * (len(rows) - 1), longest)
        for name, array in batch.items()
        if array.shape == mask.shape
    }
    lengths = mask.sum(axis=-1).clip(min=1).ravel()
    if longest > size:  # the mask of a window of padding has one token, that of another more
        several = mask[:, size:].sum(axis=1) >= longest // size
        lengths = np.where(several, longest, mask[:, :size].sum(axis=1).clip(min=1))
    parts: dict[int, np.ndarray] = {}
    for length in np.unique(lengths):
        alike = np.flatnonzero(lengths == length)
        outputs = outputs_of(**{name: array[alike][..., :length] for name, array in texts.items()})
        parts |= zip(alike, outputs.reshape(len(alike), *outputs.shape[len(rows) :]), strict=True)
    whole = np.zeros((len(parts), *np.max([part.shape for part in parts.values()], axis=0)), dtype=np.float32)
    for row, part in parts.items():
        whole[row][tuple(map(slice, part.shape))] = part
    return whole.reshape(*rows, *whole.shape[1:])


def load_generator(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Forward:
    """Load the model for text generation."""
    return generator_of(_loaded(folder, spec, device), folder, options)


def generator_of(model: Any, folder: Path, options: GenerationOptions) -> Forward:
    """Return the Forward that generates texts with a model loaded from `folder`."""
    from torchlake.runtimes._generating import generator

    return generator(model, folder, options)


def _loaded(folder: Path, spec: TaskSpec, device: str) -> Any:
    import torch

    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    torch.nn.Module.to(model, device)
    if device == "cpu" and _products.use_onednn():
        _use_onednn(model)
    return model


def _use_onednn(model: "torch.nn.Module") -> None:
    import torch

    def multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _products.product(x, layer.weight, layer.bias)

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(multiply, module)  # type: ignore[method-assign]
