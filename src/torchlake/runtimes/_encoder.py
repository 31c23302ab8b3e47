"""BERT, RoBERTa, DistilBERT and similar encoders as plain tensors, for forward passes over concatenated rows.

    ids, mask (B, L) -> tokens (T,) without padding -> layers -> first token of each row (B, H) -> logits (B, C)
                                                              -> pooled tokens of each row (B, P) -> vectors (B, D)

These encoders (Vaswani et al. 2017, with the norm after each block; Devlin et al. 2018) consist of the same few
products under different module names. With the plain tensors a runtime can skip padding, and in the last layer
everything but the first token, if that is the only one that is read, as by classifiers (a twelfth of RoBERTa-base's
work, a sixth of MiniLM's). Tokens are pooled by the task's own module.

In a batch sorted by length, rows of equal length are neighbors, so attention runs over them together without a mask;
each further length in a batch costs one more call per layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import DataError
from torchlake.models.config import encoder_config
from torchlake.models.load import load_weights, refuse_outputs, refuse_sizes, refuse_unused
from torchlake.models.spec import EMBEDS

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("gelu", "relu")
ROBERTA_LIKE = ("camembert", "roberta", "xlm-roberta")
MODEL_TYPES = ("bert", "distilbert", "electra", "mpnet", *ROBERTA_LIKE)
TASKS = ("text_classification", "feature_extraction")
"Tasks that read the first token, or pooled tokens."
BODIES = {"camembert": "roberta", "xlm-roberta": "roberta"}
"The prefix of the encoder's tensor names, if it is not the model type."


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of a layer's tensors in a safetensors file, and of the head."""

    layers: str
    qkv: tuple[str, str, str]
    out: str
    norm: str
    up: str
    down: str
    last_norm: str
    head: tuple[str, str]


BERT = _Names(
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    last_norm="output.LayerNorm",
    head=("pooler.dense", "classifier"),
)
MPNET = replace(BERT, qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), out="attention.attn.o")
MPNET = replace(MPNET, norm="attention.LayerNorm")
DISTILBERT = _Names(
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    last_norm="output_layer_norm",
    head=("pre_classifier", "classifier"),
)

Apply = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Linear:
    """x (T, I) -> x weight^T + bias (T, O)."""

    weight: "torch.Tensor"
    "(O, I)"
    bias: "torch.Tensor"
    "(O,)"


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalization over the last dimension."""

    weight: "torch.Tensor"
    bias: "torch.Tensor"
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer, with queries, keys and values in one product."""

    qkv: Linear
    out: Linear
    norm: Norm
    up: Linear
    down: Linear
    last_norm: Norm


@dataclass(frozen=True, slots=True)
class Encoder:
    """A classifier of this family, or an embedding model."""

    words: "torch.Tensor"
    "(vocabulary, H)"
    positions: "torch.Tensor"
    "The position embeddings (positions, H), including the embedding of the first text of a pair."
    second: "torch.Tensor | None"
    "The vector (H,) added to tokens of the second text; None: the model has no token types."
    norm: Norm
    layers: tuple[Layer, ...]
    heads: int
    activation: str
    padding_id: int | None
    "RoBERTa-like models count positions from this id; None: from 0."
    head: "torch.nn.Module"
    "First tokens (B, H) to logits (B, C); of an embedding model, pooled tokens (B, P) to vectors (B, D) in fp32."
    pools: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None" = None
    "The pooling: states (B, L, H) and mask (B, L) -> pooled tokens (B, P); None: the head gets first tokens."

    embeds: bool = False
    distances: "torch.Tensor | None" = None
    "Numbers added to the scores of attention, by the distance of two tokens (MPNet): (heads, positions, positions)."

    @property
    def width(self) -> int:
        """The hidden width H."""
        return self.words.shape[1]

    def to(self, device: str, dtype: "torch.dtype") -> "Encoder":
        """Return the encoder on `device` in `dtype`."""

        def moved(value: Any) -> Any:
            if isinstance(value, Linear | Norm | Layer):
                return type(value)(*(moved(getattr(value, each.name)) for each in fields(value)))
            return value if isinstance(value, float) else value.to(device, dtype)

        return replace(
            self,
            words=moved(self.words),
            positions=moved(self.positions),
            second=None if self.second is None else moved(self.second),
            distances=None if self.distances is None else moved(self.distances),
            norm=moved(self.norm),
            layers=tuple(moved(layer) for layer in self.layers),
            head=self.head.to(device, None if self.embeds else dtype),
        )


def heads(folder: Path) -> int:
    """Return the number of attention heads of the model."""
    config = atomic_io.read_json(folder / "config.json")
    return int(config.get("num_attention_heads", config.get("n_heads", 1)))


def refusal(folder: Path) -> str | None:
    """Return why the model does not belong to this family, or None."""
    config = atomic_io.read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        return f"it does not support models of type {kind!r}"
    activation = config.get("hidden_act", config.get("activation", "gelu"))
    if activation not in ACTIVATIONS:
        return f"it supports the activations {' and '.join(ACTIVATIONS)} only, and this model has {activation!r}"
    if config.get("is_decoder") or config.get("position_embedding_type", "absolute") != "absolute":
        return "it supports encoders with absolute positions only"
    if kind == "electra" and config.get("embedding_size", 128) != config.get("hidden_size", 256):
        return "it supports ELECTRA only with embeddings as wide as its states"
    return None


