"""The HTML page of `report`: its numbers and texts; `page.html` is the template.

The page is self-contained: inline style, curves as inline SVG, no script, nothing loaded from elsewhere. The template
escapes every text.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchlake.metrics import DIRECTIONS
from torchlake.preparation.findings import Finding

VALIDATIONS_SHOWN = 20
# A chart's size in SVG units: about the width of a phone, so that text stays readable there.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 400, 210, 44, 24, 10, 10
DOTS = 40
"The number of points up to which each has a dot with its value."
Point = tuple[float, float]
Section = tuple[str, str, str, Any]
"A class of CSS, the title, the macro that draws the content, and the content; without content it is left out."


def render(facts: Mapping[str, Any]) -> str:
    """Return the page for the facts that `report.collect` returns."""
    progress, job = facts["progress"], facts["job"]
    state = "complete" if facts["complete"] else f"at step {progress['steps']:,}, not complete"
    validation = facts["validations"]
    scores = sorted({name for line in validation for name in line} - {"step", "loss", "log_loss"})
    loss = [("training", facts["losses"]), ("validation", _series(validation, "loss"))]
    curves = [_chart("Loss by step", [(name, points) for name, points in loss if points])]
    for better in ("higher", "lower") if len(validation) > 1 else ():  # the numbers of one are in the table below
        group = [name for name in scores if DIRECTIONS.get(name, "higher") == better]
        title = f"Validation, {better} is better"
        curves.append(_chart(title, [(name, _series(validation, name)) for name in group]))
    best = f" (step {facts['best_step']:,})" if facts["best_step"] else ""
    metrics = {name: f"{value:.4f}" for name, value in facts["metrics"].items() if value is not None}
    sections = [
        ("full", "Curves", *(("curves", curves) if facts["losses"] else ("lines", ["No step yet."]))),
        ("", f"Validation of the best model{best}", "rows", metrics),
        ("", "Data", "rows", facts["data"]),
        ("full", "Data checks", "lines", [Finding(**one).line for one in facts["findings"]]),
        ("full", "Validations", "grid", validation[-VALIDATIONS_SHOWN:]),
        ("full", "Written at the last validation", "grid", facts["texts"]),
        ("", "Model", "rows", _given(facts["model"])),
        *_of_job(job),
        ("", "Checkpoints", "grid", facts["checkpoints"]),
        ("full", "Warnings", "lines", facts["warnings"]),
        ("", "Machine that wrote this page", "rows", facts["machine"]),
        ("", "Versions", "rows", facts["versions"]),
    ]
    return _page(facts, state, _tiles(facts), sections)


def render_folds(facts: Mapping[str, Any]) -> str:
    """Return the page of a cross-validation."""
    means, deviations = facts.get("metrics", {}), facts.get("deviations", {})
    shown = {name: f"{mean:.4f} ± {deviations[name]:.4f}" for name, mean in means.items()}
    metric = facts.get("metric")
    tiles = [("folds", str(facts["number_of_folds"]))]
    tiles += [(f"{metric}, mean ± deviation".replace("_", " "), shown[metric])] if metric in shown else []
    sections = [
        ("full", "Mean and standard deviation over the folds", "rows", shown),
        ("full", "Validation of each fold's best model", "grid", facts.get("folds", [])),
        *_of_job(facts["job"]),
    ]
    state = "complete" if facts["complete"] else "not complete"
    return _page(facts, state, tiles, sections)


def _page(facts: Mapping[str, Any], state: str, tiles: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    templates = Environment(
        loader=PackageLoader("torchlake.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    templates.filters["one"] = "{:.1f}".format
    known = {name: facts[name] for name in ("run", "job", "written")}
    return templates.get_template("page.html").render(
        **known, state=state, tiles=tiles, sections=sections, shown=_shown
    )


def _of_job(job: Mapping[str, Any]) -> list[Section]:
    return [("", f"Job: {name}", "rows", _given(section)) for name, section in job.items()]


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main numbers: metrics, steps, time and speed."""
    progress, metrics = facts["progress"], facts["metrics"]
    names = dict.fromkeys(name for name in (facts["metric"], *metrics) if name in metrics and name != "loss")
    tiles = [(name.replace("_", " "), f"{metrics[name]:.4f}") for name in names if metrics[name] is not None][:2]
    tiles += [
        ("steps", f"{progress['steps']:,}"),
        ("time in steps", _duration(progress["seconds_in_steps"])),
        ("rows per second", f"{progress['rows_per_s'] or 0:,.0f}"),
        ("tokens per second", f"{progress['tokens_per_s'] or 0:,.0f}"),
    ]
    if progress["mfu"] is not None:
        tiles.append(("of the matrix rate", f"{progress['mfu']:.0%}"))
    if progress["peak_memory_bytes"] is not None:
        tiles.append(("peak memory", f"{progress['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return tiles


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are empty or off."""
    kept = {name: _given(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return {name: value for name, value in kept.items() if value is not False and value not in (None, "", [], {})}


def _series(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def _chart(title: str, series: Sequence[tuple[str, Sequence[Point]]]) -> dict[str, Any]:
    """Return a line chart; its vertical axis begins and ends at round numbers. Without points it is empty."""
    points = [point for _, line in series for point in line]
    if not points:
        return {}
    ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def place(point: Point) -> tuple[float, float]:
        across = (point[0] - left) / (right - left) if right > left else 0.5
        up = (point[1] - ticks[0]) / (ticks[-1] - ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    def dots(name: str, line: Sequence[Point]) -> list[tuple[float, float, str]]:
        return [(*place((x, y)), f"{name} {y:.4f} at step {x:,.0f}") for x, y in line] if len(line) <= DOTS else []

    anchors = {(left + right) // 2: "middle"} | ({left: "start", right: "end"} if right > left else {})
    return {
        "title": title,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "ticks": [(f"{tick:g}", place((left, tick))[1]) for tick in ticks],
        "steps": [(f"{x:,.0f}", place((x, ticks[0]))[0], anchor) for x, anchor in anchors.items()],
        "lines": [{"name": name, "places": list(map(place, line)), "dots": dots(name, line)} for name, line in series],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-6 * max(abs(low), abs(high)))
    rough = (span if span > 1e-30 else 1.0) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and ("bytes" in name or "memory" in name):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 else f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(key, item)}" for key, item in value.items())
    return str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
