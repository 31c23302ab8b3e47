"""Cross entropy of a language model without the logits of a whole micro-batch.

    hidden states (T, H) at the targets' places -> chunks of them: logits -> loss -> gradients of the hidden states and
                                                                       of the head's weight

16,384 tokens and 128,000 words have logits of 4 GiB in bf16; the loss adds fp32 copies and gradients, 27 GiB in all. In
chunks only the largest chunk counts. The gradients are computed in the forward pass, as Liger's kernel does (Hsu et al.
2024), so no product is computed twice. They are kept until the backward pass: fp32 for the weight, none if it is
frozen.

`attach` puts the loss inside the model's own forward pass, in place of its head. So the hooks of DDP, FSDP and
DeepSpeed run as usual: they gather the head's weight before it is used. Some models scale or cap their logits after the
head. `find` detects this with one row; a model that does anything else keeps its own path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchlake.loss import CHUNK_BYTES, SMALL_BYTES
from torchlake.models.probes import evaluating

AGREEMENT = 1e-5
"The relative tolerance for the logits of a row in fp32, and for its loss."


@dataclass(frozen=True, kw_only=True)
class AfterHead:
    """A model's computation on its head's output x: factor * x, or cap * tanh(factor * x / cap)."""

    factor: float = 1.0
    cap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits."""
        scaled = logits if self.factor == 1 else logits * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


@dataclass
class _Call:
    """One forward pass: the targets that the head gets, and the loss that it returns."""

    targets: torch.Tensor | None = None
    places: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss () summed over hidden (T, H) and targets (T,), with its gradients computed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        after: AfterHead,
        terms: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        learning: bool,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # Autograd reports what needs a gradient even while gradients are off, as in validation.
        for_hidden, for_weight, for_bias = (learning and needed for needed in ctx.needs_input_grad[:3])
        # The head's weight is cast once, not for every chunk.
        cast = weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        size = max(1, CHUNK_BYTES // (4 * len(weight)))
        with torch.autocast(device, enabled=False):
            for first in range(0, len(hidden), size):
                part = hidden[first : first + size].to(dtype)
                logits = functional.linear(part, cast, None if bias is None else bias.to(dtype))
                summed, grad = terms(logits, targets[first : first + size], after)
                loss += summed
                if hidden_grad is not None:
                    hidden_grad[first : first + size] = grad @ cast
                if weight_grad is not None and weight_grad.dtype == dtype:
                    weight_grad.addmm_(grad.T, part)
                elif weight_grad is not None:
                    weight_grad += grad.T @ part
                if bias_grad is not None:
                    bias_grad += grad.sum(0, dtype=torch.float32)
                del logits, grad  # before the next chunk's
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if hidden_grad is None else (hidden_grad * grads[0]).to(hidden_grad.dtype),
            None if weight_grad is None else weight_grad.mul_(grads[0]).to(weight_dtype),
            None if bias_grad is None else bias_grad.mul_(grads[0]).to(bias_dtype),
            *[None] * 4,
        )


