"""The cost of a training step: memory of a rank, traffic between ranks, floating-point operations, seconds.

These are formulas over a model's shape; nothing is run or measured here. B rows of L tokens, hidden width h,
feed-forward width f, N ranks, P parameters of which T are trainable. Trained weights, gradients and AdamW's two moments
are fp32, as torchlake trains; bf16 is autocast around the forward pass, or 16-bit copies of all weights.

    memory      what ZeRO shards over N ranks (Rajbhandari et al. 2020), and the activations of one micro-batch, those
                of a layer as in Korthikanti et al. 2022, for what autograd keeps of transformers' layers
    traffic     a ring: an all-gather or a reduce-scatter sends (N - 1)/N of its bytes from each rank, an all-reduce
                twice that (Patarasuk and Yuan 2009)
    time        6 floating-point operations per parameter and token (Kaplan et al. 2020), 4 for a frozen parameter, and
                those of attention; log2(N) latencies per collective (Thakur et al. 2005)

Not included: the optimizer's own time, kernel launches, validation, checkpoints, and allocator overhead.
"""

import math

from torchlake.loss import CHUNK_BYTES, SMALL_BYTES
from torchlake.planning.terms import (
    MIB,
    Cluster,
    ComputeSettings,
    Exchange,
    Memory,
    Parameters,
    Shape,
    Sharding,
    StepTime,
    Traffic,
)

DEEPSPEED_BUCKET = 500_000_000
"Elements that DeepSpeed reduces at once: the size of its buffer, limited by the number of gradients."
DEEPSPEED_LIVE = 1_000_000_000
"Parameters that DeepSpeed's stage 3 keeps gathered."
OVERHEAD = {False: 96 * MIB, True: 1024 * MIB}
"Bytes besides the model's tensors, without and with a GPU: library buffers, CUDA context, NCCL buffers."
FORWARD = 1 / 3
"Share of the forward pass in a step's operations; the backward pass has two products for each of its products."


def layer_bytes(shape: Shape, length: int, setting: ComputeSettings) -> float:
    """Return the bytes per token that one layer keeps for its backward pass, in rows of `length` tokens.

    Under autocast the norms' inputs stay fp32, and each linear layer that reads hidden states keeps its own bf16 copy;
    with 16-bit weights neither, but RMSNorm in Python computes in fp32.
    Without a fused kernel (or with dropout on CPUs, which no fused kernel supports), attention keeps its L x L
    probabilities and their inputs in fp32, and with dropout also the mask and the result.
    """
    size, size_of_norm = 2 if setting.bf16 else 4, _size_of_residual(setting)
    norms = 2 * shape.hidden * ((4 + size_of_norm) if shape.rms_norm else size_of_norm)
    inputs = size * shape.hidden * (shape.readers if setting.bf16 and not setting.weights else 2)
    attention = size * (2 * shape.query + 2 * shape.key_value)
    if shape.packed:
        attention += size * (shape.query + shape.key_value)
    feed_forward = size * shape.feed_forward * (4 if shape.gated else 2)
    dropouts = shape.dropouts * shape.hidden * (1 if setting.gpu else size)
    matrices = 0
    if not _is_fused(shape, setting):
        matrices = 4 * shape.heads * length * (3 if shape.attention_dropout else 1)
        matrices += (4 - size) * (shape.query + 2 * shape.key_value)
    return norms + inputs + attention + feed_forward + dropouts + matrices


def activation_bytes(shape: Shape, rows: int, length: int, setting: ComputeSettings) -> float:
    """Return the bytes that autograd keeps between forward and backward pass of `rows` rows of `length` tokens.

    With checkpointing: every layer's input, the outputs that are kept selectively, and everything of one layer.
    """
    tokens = rows * length
    layer = layer_bytes(shape, length, setting)
    trained = shape.layers - shape.untrained
    layers = trained * layer
    if setting.checkpointing:
        kept = _kept_bytes(shape, length, setting) if setting.selective else 0
        layers = trained * (_size_of_residual(setting) * shape.hidden + kept) + layer
    # The embeddings' norm and dropout, and the last layer's output or the final norm.
    ends = _size_of_residual(setting) * shape.hidden * (2 + (shape.dropouts > 0))
    return tokens * (layers + ends) + head_bytes(shape, tokens if shape.output_per_token else rows, setting)


