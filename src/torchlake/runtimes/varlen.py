"""Concatenated rows: no padding, and nothing is computed that the head does not read.

For BERT, RoBERTa, DistilBERT, ELECTRA, MPNet and similar models. On a CPU in fp32, with logits that differ from
`eager`'s by rounding only. On a GPU in bf16, because the variable-length kernel of Flash Attention 2 (Dao 2023;
`torch.nn.attention.varlen`) has no fp32: probabilities differ in the third decimal there.
"""

from pathlib import Path

from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _encoder, _packed, _products, _ragged

TOLERANCE = 1e-5
tasks: tuple[str, ...] | None = _packed.TASKS
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True
refusal = _packed.refusal


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the encoder. Raises the errors of `models.load_model`."""
    import torch

    linear = _products.linear if device == "cpu" else _products.by_torch
    if _packed.is_one(folder, spec):
        _packed.check_device("varlen", folder, device)
        return _packed.make_forward(folder, spec, linear=linear)
    encoder = _encoder.read(folder, spec)
    if encoder.distances is not None:
        _packed.check_device("varlen", folder, device)
    feed_forward = _ragged.fused(encoder, linear)
    if device == "cpu":
        return _ragged.make_forward(encoder, linear=linear, feed_forward=feed_forward, pad=_products.padding())
    encoder = encoder.to(device, torch.bfloat16)
    return _ragged.make_forward(encoder, linear=linear, feed_forward=feed_forward)
