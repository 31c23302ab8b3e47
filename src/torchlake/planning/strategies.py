"""Every strategy for a job: what it needs, whether it fits, which one is the best, and what would make one fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.sections.strategies import LoraOptions
from torchlake.display import Shown, count, shown
from torchlake.planning import workload
from torchlake.planning.cluster import size
from torchlake.planning.model_survey import survey_model
from torchlake.planning.survey import TableSurvey
from torchlake.planning.terms import SHARDINGS, Cluster, Memory, Sharding, StepTime
from torchlake.planning.workload import Workload

RANKS = (1, 8, 64, 512)
MOST_RANKS = 4096
AS_FAST = 1.1
"A more complex strategy must be faster by more than this factor."
HEADROOM = 0.9
"Usable share of a device's memory; the rest is allocator overhead."


@shown
@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """One strategy on `ranks` ranks."""

    strategy: str
    ranks: int
    memory: Memory
    fits: bool
    obstacle: str | None
    "Why it cannot run, or None."
    sent: float
    "Bytes that each rank sends in a step."
    time: StepTime
    hours: float
    "The time of all steps, without validation and checkpoints."
    efficiency: float
    "Speed relative to perfect scaling from one rank."

    @property
    def state(self) -> str:
        """Whether it can run and fits, in words."""
        return self.obstacle or ("fits" if self.fits else "too much memory")

    def _shown(self) -> Shown:
        needs = f"{size(self.memory.peak)}, {self.hours:.3g} h"
        return f"{self.strategy} on {count(self.ranks, 'rank')}, {needs}, {self.state}", []


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The common inputs of all strategies."""

    job: Job
    case: Workload
    cluster: Cluster
    steps: int
    memory: float
    "Bytes of memory per rank."
    here: bool
    "Whether training would run on this machine, not on a GPU elsewhere."

    @property
    def usable_memory(self) -> float:
        """Bytes per rank without headroom."""
        return HEADROOM * self.memory


def plan_strategies(context: PlanContext, ranks: int) -> tuple[StrategyPlan, ...]:
    """Evaluate every strategy on `ranks` ranks."""
    alone = workload.time_on(context.case, SHARDINGS[0], 1, context.cluster)[0].overlapped
    found = []
    for sharding in SHARDINGS:
        memory = workload.memory_on(context.case, sharding, ranks)
        spent, exchanged = workload.time_on(context.case, sharding, ranks, context.cluster)
        found.append(
            StrategyPlan(
                strategy=sharding.name,
                ranks=ranks,
                memory=memory,
                fits=memory.peak <= context.usable_memory,
                obstacle=_obstacle(context.job, sharding, ranks, here=context.here),
                sent=exchanged.sent(ranks),
                time=spent,
                hours=spent.overlapped * context.steps / 3600,
                efficiency=alone / (ranks * spent.overlapped),
            )
        )
    return tuple(found)


def _obstacle(job: Job, sharding: Sharding, ranks: int, *, here: bool) -> str | None:
    """Return why training cannot use a strategy, or None. `here`: on this machine, with the installed libraries."""
    if sharding.plugin not in plugins.names("strategies"):
        return "not in this version"
    strategy = plugins.load("strategies", sharding.plugin)
    if strategy.MAX_RANKS is not None and ranks > strategy.MAX_RANKS:
        return f"runs on {strategy.MAX_RANKS} process"
    never: str | None = strategy.never.get(job.task)
    if never is None and here:
        never = strategy.refusal(job.train)
    return never


def fastest(found: Sequence[StrategyPlan]) -> StrategyPlan | None:
    """Return the simplest (first) of the strategies that fit and are about as fast as the fastest."""
    usable = [one for one in found if one.fits and one.obstacle is None]
    least = min((one.time.overlapped for one in usable), default=0.0)
    return next((one for one in usable if one.time.overlapped <= AS_FAST * least), None)


def best_of(found: Sequence[StrategyPlan]) -> StrategyPlan:
    able = [one for one in found if one.obstacle is None]
    return fastest(found) or min(able, key=lambda one: one.memory.peak)


