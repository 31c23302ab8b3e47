"""Draw docs/images/scoring.png from bench/results/scoring.json: rows/s as bars, agreement with `eager` beside them.

Needs matplotlib, which nothing else here does: pip install matplotlib.
"""

import json
import sys
from pathlib import Path
from typing import Any

from _common import RESULTS

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "scoring.png"
COLOURS = {"seed": "#8c8c8c", "peer": "#4477aa", "torchlake": "#cc6633"}
LABELS = {"seed": "the seed's baseline", "peer": "what users pick instead", "torchlake": "torchlake"}


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "scoring.json"
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    result = json.loads(source.read_text())
    draw([row for row in result["rows"] if row["kind"] in COLOURS and row.get("rows_per_s")], picture)


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
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
    axes.set_xlabel(
        "rows a second on one core; ratio to the baseline;\nlabels that agree with eager's (fine-tuned MiniLM)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()]
    keys.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="///", label="8 or 16 bits"))
    axes.legend(handles=keys, loc="lower right", frameon=False, fontsize=9)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=130)


def beside(row: dict[str, Any]) -> str:
    """What stands at the end of a bar."""
    said = [f"{row['rows_per_s']:.0f}"]
    if row.get("ratio"):
        said.append(f"{row['ratio']:.1f}x")
    agreement = row.get("tuned_agreement")
    if agreement is not None:
        said.append(f"{agreement:.1%} agree")
    elif row["exact"]:
        said.append("exact")
    return "  ".join(said)


if __name__ == "__main__":
    main()
