"""Static int8 on CPUs: PyTorch's oneDNN product of 8-bit integers, with ranges found once on the user's rows.

    x (T, I) fp32 -> 8 bits -> integer product with weights of 8 bits; bias, GELU or the residual added in the cache
    feed-forward: 8 bits -> product, GELU, 8 bits -> product + residual -> fp32

The ranges are `_calibration.py`'s, as for `onnx_int8` and `openvino_int8`. Since they are known beforehand, a product
hands on what the next step wants: 8 bits to the next product, bf16 to attention where the CPU multiplies it, fp32 to
norms and residuals. Moving numbers through memory is what int8 waits for (AMX multiplies them ten times faster than
fp32), and `int8`, which finds its scales while it scores, moves everything in fp32.

Rows are laid end to end as in `varlen`. Embeddings, norms, residuals and the classifier stay in fp32. Calibrated
once per model, on rows like those to score; what is kept are the ranges, some KB, and the weights are rounded when
loading.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlake import exports
from torchlake.errors import DataError, UsageError
from torchlake.runtimes import Forward, _calibration, _cpu, _encoder, _exported, _ragged
from torchlake.task_spec import TaskSpec

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.06
CALIBRATED = True
never: dict[str, str] = {"text_generation": "it has no key-value cache"}

RANGES = "ranges.safetensors"


def refusal(folder: Path) -> str | None:
    """Why the model of `folder` cannot run here; None when it can."""
    return _cpu.overflow() or _encoder.refusal(folder)


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Find the ranges of the model's products on `batches` and keep them in `folder`.

    Raises UsageError without rows, StorageError, and as `models.load_model` does.
    """
    from safetensors.numpy import save_file

    _calibration.check_rows(folder, batches)
    with exports.making(
        folder, "static_int8", rows=_calibration.rows(batches), versions=_exported.versions("safetensors")
    ) as place:
        save_file(_find_ranges(_encoder.read(folder, spec), batches), place / RANGES)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The encoder of `folder` with its layers in int8.

    Raises as `models.load_model` does, UsageError on a GPU, without VNNI, and when these weights have no ranges.
    """
    import torch
    from safetensors.numpy import load_file

    _exported.only_on_cpus("static_int8", device)
    reason = refusal(folder)
    if reason is None and not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        reason = "this torch was built without oneDNN: take 'varlen'"
    if reason is not None:
        raise UsageError(f"The runtime 'static_int8' cannot run {folder}: {reason}")
    export = _exported.found(folder, "static_int8", calibrated=CALIBRATED)
    encoder = _encoder.read(folder, spec)
    ranges = _in_order(load_file(export / RANGES), export / RANGES)
    to_attention = torch.bfloat16 if _cpu.multiplies_bf16() else torch.float32

    def linear(layer: _encoder.Linear) -> _ragged.Multiply:
        product = _Product(layer, next(ranges))
        return lambda x, residual: product(x, residual, out=to_attention if residual is None else torch.float32)

    def feed_forward(layer: _encoder.Layer) -> _encoder.Apply:
        return _feed_forward(
            _Product(layer.up, next(ranges)), _Product(layer.down, next(ranges)), activation=encoder.activation
        )

    return _ragged.make_forward(encoder, linear=linear, feed_forward=feed_forward)


@dataclass(frozen=True, slots=True)
class _Range:
    """How the input of one product becomes 8 bits: clip(round(x / (smooth * scale)) + zero, 0, 255)."""

    smooth: np.ndarray
    "(I,) fp32; infinity for channels that are multiplied in fp32."
    scale: float
    zero: int

    @property
    def plain(self) -> bool:
        """Whether one scale serves all channels."""
        return bool((self.smooth == 1).all())


def _in_order(kept: dict[str, np.ndarray], path: Path) -> Iterator[_Range]:
    """The ranges of a file, in the order in which `make_forward` asks for its products. Raises DataError at the end."""
    for number in range(len(kept) // 3):
        smooth, scale, zero = (kept[f"{number}.{part}"] for part in ("smooth", "scale", "zero"))
        yield _Range(smooth, float(scale), int(zero))
    raise DataError(f"{path}: has fewer ranges than the model has products. Delete its folder and optimize again.")


class _Product:
    """x (T, I) -> x weight^T + bias [+ residual], in 8 bits."""

    def __init__(self, layer: _encoder.Linear, kept: _Range) -> None:
        import torch

        weight = layer.weight.numpy().T
        rounded, scales = _calibration.round_weights(_calibration.scaled(weight, kept.smooth))
        self.range = kept
        self.packed = torch.ops.onednn.qlinear_prepack(torch.from_numpy(np.ascontiguousarray(rounded.T)), None)
        self.scales = torch.from_numpy(scales)
        self.no_zero_points = torch.zeros(len(scales), dtype=torch.int64)
        # The input's zero point is in the bias, so that the product need not know of it.
        moved = kept.scale * kept.zero * scales * rounded.sum(axis=0, dtype=np.int64)
        self.bias = (layer.bias - torch.from_numpy(moved)).float()
        self.inverse = torch.from_numpy(1 / (kept.smooth * np.float32(kept.scale)))
        self.half_above = torch.tensor(kept.zero + 0.5)
        loud = np.flatnonzero(np.isinf(kept.smooth))
        self.loud = torch.from_numpy(loud) if len(loud) else None
        self.loud_weight = torch.from_numpy(weight[loud])

    def __call__(self, x: "torch.Tensor", residual: "torch.Tensor | None", *, out: "torch.dtype") -> "torch.Tensor":
        """x fp32 or bf16; the residual (T, O), fp32, is used up."""

        if self.loud is not None:
            exact = x[:, self.loud].float() @ self.loud_weight
            residual = exact if residual is None else residual.add_(exact)
        rounded = self.round(x)
        return self.multiply(rounded, out=out) if residual is None else self.add(rounded, residual).to(out)

    def add(self, rounded: "torch.Tensor", residual: "torch.Tensor") -> "torch.Tensor":
        """residual + x weight^T + bias of x in 8 bits, in the residual's place."""
        import torch

        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise.binary(
            rounded, self.range.scale, 0, self.packed, self.scales, self.no_zero_points, residual, self.bias,
            1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], "",
        )  # fmt: skip
        return result

    def round(self, x: "torch.Tensor") -> "torch.Tensor":
        """x (T, I) in 8 bits."""
        import torch

        steps = torch.addcmul(self.half_above, x, self.inverse).clamp_(0, 255)
        # Going through 16 bits is several times faster than the direct way, which torch does number by number.
        return steps.to(torch.int16).to(torch.uint8)

    def multiply(
        self,
        rounded: "torch.Tensor",
        *,
        out: "torch.dtype",
        scale: float = 1.0,
        zero: int = 0,
        activation: str = "none",
    ) -> "torch.Tensor":
        """activation(x weight^T + bias) of x in 8 bits; for `out` 8 bits, by `scale` and `zero`."""
        import torch

        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, self.range.scale, 0, self.packed, self.scales, self.no_zero_points, self.bias,
            scale, zero, out, activation, [], "none" if activation == "gelu" else "",
        )  # fmt: skip
        return result