def _terms(logits: torch.Tensor, targets: torch.Tensor, after: AfterHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss (), fp32, of logits (T, V) before `after`, and its gradient (T, V) in their dtype."""
    final = after.apply(logits.float())
    logs = functional.log_softmax(final, dim=-1)
    loss = -logs.gather(1, targets[:, None]).sum()
    grad = logs.exp_()
    grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
    if after.cap is not None:
        grad *= 1 - (final / after.cap) ** 2
    if after.factor != 1:
        grad *= after.factor
    return loss, grad.to(logits.dtype)


def find(model: nn.Module, row: torch.Tensor, forward: Mapping[str, Any], *, tokens: int) -> AfterHead | None:
    """Return the computation of `model`, a causal language model of transformers, after its head, for `attach`.

    `row` (1, L) int64 is a row of token ids to test the model with, `forward` the task's arguments, `tokens` the
    largest number of one pass. None if the logits of `tokens` tokens are small, or the model computes its logits in a
    way that is not an `AfterHead`. The row is computed in evaluation mode; the mode is restored.
    """
    head = _head(model)
    if head is None or tokens * head.out_features * 4 <= min(SMALL_BYTES, CHUNK_BYTES):
        return None
    with torch.no_grad(), evaluating(model):
        found = _find_after_head(model, head, row, forward)
        if found is None:
            return None
        after, logits = found
        before = model.forward, head.forward
        _replace(model, head, after, _terms)
        targets, places = row[0, 1:], torch.arange(row.shape[1] - 1)
        expected = functional.cross_entropy(logits[0, :-1].float(), targets, reduction="sum")
        found_loss = model(input_ids=row, targets=targets, places=places, **forward)
        same = torch.isclose(found_loss, expected, rtol=AGREEMENT, atol=0)
        model.forward, head.forward = before  # type: ignore[method-assign]
        return after if same else None


def attach(model: nn.Module, after: AfterHead, *, compiled: bool = False, each: bool = False) -> None:
    """Let `model` return its loss if its forward pass gets `targets`; `after` is what `find` returned.

    With `targets` (n,) int64 and `places` (n,), numbers of positions in the flattened batch, `model(...)` returns the
    loss () summed over the targets in fp32, or with `each` the log-probability (n,) of each; it computes logits only at
    those places. Without targets it works as before. `compiled`: compile the pointwise part of the summed loss. The
    model may be on the meta device.
    """
    head = _head(model)
    assert head is not None, "find() returned the computation after its head"
    _replace(model, head, after, torch.compile(_terms, dynamic=True) if compiled else _terms, each=each)


def _head(model: nn.Module) -> nn.Linear | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Linear) else None


def _find_after_head(
    model: nn.Module, head: nn.Linear, row: torch.Tensor, forward: Mapping[str, Any]
) -> tuple[AfterHead, torch.Tensor] | None:
    """Return the model's computation after its head, found by one row (1, L), and the row's logits; None: it is not an
    `AfterHead`."""
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = head.register_forward_hook(lambda _, inputs, output: outputs.append((inputs[0], output)))
    try:
        logits = model(input_ids=row, **forward).logits
    finally:
        hook.remove()
    if len(outputs) != 1 or logits.shape != outputs[0][1].shape or outputs[0][0].shape[:2] != row.shape:
        return None
    output, final = outputs[0][1].float(), logits.float()
    largest = output.abs().argmax()
    factor = float(final.flatten()[largest] / output.flatten()[largest])
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # type: ignore[union-attr, operator]
    tried = [AfterHead(), AfterHead(factor=factor)]
    if isinstance(cap, int | float) and cap > 0:
        tried.append(AfterHead(cap=float(cap)))
    for after in tried:
        scale = max(1e-6, float(final.abs().max()))
        if bool((after.apply(output) - final).abs().max() <= AGREEMENT * scale):
            return after, logits
    return None


def _log_probabilities(states: torch.Tensor, targets: torch.Tensor, head: nn.Linear, after: AfterHead) -> torch.Tensor:
    """Return the log-probabilities (n,) of targets (n,) after states (n, H), in fp32.

    Above CHUNK_BYTES of logits, each chunk's are computed again in the backward pass instead of kept.
    """

    def some(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(part, head.weight, head.bias)
        with torch.autocast(part.device.type, enabled=False):
            return -functional.cross_entropy(after.apply(logits.float()), wanted, reduction="none")

    size = max(1, CHUNK_BYTES // (4 * head.out_features))
    if len(states) <= size:
        return some(states, targets)
    pieces = zip(states.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(some, part, wanted, use_reentrant=False) for part, wanted in pieces])


def _replace(
    model: nn.Module, head: nn.Linear, after: AfterHead, terms: Callable[..., Any], *, each: bool = False
) -> None:
    """Set the `forward` of the model and of its head; hooks and the names of tensors do not change."""
    call = _Call()
    model_forward, head_forward = model.forward, head.forward

    @wraps(model_forward)  # `generate` looks at its arguments
    def forward(
        *args: Any, targets: torch.Tensor | None = None, places: torch.Tensor | None = None, **options: Any
    ) -> Any:
        if targets is None:
            return model_forward(*args, **options)
        call.targets, call.places = targets, places
        try:
            logits = model_forward(*args, **options).logits
            assert call.loss is not None, "the model did not call its head"
            # Times zero: it keeps the head's output in the graph, where strategies hook the backward pass.
            return call.loss + logits.sum() * 0
        finally:
            call.targets = call.places = call.loss = None

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        if call.targets is None or call.places is None:
            return head_forward(hidden)
        states = hidden.flatten(0, 1).index_select(0, call.places)
        if each:
            call.loss = _log_probabilities(states, call.targets, head, after)
            return call.loss.sum().expand(1, 1, 1)
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            states, head.weight, head.bias, call.targets, after, terms, torch.is_grad_enabled()
        )
        call.loss = loss
        return loss.expand(1, 1, 1)

    model.forward, head.forward = forward, loss_of  # type: ignore[method-assign,assignment]
