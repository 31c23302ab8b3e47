"""What a command returns, and how its values become lines of text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlake.display import grid


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a command: `values` for --json, `lines` for people."""

    values: Mapping[str, Any]
    lines: Sequence[str]
    exit_code: int = 0


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a line for each name and its value."""
    width = max(map(len, facts), default=0)
    return [f"{name:<{width}}  {_formatted(name, value)}" for name, value in facts.items()]


def metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Return a line for each metric, with its interval."""
    cells = [[name, f"{m.value:.4f}", f"{m.low:.4f} to {m.high:.4f}"] for name, m in metrics.items()]
    return grid([["metric", "value", "95 % interval"], *cells])


def metric_values(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return metrics and their intervals for --json."""
    return {name: {"value": m.value, "low": m.low, "high": m.high} for name, m in metrics.items()}


def candidate_lines(candidates: Sequence[Any]) -> list[str]:
    """Return a line for each runtime that `optimize` tried; a dash for numbers that were not measured."""
    if any(one.tokens_per_s is not None for one in candidates):
        return _writer_lines(candidates)
    head = ["runtime", "threads", "batch", "rows/s", "agreement", "difference", "change", "95 % interval", "verdict"]
    rows = []
    for one in candidates:
        interval = None if one.change is None else f"{one.change_low:+.4f} to {one.change_high:+.4f}"
        numbers = [(one.threads, "d"), (one.batch_tokens, ",d"), (one.rows_per_s, ",.1f"), (one.agreement, ".2%")]
        numbers += [(one.difference, ".1e"), (one.change, "+.4f"), (interval, "")]
        rows.append([one.runtime, *("-" if v is None else format(v, form) for v, form in numbers), one.verdict])
    return grid([head, *rows], left=(0, len(head) - 1))


def _writer_lines(candidates: Sequence[Any]) -> list[str]:
    """Return the lines of runtimes that write; `nats` is the change of the log-probability of a token."""
    head = ["runtime", "threads", "batch", "tokens/s", "equal texts", "common", "nats", "verdict"]
    rows = []
    for one in candidates:
        numbers = [(one.threads, "d"), (one.batch_tokens, ",d"), (one.tokens_per_s, ",.1f"), (one.agreement, ".2%")]
        numbers += [(one.common, ".2%"), (one.nats, "+.4f")]
        rows.append([one.runtime, *("-" if v is None else format(v, form) for v, form in numbers), one.verdict])
    return grid([head, *rows], left=(0, len(head) - 1))


def _formatted(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and "memory" in name:
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item / 2**30:.1f} GiB" if key == "free" else str(item) for key, item in value.items())
    return "none" if value is None else str(value)
