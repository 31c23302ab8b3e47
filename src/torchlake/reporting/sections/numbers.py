"""Predicted numbers, losses by position, cosines and histograms."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Any

from torchlake.reporting import figures
from torchlake.reporting.page import Section, folded, number


def of_numbers(found: Mapping[str, Any]) -> Iterable[Section]:
    """Yield the section of predicted numbers."""
    one = found.get("residuals")
    if not one:
        return
    table = [
        {
            "label": f"{band['from']:.4g} to {band['to']:.4g}",
            "rows": band["rows"],
            "mean prediction": band["prediction"],
        }
        | {"mean residual": band["residual"], "mean absolute difference": band["absolute"]}
        for band in one["bands"]
    ]
    widths = [{"share of rows": f"{share:.0%}", "within": f"± {width:.4g}"} for share, width in one["widths"]]
    seen = f"{len(one['points'])} rows, drawn at random; on the line predictions are true"
    drawn = figures.picture("Predicted against true", seen, figures.predicted_against_true(one["points"]))
    yield "full", "Predicted against true", "parts", [("figures", [drawn]), ("grid", table), ("grid", widths)]


def positions(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the loss and the perplexity by position in the text."""
    return [{**one, "loss": number(one["loss"]), "perplexity": perplexity(one["loss"])} for one in found]


def perplexity(loss: float) -> str:
    """Return the perplexity of a mean loss."""
    return f"{exp(min(loss, 700.0)):.4g}"


def cosines(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the quantiles and the picture of cosines of equal and of random pairs."""
    if not found:
        return []
    middle = ", ".join(f"{value:.3f} {name}" for name, value in list(found["quantiles"][2].items())[1:])
    draw = figures.steps(found["edges"], found["counts"], "cosine")
    drawn = figures.picture("Cosines of equal and of random pairs", f"the median is {middle}", draw)
    bins = zip(found["edges"], found["edges"][1:], *found["counts"].values(), strict=False)
    numbers = [{"cosine": f"{a:.4g} to {b:.4g}", **dict(zip(found["counts"], n, strict=True))} for a, b, *n in bins]
    lines = ["Random: the first text with the second one of another row. Pairs that belong together should be apart."]
    return [
        ("figures", [drawn]),
        ("lines", lines),
        ("grid", found["quantiles"]),
        folded("The numbers", "grid", numbers),
    ]


def histograms(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return pictures of lengths and scores."""
    drawn, tables = [], []
    for name, bins in found.items():
        if bins:
            most = max(bins, key=lambda one: one[2])
            seen = f"most rows, {most[2]:,}, from {most[0]:.4g} to {most[1]:.4g}"
            drawn.append(figures.picture(name.capitalize(), seen, figures.histogram(bins, name)))
            table = [{name: f"{start:.4g} to {stop:.4g}", "rows": rows} for start, stop, rows in bins]
            tables.append(folded(f"The numbers of {name}", "grid", table))
    return [("figures", drawn), *tables] if drawn or tables else []
