"""How ranks share one model; each file here is a strategy.

    MAX_RANKS: int | None                    the most ranks it runs with, None: any number
    never: dict[str, str]                    task -> why it cannot be trained with this strategy
    refusal(train) -> str | None             why it cannot run here with these settings; None: it can
    reduces_in_main_memory(train) -> bool    whether its collectives also have tensors that are not on `group.device`
    receives(train, group) -> bool           whether only rank 0's model has its weights; the others' is on the meta
                                             device until wrap() fills it
    wrap(model, make_optimizer, *, group, train) -> (module, optimizer)
                                             the module that the loop calls, sharded if the strategy shards, on
                                             `group.device`; calls make_optimizer(model) after sharding
    no_sync(module) -> context               inside, gradients accumulate without being reduced (all micro-batches but
                                             the last)
    backward(module, loss)                   add the gradients of `loss`
    clip_norm(module, max_norm, scale) -> Tensor
                                             divide all ranks' gradients by `scale`, then clip them to
                                             `max_norm`; their norm before clipping, () on the device, equal
                                             on all ranks
    step(module, optimizer, finite)          one optimizer step, or none unless `finite`, () bool on the device; clears
                                             the gradients
    discard_gradients(module, optimizer)     clears the gradients without a step
    model_shard(model, wanted, group) -> Pieces
                                             what this rank stores of the model's tensors named in `wanted`; every rank
                                             calls it
    optimizer_shard(model, optimizer, names, group) -> Pieces
                                             what this rank stores of the optimizer's, named "<parameter>|<field>"
    restore(optimizer, names, stored)        load the optimizer's tensors, from any strategy

The model comes in main memory with its weights loaded, or empty (`receives`). Gradients are averaged over the ranks, so
the loop multiplies a loss by their number. Names are the unwrapped model's, so that a checkpoint fits any strategy.
"""