def reason_for(best: StrategyPlan | None, found: Sequence[StrategyPlan], context: PlanContext) -> str:
    """Explain in a sentence or two why it is `best`, or why none fits."""
    room = f"{HEADROOM:.0%} of a rank's {size(context.memory)}"
    able = [one for one in found if one.obstacle is None]
    if best is None:
        least = min(able, key=lambda one: one.memory.peak)
        return f"No strategy fits into {room}: {least.strategy} needs least, {size(least.memory.peak)}."
    fitting = sum(one.fits for one in able)
    how = f"the fastest of {fitting} that fit, or within {AS_FAST - 1:.0%} of it and simpler,"
    if fitting == 1:
        how = "the only one that can run" if len(able) == 1 else f"the only one of {len(able)} that fits"
    said = (
        f"{best.strategy} is {how} on {best.ranks} rank{'s' * (best.ranks > 1)}: {best.time.overlapped:.3g} s a step, "
        f"and its {size(best.memory.peak)} are within {room}."
    )
    asked = [one for one in found if one.strategy.split()[0] == context.job.train.strategy]
    if not asked or best in asked:
        return said
    other = min(asked, key=lambda one: one.time.overlapped)
    slower = f"takes {other.time.overlapped / best.time.overlapped:.2f} times as long"
    why = other.obstacle or (slower if other.fits else f"needs {size(other.memory.peak)}")
    return f"{said} The job asks for {context.job.train.strategy}: {why}."


def remedies_for(context: PlanContext, base: Path | None, table: TableSurvey, ranks: int) -> tuple[str, ...]:
    """Return changes that would make a strategy fit, the smallest of each kind, each by itself."""
    job, case = context.job, context.case
    more = (2**power for power in range(1, MOST_RANKS.bit_length()) if 2**power > ranks)
    kinds: list[Iterator[tuple[str, Workload, int]]] = [
        ((f"train.micro_batch_tokens={one.micro_batch_tokens}", one, ranks) for one in _smaller(case)),
        ((f"--processes {number}", case, number) for number in more),
    ]
    kinds.append(
        (f"train.activation_checkpointing={way}", one, ranks) for way, one in _with_more_checkpointing(case).items()
    )
    if job.model.lora is None:
        model = job.model.model_copy(update={"lora": LoraOptions()})
        adapted = survey_model(job.model_copy(update={"model": model}), base, table.spec)[1]
        kinds.append(iter([(f"model.lora={{rank: {LoraOptions().rank}}}", replace(case, parameters=adapted), ranks)]))
    found = []
    for changes in kinds:
        for name, changed, number in changes:
            fits = _simplest(context, changed, number)
            if fits is not None:
                found.append(f"{name}: {fits[0]} then needs {size(fits[1])}")
                break
    return tuple(found) or ("None of smaller micro-batches, more processes, checkpointing and LoRA is enough alone.",)


def _with_more_checkpointing(case: Workload) -> dict[str, Workload]:
    """Return the workload with each kind of activation checkpointing that keeps less than its own, the faster first."""
    selective = replace(case, setting=replace(case.setting, checkpointing=True, selective=True))
    whole = replace(case, setting=replace(case.setting, checkpointing=True, selective=False))
    if not case.setting.checkpointing:
        return {"selective": selective, "true": whole}
    return {"true": whole} if case.setting.selective else {}


def _smaller(case: Workload) -> Iterator[Workload]:
    """Yield the workload with ever smaller micro-batches, down to one row."""
    tokens = case.micro_batch_tokens // 2
    while tokens >= case.longest:
        yield replace(case, micro_batch_tokens=tokens)
        tokens //= 2


def _simplest(context: PlanContext, case: Workload, ranks: int) -> tuple[str, float] | None:
    """Return the simplest strategy that fits and its memory in bytes, or None."""
    for sharding in SHARDINGS:
        peak = workload.memory_on(case, sharding, ranks).peak
        if peak <= context.usable_memory and _obstacle(context.job, sharding, ranks, here=context.here) is None:
            return sharding.name, peak
    return None
