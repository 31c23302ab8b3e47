"""PyTorch's own fast path for encoders: `torch.nn.TransformerEncoder` with one fused operator per layer.

Optimum's `BetterTransformer` put the weights of a Hugging Face encoder into these layers; it is gone since
transformers 5, the layers are not. In evaluation, with a mask of the padding, they compute on a nested tensor, which
leaves the padding out. For BERT, RoBERTa, DistilBERT and models of their shape, in fp32.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _encoder

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
never: dict[str, str] = {"text_generation": "it has no key-value cache"}


def refusal(folder: Path) -> str | None:
    """As `_encoder.refusal`; besides, the fused operator wants an even number of heads."""
    return _encoder.refusal(folder) or (
        "PyTorch's fused layer wants an even number of attention heads" if _encoder.heads(folder) % 2 else None
    )


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The encoder of `folder` in PyTorch's own layers. Raises as `models.load_model` does."""
    import torch

    encoder = _encoder.read(folder, spec)
    body = _transformer(encoder).to(device).eval()
    encoder = encoder.to(device, torch.float32)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        real = attention_mask != 0
        positions = np.zeros_like(input_ids)
        positions[real] = _encoder.remove_padding(encoder.padding_id, input_ids, attention_mask).positions
        padding = None if real.all() else torch.from_numpy(~real).to(device)
        with torch.inference_mode(), warnings.catch_warnings():
            # Nested tensors call themselves a prototype, once per process; the ones used here never leave the operator.
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
