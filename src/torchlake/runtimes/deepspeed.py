"""DeepSpeed's inference engine: its CUDA kernels replace the encoder's layers, in fp16.

DeepSpeed replaces whole layers of BERT, RoBERTa and DistilBERT. They return a tuple and take an additive mask, as older
versions of transformers did, and size their workspace by the first batch; this file adapts that. Loading scores a batch
before and after the replacement, and the results must agree.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError, pip_install
from torchlake.runtimes import Forward, first_reason

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.02
tasks: tuple[str, ...] | None = ("text_classification",)
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False

KINDS = ("bert", "distilbert", "roberta")
"The model types whose layers DeepSpeed can replace; it would silently keep others."
DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
AGREEMENT = 0.05
"The tolerance of logits, relative to the largest; the error of fp16 is a tenth of it."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None; quick checks only."""
    kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    return first_reason(
        model=None
        if kind in KINDS
        else f"it has kernels for {', '.join(KINDS)}, not for {kind!r}: use 'compiled' or 'eager'",
        machine=None
        if any(Path(device).exists() for device in DEVICES)
        else "its kernels exist for CUDA only, and there is no GPU here: use 'varlen' or 'openvino'",
        library=None
        if find_spec("deepspeed")
        else f"the library 'deepspeed' is not installed: {pip_install('torchlake[deepspeed]')}",
    )


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model with DeepSpeed's layers.

    Raises UsageError on a CPU, and if the kernels are unavailable or do not agree with the model; and the errors of
    `models.load_model`.
    """
    if device == "cpu":
        raise UsageError(
            "The runtime 'deepspeed' has kernels for CUDA only. On a CPU use 'varlen' or 'openvino', or with VNNI "
            "'int8' or 'openvino_int8' (8 bits)."
        )
    import torch

    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    ids = torch.full((2, 8), (model.config.pad_token_id or 0) + 1)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.inference_mode():
        expected = model(input_ids=ids, attention_mask=mask).logits.numpy()
    try:
        forward = _inject(model, device)
        difference = np.abs(forward(ids.numpy(), mask.numpy()) - expected).max() / max(1.0, np.abs(expected).max())
    except Exception as error:
        raise UsageError(
            f"{folder}: DeepSpeed's kernels cannot be put into the model ({type(error).__name__}: {str(error)[:300]}). "
            "On a GPU, 'varlen' and 'compiled' also work."
        ) from error
    if not difference <= AGREEMENT:
        raise UsageError(
            f"{folder}: with DeepSpeed's kernels the logits differ by {difference:.1%}: they do not fit the installed "
            "transformers. On a GPU, 'varlen' and 'compiled' also work."
        )
    return forward


def _inject(model: Any, device: str) -> Forward:
    import deepspeed
    import torch

    model.set_attn_implementation("eager")
    engine = deepspeed.init_inference(model, dtype=torch.float16, replace_with_kernel_inject=True)
    layers = [module for module in engine.module.modules() if hasattr(module, "allocate_workspace")]
    if not layers:
        raise UsageError("it did not replace any layer")
    for layer in layers:
        layer.register_forward_hook(_first)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        hidden = torch.from_numpy(attention_mask == 0).to(device)[:, None, None, :]
        mask = torch.zeros(hidden.shape, dtype=torch.float16, device=device)
        mask.masked_fill_(hidden, torch.finfo(torch.float16).min)
        # A larger batch than the first needs a larger workspace.
        layers[0]._should_allocate_workspace = True
        with torch.inference_mode():
            logits = engine(input_ids=torch.from_numpy(input_ids).to(device), attention_mask=mask).logits
        scores: np.ndarray = logits.float().cpu().numpy()
        return scores

    return forward


def _first(layer: "torch.nn.Module", inputs: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
