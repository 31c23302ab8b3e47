"""The HTML page of `report`.

The page is self-contained: inline style, curves as inline SVG, no script, nothing loaded from elsewhere. Every text is
escaped.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchlake.metrics import DIRECTIONS

VALIDATIONS_SHOWN = 20
# A chart's size in SVG units: about the width of a phone, so that text stays readable there.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 400, 210, 44, 24, 10, 10
Point = tuple[float, float]


def render(facts: Mapping[str, Any]) -> str:
    """Return the page for the facts that `report.collect` returns."""
    progress, job = facts["progress"], facts["job"]
    state = "complete" if facts["complete"] else f"at step {progress['steps']:,}, not complete"
    validation = facts["validations"]
    scores = sorted({name for line in validation for name in line} - {"step", "loss", "log_loss"})
    loss = [("training", facts["losses"]), ("validation", _series(validation, "loss"))]
    curves = [_figure("Loss by step", [(name, points) for name, points in loss if points])]
    for better in ("higher", "lower") if len(validation) > 1 else ():  # the numbers of one are in the table below
        group = [name for name in scores if DIRECTIONS.get(name, "higher") == better]
        title = f"Validation, {better} is better"
        curves.append(_figure(title, [(name, _series(validation, name)) for name in group]))
    best = f" (step {facts['best_step']:,})" if facts["best_step"] else ""
    metrics = {name: f"{value:.4f}" for name, value in facts["metrics"].items() if value is not None}
    sections = [
        (
            "full",
            "Curves",
            f'<div class="curves">{"".join(curves)}</div>' if facts["losses"] else "<p>No step yet.</p>",
        ),
        ("", f"Validation of the best model{best}", _rows(metrics)),
        ("", "Data", _rows(facts["data"])),
        ("full", "Validations", _grid(validation[-VALIDATIONS_SHOWN:])),
        ("", "Model", _rows(_given(facts["model"]))),
        *(("", f"Job: {name}", _rows(_given(section))) for name, section in job.items()),
        ("", "Checkpoints", _grid(facts["checkpoints"])),
        ("full", "Warnings", "".join(f"<p>{_text(line)}</p>" for line in facts["warnings"])),
        ("", "Machine that wrote this page", _rows(facts["machine"])),
        ("", "Versions", _rows(facts["versions"])),
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
        ("full", "Mean and standard deviation over the folds", _rows(shown)),
        ("full", "Validation of each fold's best model", _grid(facts.get("folds", []))),
        *(("", f"Job: {name}", _rows(_given(section))) for name, section in facts["job"].items()),
    ]
    state = "complete" if facts["complete"] else "not complete"
    return _page(facts, state, tiles, sections)


def _page(
    facts: Mapping[str, Any], state: str, tiles: Sequence[tuple[str, str]], sections: Iterable[tuple[str, str, str]]
) -> str:
    job = facts["job"]
    numbers = "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in tiles
    )
    across = 3 if len(tiles) % 3 == 0 else 4
    body = "".join(
        f'<section class="{kind}"><h2>{_text(title)}</h2>{inner}</section>' for kind, title, inner in sections if inner
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(facts['run'])} - torchlake</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{_text(facts['run'])}</h1><p>{_text(job['model']['task'])} from {_text(job['model']['base'])}; "
        f'<strong>{_text(state)}</strong></p></header><div class="tiles" style="--n:{across}">{numbers}</div>'
        f'<div class="sections">{body}</div>'
        f"<footer>Written by torchlake at {_text(facts['written'])}.</footer></main></body></html>\n"
    )


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main numbers: metrics, steps, time and speed."""
    progress, metrics = facts["progress"], facts["metrics"]
    names = dict.fromkeys(name for name in (facts["metric"], *metrics) if name in metrics and name != "loss")
    tiles = [(name.replace("_", " "), f"{metrics[name]:.4f}") for name in names if metrics[name] is not None][:2]
    tiles += [
        ("steps", f"{progress['steps']:,}"),
        ("time in steps", _duration(progress["seconds_in_steps"])),
        ("rows a second", f"{progress['rows_per_s'] or 0:,.0f}"),
        ("tokens a second", f"{progress['tokens_per_s'] or 0:,.0f}"),
    ]
    if progress["mfu"] is not None:
        tiles.append(("of the matrix rate", f"{progress['mfu']:.0%}"))
    if progress["peak_memory_bytes"] is not None:
        tiles.append(("memory at its peak", f"{progress['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return tiles


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are empty or off."""
    kept = {name: _given(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return {name: value for name, value in kept.items() if value is not False and value not in (None, "", [], {})}


def _series(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def _figure(title: str, series: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Return a line chart with a legend; its vertical axis begins and ends at round numbers."""
    points = [point for _, line in series for point in line]
    if not points:
        return ""
    ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def place(point: Point) -> tuple[float, float]:
        across = (point[0] - left) / (right - left) if right > left else 0.5
        up = (point[1] - ticks[0]) / (ticks[-1] - ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    drawn = []
    for tick in ticks:
        _, y = place((left, tick))
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    anchors = {(left + right) // 2: "middle"} | ({left: "start", right: "end"} if right > left else {})
    for x, anchor in anchors.items():
        across, _ = place((x, ticks[0]))
        drawn.append(f'<text x="{across:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x:,.0f}</text>')
    for index, (name, line) in enumerate(series):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        drawn.append(f'<polyline class="c{index % 6}" points="{path}"/>')
        for point in line if len(line) <= 40 else ():
            x, y = place(point)
            text = f"{_text(name)} {point[1]:.4f} at step {point[0]:,.0f}"
            drawn.append(f'<circle class="c{index % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{text}</title></circle>')
    legend = "".join(f'<span class="c{index % 6}">{_text(name)}</span>' for index, (name, _) in enumerate(series))
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}">{"".join(drawn)}</svg>'
    return f'<figure><figcaption>{_text(title)}<span class="legend">{legend}</span></figcaption>{picture}</figure>'


def _ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-6 * max(abs(low), abs(high)))
    rough = (span if span > 1e-30 else 1.0) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _rows(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    body = "".join(f"<tr><th>{_text(name)}</th>{_cell(name, value)}</tr>" for name, value in facts.items())
    return f'<div class="wide"><table>{body}</table></div>'


def _grid(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in entries[0])
    lines = ["".join(_cell(name, value) for name, value in entry.items()) for entry in entries]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="grid"><tr>{head}</tr>{body}</table></div>'


def _cell(name: str, value: Any) -> str:
    """Return a cell of a table; short ones, such as numbers, are not broken over lines."""
    shown = _shown(name, value)
    return f"<td{' class=n' if len(shown) < 16 else ''}>{_text(shown)}</td>"


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


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


STYLE = """
:root{--page:#fbfaf7;--card:#fff;--ink:#1d2430;--soft:#667085;--line:#e4e2dc;--c0:#2563a8;--c1:#c2571a;--c2:#1f7a55;
--c3:#8a3f8f;--c4:#8a6d00;--c5:#4b5563;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--page:#12151a;--card:#1a1f27;--ink:#e7e9ee;--soft:#98a2b3;--line:#2c333e;
--c0:#7ab3ee;--c1:#f0965a;--c2:#5fc79b;--c3:#d190d6;--c4:#dcc05a;--c5:#a9b2c0}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.7rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 .6rem}
header p{margin:.3rem 0 1.2rem;color:var(--soft);overflow-wrap:anywhere}
header strong{color:var(--ink);font-weight:600}
.tiles{display:grid;gap:.7rem;margin-bottom:.9rem;
grid-template-columns:repeat(auto-fit,minmax(max(9.6rem,(100% - (var(--n) - 1)*.7rem)/var(--n)),1fr))}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
.tile{padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile span{color:var(--soft);font-size:.85rem}
.sections{columns:24rem 2;column-gap:.9rem}
section{padding:1rem;margin:0 0 .9rem;break-inside:avoid}
.full{column-span:all;margin-top:.9rem}
.full:first-child{margin-top:0}
section p{margin:.2rem 0;overflow-wrap:anywhere}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,17rem),1fr));gap:1rem;align-items:end}
figure{margin:0;min-width:0;max-width:34rem}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:.2rem .8rem;font-size:.85rem;color:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .7rem}
.legend span{font-weight:600}
svg{display:block;width:100%;height:auto;margin-top:.3rem}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1;fill:none}
polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.28rem .8rem .28rem 0;border-top:1px solid var(--line)}
tr:first-child th,tr:first-child td{border-top:0}
th{font-weight:500;color:var(--soft);white-space:nowrap;width:1%}
table.grid th{width:auto}
td{overflow-wrap:anywhere}
td.n{white-space:nowrap}
@media (max-width:30rem){th{white-space:normal}}
footer{color:var(--soft);font-size:.85rem;margin-top:1.2rem}
""" + "".join(
    f"polyline.c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}span.c{n}{{color:var(--c{n})}}\n"
    for n in range(6)
)
