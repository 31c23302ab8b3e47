"""Models of transformers over concatenated rows: their own modules, with attention within each row.

    ids, mask (B, L) -> tokens (1, T), positions -> the body, with `_attend` for its attention -> states (B, L, H)

The head is transformers' and gets the states as it would without this. For models that are not an `Encoder`
(`_encoder.py`), or whose task reads tokens other than the first: those whose body takes positions, and whose attention
is an entry of transformers' table or DeBERTa's (`_disentangled.py`). Linear layers are the runtime's products. Loading
compares the states of a few short rows with the model's own.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.config import POSITIONS_AFTER_PADDING
from torchlake.runtimes import Forward, _disentangled, _encoder, _ragged, eager
from torchlake.runtimes._encoder import Linear
from torchlake.runtimes._padding import PackedRows, remove_padding

if TYPE_CHECKING:
    import torch

ENCODERS = (
    "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "gte", "jina_embeddings_v3",
    "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
DECODERS = (
    "gemma", "gemma3_text", "gpt2", "gpt_neox", "llama", "ministral", "mistral", "modernbert-decoder", "olmo2", "opt",
    "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
MODEL_TYPES = (*ENCODERS, *_disentangled.MODEL_TYPES, *DECODERS)
OTHERS = {"gemma2": "its attention limits the scores", "t5": "its attention also reads the distance of tokens"}
"Why other well-known models do not belong to these."
TASKS = ("text_classification", "feature_extraction", "token_classification", "question_answering")
ATTENTION = "torchlake_rows"
"The name in transformers' table."
LARGEST_DIFFERENCE = 1e-3
"Of the states of short rows from the model's own, relative to the largest state."

_rows: ContextVar[PackedRows] = ContextVar("rows of the batch that is computed")


def refusal(folder: Path) -> str | None:
    """Return why neither this way nor `Encoder` computes the model, or None."""
    config = atomic_io.read_json(folder / "config.json")
    kind, head = config.get("model_type"), str((config.get("architectures") or [""])[0])
    if kind in OTHERS:
        return f"it does not support models of type {kind!r}: {OTHERS[kind]}"
    reason = _encoder.refusal(folder)
    if reason is None and kind not in MODEL_TYPES and head.endswith(("ForTokenClassification", "ForQuestionAnswering")):
        return f"it does not support the head {head}"
    if reason is None or kind not in MODEL_TYPES:
        return reason
    if kind in _disentangled.MODEL_TYPES:
        return _disentangled.refusal(config)
    is_other = kind in _encoder.MODEL_TYPES and (
        config.get("is_decoder") or config.get("position_embedding_type", "absolute") != "absolute"
    )
    return reason if is_other else None


def is_one(folder: Path, spec: TaskSpec) -> bool:
    """Return whether the model is computed this way, and not as an `Encoder`."""
    return _encoder.refusal(folder) is not None or spec.task not in _encoder.TASKS


def check_device(runtime: str, folder: Path, device: str) -> None:
    """Raise UsageError on a GPU, for a model whose attention the kernel for rows of any length does not support."""
    if device != "cpu":
        kind = atomic_io.read_json(folder / "config.json").get("model_type")
        raise UsageError(
            f"The runtime {runtime!r} supports models of type {kind!r} on CPUs only; on a GPU use 'eager'."
        )


def make_forward(
    folder: Path,
    spec: TaskSpec,
    *,
    linear: Callable[[Linear], _ragged.Multiply],
    dtype: "torch.dtype | None" = None,
) -> Forward:
    """Return the forward pass on CPUs; the body is in `dtype` (default: fp32).

    Raises the errors of the task, and UsageError if the concatenated rows of this model affect one another.
    """
    import torch

    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    body = getattr(model, model.base_model_prefix)
    ids, mask = _short_rows(body.config.get_text_config())
    with torch.inference_mode():
        expected = body(input_ids=ids, attention_mask=mask).last_hidden_state[mask != 0]
        _pack(body)
        found = body(input_ids=ids, attention_mask=mask).last_hidden_state[mask != 0]
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UsageError(
            f"{folder}: concatenated rows of this model affect one another: their states differ by {difference:.2g} of "
            "the largest. Use the runtime 'eager'."
        )
    body.to(dtype or torch.float32)
    for module in body.modules():
        if type(module) is torch.nn.Linear:
            bias = module.bias if module.bias is not None else module.weight.new_zeros(len(module.weight))
            product = linear(Linear(module.weight.detach(), bias.detach()))
            module.forward = partial(_multiply, product)  # type: ignore[method-assign]
    return eager.forward_of(model, folder, spec, "cpu")


def _short_rows(config: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return ids and mask (3, 7) of rows of 7, 7 and 3 tokens without padding."""
    import torch

    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[2, 3:] = 0
    pad = config.pad_token_id or 0
    ids = (torch.arange(21).reshape(3, 7) * 7 + pad + 1) % config.vocab_size
    ids[ids == pad] = (pad + 1) % config.vocab_size
    return torch.where(mask != 0, ids, pad), mask


