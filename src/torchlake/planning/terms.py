"""What the formulas of `costs.py` are about: a model, the settings of a step, strategies, machines and results."""

import math
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a transformer. Widths are of the last dimension."""

    layers: int
    "Layers run in a forward pass; shared layers count each time."
    hidden: int
    query: int
    "The width of all heads together."
    key_value: int
    "The width of all key heads together."
    heads: int
    feed_forward: int
    gated: bool
    "The feed-forward part multiplies two projections (Shazeer 2020)."
    readers: int
    "Linear layers per layer that read hidden states, without the attention's output projection."
    packed: bool
    "One projection for queries, keys and values; rotary embedding (Su et al. 2021) copies the first two."
    rms_norm: bool
    "RMSNorm in Python instead of LayerNorm; it keeps the normalized input too."
    dropouts: int
    "Active dropouts per layer on hidden states."
    attention_dropout: bool
    fused: bool
    "Attention by scaled_dot_product_attention, whose fused kernels keep no L x L matrix."
    outputs: int
    "The number of classes or words."
    output_per_token: bool
    untrained: int = 0
    "The number of first layers below everything that is trained: they have no backward pass, and keep nothing for one."
    output_trained: bool = True
    "Whether the layer that makes the outputs is trained."


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameter counts."""

    total: int
    trainable: int
    matrices: int
    "Parameters in linear layers that every token passes; shared layers count each time."
    matrices_trainable: int
    linear: int
    "Parameters in all linear layers, counted once: autocast keeps a copy of them."
    layer: int
    "Parameters in the largest repeated layer, which FSDP gathers at once."
    layers: int
    "Parameters in all repeated layers; the rest (embeddings, head) is one more unit."
    units: int
    "The number of repeated layers."


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """How the job computes a step."""

    bf16: bool
    "The forward pass computes in 16 bits (bf16 or fp16)."
    gpu: bool
    weights: bool = False
    "Whether 16-bit copies of all weights replace autocast; frozen weights of LoRA exist in 16 bits only."
    frozen_bytes: float | None = None
    "Bytes of a frozen parameter of a quantized base; None: not quantized."
    checkpointing: bool = False
    "Activation checkpointing: the backward pass recomputes a layer's activations (Chen et al. 2016)."
    selective: bool = False
    "Checkpointing recomputes all but the outputs of matrix products and attention (Korthikanti et al. 2022)."
    moment_bytes: float = 8.0
    "Bytes per trained parameter that the optimizer keeps: AdamW's two moments."
    bucket_bytes: float = 25.0 * MIB
    "Size of DDP's gradient buckets."
    sent_bytes: int = 4
    "Bytes of a gradient element as DDP sends it."


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a strategy shards over the ranks."""

    name: str
    plugin: str
    "The strategy's file in torchlake/strategies."
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    reshards: bool = False
    "Gathered weights are freed after the layer's forward pass and gathered again."


SHARDINGS = (
    Sharding(name="single", plugin="single"),
    Sharding(name="ddp", plugin="ddp"),
    Sharding(name="fsdp reshard=false", plugin="fsdp", weights=True, gradients=True, optimizer=True),
    Sharding(name="fsdp reshard=true", plugin="fsdp", weights=True, gradients=True, optimizer=True, reshards=True),
    Sharding(name="deepspeed stage=1", plugin="deepspeed", optimizer=True),
    Sharding(name="deepspeed stage=2", plugin="deepspeed", gradients=True, optimizer=True),
    Sharding(name="deepspeed stage=3", plugin="deepspeed", weights=True, gradients=True, optimizer=True, reshards=True),
)
"The strategies, in order of increasing complexity."


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    "The rank's fp32 weights, and the bf16 copies that autocast or the strategy keeps."
    gradients: float
    optimizer: float
    activations: float
    "The activations of the largest micro-batch, with the gradients of one layer's activations."
    gathered: float
    "Temporary weights and gradients of other ranks, and send buffers."
    overhead: float
    peak: float
    "The largest sum of these at one time; less than the total if gradients replace activations."


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network link between two ranks."""

    bandwidth: float
    "Bytes per second that a rank sends."
    latency: float
    "Seconds."


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines."""

    flops: float
    "Floating-point operations per second of one rank."
    within: Link
    across: Link
    ranks_per_machine: int = 8

    def link(self, ranks: int) -> Link:
        """Return the slowest link of a ring of `ranks` ranks."""
        return self.within if ranks <= self.ranks_per_machine else self.across


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives of one kind in a step: total tensor bytes, and number of calls."""

    bytes: float = 0.0
    calls: float = 0.0

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends."""
        return self.bytes * (ranks - 1) / ranks

    def seconds(self, ranks: int, link: Link) -> float:
        """Return the seconds on a ring."""
        return 0.0 if ranks == 1 else self.calls * math.log2(ranks) * link.latency + self.sent(ranks) / link.bandwidth


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of a step, by the computation they can overlap with."""

    forward: Exchange = Exchange()
    backward: Exchange = Exchange()
    after: Exchange = Exchange()
    "Exchanges after the optimizer step, without overlap."

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends in a step."""
        return sum(one.sent(ranks) for one in (self.forward, self.backward, self.after))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step."""

    computing: float
    communication: float
    overlapped: float
    "The time with as much overlap as the strategy allows."
    summed: float
    "The time without overlap."
