"""`report`: a run folder told on one page, report.html, and the same facts for programs, report.json.

The page carries everything in itself: its style, its curves as inline SVG, no script, nothing fetched from elsewhere.
Every text in it is escaped, and secrets (passwords in URLs, tokens, signatures) are redacted before either file is
written. It can be written while the run still trains. Price: one pass over metrics.jsonl.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchlake import durable, record
from torchlake.config import load_job
from torchlake.diagnosing import doctor
from torchlake.errors import DataError

CURVE_POINTS = 120
WARNINGS_SHOWN = VALIDATIONS_SHOWN = 20
# A chart's size in its own units; about a phone's width, so that its letters stay readable there.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 400, 210, 44, 24, 10, 10
SECRET_KEYS = re.compile(r"(?i)passw|secret|credential|authorization|signature|api_?key|access_?key|(^|_)token$")
SECRETS = (
    (re.compile(r"(\w+://)[^/\s@]+@"), r"\1[redacted]@"),
    (
        re.compile(r"(?i)([?&;](?:[\w-]*(?:token|sig|signature|key|secret|password|credential))=)[^&;\s]+"),
        r"\1[redacted]",
    ),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|glpat-|dapi|xox[abp]-)[A-Za-z0-9_-]{10,}"), "[redacted]"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), "[redacted]"),
    (re.compile(r"(?i)\b(bearer|basic) [a-z0-9+/=._-]{8,}"), r"\1 [redacted]"),
)
Point = tuple[float, float]


def report(run: str | Path) -> Path:
    """Write report.html and report.json into the run folder `run`; returns the path of the page.

    Raises DataError when `run` is no run folder, StorageError when the files cannot be written.
    """
    folder = Path(run)
    if not (folder / "job.yaml").is_file():
        raise DataError(
            f"{folder}: no run folder (it has no job.yaml); name the folder that `torchlake train` printed."
        )
    facts = redacted(collect(folder))
    page = folder / "report.html"
    durable.write_json(folder / "report.json", facts, site="report.json")
    durable.write_bytes(page, render(facts).encode(), site="report.html")
    return page


def collect(folder: Path) -> dict[str, Any]:
    """The facts of a run, as plain JSON values."""
    lines = record.read_metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    validations = [
        {name.removeprefix(record.VALIDATION): value for name, value in line.items()}
        for line in lines
        if any(name.startswith(record.VALIDATION) for name in line)
    ]
    checkpoints = _checkpoints(folder / "checkpoints")
    best = next((entry["best"] for entry in reversed(checkpoints) if entry["best"]), None)
    result = durable.read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    found = doctor().facts
    installed = {name: value for name, value in found["optional"].items() if not value.startswith("missing")}
    facts: dict[str, Any] = _plain(
        {
            "run": folder.resolve().name,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": bool(result),
            "progress": _progress(steps),
            "metric": result.get("metric"),
            "metrics": best["metrics"] if best else result.get("metrics", {}),
            "best_step": best["step"] if best else None,
            "data": _data(steps),
            "job": load_job(folder / "job.yaml").model_dump(mode="json"),
            "model": _model(folder / "model"),
            "losses": _thinned([(line["step"], line["loss"]) for line in steps]),
            "validations": validations,
            "checkpoints": [{key: entry[key] for key in ("step", "bytes", "world_size")} for entry in checkpoints],
            "warnings": _warnings(folder / "logs"),
            "machine": {**found["machine"], **found["devices"]},
            "versions": {**found["versions"], **installed},
        }
    )
    return facts


def redacted(value: Any, key: str = "") -> Any:
    """`value` with everything that looks like a secret replaced, by its key's name or by its own shape."""
    if isinstance(value, Mapping):
        return {name: redacted(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        if SECRET_KEYS.search(key):
            return "[redacted]"
        for pattern, replacement in SECRETS:
            value = pattern.sub(replacement, value)
    return value


def _progress(steps: Sequence[record.Line]) -> dict[str, Any]:
    seconds = sum(line["seconds"] for line in steps)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": steps[-1]["epoch"] if steps else 0,
        "seconds_in_steps": round(seconds, 3),
        "rows_per_s": round(sum(line["rows"] for line in steps) / seconds, 1) if seconds else None,
        "tokens_per_s": round(sum(line["tokens"] for line in steps) / seconds, 1) if seconds else None,
        "steps_not_applied": sum(not math.isfinite(line["loss"]) for line in steps),
    }


def _data(steps: Sequence[record.Line]) -> dict[str, Any]:
    """What the first epoch read; padding is known where the steps tell how many tokens they held with it."""
    first = [line for line in steps if line["epoch"] == 1]
    rows, tokens = (sum(line[name] for line in first) for name in ("rows", "tokens"))
    held = sum(line.get("padded_tokens", 0) for line in first)
    return {
        "rows_in_epoch_1": rows,
        "tokens_in_epoch_1": tokens,
        "tokens_per_row": round(tokens / rows, 1) if rows else None,
        "padding_percent": round(100 * (1 - tokens / held), 1) if held else None,
    }


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The complete checkpoints, oldest first."""
    found = []
    for path in sorted(folder.glob("step_*")):
        if path.suffix or not (path / durable.MANIFEST).is_file():
            continue
        state = durable.read_json(path / "state.json")
        size = sum(file["bytes"] for file in durable.read_json(path / durable.MANIFEST)["files"].values())
        entry = {"step": state["step"], "bytes": size, "world_size": state.get("world_size"), "best": state.get("best")}
        found.append(entry)
    return found


def _model(folder: Path) -> dict[str, Any]:
    if not (folder / "task.json").is_file():
        return {}
    weights = folder / "model.safetensors"
    return {
        **durable.read_json(folder / "task.json"),
        "folder": str(folder),
        "weights_bytes": weights.stat().st_size if weights.is_file() else None,
    }


def _warnings(folder: Path) -> list[str]:
    """The last warnings and errors of all ranks' logs, in the order of time."""
    found = []
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a kill may cost half a line
            if entry.get("level") in ("WARNING", "ERROR", "CRITICAL"):
                found.append(f"{entry.get('time')} rank {entry.get('rank')}: {entry.get('message')}")
    return sorted(found)[-WARNINGS_SHOWN:]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most CURVE_POINTS points, each the mean of as many neighbours; points that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    width = max(1, math.ceil(len(finite) / CURVE_POINTS))
    groups = [finite[start : start + width] for start in range(0, len(finite), width)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _plain(value: Any) -> Any:
    """NaN and the infinities, for which JSON has no numbers, as null."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(facts: Mapping[str, Any]) -> str:
    """The page of these facts."""
    progress, job = facts["progress"], facts["job"]
    state = "complete" if facts["complete"] else f"at step {progress['steps']:,}, not complete"
    validation = facts["validations"]
    scores = sorted({name for line in validation for name in line} - {"step", "loss", "log_loss"})
    loss = [("training", facts["losses"]), ("validation", _series(validation, "loss"))]
    curves = [_figure("Loss by step", [(name, points) for name, points in loss if points])]
    curves += [_figure("Validation by step", [(name, _series(validation, name)) for name in scores])] if scores else []
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
        *(("", f"Job: {name}", _rows(section)) for name, section in job.items()),
        ("", "Model", _rows(facts["model"])),
        ("", "Checkpoints", _grid(facts["checkpoints"])),
        ("full", "Warnings", "".join(f"<p>{_text(line)}</p>" for line in facts["warnings"])),
        ("", "Machine that wrote this page", _rows(facts["machine"])),
        ("", "Versions", _rows(facts["versions"])),
    ]
    body = "".join(
        f'<section class="{kind}"><h2>{_text(title)}</h2>{inner}</section>' for kind, title, inner in sections if inner
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(facts['run'])} - torchlake</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{_text(facts['run'])}</h1><p>{_text(job['model']['task'])} from {_text(job['model']['base'])}; "
        f'<strong>{_text(state)}</strong></p></header><div class="tiles">{_tiles(facts)}</div>'
        f'<div class="sections">{body}</div>'
        f"<footer>Written by torchlake at {_text(facts['written'])}.</footer></main></body></html>\n"
    )


def _tiles(facts: Mapping[str, Any]) -> str:
    """The few numbers that one looks for first."""
    progress, metrics = facts["progress"], facts["metrics"]
    names = dict.fromkeys(name for name in (facts["metric"], *metrics) if name in metrics and name != "loss")
    tiles = [(name.replace("_", " "), f"{metrics[name]:.4f}") for name in names if metrics[name] is not None][:2]
    tiles += [
        ("steps", f"{progress['steps']:,}"),
        ("time in steps", _duration(progress["seconds_in_steps"])),
        ("rows a second", f"{progress['rows_per_s'] or 0:,.0f}"),
        ("tokens a second", f"{progress['tokens_per_s'] or 0:,.0f}"),
    ]
    return "".join(f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in tiles)


def _series(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def _figure(title: str, series: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """A chart of lines with a legend; its axes begin and end at round numbers."""
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
    for x, anchor in ((left, "start"), (right, "end")):
        across, _ = place((x, ticks[0]))
        drawn.append(f'<text x="{across:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x:,.0f}</text>')
    for index, (name, line) in enumerate(series):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        drawn.append(f'<polyline class="c{index % 6}" points="{path}"/>')
        for point in line if len(line) <= 40 else ():
            x, y = place(point)
            told = f"{_text(name)} {point[1]:.4f} at step {point[0]:,.0f}"
            drawn.append(f'<circle class="c{index % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{told}</title></circle>')
    legend = "".join(f'<span class="c{index % 6}">{_text(name)}</span>' for index, (name, _) in enumerate(series))
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}">{"".join(drawn)}</svg>'
    return f'<figure><figcaption>{_text(title)}<span class="legend">{legend}</span></figcaption>{picture}</figure>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, seven at most, that enclose both."""
    span = max(high - low, 1e-6 * max(abs(low), abs(high)))
    rough = (span if span > 1e-30 else 1.0) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _rows(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    cells = [(_text(name), _text(_shown(name, value))) for name, value in facts.items()]
    body = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
    return f'<div class="wide"><table>{body}</table></div>'


def _grid(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in entries[0])
    lines = ["".join(f"<td>{_text(_shown(name, value))}</td>" for name, value in entry.items()) for entry in entries]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="grid"><tr>{head}</tr>{body}</table></div>'


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
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.7rem;margin-bottom:.9rem}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
.tile{padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile span{color:var(--soft);font-size:.85rem}
.sections{columns:24rem 2;column-gap:.9rem}
section{padding:1rem;margin:0 0 .9rem;break-inside:avoid}
.full{column-span:all;margin-top:.9rem}
.full:first-child{margin-top:0}
section p{margin:.2rem 0;overflow-wrap:anywhere}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem}
figure{margin:0;min-width:0}
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
footer{color:var(--soft);font-size:.85rem;margin-top:1.2rem}
""" + "".join(
    f"polyline.c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}span.c{n}{{color:var(--c{n})}}\n"
    for n in range(6)
)
