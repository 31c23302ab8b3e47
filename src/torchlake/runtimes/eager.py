"""The model as transformers or its task loads it, in fp32: the reference for all other runtimes.

If padding changes a row's result (XLNet, FNet; `models/probes.py`), texts of equal length are computed together.

It is fast without changing results: `torch.inference_mode`; no attention mask for batches without padding, so that
scaled dot-product attention can use its unmasked kernel; and, on AMD's CPUs, oneDNN's matrix product in linear layers
(`_products.py`), whose different summation order changes logits by about 1e-6.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import joined_outputs
from torchlake.models.generation import GenerationOptions, start_token
from torchlake.runtimes import Forward, LogProbs, Writer, _products

TOLERANCE = 0.0
tasks: tuple[str, ...] | None = None
never: dict[str, str] = {}
TOKEN_TYPES = True

MASK = "attention_mask"


def refusal(folder: Path) -> str | None:
    """Return None: it runs every model that transformers or the task loads."""
    return None


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model on `device` ("cpu", "cuda"). Raises the errors of `models.load_model`."""
    return forward_of(load_model(folder, spec, device), folder, spec, device)


def forward_of(model: Any, folder: Path, spec: TaskSpec, device: str) -> Forward:
    """Return the Forward of a model loaded from `folder`; `device` is the one of its inputs."""
    # Imported here because the driver reads only this file's declarations.
    import torch

    from torchlake.models import probes

    task = plugins.load("tasks", spec.task)
    processor = task.load_processor(folder, spec, scoring=False) if task.checks_padding and not task.packs else None
    made = None if processor is None else probes.features(task, processor, spec)
    unmasked = task.checks_padding and (made is None or not probes.mask_matters(model, task, made, processor, spec))

    def outputs_of(**batch: np.ndarray) -> np.ndarray:
        inputs = {
            name: None if unmasked and name == MASK and array.all() else array
            for name, array in batch.items()
            if name not in task.kept_back
        }
        with torch.inference_mode():
            sent = {name: None if one is None else torch.from_numpy(one).to(device) for name, one in inputs.items()}
            answer = model(**sent, **task.forward_options)
            outputs = task.checked_outputs(answer, len(next(iter(batch.values()))))
        scores: np.ndarray = outputs.float().cpu().numpy()
        return scores

    if made is None or not probes.padding_matters(model, task, made, processor, spec):
        return outputs_of
    padded = probes.padded_arrays(task, made, processor, spec)

    def length_by_length(**batch: np.ndarray) -> np.ndarray:
        return _length_by_length(outputs_of, batch, task.text_lengths(batch, spec), padded)

    return length_by_length


def _length_by_length(
    outputs_of: Forward, batch: Mapping[str, np.ndarray], lengths: np.ndarray, padded: Collection[str]
) -> np.ndarray:
    """Return the outputs of a batch whose texts of equal lengths are computed together.

    `lengths` are those of texts (B,), or of several per row (B, K); `padded` names the arrays that have a value for
    each token. Outputs of tokens (B, L, ...) are 0 after a row's end.
    """
    shape, flat = lengths.shape, lengths.ravel()
    texts = {
        name: array if array.shape[: len(shape)] == shape else np.repeat(array[:, None], shape[-1], axis=1)
        for name, array in batch.items()
    }
    texts = {
        name: array.reshape(len(flat), *(1,) * (len(shape) - 1), *array.shape[len(shape) :])
        for name, array in texts.items()
    }
    parts, places = [], []
    for length in np.unique(flat):
        alike = np.flatnonzero(flat == length)
        some = {name: array[alike] for name, array in texts.items()}
        some |= {name: some[name].take(np.arange(length), axis=len(shape)) for name in padded}
        outputs = outputs_of(**some)
        parts.append(outputs.reshape(len(alike), *outputs.shape[len(shape) :]))
        places.append(alike)
    whole = joined_outputs(parts, fill=0.0)[np.argsort(np.concatenate(places))]
    return whole.reshape(*shape, *whole.shape[1:])


def open_writer(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """Load the model for text generation."""
    return writer_of(load_model(folder, spec, device), folder, options)


def writer_of(model: Any, folder: Path, options: GenerationOptions) -> Writer:
    """Return the Writer of a model loaded from `folder`."""
    from torchlake.runtimes._writing.choices import ChoicesWriter
    from torchlake.runtimes._writing.session import session_of
    from torchlake.runtimes._writing.static import StaticWriter

    if options.structure is not None and options.structure.choices:
        return ChoicesWriter(model, folder, options)
    static = StaticWriter(model, folder, options)
    session = session_of(model, static)
    if session is None:
        static.check()
    return session or static


def load_log_probs(folder: Path, spec: TaskSpec, *, device: str) -> LogProbs:
    """Load the model for the log-probabilities of answers; row by row, because each has a logit for every token."""
    return log_probs_of(load_model(folder, spec, device), folder, device)


def log_probs_of(model: Any, folder: Path, device: str) -> LogProbs:
    """Return the LogProbs of a model loaded from `folder`; `device` is the one of its inputs."""
    import torch

    apart = bool(model.config.is_encoder_decoder)
    start = start_token(folder, model.config) if apart else 0

    def of_row(prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
        written = torch.from_numpy(answer.astype(np.int64)).to(device)
        read = torch.from_numpy(prompt.astype(np.int64)).to(device)
        if apart:
            before = torch.cat([torch.tensor([start], device=device), written[:-1]])
            logits = model(input_ids=read[None], decoder_input_ids=before[None]).logits[0]
        else:
            logits = model(input_ids=torch.cat([read, written[:-1]])[None]).logits[0, len(read) - 1 :]
        found: np.ndarray = logits.float().log_softmax(-1).gather(1, written[:, None])[:, 0].cpu().numpy()
        return found

    def log_probs(prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> list[np.ndarray]:
        with torch.inference_mode():
            return [of_row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    return log_probs


def load_model(folder: Path, spec: TaskSpec, device: str, dtype: Any = None) -> Any:
    """Return the model on a device, in fp32 with the faster matrix product where the CPU has one; or in `dtype`."""
    import torch

    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    torch.nn.Module.to(model, device=device, dtype=dtype)
    if device == "cpu" and dtype is None:
        _products.choose_in(model)
    return model
