"""Which library multiplies a training step's matrices fastest on this CPU: MKL or oneDNN, in fp32 or in bf16?

The three products of a linear layer, at the shapes of MiniLM and of roberta-base, on one core: forward, the gradient of
the input, the gradient of the weight. oneDNN takes the weight plain or packed; training changes it at every step, so
packing is counted in. Then whole training steps of MiniLM. The contenders take turns; the best of the rounds counts.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from _common import finish, minilm, parser
from _contender import ONE_THREAD

os.environ.update(ONE_THREAD)

import torch
from torch import nn
from torch.nn import functional

SHAPES = [(384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768)]
ROWS, LENGTH = 64, 24


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (N, I) times weight (O, I), transposed, as fp32 products of oneDNN."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "none")
    return result


def products(tokens: int, inputs: int, outputs: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each of the three products the ways to compute it."""
    x, weight, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    gradient = torch.randn(tokens, outputs)
    x16, weight16, bias16, gradient16 = (one.bfloat16() for one in (x, weight, bias, gradient))
    pack = torch.ops.mkldnn._reorder_linear_weight
    return {
        "forward": {
            "mkl": lambda: functional.linear(x, weight, bias),
            "onednn": lambda: by_onednn(x, weight, bias),
            "onednn_packed": lambda: by_onednn(x, pack(weight, tokens), bias),
            "bf16": lambda: functional.linear(x16, weight16, bias16),
        },
        "gradient of the input": {
            "mkl": lambda: gradient @ weight,
            "onednn": lambda: by_onednn(gradient, weight.t()),
            "onednn_packed": lambda: by_onednn(gradient, pack(weight.t().contiguous(), tokens)),
            "bf16": lambda: gradient16 @ weight16,
        },
        "gradient of the weight": {
            "mkl": lambda: gradient.t() @ x,
            "onednn": lambda: by_onednn(gradient.t(), x.t()),
            "bf16": lambda: gradient16.t() @ x16,
        },
    }


class OneDnnLinear(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        of_x = by_onednn(gradient, weight.t()).reshape(x.shape)
        return of_x, by_onednn(gradient.t(), x.reshape(-1, weight.shape[1]).t()), gradient.sum(0)


def trained(kind: str) -> Callable[[], float]:
    """A step of MiniLM on `ROWS` rows of `LENGTH` tokens, its products by MKL, oneDNN or in bf16; its loss."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2, **shape).train()
    if kind == "onednn":
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.forward = lambda x, layer=layer: OneDnnLinear.apply(x, layer.weight, layer.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids, labels = torch.randint(1000, 20_000, (ROWS, LENGTH)), torch.randint(0, 2, (ROWS,))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def best(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The shortest seconds of each, in turn."""
    seconds = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if number:  # the first is for warming up
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def main() -> None:
    options = parser(__doc__, tokens=ROWS * LENGTH, rounds=20).parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for inputs, outputs in SHAPES:
        operations = 2e-9 * options.tokens * inputs * outputs
        with torch.no_grad():
            for name, ways in products(options.tokens, inputs, outputs).items():
                seconds = best(ways, options.rounds)
                rates = {f"{way}_gflops": operations / one for way, one in seconds.items()}
                rows.append({"name": f"{name}, {inputs} to {outputs}", **rates})
    steps = {kind: trained(kind) for kind in ("mkl", "onednn", "bf16")}
    seconds = best(steps, options.rounds // 2)
    rows.append({"name": "training step", **{f"{kind}_seconds": one for kind, one in seconds.items()}})
    note = f"{options.tokens} tokens, one core; best of {options.rounds} rounds; the step: MiniLM, {ROWS} rows"
    finish("products", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
