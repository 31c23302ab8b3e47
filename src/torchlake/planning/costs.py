"""What a training step costs: bytes on a rank, bytes between ranks, floating-point operations, seconds.

Formulas only, over a model's shape: nothing is run and nothing is measured here. B rows of L tokens, hidden width h,
feed-forward width f, N ranks, P parameters of which T learn. Weights, gradients and AdamW's two moments are fp32, as
torchlake trains; bf16 is autocast around the forward pass.

    memory      what ZeRO splits over N ranks (Rajbhandari et al. 2020), and the activations of one micro-batch, those
                of a layer as Korthikanti et al. 2022 count them, for what autograd really keeps of transformers' layers
    traffic     a ring: an all-gather or a reduce-scatter sends (N - 1)/N of its bytes from each rank, an all-reduce
                twice that (Patarasuk and Yuan 2009)
    time        6 floating-point operations per parameter and token (Kaplan et al. 2020), 4 where the parameter is
                frozen, and the attention's own; log2(N) latencies per collective (Thakur et al. 2005)

Not in it: the optimizer's own time, the start of kernels, validation, checkpoints, and what an allocator wastes.
"""

import math
from dataclasses import dataclass

MIB = 2**20
DEEPSPEED_BUCKET = 500_000_000
"Numbers that DeepSpeed reduces at once; its buffer holds as many, or all gradients where they are fewer."
DEEPSPEED_LIVE = 1_000_000_000
"Parameters that its third stage keeps gathered."
OVERHEAD = {False: 96 * MIB, True: 1024 * MIB}
"Bytes beside the model's tensors, without and with a GPU: buffers of the libraries, a CUDA context, nccl's buffers."
FORWARD = 1 / 3
"Share of a step's operations that the forward pass takes; the backward pass computes two products for each of its."


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer as the formulas see it. Widths are of the last dimension."""

    layers: int
    "How often a layer runs: more than there are layers, where they share weights."
    hidden: int
    query: int
    "Of all heads together."
    key_value: int
    "Of all heads that keys have, together."
    heads: int
    feed_forward: int
    gated: bool
    "Whether the feed-forward part multiplies two projections (Shazeer 2020)."
    readers: int
    "Linear layers of a layer that read hidden states, the attention's output projection not counted."
    packed: bool
    "One projection makes queries, keys and values, and turning the first two (Su et al. 2021) copies them."
    rms_norm: bool
    "RMSNorm in Python, which keeps the normalised input too, instead of LayerNorm."
    dropouts: int
    "Dropouts of a layer on hidden states; 0 where their probability is 0."
    attention_dropout: bool
    fused: bool
    "Attention through scaled_dot_product_attention: its fused kernels keep no L x L matrix."
    outputs: int
    "Classes or words."
    output_per_token: bool


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    total: int
    trainable: int
    matrices: int
    "Of the linear layers that every token passes, each time one is passed: shared layers count as often as they run."
    matrices_trainable: int
    linear: int
    "Of all linear layers, once: what autocast keeps a copy of."
    layer: int
    "Of the largest repeated layer: what FSDP gathers at once."
    layers: int
    "Of all repeated layers; the rest (embeddings, head) is gathered as one more unit."
    units: int
    "Repeated layers."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the job computes."""

    bf16: bool
    "Whether the forward pass computes in 16 bits; fp16 counts the same."
    gpu: bool
    checkpointing: bool = False
    "Activation checkpointing: a layer's activations are computed again in the backward pass (Chen et al. 2016)."
    bucket_bytes: float = 25.0 * MIB
    "Gradients that DDP sends at once."
    sent_bytes: int = 4
    "Of a number of a gradient, as DDP sends it."


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a strategy splits over the ranks."""

    name: str
    plugin: str
    "Its file in torchlake/strategies."
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    regathers: bool = False
    "Whether gathered weights are dropped after the forward pass of their layer and gathered again."


SHARINGS = (
    Sharing(name="single", plugin="single"),
    Sharing(name="ddp", plugin="ddp"),
    Sharing(name="fsdp reshard=false", plugin="fsdp", weights=True, gradients=True, optimizer=True),
    Sharing(name="fsdp reshard=true", plugin="fsdp", weights=True, gradients=True, optimizer=True, regathers=True),
    Sharing(name="deepspeed stage=1", plugin="deepspeed", optimizer=True),
    Sharing(name="deepspeed stage=2", plugin="deepspeed", gradients=True, optimizer=True),
    Sharing(name="deepspeed stage=3", plugin="deepspeed", weights=True, gradients=True, optimizer=True, regathers=True),
)
"From the simplest on."


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    "fp32, or the rank's part of them; with them the bf16 copies that autocast or the strategy keeps."
    gradients: float
    optimizer: float
    activations: float
    "Of the largest micro-batch, and the gradients of one layer's."
    gathered: float
    "Weights and gradients of other ranks that are here for a moment, and buffers to send from."
    overhead: float
    peak: float
    "The largest sum that is there at one time: less than that of all where gradients come as activations go."


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between two ranks."""

    bandwidth: float
    "Bytes a second that a rank sends."
    latency: float
    "Seconds."


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines."""

    flops: float
    "Floating-point operations a second of one rank."
    within: Link
    across: Link
    ranks_per_machine: int = 8

    def link(self, ranks: int) -> Link:
        """The slowest link of a ring of so many ranks."""
        return self.within if ranks <= self.ranks_per_machine else self.across


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives of one kind in a step: bytes of the whole tensors, and how many calls they come in."""

    bytes: float = 0.0
    calls: float = 0.0

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends."""
        return self.bytes * (ranks - 1) / ranks

    def seconds(self, ranks: int, link: Link) -> float:
        """Time on a ring; no time for one rank."""
        return 0.0 if ranks == 1 else self.calls * math.log2(ranks) * link.latency + self.sent(ranks) / link.bandwidth


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a step exchanges, by when it can overlap with computing."""

    forward: Exchange = Exchange()
    backward: Exchange = Exchange()
    after: Exchange = Exchange()
    "Behind the optimizer, where there is nothing to overlap with."

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends in a step."""
        return sum(one.sent(ranks) for one in (self.forward, self.backward, self.after))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step: of computing, of communication, and of both."""

    computing: float
    communication: float
    overlapped: float
    "Communication as far hidden behind computing as the strategy allows."
    summed: float
    "Nothing hidden."


