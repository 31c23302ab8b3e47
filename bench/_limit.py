"""How fast one core multiplies matrices, in fp32 and in int8: the limit that no forward pass can exceed.

The shapes are those of an encoder's layers over batches of a few hundred tokens, by the fastest of the operators that
torch offers for them; best of several repetitions. One shape is not enough: where a core multiplies 8-bit integers at
1,000 Gop/s and more, a large result is written more slowly than it is computed.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

SHAPES = [(tokens, *shape) for tokens in (256, 512, 1024) for shape in ((768, 768), (768, 3072), (3072, 768))]
"(T, I, O) each: x (T, I) times the transpose of a weight (O, I)."


def rates(repetitions: int = 20) -> dict[str, float]:
    """Operations a second in units of 1e9: fp32 and int8. An operator that is missing here does not count."""
    import torch

    torch.set_num_threads(1)
    with torch.inference_mode():
        found = [_rates_of(shape, repetitions) for shape in SHAPES]
    return {kind: max(one[kind] for one in found) for kind in found[0]}


def _rates_of(shape: tuple[int, int, int], repetitions: int) -> dict[str, float]:
    import torch

    tokens, inner, outer = shape
    x, weight = torch.randn(tokens, inner), torch.randn(outer, inner)
    bias = torch.zeros(outer)
    x8 = torch.randint(0, 255, (tokens, inner), dtype=torch.uint8)
    signed = torch.randint(-127, 127, (tokens, inner), dtype=torch.int8)
    weight8 = torch.randint(-127, 127, (inner, outer), dtype=torch.int8)
    scales, zeros = torch.full((outer,), 0.01), torch.zeros(outer, dtype=torch.int64)

    def packed_linear() -> Callable[[], object]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn(), tokens)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def quantized() -> Callable[[], object]:
        packed = torch.ops.onednn.qlinear_prepack(weight8.T.contiguous(), [tokens, inner])
        return lambda: torch.ops.onednn.qlinear_pointwise(
            x8, 0.01, 128, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
        )

    kinds: dict[str, list[Callable[[], Callable[[], object]]]] = {
        "fp32": [
            lambda: lambda: torch.mm(x, weight.T),
            lambda: lambda: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""),
            packed_linear,
        ],
        "int8": [quantized, lambda: lambda: torch._int_mm(signed, weight8)],
    }
    operations = 2 * tokens * inner * outer
    return {
        kind: operations / min(_seconds(make, repetitions) for make in makers) / 1e9 for kind, makers in kinds.items()
    }


def model_operations(folder: Path, lengths: list[int]) -> float:
    """Operations of scoring one row of the table, on average: real tokens alone, attention and head included."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]

    def row(length: int) -> float:
        products = length * 2 * (4 * hidden * hidden + 2 * hidden * inner)
        attention = 4 * length * length * hidden
        return float(layers * (products + attention) + 2 * hidden * hidden)

    return sum(row(length) for length in lengths) / len(lengths)


def _seconds(make: Callable[[], Callable[[], object]], repetitions: int) -> float:
    """The time of the fastest repetition; infinite if the operator is missing."""
    try:
        multiply = make()
        multiply()
    except (RuntimeError, AttributeError, NotImplementedError):
        return float("inf")
    best = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    print(json.dumps(rates()))
