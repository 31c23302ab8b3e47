"""Which share of an H200's matrix peak can a training step reach, by its kernels? A count, not a measurement.

One micro-batch, forward and backward, runs on fake tensors (shapes without data), and every operator that reaches the
dispatcher is a kernel. Models of one and two layers give the cost of a layer, which is extrapolated. It is assumed that

    products       run at 75 % of 989 TFLOP/s in bf16, or at the pace that 4.0 of 4.8 TB/s move their operands
    attention      is one fused kernel at 55 % of the peak; causal: half of the pairs
    other kernels  read and write each operand once at 4.0 TB/s, and take at least 3 us
    gaps           there are none: no host waits, no communication; the optimizer's step is not counted. Where a kernel
                   takes less than the 8 us that a host needs to launch it, the host bounds the step instead
    compiled       consecutive kernels between two products or attentions are one: it reads what comes from outside, and
                   writes what is used after it, by the backward pass too. So also outside the layers (embedding, last
                   norm), which stay uncompiled, and where the head's gradient is summed over chunks. A row of 128,000
                   logits counts as read once, though a softmax reads it twice: 1 ms. Nothing is recomputed to save
                   writes, as Inductor does.
    dropout        of hidden states as configured; none of the attention

    before   fp32 weights under autocast, whole logits, no compilation
    after    bf16 weights, the loss in chunks, compiled layers and loss

The share counts the model's operations alone, not recomputed ones.
"""

import collections
import os
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch
import transformers
from _common import arguments, finish
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchlake.tasks import _chunked_loss

PEAK, PRODUCTS, ATTENTION = 989e12, 0.75, 0.55
BANDWIDTH, LEAST_S = 4.0e12, 3e-6
FP32 = 67e12 * 0.8
"Operations per second of a product in fp32."
AIM = 0.55
VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "alias", "detach", "lift_fresh"),
    *("t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "diagonal"),
    *("split", "split_with_sizes", "chunk", "unbind", "empty", "empty_like", "empty_strided", "new_empty"),
}
"Operators that launch nothing."
SHAPES = {"llama-1b": (8, 2048, 16), "roberta-large": (128, 128, 24), "roberta-large, 64 short rows": (64, 26, 24)}
"Rows, tokens of each, layers: 16,384 tokens, and the default batch of short texts."
HOST_US = 8.0
"What a host takes to launch a kernel, with autograd: below that a GPU waits for it."
Kernel = tuple[str, float, dict[int, float], dict[int, float]]
"Kind, seconds of a product or attention (0: another kernel), bytes of each storage read, and of each written."