def layer_bytes(shape: Shape, length: int, setting: Setting) -> float:
    """Bytes per token that one layer keeps for its backward pass, in rows of `length` tokens.

    The norms' inputs stay fp32 under autocast, and each linear layer that reads hidden states keeps a bf16 copy of its
    own. Without a fused kernel, or with dropout on CPUs, whose fused kernel has none, attention keeps its L x L
    probabilities, and what they are computed from, in fp32; with dropout also the mask and what it left.
    """
    size = 2 if setting.bf16 else 4
    norms = 2 * 4 * shape.hidden * (2 if shape.rms_norm else 1)
    inputs = size * shape.hidden * (shape.readers if setting.bf16 else 2)
    attention = size * (2 * shape.query + 2 * shape.key_value)
    if shape.packed:
        attention += size * (shape.query + shape.key_value)
    feed_forward = size * shape.feed_forward * (4 if shape.gated else 2)
    dropouts = shape.dropouts * shape.hidden * (1 if setting.gpu else size)
    matrices = 0
    if not shape.fused or (shape.attention_dropout and not setting.gpu):
        matrices = 4 * shape.heads * length * (3 if shape.attention_dropout else 1)
        matrices += (4 - size) * (shape.query + 2 * shape.key_value)
    return norms + inputs + attention + feed_forward + dropouts + matrices


def activation_bytes(shape: Shape, rows: int, length: int, setting: Setting) -> float:
    """Bytes that autograd keeps between the forward and the backward pass of `rows` rows of `length` tokens.

    With checkpointing: every layer's input, and all of one layer.
    """
    tokens = rows * length
    layer = layer_bytes(shape, length, setting)
    layers = shape.layers * layer
    if setting.checkpointing:
        layers = shape.layers * 4 * shape.hidden + layer
    # Of the embeddings' norm and dropout and the last layer's output, or of the last norm.
    ends = 4 * shape.hidden * (2 + (shape.dropouts > 0))
    answers = tokens if shape.output_per_token else rows
    head = answers * (shape.outputs * (10 if setting.bf16 else 8) + 8 * shape.hidden)
    return tokens * (layers + ends) + head


def working_bytes(shape: Shape, tokens: int, setting: Setting) -> float:
    """Bytes of gradients of activations while the backward pass is inside one layer's feed-forward part."""
    return tokens * (2 if setting.bf16 else 4) * (2 * shape.feed_forward + 2 * shape.hidden)


