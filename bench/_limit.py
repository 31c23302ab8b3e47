"""How fast one core multiplies matrices, in fp32 and in int8: the limit that no forward pass can exceed.

The shapes are those of an encoder's feed-forward layer over a thousand tokens, (1024, 768) x (768, 3072), by the
fastest of the operators that torch offers for them; best of several repetitions.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

TOKENS, INNER, OUTER = 1024, 768, 3072
OPERATIONS = 2 * TOKENS * INNER * OUTER


def rates(repetitions: int = 20) -> dict[str, float]:
    """Operations a second in units of 1e9: fp32 and int8. An operator that is missing here does not count."""
    import torch

    torch.set_num_threads(1)
    x, weight = torch.randn(TOKENS, INNER), torch.randn(OUTER, INNER)
    bias = torch.zeros(OUTER)
    x8 = torch.randint(0, 255, (TOKENS, INNER), dtype=torch.uint8)
    signed = torch.randint(-127, 127, (TOKENS, INNER), dtype=torch.int8)
    weight8 = torch.randint(-127, 127, (INNER, OUTER), dtype=torch.int8)
    scales, zeros = torch.full((OUTER,), 0.01), torch.zeros(OUTER, dtype=torch.int64)

    def packed_linear() -> Callable[[], object]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn(), TOKENS)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def quantised() -> Callable[[], object]:
        packed = torch.ops.onednn.qlinear_prepack(weight8, [TOKENS, INNER])
        return lambda: torch.ops.onednn.qlinear_pointwise(
            x8, 0.01, 128, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
        )

    kinds: dict[str, list[Callable[[], Callable[[], object]]]] = {
        "fp32": [
            lambda: lambda: torch.mm(x, weight.T),
            lambda: lambda: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""),
            packed_linear,
        ],
        "int8": [quantised, lambda: lambda: torch._int_mm(signed, weight8)],
    }
    with torch.inference_mode():
        return {kind: max(_rate(make, repetitions) for make in makers) / 1e9 for kind, makers in kinds.items()}


def model_operations(folder: Path, lengths: list[int]) -> float:
    """Operations of scoring one row of the table, on average: real tokens alone, attention and head included."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]

    def row(length: int) -> float:
        products = length * 2 * (4 * hidden * hidden + 2 * hidden * inner)
        attention = 4 * length * length * hidden
        return float(layers * (products + attention) + 2 * hidden * hidden)

    return sum(row(length) for length in lengths) / len(lengths)


def _rate(make: Callable[[], Callable[[], object]], repetitions: int) -> float:
    try:
        multiply = make()
        multiply()
    except (RuntimeError, AttributeError, NotImplementedError):
        return 0.0
    best = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - began)
    return OPERATIONS / best


if __name__ == "__main__":
    print(json.dumps(rates()))