def _feed_forward(up: _Product, down: _Product, *, activation: str) -> _encoder.Apply:
    """x -> x + down(activation(up(x))); what stands between the two products stays in 8 bits where it can."""
    import torch

    if up.loud is None and down.range.plain:
        between = down.range

        def fused(x: torch.Tensor) -> torch.Tensor:
            inner = up.multiply(
                up.round(x), out=torch.uint8, scale=between.scale, zero=between.zero, activation=activation
            )
            return down.add(inner, x)

        return fused

    activate: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.gelu if activation == "gelu" else torch.relu_
    return lambda x: down(activate(up(x, None, out=torch.float32)), x, out=torch.float32)


def _find_ranges(encoder: _encoder.Encoder, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Score the rows in fp32, note what goes into each product, and choose its range."""
    import torch

    watched: list[tuple[_encoder.Linear, _calibration.Seen, bool]] = []
    generator = np.random.default_rng(0)
    parts = list(_calibration.small(batches))
    share = -(-_calibration.SAMPLE_TOKENS // len(parts))

    def watch(layer: _encoder.Linear, *, plain_is_faster: bool = False) -> _ragged.Multiply:
        seen = _calibration.nothing_seen(layer.weight.shape[1])
        watched.append((layer, seen, plain_is_faster))

        def multiply(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            values = x.numpy()
            seen.add(values, values[generator.permutation(len(values))[:share]])
            result = torch.nn.functional.linear(x, layer.weight, layer.bias)
            return result if residual is None else result + residual

        return multiply

    activate = torch.nn.functional.gelu if encoder.activation == "gelu" else torch.nn.functional.relu

    def feed_forward(layer: _encoder.Layer) -> _encoder.Apply:
        up, down = watch(layer.up), watch(layer.down, plain_is_faster=True)
        return lambda x: down(activate(up(x, None)), x)

    forward = _ragged.make_forward(encoder, linear=watch, feed_forward=feed_forward)
    for ids, mask in parts:
        forward(ids, mask)
    kept: dict[str, np.ndarray] = {}
    for number, (layer, seen, plain_is_faster) in enumerate(watched):
        seen = seen.widened()
        smooth = _calibration.smoothing(seen, layer.weight.numpy().T, plain_is_faster=plain_is_faster)
        scale, zero = _calibration.grid(seen.low / smooth, seen.high / smooth)
        kept |= {f"{number}.smooth": smooth, f"{number}.scale": np.asarray(scale), f"{number}.zero": np.asarray(zero)}
    return kept