def memory(
    sharing: Sharing, parameters: Parameters, setting: Setting, *, ranks: int, activations: float, accumulates: bool
) -> Memory:
    """Bytes on each of `ranks` ranks; `activations` of the largest micro-batch, `accumulates`: a step has several.

    Gradients are freed after each step, so with one micro-batch they come as activations go, and the larger of both
    counts; DDP's buckets stay. DeepSpeed computes in bf16 with its fp32 weights in the optimizer, and its third stage
    keeps up to a billion gathered parameters (its defaults).
    """
    deepspeed = sharing.plugin == "deepspeed"
    total, trainable, size = parameters.total, parameters.trainable, 2 if setting.bf16 else 4
    weights = (size if deepspeed else 4) * total / (ranks if sharing.weights else 1)
    if setting.bf16 and not deepspeed and not sharing.weights:
        weights += 2 * parameters.linear  # autocast's copies
    # DeepSpeed adds them up in fp32 where they are split.
    gradients = (size if deepspeed and not sharing.gradients else 4) * trainable / (ranks if sharing.gradients else 1)
    optimizer = (12 if deepspeed else 8) * trainable / (ranks if sharing.optimizer else 1)
    gathered = _gathered(sharing, parameters, setting, accumulates=accumulates)
    together = accumulates or sharing.plugin in ("ddp", "deepspeed")
    passing = activations + gradients if together else max(activations, gradients)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        gathered=gathered,
        overhead=OVERHEAD[setting.gpu],
        peak=weights + optimizer + gathered + OVERHEAD[setting.gpu] + passing,
    )


def _gathered(sharing: Sharing, parameters: Parameters, setting: Setting, *, accumulates: bool) -> float:
    """Bytes that a rank holds for a moment for others.

    FSDP: the layer that computes and the next one, with their gradients, and all that is in no layer, which stays;
    the whole gradient where micro-batches add up.
    """
    total, trainable, size = parameters.total, parameters.trainable, 2 if setting.bf16 else 4
    if sharing.plugin == "deepspeed":
        live = min(total, DEEPSPEED_LIVE) if sharing.weights else 0
        return float(size * (live + min(trainable, DEEPSPEED_BUCKET)))
    if not sharing.weights:
        return 0.0
    units = 2 * parameters.layer + total - parameters.layers
    gradients = 4 * trainable * (1 if accumulates else min(1.0, units / total))
    return size * (min(units, total) if sharing.regathers else total) + gradients


def traffic(sharing: Sharing, parameters: Parameters, setting: Setting, *, micro_batches: float) -> Traffic:
    """What ranks exchange in a step of `micro_batches` micro-batches.

    Gradients are sent once, after the last of them; where DeepSpeed splits them, after each.
    """
    size, units = 2 if setting.bf16 else 4, parameters.units + 1
    if sharing.plugin == "single":
        return Traffic()
    if sharing.plugin == "ddp":  # an all-reduce is a reduce-scatter and an all-gather
        calls = 2 * math.ceil(4 * parameters.trainable / setting.bucket_bytes)
        return Traffic(backward=Exchange(bytes=2 * parameters.trainable * setting.sent_bytes, calls=calls))
    deepspeed = sharing.plugin == "deepspeed"
    times = micro_batches if deepspeed and sharing.gradients else 1
    reduced = Exchange(bytes=times * (size if deepspeed else 4) * parameters.trainable, calls=times * units)
    if not sharing.weights:
        return Traffic(backward=reduced, after=Exchange(bytes=size * parameters.trainable, calls=1))
    gather = Exchange(bytes=size * parameters.total * micro_batches, calls=units * micro_batches)
    if not sharing.regathers:
        return Traffic(forward=gather, backward=reduced)
    both = Exchange(bytes=gather.bytes + reduced.bytes, calls=gather.calls + reduced.calls)
    return Traffic(forward=gather, backward=both)


def token_flops(parameters: Parameters, shape: Shape, setting: Setting) -> float:
    """Operations of one training step per token, the attention's products aside.

    Forward 2 per parameter of a matrix, backward 2 for the gradient of its input and 2 for its own where it learns.
    """
    per_parameter = 4 * parameters.matrices + 2 * parameters.matrices_trainable
    again = 2 * parameters.matrices if setting.checkpointing else 0
    head = 6 * shape.hidden * shape.outputs if shape.output_per_token else 0
    return float(per_parameter + again + head)


def pair_flops(shape: Shape, setting: Setting) -> float:
    """Operations of one training step per pair of tokens of a row: two products forward, four backward."""
    return float(shape.layers * shape.query * (16 if setting.checkpointing else 12))


def step_time(exchanged: Traffic, *, ranks: int, computing: float, cluster: Cluster) -> StepTime:
    """Seconds of a step whose slowest rank computes for `computing` seconds."""
    link = cluster.link(ranks)
    forward, backward, after = (
        one.seconds(ranks, link) for one in (exchanged.forward, exchanged.backward, exchanged.after)
    )
    communication = forward + backward + after
    hidden = max(FORWARD * computing, forward) + max((1 - FORWARD) * computing, backward) + after
    return StepTime(
        computing=computing, communication=communication, overlapped=hidden, summed=computing + communication
    )
