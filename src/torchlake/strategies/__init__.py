"""How ranks share one model; a file here is a strategy.

    MIN_RANKS: int                           the fewest ranks it runs with
    MAX_RANKS: int | None                    the most, None: any number
    never: dict[str, str]                    task -> why it cannot be trained this way
    refusal(train) -> str | None             why it cannot run here as `train` asks, found before any work; None: it can
    wrap(model, make_optimizer, *, group, train) -> (module, optimizer)
                                             the module that the loop calls, the model's tensors shared out, on
                                             `group.device`; make_optimizer(model) is called when they are
    no_sync(module) -> context               inside it, gradients add up unshared (all micro-batches but the last)
    backward(module, loss)                   add the gradients of `loss`
    clip_norm(module, max_norm, scale) -> float
                                             divide the gradients of all ranks by `scale`, then scale them to
                                             `max_norm`; their norm between the two, equal on all ranks
    step(module, optimizer)                  one optimizer step; then the gradients are gone
    discard_gradients(module, optimizer)                  no step; the gradients are gone all the same
    model_shard(model, wanted, group) -> Pieces
                                             what this rank stores of the model's tensors named in `wanted`; every rank
                                             calls it
    optimizer_shard(model, optimizer, names, group) -> Pieces
                                             what it stores of the optimizer's, named "<parameter>|<field>"; the same
    restore(optimizer, names, stored)        put the optimizer's tensors back, wherever they were written

A model comes in main memory with its weights loaded. Gradients are averaged over the ranks, so the loop multiplies a
loss by their number. Names are the model's own, without a prefix, so that a checkpoint fits any strategy.
"""
