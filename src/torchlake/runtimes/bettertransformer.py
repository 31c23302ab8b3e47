"""PyTorch's fast path for encoders: `torch.nn.TransformerEncoder` with one fused operator per layer.

Optimum's `BetterTransformer` put a Hugging Face encoder's weights into these layers; it is gone since transformers 5,
but the layers remain. In evaluation mode, with a padding mask, they compute on a nested tensor without padding. For
BERT, RoBERTa, DistilBERT and similar models, in fp32.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlake import atomic_io
from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _encoder
from torchlake.runtimes._padding import remove_padding

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
tasks: tuple[str, ...] | None = ("text_classification",)
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None; the operator needs an even number of heads, and no distances."""
    if atomic_io.read_json(folder / "config.json").get("model_type") == "mpnet":
        return "PyTorch's fused layer cannot add numbers to the scores of attention, as 'mpnet' needs"
    return _encoder.refusal(folder) or (
        "PyTorch's fused layer needs an even number of attention heads" if _encoder.heads(folder) % 2 else None
    )


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the encoder into PyTorch's own layers. Raises the errors of `models.load_model`."""
    import torch

    encoder = _encoder.read(folder, spec)
    body = _transformer(encoder).to(device).eval()
    encoder = encoder.to(device, torch.float32)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        real = attention_mask != 0
        positions = np.zeros_like(input_ids)
        positions[real] = remove_padding(encoder.padding_id, input_ids, attention_mask).positions
        padding = None if real.all() else torch.from_numpy(~real).to(device)
        with torch.inference_mode(), warnings.catch_warnings():
            # Each process would warn once that nested tensors are a prototype.
            warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage")
            x = torch.nn.functional.embedding(torch.from_numpy(input_ids).to(device), encoder.words)
            x += torch.nn.functional.embedding(torch.from_numpy(positions).to(device), encoder.positions)
            norm = encoder.norm
            x = torch.nn.functional.layer_norm(x, (encoder.width,), norm.weight, norm.bias, norm.eps)
            x = body(x, src_key_padding_mask=padding)
            logits: np.ndarray = encoder.head(x[:, 0]).cpu().numpy()
        return logits

    return forward


def _transformer(encoder: _encoder.Encoder) -> "torch.nn.TransformerEncoder":
    import torch

    first = encoder.layers[0]
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(
            encoder.width,
            encoder.heads,
            dim_feedforward=len(first.up.weight),
            dropout=0.0,
            activation=encoder.activation,
            layer_norm_eps=first.norm.eps,
            batch_first=True,
        )
        body = torch.nn.TransformerEncoder(layer, len(encoder.layers))
    state = {}
    for index, weights in enumerate(encoder.layers):
        parts: dict[str, _encoder.Linear | _encoder.Norm] = {
            "self_attn.in_proj_": weights.qkv,
            "self_attn.out_proj.": weights.out,
            "linear1.": weights.up,
            "linear2.": weights.down,
            "norm1.": weights.norm,
            "norm2.": weights.last_norm,
        }
        for name, part in parts.items():
            state[f"layers.{index}.{name}weight"] = part.weight
            state[f"layers.{index}.{name}bias"] = part.bias
    body.load_state_dict(state, assign=True)
    return body