def read(folder: Path, spec: TaskSpec) -> Encoder:
    """Load the classifier of a model folder as an `Encoder`, in fp32 in main memory. Raises the errors of
    `models.load_model`.

    The tensors are read from the file by name, because importing transformers takes longer than everything else. The
    weights of queries, keys and values are concatenated and therefore copied; the others are as `load_weights` returns
    them, in a job in a memory map that processes share.
    """

    config = encoder_config(folder)
    assert config is not None, "refusal() accepts only these model types"
    if config["hidden_size"] % config["num_attention_heads"]:
        raise DataError(
            f"{folder / 'config.json'}: its {config['num_attention_heads']} attention heads cannot share states of "
            f"{config['hidden_size']} numbers. Copy the file from where the weights are from."
        )
    body = f"{BODIES.get(config['model_type'], config['model_type'])}."
    stored = load_weights(folder)
    names_of = {name: _current_name(name).removeprefix(body) for name in stored}
    take = _TensorReader(folder, {names_of[name]: tensor for name, tensor in stored.items()})
    kind = config["model_type"]
    names = {"distilbert": DISTILBERT, "mpnet": MPNET}.get(kind, BERT)
    eps = 1e-12 if kind == "distilbert" else config["layer_norm_eps"]
    positions = take("embeddings.position_embeddings.weight")
    second = None
    if kind not in ("distilbert", "mpnet"):
        types = take("embeddings.token_type_embeddings.weight")
        positions, second = positions + types[0], types[1] - types[0] if len(types) > 1 else None
    embeds = spec.task == EMBEDS
    head: Any = (
        plugins.load("tasks", spec.task).load_vectors(folder) if embeds else _classifier(take, names, spec, config)
    )
    encoder = Encoder(
        words=take("embeddings.word_embeddings.weight"),
        positions=positions,
        second=second,
        norm=take.norm("embeddings.LayerNorm", eps),
        layers=tuple(take.layer(f"{names.layers}.{index}", names, eps) for index in range(config["num_hidden_layers"])),
        heads=config["num_attention_heads"],
        activation=config["hidden_act"],
        padding_id={"mpnet": 1}.get(kind, config["pad_token_id"] if kind in ROBERTA_LIKE else None),
        head=head,
        pools=head.pool if embeds and head.how.poolings != ("cls",) else None,
        embeds=embeds,
        distances=_distances(take("encoder.relative_attention_bias.weight"), len(positions))
        if kind == "mpnet"
        else None,
    )
    refuse_unused(
        folder, (name for name, as_ in names_of.items() if as_ not in take.read), body=body if embeds else None
    )
    return encoder


def _distances(by_bucket: "torch.Tensor", positions: int) -> "torch.Tensor":
    """Expand MPNet's numbers by bucket of distances, (buckets, heads), to (heads, positions, positions).

    transformers uses the first 32 buckets, however many there are.
    """
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    places = torch.arange(positions)
    buckets = MPNetEncoder.relative_position_bucket(places[None] - places[:, None])
    return by_bucket[buckets].permute(2, 0, 1).contiguous()


def linear_module(layer: Linear) -> "torch.nn.Module":
    """Return the layer as a module of torch."""
    import torch

    outputs, inputs = layer.weight.shape
    module = torch.nn.Linear(inputs, outputs, device="meta")
    module.load_state_dict({"weight": layer.weight.contiguous(), "bias": layer.bias.contiguous()}, assign=True)
    return module


def _classifier(take: "_TensorReader", names: _Names, spec: TaskSpec, config: Mapping[str, Any]) -> "torch.nn.Module":
    import torch

    kind = config["model_type"]
    activation = {"distilbert": torch.nn.ReLU, "electra": torch.nn.GELU}.get(kind, torch.nn.Tanh)
    like_roberta = kind in (*ROBERTA_LIKE, "electra", "mpnet")
    head: list[torch.nn.Module] = []
    for name in ("classifier.dense", "classifier.out_proj") if like_roberta else names.head:
        linear = take.linear(name)
        head += [linear_module(linear)] if head else [linear_module(linear), activation()]
    refuse_outputs(take.folder, len(linear.bias), spec)
    return torch.nn.Sequential(*head)


@dataclass(frozen=True, slots=True)
class _TensorReader:
    """Reads tensors by name. Raises DataError for a missing one."""

    folder: Path
    tensors: "dict[str, torch.Tensor]"
    read: set[str] = field(default_factory=set)
    "The names that were read."

    def __call__(self, name: str) -> "torch.Tensor":
        self.read.add(name)
        if name not in self.tensors:
            raise DataError(
                f"{self.folder}: the weights lack {name}. This is not a fine-tuned model of its type: its answers "
                "would be random. Fine-tune it first (torchlake train)."
            )
        return self.tensors[name].float()

    def linear(self, name: str) -> Linear:
        weight, bias = self(f"{name}.weight"), self(f"{name}.bias")
        if len(bias) != len(weight):
            refuse_sizes(self.folder, [(f"{name}.bias", bias.shape, weight.shape[:1])])
        return Linear(weight, bias)

    def norm(self, name: str, eps: float) -> Norm:
        return Norm(self(f"{name}.weight"), self(f"{name}.bias"), eps)

    def layer(self, place: str, names: _Names, eps: float) -> Layer:
        import torch

        parts = [self.linear(f"{place}.{name}") for name in names.qkv]
        return Layer(
            qkv=Linear(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])),
            out=self.linear(f"{place}.{names.out}"),
            norm=self.norm(f"{place}.{names.norm}", eps),
            up=self.linear(f"{place}.{names.up}"),
            down=self.linear(f"{place}.{names.down}"),
            last_norm=self.norm(f"{place}.{names.last_norm}", eps),
        )


def _current_name(name: str) -> str:
    """Rename gamma and beta of early BERTs, converted from TensorFlow, to weight and bias."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
