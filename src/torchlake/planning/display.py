"""A plan as text: facts by name, and two tables as rows of cells."""

from torchlake.planning.cluster import size
from torchlake.planning.plan import Plan
from torchlake.planning.strategies import StrategyPlan

WARN_ABOVE = 0.05
"The share of truncated rows above which a hint is shown."
MEMORY = ("strategy", "weights", "gradients", "moments", "activations", "gathered", "other", "peak", "sent", "")
SCALING = ("ranks", "strategy", "peak", "s/step", "unhidden", "hours", "efficiency", "")


def facts(done: Plan) -> dict[str, str]:
    """Return facts about the table and the model."""
    tokens, padding, parameters = done.tokens, done.padding, done.parameters
    looked = "all sampled" if done.sampled == done.rows else f"{done.sampled:,} sampled"
    left = f", {done.unusable:,} of them without text or label" if done.unusable else ""
    give_or_take = f", ± {1.96 * tokens.error / tokens.total:.1%}" if tokens.error else ""
    blocks = "" if done.blocks is None else f", in {done.blocks:,} blocks"
    examples = "rows" if done.blocks is None else "blocks"
    about = "" if done.sampled == done.rows else "about "
    other = "not sorted by length" if done.blocks is None else "padded instead of packed"
    rows, length = done.micro_batch
    precision = ("16 bits, weights too" if done.setting.weights else "16 bits") if done.setting.bf16 else "fp32"
    return {
        "table": f"{done.rows:,} rows, {looked}{left}; {done.training_rows:,} to train on{blocks}, "
        f"{done.steps:,} steps",
        "tokens": f"{tokens.total:,.0f} an epoch{give_or_take}; {tokens.mean:.1f} a row, the longest {about}"
        f"{tokens.longest:,}",
        "truncated": f"{tokens.truncated:.1%} of rows are cut, and {tokens.cut:.1%} of tokens left out"
        + ("; raise model.max_length to keep more" if tokens.truncated > WARN_ABOVE else ""),
        "padding": f"{padding.sorted:.1%} of what is computed; {padding.arrival:.1%} if rows were {other}, "
        f"{padding.max_length:.1%} if all were padded to the maximum length",
        "model": f"{parameters.total / 1e6:,.1f} million parameters, {parameters.trainable / 1e6:,.1f} million are "
        f"trained; {done.shape.layers} layers, {done.shape.hidden:,} wide",
        "micro-batch": f"{rows:,} {examples} of {length:,} tokens at most, in {precision}",
    }


def memory_rows(done: Plan) -> list[tuple[str, ...]]:
    """Return the memory of each strategy."""
    return [MEMORY, *(_memory_row(one, chosen=one.strategy == done.choice) for one in done.strategies)]


def _memory_row(one: StrategyPlan, *, chosen: bool) -> tuple[str, ...]:
    memory = one.memory
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.gathered, memory.overhead)
    return (one.strategy, *map(size, parts), size(memory.peak), size(one.sent), "taken" if chosen else one.state)


def scaling_rows(done: Plan) -> list[tuple[str, ...]]:
    """Return the time on increasing numbers of ranks."""
    return [SCALING, *(_scaling_row(one, done.batch_size) for one in done.scaling)]


def _scaling_row(one: StrategyPlan, batch_size: int) -> tuple[str, ...]:
    notes = [] if one.fits else ["too much memory"]
    if one.ranks > batch_size:
        notes.append(f"a batch has {batch_size:,} rows: {one.ranks - batch_size:,} ranks have none")
    seconds = (f"{one.time.overlapped:.3g}", f"{one.time.summed:.3g}")
    share = f"{one.efficiency:.0%}" if one.efficiency >= 0.1 else f"{one.efficiency:.2%}"
    return (str(one.ranks), one.strategy, size(one.memory.peak), *seconds, f"{one.hours:.3g}", share, "; ".join(notes))
