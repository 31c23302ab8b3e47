"""Draw rows/s as bars, with what the answers agree with beside them.

    bench/results/scoring.json       -> docs/images/scoring.png
    bench/results/embeddings.json    -> docs/images/embeddings.png
                                     -> docs/images/embeddings-first.svg: the fastest of each contender

Needs matplotlib, which nothing else here does: pip install matplotlib.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from _common import RESULTS

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = {"seed": "#8c8c8c", "peer": "#4477aa", "torchlake": "#cc6633"}
LABELS = {"seed": "the baseline", "peer": "what users pick instead", "torchlake": "torchlake"}
ABOUT = {
    "scoring": "ratio to the baseline;\nlabels that agree with eager's (fine-tuned MiniLM)",
    "embeddings": "ratio to sentence-transformers;\nmean cosine to its vectors (MiniLM)",
}

FIRST = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<style>
text {{ font: 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }}
.title {{ font-size: 14px; fill: #59636e }}
.name {{ text-anchor: end }}
.own {{ font-weight: 600 }}
.bar {{ fill: #7f9db9 }}
.bar.own {{ fill: #d9622b }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} .title {{ fill: #9198a1 }} .bar {{ fill: #54738f }} }}
</style>
{shapes}
</svg>
"""


def main() -> None:
    for name, about in ABOUT.items():
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        if name == "embeddings":
            rows = [{"kind": kind_of(row), **row} for row in rows]
            (IMAGES / "embeddings-first.svg").write_text(first_picture(rows), encoding="utf-8")
        rows = [row for row in rows if row["kind"] in COLOURS and row.get("rows_per_s")]
        draw(rows, IMAGES / f"{name}.png", f"rows a second on one core; {about}")


def kind_of(row: dict[str, Any]) -> str:
    """Whether a row of embeddings is the baseline, torchlake's or another's."""
    if row["ratio"] == 1.0:
        return "seed"
    return "torchlake" if row["name"].startswith("torchlake") else "peer"


def draw(rows: list[dict[str, Any]], picture: Path, about: str) -> None:
    """Write the picture; the fastest row is on top."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sorted(rows, key=lambda row: row["rows_per_s"])
    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(rows) + 1.3), layout="constrained")
    rates = [row["rows_per_s"] for row in rows]
    axes.barh(
        range(len(rows)),
        rates,
        color=[COLOURS[row["kind"]] for row in rows],
        hatch=["" if row["exact"] else "///" for row in rows],
        edgecolor="white",
        linewidth=0.5,
        height=0.78,
    )
    for place, row in enumerate(rows):
        axes.text(rates[place] + max(rates) * 0.008, place, beside(row), va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axes.set_xlim(0, max(rates) * 1.36)
    axes.margins(y=0.01)
    axes.set_xlabel(about)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()]
    keys.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="///", label="8 or 16 bits"))
    axes.legend(handles=keys, loc="lower right", frameon=False, fontsize=9)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=130)


def first_picture(rows: list[dict[str, Any]]) -> str:
    """Return the picture of the README: each contender's fastest exact variant, and its fastest in 8 or 16 bits.

    It is SVG, so that its texts follow the reader's light or dark mode.
    """
    fastest: dict[tuple[bool, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["exact"], row["rows_per_s"])):
        fastest[row["exact"], row["name"].split()[0]] = row
    chosen = sorted(fastest.values(), key=lambda row: (not row["exact"], row["rows_per_s"]), reverse=True)
    lowest = min(row["cosine"] for row in chosen)
    titles = {False: f"8 or 16 bits (cosine to the exact vectors: {lowest:.3f} or more)", True: "exact vectors"}
    left, width, scale, y = 300, 680, 330 / max(row["rows_per_s"] for row in chosen), -6
    shapes = []
    for place, row in enumerate(chosen):
        if place == 0 or row["exact"] != chosen[place - 1]["exact"]:
            y += 30
            shapes.append(f'<text x="0" y="{y - 6}" class="title">{titles[row["exact"]]}</text>')
        name = escape(re.sub(r" [\d.]+,", "", row["name"]))
        own = " own" if row["kind"] == "torchlake" else ""
        bar = row["rows_per_s"] * scale
        shapes.append(f'<text x="{left - 8}" y="{y + 17}" class="name{own}">{name}</text>')
        shapes.append(f'<rect x="{left}" y="{y + 3}" width="{bar:.0f}" height="18" class="bar{own}"/>')
        shapes.append(f'<text x="{left + bar + 7:.0f}" y="{y + 17}" class="rate{own}">{row["rows_per_s"]:.0f}</text>')
        y += 25
    return FIRST.format(width=width, height=y + 4, shapes="\n".join(shapes))


def beside(row: dict[str, Any]) -> str:
    """What stands at the end of a bar."""
    said = [f"{row['rows_per_s']:.0f}"]
    if row.get("ratio"):
        said.append(f"{row['ratio']:.1f}x")
    agreement = row.get("tuned_agreement")
    if not row["exact"] and "cosine" in row:
        said.append(f"cosine {row['cosine']:.3f}")
    elif agreement is not None:
        said.append(f"{agreement:.1%} agree")
    elif row["exact"]:
        said.append("exact")
    return "  ".join(said)


if __name__ == "__main__":
    main()
