"""Which library multiplies matrices fastest on this class of CPU, torch's default (MKL) or oneDNN?

For scoring: the products of MiniLM's layers by the number of rows, and the runtimes beside `varlen`, whose numbers are
the CPU's row in src/torchlake/processes/cpus.json. `few` and `many` are the medians of MKL's time over oneDNN's up to
64 rows and above. CPU time; the contenders take turns, and the best of the rounds counts.

For training, in fp32 or in bf16:

The three products of a linear layer, at the shapes of MiniLM and of roberta-base, on one core: forward, the gradient of
the input, the gradient of the weight. oneDNN takes the weight plain or packed; training changes it at every step, so
packing is counted in. Then whole training steps of MiniLM. The contenders take turns; the best of the rounds counts.
A CPU without products of bf16 numbers would emulate them, for seconds each: there they are left out.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _common import LIMIT, SCRATCH, finish, minilm, parser, random_model
from _contender import ONE_THREAD

os.environ.update(ONE_THREAD)

import torch
from _scoring_torchlake import prepare, score_texts, settings_of
from torch import nn
from torch.nn import functional

from torchlake.processes import hardware
from torchlake.runtimes import _products
from torchlake.scoring.scorer import Scorer

BY_ROWS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
LAYER = [(384, 1152), (384, 384), (384, 1536), (1536, 384)]
LAYERS = 6
RUNTIMES = ("varlen", "eager", "onnx", "openvino", "bf16", "int8", "onnx_int8", "openvino_int8")
NOT_LIMITED = ("onnx", "openvino")
"In fp32 these exceed the rate of AVX2 on a CPU that is limited to it."
TEXTS = 256
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


def by_rows(rounds: int) -> list[dict[str, Any]]:
    """CPU milliseconds of the products of all layers, for each number of rows, and what follows for the table."""
    layers = [(torch.randn(outputs, inputs), torch.randn(outputs)) for inputs, outputs in LAYER for _ in range(LAYERS)]
    found: list[dict[str, Any]] = []
    for number in BY_ROWS:
        xs = {inputs: torch.randn(number, inputs) for inputs, _ in LAYER}
        ways = {
            "mkl": lambda xs=xs: [functional.linear(xs[weight.shape[1]], weight, bias) for weight, bias in layers],
            "onednn": lambda xs=xs: [_products.product(xs[weight.shape[1]], weight, bias) for weight, bias in layers],
        }
        took = best(ways, rounds)
        row = {"name": f"scoring, {number} rows", **{f"{way}_ms": 1e3 * one for way, one in took.items()}}
        found.append(row | {"ratio": took["mkl"] / took["onednn"]})
    ratios = dict(zip(BY_ROWS, (row["ratio"] for row in found), strict=True))
    for kind in ("few", "many"):
        some = [one for number, one in ratios.items() if (number <= _products.FEW) == (kind == "few")]
        found.append({"name": f"scoring, {kind} rows", "ratio": statistics.median(some)})
    return found


def runtimes(rounds: int) -> list[dict[str, Any]]:
    """CPU rows/s of the runtimes with MiniLM's shape and random texts, and their ratio to `varlen`."""
    shape = {"num_hidden_layers": LAYERS, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    folder = random_model(SCRATCH / f"products{LIMIT}", base="bert", **shape)
    random, words = np.random.default_rng(0), ["a", "slow", "film", "about", "people", "who", "wait", "quietly"]
    numbers = np.clip(random.gamma(3, 8, TEXTS).astype(int), 3, 100)
    texts = [f"{' '.join(random.choice(words, number))} {at}" for at, number in enumerate(numbers)]
    ways: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for name in RUNTIMES:
        if LIMIT and name in NOT_LIMITED:
            rows.append({"name": f"runtime {name}", "reason": "it uses more of the CPU than this class has"})
            continue
        try:
            prepare({"model": str(folder), "runtime": name, "texts": texts[:64]})
            scorer = Scorer(settings=settings_of(folder, name))
        except Exception as error:  # the row has the reason
            rows.append({"name": f"runtime {name}", "reason": str(error)[:200]})
            continue
        ways[name] = lambda scorer=scorer: score_texts(scorer, texts)
    expected = ways["varlen"]()[0]
    for name, seconds in best(ways, rounds).items():
        row = {"name": f"runtime {name}", "rows_per_s": TEXTS / seconds}
        rows.append(row | {"difference": float(np.abs(ways[name]()[0] - expected).max())})
    base = next(row["rows_per_s"] for row in rows if row["name"] == "runtime varlen")
    return [row | ({"ratio": row["rows_per_s"] / base} if "rows_per_s" in row else {}) for row in rows]


def best(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The shortest CPU seconds of each, in turn."""
    seconds = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        for name, run in ways.items():
            began = time.process_time()
            run()
            if number:  # the first is for warming up
                seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds


def main() -> None:
    options_parser = parser(__doc__, tokens=ROWS * LENGTH, rounds=20)
    options_parser.add_argument("--scoring", action="store_true", help="measure scoring only")
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = by_rows(options.rounds)
    rows += runtimes(max(2, options.rounds // 5))
    for inputs, outputs in [] if options.scoring else SHAPES:
        operations = 2e-9 * options.tokens * inputs * outputs
        with torch.no_grad():
            for name, ways in products(options.tokens, inputs, outputs).items():
                if not hardware.supports_bf16():
                    del ways["bf16"]
                seconds = best(ways, options.rounds)
                rates = {f"{way}_gflops": operations / one for way, one in seconds.items()}
                rows.append({"name": f"{name}, {inputs} to {outputs}", **rates})
    if not options.scoring:
        steps = {kind: trained(kind) for kind in ("mkl", "onednn", *(("bf16",) if hardware.supports_bf16() else ()))}
        seconds = best(steps, options.rounds // 2)
        rows.append({"name": "training step", **{f"{kind}_seconds": one for kind, one in seconds.items()}})
    note = (
        f"scoring: MiniLM's layers, {TEXTS} texts; training: {options.tokens} tokens, the step: MiniLM, {ROWS} rows; "
        f"one core, best of {options.rounds} rounds"
    )
    finish("products", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