def head_bytes(shape: Shape, answers: int, setting: ComputeSettings) -> float:
    """Return the bytes of the logits, the loss and their gradients, for `answers` rows or tokens.

    A language model's loss is computed in chunks: the logits of one, its fp32 copy, log-softmax and gradient, and the
    gradients of the hidden states and of the head's weight, the latter in fp32 beside the chunk's.
    """
    logits, size = answers * shape.outputs, 2 if setting.bf16 else 4
    if not shape.output_per_token or 4 * logits <= SMALL_BYTES:
        return float(logits * (10 if setting.bf16 else 8) + answers * 8 * shape.hidden)
    weight = shape.outputs * shape.hidden * (4 + size) if shape.output_trained else 0
    chunk = min(logits, CHUNK_BYTES // 4)
    return float(chunk * (12 if setting.bf16 else 8) + weight + answers * (size + 8) * shape.hidden)


def _kept_bytes(shape: Shape, length: int, setting: ComputeSettings) -> int:
    """Return the bytes per token of the outputs of a layer's matrix products and attention."""
    size = 2 if setting.bf16 else 4
    widths = 2 * shape.query + 2 * shape.key_value + 2 * shape.hidden + shape.feed_forward * (2 if shape.gated else 1)
    scores = 0 if _is_fused(shape, setting) else shape.heads * length
    return size * (widths + scores)


def _is_fused(shape: Shape, setting: ComputeSettings) -> bool:
    """Return whether attention's kernel keeps no L x L matrix; kernels for CPUs do not support dropout."""
    return shape.fused and (setting.gpu or not shape.attention_dropout)


def _size_of_residual(setting: ComputeSettings) -> int:
    """Return the bytes of an element of the residual stream, which autocast leaves in fp32."""
    return 2 if setting.bf16 and setting.weights else 4


def working_bytes(shape: Shape, tokens: int, setting: ComputeSettings) -> float:
    """Return the bytes of activation gradients during the backward pass of one feed-forward part."""
    return tokens * (2 if setting.bf16 else 4) * (2 * shape.feed_forward + 2 * shape.hidden)


def memory(
    sharding: Sharding,
    parameters: Parameters,
    setting: ComputeSettings,
    *,
    ranks: int,
    activations: float,
    accumulates: bool,
) -> Memory:
    """Return the bytes on each of `ranks` ranks; `activations` are those of the largest micro-batch.

    Gradients are freed after each step. So with one micro-batch per step (not `accumulates`) they replace activations,
    and the larger of both counts; DDP's buckets stay. DeepSpeed computes in bf16 with fp32 weights in the optimizer,
    and its stage 3 keeps up to a billion gathered parameters (its defaults).
    """
    deepspeed = sharding.plugin == "deepspeed"
    total, trainable, size = parameters.total, parameters.trainable, 2 if setting.bf16 else 4
    frozen = setting.frozen_bytes or (2 if setting.weights else 4)
    weights = (size * total if deepspeed else 4 * trainable + frozen * (total - trainable)) / (
        ranks if sharding.weights else 1
    )
    if setting.bf16 and not deepspeed and not sharding.weights:
        weights += 2 * (trainable if setting.weights else parameters.linear)  # the copies
    # DeepSpeed accumulates sharded gradients in fp32.
    gradients = (size if deepspeed and not sharding.gradients else 4) * trainable / (ranks if sharding.gradients else 1)
    optimizer = (setting.moment_bytes + (4 if deepspeed else 0)) * trainable / (ranks if sharding.optimizer else 1)
    gathered = _gathered(sharding, parameters, setting, accumulates=accumulates)
    together = accumulates or sharding.plugin in ("ddp", "deepspeed")
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


def _gathered(sharding: Sharding, parameters: Parameters, setting: ComputeSettings, *, accumulates: bool) -> float:
    """Return the bytes of temporary weights and gradients on a rank.

    FSDP: the current and the next layer with their gradients, and everything outside layers; the whole gradient if
    micro-batches accumulate.
    """
    total, trainable, size = parameters.total, parameters.trainable, 2 if setting.bf16 else 4
    if sharding.plugin == "deepspeed":
        live = min(total, DEEPSPEED_LIVE) if sharding.weights else 0
        return float(size * (live + min(trainable, DEEPSPEED_BUCKET)))
    if not sharding.weights:
        return 0.0
    units = 2 * parameters.layer + total - parameters.layers
    gradients = 4 * trainable * (1 if accumulates else min(1.0, units / total))
    return size * (min(units, total) if sharding.reshards else total) + gradients


def traffic(sharding: Sharding, parameters: Parameters, setting: ComputeSettings, *, micro_batches: float) -> Traffic:
    """Return what ranks exchange in a step of `micro_batches` micro-batches.

    Gradients are sent after the last one; if DeepSpeed shards them, after each.
    """
    size, units = 2 if setting.bf16 else 4, parameters.units + 1
    if sharding.plugin == "single":
        return Traffic()
    if sharding.plugin == "ddp":  # an all-reduce is a reduce-scatter and an all-gather
        calls = 2 * math.ceil(4 * parameters.trainable / setting.bucket_bytes)
        return Traffic(backward=Exchange(bytes=2 * parameters.trainable * setting.sent_bytes, calls=calls))
    deepspeed = sharding.plugin == "deepspeed"
    times = micro_batches if deepspeed and sharding.gradients else 1
    reduced = Exchange(bytes=times * (size if deepspeed else 4) * parameters.trainable, calls=times * units)
    if not sharding.weights:
        return Traffic(backward=reduced, after=Exchange(bytes=size * parameters.trainable, calls=1))
    gather = Exchange(bytes=size * parameters.total * micro_batches, calls=units * micro_batches)
    if not sharding.reshards:
        return Traffic(forward=gather, backward=reduced)
    both = Exchange(bytes=gather.bytes + reduced.bytes, calls=gather.calls + reduced.calls)
    return Traffic(forward=gather, backward=both)


def token_flops(parameters: Parameters, shape: Shape, setting: ComputeSettings) -> float:
    """Return the operations of a training step per token, without attention's products.

    Per matrix parameter: 2 forward, 2 for the gradient of the input and, if trainable, 2 for its own gradient.
    """
    backward = 1 - shape.untrained / shape.layers
    per_parameter = (2 + 2 * backward) * parameters.matrices + 2 * parameters.matrices_trainable
    again = 2 * backward * parameters.matrices if setting.checkpointing and not setting.selective else 0
    head = 6 * shape.hidden * shape.outputs if shape.output_per_token else 0
    return float(per_parameter + again + head)


def pair_flops(shape: Shape, setting: ComputeSettings) -> float:
    """Return the operations of a training step per pair of tokens of a row: two products forward, four backward."""
    trained = shape.query * (16 if setting.checkpointing and not setting.selective else 12)
    return float((shape.layers - shape.untrained) * trained + shape.untrained * shape.query * 4)


def step_time(exchanged: Traffic, *, ranks: int, computing: float, cluster: Cluster) -> StepTime:
    """Return the seconds of a step whose slowest rank computes for `computing` seconds."""
    link = cluster.link(ranks)
    forward, backward, after = (
        one.seconds(ranks, link) for one in (exchanged.forward, exchanged.backward, exchanged.after)
    )
    communication = forward + backward + after
    hidden = max(FORWARD * computing, forward) + max((1 - FORWARD) * computing, backward) + after
    return StepTime(
        computing=computing, communication=communication, overlapped=hidden, summed=computing + communication
    )
