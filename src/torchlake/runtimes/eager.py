"""The stock transformers model in fp32: the reference for all other runtimes.

If padding changes a row's result (XLNet, Funnel; `models/probes.py`), rows of equal length are computed together.

It is fast without changing results: `torch.inference_mode`; no attention mask for batches without padding, so that
scaled dot-product attention can use its unmasked kernel; and, on AMD's CPUs, oneDNN's matrix product in linear layers
(`_products.py`), whose different summation order changes logits by about 1e-6.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.models.generation import GenerationOptions
from torchlake.models.load import load_model, load_tokenizer
from torchlake.runtimes import Forward, _products

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOLERANCE = 0.0
never: dict[str, str] = {}


def refusal(folder: Path) -> str | None:
    """Return None: it runs every model that transformers loads."""
    return None


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model on `device` ("cpu", "cuda"). Raises as `models.load_model`."""
    return forward_of(_loaded(folder, spec, device), folder, spec, device)


def forward_of(model: "PreTrainedModel", folder: Path, spec: TaskSpec, device: str) -> Forward:
    """Return the Forward of a model loaded from `folder`; `device` is that of its inputs."""
    # Imported here because the driver reads only this file's declarations.
    import torch

    from torchlake.models import probes

    task = plugins.load("tasks", spec.task)
    tokenizer = load_tokenizer(folder)

    def logits_of(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        mask = None if attention_mask.all() else torch.from_numpy(attention_mask).to(device)
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(input_ids).to(device), attention_mask=mask, **task.FORWARD).logits
        scores: np.ndarray = logits.float().cpu().numpy()
        return scores

    if task.PACKED or not probes.padding_matters(model, probes.rows(task, tokenizer, spec), tokenizer.pad_token_id):
        return logits_of

    def length_by_length(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        lengths = attention_mask.sum(axis=1).clip(min=1)
        scores = np.zeros((len(input_ids), max(1, len(spec.labels))), dtype=np.float32)
        for length in np.unique(lengths):
            alike = lengths == length
            scores[alike] = logits_of(input_ids[alike, :length], attention_mask[alike, :length])
        return scores

    return length_by_length


def load_generator(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Forward:
    """Load the model for text generation."""
    return generator_of(_loaded(folder, spec, device), folder, options)


def generator_of(model: "PreTrainedModel", folder: Path, options: GenerationOptions) -> Forward:
    """Return the Forward that generates texts with a model loaded from `folder`."""
    from torchlake.runtimes._generating import generator

    return generator(model, folder, options)


def _loaded(folder: Path, spec: TaskSpec, device: str) -> "PreTrainedModel":
    import torch

    model = load_model(folder, spec, auto_class=plugins.load("tasks", spec.task).AUTO_CLASS)
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
