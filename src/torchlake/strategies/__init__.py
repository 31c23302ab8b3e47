"""How ranks share one model; a file here is a strategy.

    MIN_RANKS: int                           the fewest ranks it runs with
    MAX_RANKS: int | None                    the most, None: any number
    never: dict[str, str]                    task -> why it cannot be trained this way
    wrap(model, *, device) -> module         the module that the loop calls; the model is on its device already
    no_sync(module) -> context               inside it, gradients add up unshared (all micro-batches but the last)
    clip_norm(module, max_norm) -> float     scale the gradients of all ranks to `max_norm`; their norm before
    state(module) -> dict                    the whole model's tensors by name; every rank calls it

`wrap` comes last when a model is made: weights are loaded before it, the optimizer is built after it. Gradients are
averaged over the ranks, so the loop multiplies a loss by their number.
"""