def _pack(body: Any) -> None:
    """Let the body of a model compute the rows of a padded batch one after the other, without padding."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    config = body.config.get_text_config()
    config.use_cache = False
    padding_id = config.pad_token_id if config.model_type in POSITIONS_AFTER_PADDING else None
    if config.model_type in _disentangled.MODEL_TYPES:
        _disentangled.attach(body, _rows)
    else:
        AttentionInterface.register(ATTENTION, _attend)
        AttentionMaskInterface.register(ATTENTION, _no_mask)
        body.set_attn_implementation(ATTENTION)
    forward, pooler = body.forward, getattr(body, "pooler", None)
    if pooler is not None:  # it reads the first token of each row, in fp32
        body.pooler = None

    def packed(
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = remove_padding(padding_id, input_ids.numpy(), mask.numpy())
        tokens, positions = (torch.from_numpy(each)[None] for each in (rows.ids, rows.positions))
        others = {} if token_type_ids is None else {"token_type_ids": token_type_ids[mask != 0][None]}
        token = _rows.set(rows)
        try:
            answer = forward(input_ids=tokens, position_ids=positions, **others)
        finally:
            _rows.reset(token)
        states = answer.last_hidden_state[0].float()
        padded = states.new_zeros(*input_ids.shape, states.shape[-1])
        padded[mask != 0] = states
        answer["last_hidden_state"] = padded
        if pooler is not None:
            answer["pooler_output"] = pooler(padded)
        return answer

    body.forward = packed


def _multiply(product: _ragged.Multiply, x: "torch.Tensor") -> "torch.Tensor":
    return product(x.flatten(0, -2), None).view(*x.shape[:-1], -1)


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: `_attend` computes rows apart from one another."""


def _attend(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> "tuple[torch.Tensor, None]":
    """Compute attention within each row, as transformers calls it: query (1, heads, T, D), key and value with as many
    heads or a part of them; return (1, T, heads, D).

    With a `sliding_window`, tokens attend to those at a smaller distance.
    """
    import torch

    causal = bool(getattr(module, "is_causal", False))
    context, at = torch.empty_like(query.transpose(1, 2)), 0
    for count, length in _rows.get().length_groups:
        end = at + count * length
        q, k, v = (part[0, :, at:end].unflatten(1, (count, length)).transpose(0, 1) for part in (query, key, value))
        near = None
        if sliding_window is not None and length > sliding_window:
            distances = torch.arange(length)[:, None] - torch.arange(length)
            near = (distances < sliding_window) & (distances >= 0 if causal else distances > -sliding_window)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=near, is_causal=causal and near is None, scale=scaling, enable_gqa=len(k[0]) != len(q[0])
        )
        context[0, at:end].unflatten(0, (count, length)).copy_(mixed.transpose(1, 2))
        at = end
    return context, None