class Trace(TorchDispatchMode):
    """Record the kernels of a pass."""

    def __init__(self, *, causal: bool, vocabulary: int) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.flops = 0.0
        self.pairs = 0.5 if causal else 1.0
        self.vocabulary = vocabulary
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        read = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if name in VIEWS or not made:
            return out
        self.kept += made  # a storage that is freed would give its number to another
        sizes = [{key_of(each): float(each.numel() * each.element_size()) for each in some} for some in (read, made)]
        self.kernels.append((*self.cost(name, args, read, made), *sizes))
        return out

    def cost(self, name: str, args: Any, read: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[str, float]:
        moved = sum(each.numel() * each.element_size() for each in (*read, *made)) / BANDWIDTH
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            flops = 2.0 * left.numel() * right.shape[-1]
            self.flops += flops
            rate = PEAK * PRODUCTS if left.dtype == torch.bfloat16 else FP32
            return "products", max(flops / rate, moved)
        if "scaled_dot_product" in name:
            backward = "backward" in name
            query, key = args[1:3] if backward else args[:2]
            rows, heads, length, width = query.shape
            flops = 4.0 * rows * heads * length * key.shape[2] * width * self.pairs * (2.5 if backward else 1)
            self.flops += flops
            return "attention", flops / (PEAK * ATTENTION)
        if any(each.ndim and each.shape[-1] == self.vocabulary for each in (*read, *made)):
            return "loss", 0.0
        return ("casts and copies" if name in ("_to_copy", "copy_", "clone") else "pointwise and norms"), 0.0


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def seconds(kernels: list[Kernel], *, compiled: bool) -> tuple[collections.Counter[str], int]:
    """Seconds by kind, and the number of kernels."""
    total: collections.Counter[str] = collections.Counter()
    last_read = {key: place for place, (_, _, read, _) in enumerate(kernels) for key in read}
    number, first = 0, 0
    while first < len(kernels):
        kind, cost, read, made = kernels[first]
        after = first + 1
        if cost:
            total[kind] += cost
        else:
            read, made = dict(read), dict(made)
            while compiled and after < len(kernels) and not kernels[after][1]:
                for key, size in kernels[after][2].items():
                    if key not in made:
                        read[key] = max(size, read.get(key, 0.0))
                made |= kernels[after][3]
                after += 1
            if compiled:
                made = {key: size for key, size in made.items() if last_read.get(key, len(kernels)) >= after}
            kinds = {kernels[place][0] for place in range(first, after)}
            kind = "loss" if "loss" in kinds else kind if not compiled else "compiled pointwise"
            total[kind] += max(LEAST_S, (sum(read.values()) + sum(made.values())) / BANDWIDTH)
        number += 1
        first = after
    return total, number


def trace(name: str, layers: int, *, after: bool) -> Trace:
    """The kernels of one micro-batch of a model with the given number of layers."""
    rows, length, _ = SHAPES[name]
    words = name == "llama-1b"
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16 if after else torch.float32)
        model = build(name, layers).train()
        torch.set_default_dtype(torch.float32)
        ids = torch.zeros(rows, length, dtype=torch.long)
        targets = torch.zeros((rows, length) if words else (rows,), dtype=torch.long)
        options: dict[str, Any] = {"use_cache": False} if words else {}
        if words and after:
            _chunked_loss._replace(model, model.lm_head, _chunked_loss.AfterHead(), _chunked_loss._terms)
            options["targets"] = targets
        counted = Trace(causal=words, vocabulary=model.config.vocab_size if words else -1)
        with counted, torch.autocast("cpu", torch.bfloat16, enabled=not after):
            loss = model(input_ids=ids, **options)
            if not isinstance(loss, torch.Tensor):
                logits = loss.logits.float()
                logits = logits.flatten(0, 1) if words else logits
                loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            loss.backward()
    return counted


def build(name: str, layers: int) -> Any:
    if name == "llama-1b":
        sizes = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
        sizes |= {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192}
        config: Any = transformers.LlamaConfig(
            **sizes, num_hidden_layers=layers, tie_word_embeddings=True, attn_implementation="sdpa"
        )
        return transformers.LlamaForCausalLM(config)
    sizes = {"vocab_size": 50_265, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    sizes |= {"max_position_embeddings": 514, "type_vocab_size": 1}
    config = transformers.RobertaConfig(
        **sizes, num_hidden_layers=layers, attention_probs_dropout_prob=0.0, attn_implementation="sdpa"
    )
    return transformers.RobertaForSequenceClassification(config)


def predict(name: str, *, after: bool) -> dict[str, Any]:
    """The step of the whole model, extrapolated from one and two layers."""
    one, two = (trace(name, layers, after=after) for layers in (1, 2))
    (first, kernels), (second, more) = (seconds(each.kernels, compiled=after) for each in (one, two))
    repeated = SHAPES[name][2] - 1
    by_kind = {kind: first[kind] + repeated * (second[kind] - first[kind]) for kind in second}
    flops, total = one.flops + repeated * (two.flops - one.flops), sum(by_kind.values())
    number = kernels + repeated * (more - kernels)
    return {
        "kernels": number,
        "tflop": round(flops / 1e12, 1),
        "ms": round(total * 1e3, 1),
        "us_per_kernel": round(total * 1e6 / number, 1),
        "share_of_peak": round(flops / total / PEAK, 3),
        "ms_by_kind": {kind: round(each * 1e3, 1) for kind, each in sorted(by_kind.items(), key=lambda item: -item[1])},
    }


def main() -> None:
    asked = arguments(__doc__ or "")
    rows = []
    for name in SHAPES:
        before, after = (predict(name, after=when) for when in (False, True))
        for when, step in (("before", before), ("after", after)):
            faster = round(before["ms"] / step["ms"], 2)
            full = SHAPES[name][0] * SHAPES[name][1] == 16_384
            aim = AIM if when == "after" and full else None
            launched = "host" if step["us_per_kernel"] < HOST_US else "GPU"
            rows.append({"model": name, "when": when, **step, "faster": faster, "aim": aim, "bound_by": launched})
    note = (
        "H200, 16,384 tokens or as named, counted and not measured; ms of forward and backward, without the optimizer"
    )
    finish("roofline", rows, as_json=asked.json, note=note)


if __name__ == "__main__":
    main()
