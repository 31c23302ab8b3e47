"""Pictures by matplotlib as inline SVG, and as PNG for trackers; without matplotlib there are none.

Text stays text, the ground is transparent, and each color is a variable of the page's style, so that pictures follow
its dark mode. The palette is Okabe and Ito's, which color-blind people can tell apart, and lines differ in their dashes
too. A picture has a sentence that says what is seen, for people who do not see it; the page puts its numbers into a
table below.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torchlake.errors import pip_install

MISSING = f"Pictures need matplotlib: {pip_install('torchlake[report]')}"
COLORS = {"ink": "#010101", "soft": "#020202", "line": "#030303", **{f"c{n}": f"#04040{n}" for n in range(6)}}
"What stands for each of the style's variables until the picture is drawn."
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 2)))
FONT = re.compile(r"font-family: [^;\"]+;? ?|font: ([\d.]+px) [^;\"]+;?")
NUMBER = re.compile(r"(<text.*?</text>)|\b\d+\.\d{3,}", re.DOTALL)
"Coordinates, and text, whose numbers stay as they are."
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["soft"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
    "axes.grid": True,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "path.simplify_threshold": 0.5,
}
SIZE = (4.2, 2.7)
LETTERS = 30
"What a picture has room for of a name."
Draw = Callable[[Any], None]
"A function that draws on an axes of matplotlib."
Points = Sequence[Sequence[float]]


def is_available() -> bool:
    """Return whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def picture(title: str, seen: str, draw: Draw, size: tuple[float, float] = SIZE) -> dict[str, str] | None:
    """Return the title, the sentence and the SVG of a picture; None without matplotlib."""
    if not is_available():
        return None
    out = io.StringIO()
    _draw(draw, size, salt=title, to=lambda figure: figure.savefig(out, format="svg", metadata={"Date": None}))
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", drawn, flags=re.DOTALL)  # rules for the whole page
    drawn = re.sub(r'<g id="[^"]+"', "<g", drawn)  # the same in every picture
    drawn = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', drawn)
    drawn = FONT.sub(lambda found: f"font-size: {found[1]};" if found[1] else "", drawn)
    drawn = NUMBER.sub(lambda found: found[1] or f"{float(found[0]):.1f}", drawn)
    for name, color in COLORS.items():
        drawn = drawn.replace(color, f"var(--{name})")
    return {"title": title, "seen": seen, "svg": re.sub(r"\n\s*", "\n", drawn).replace("xlink:href", "href")}


def png(draw: Draw, size: tuple[float, float] = (6, 5)) -> bytes | None:
    """Return the same picture in black on white; None without matplotlib."""
    if not is_available():
        return None
    out = io.BytesIO()
    _draw(draw, size, salt="png", to=lambda figure: figure.savefig(out, format="png", dpi=110), plain=True)
    return out.getvalue()


def _draw(draw: Draw, size: tuple[float, float], *, salt: str, to: Draw, plain: bool = False) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {**({} if plain else SETTINGS), "svg.hashsalt": salt, "svg.fonttype": "none"}
    with rc_context(settings), warnings.catch_warnings():
        # Of a name in another script or with an emoji: in SVG the reader's fonts draw it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(1.0 if plain else 0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        draw(axes)
        to(figure)


def lines(
    series: Mapping[str, Points], *, x: str, y: str, per_epoch: float | None = None, smooth: bool = False
) -> Draw:
    """Return a line for each name; of long ones the smoothed line, with the values behind it."""

    def draw(axes: Any) -> None:
        for at, (name, points) in enumerate(series.items()):
            color, xs, ys = COLORS[f"c{at % 6}"], [p[0] for p in points], [p[1] for p in points]
            if smooth and len(points) > 30:
                axes.plot(xs, ys, color=color, alpha=0.3, linewidth=0.8)
                ys = _smoothed(ys)
            mark = "o" if len(points) <= 40 else ""
            axes.plot(xs, ys, color=color, linestyle=DASHES[at % 6], marker=mark, markersize=3, label=_plain(name))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.xaxis.get_major_locator().set_params(integer=x == "step")
        if per_epoch:
            top = axes.secondary_xaxis("top", functions=(lambda v: v / per_epoch, lambda v: v * per_epoch))
            top.set_xlabel("epoch")
            top.xaxis.get_major_locator().set_params(integer=True)
        if len(series) > 1:
            axes.legend(labelcolor=COLORS["ink"])

    return draw


def _plain(name: str) -> str:
    """Return a name, or its beginning, that is drawn as it is: no formula, and in the legend after an underscore."""
    name = name if len(name) <= LETTERS else f"{name[: LETTERS - 3]}..."
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


def _smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return an exponential moving average, without the bias of its first values."""
    mean, total, found = 0.0, 0.0, []
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        found.append(mean / total)
    return found


def reliability(bins: Sequence[Mapping[str, float]]) -> Draw:
    """Return the reliability curve; the area of a point is its number of rows."""

    def draw(axes: Any) -> None:
        most = max(one["rows"] for one in bins)
        xs, ys = [one["confidence"] for one in bins], [one["right"] for one in bins]
        axes.plot([0, 1], [0, 1], color=COLORS["soft"], linestyle=":", label="perfect")
        axes.plot(xs, ys, color=COLORS["c0"], label="model")
        axes.scatter(xs, ys, s=[8 + 60 * one["rows"] / most for one in bins], color=COLORS["c0"])
        axes.set(xlabel="confidence", ylabel="share right", xlim=(0, 1.02), ylim=(0, 1.02))
        axes.legend(labelcolor=COLORS["ink"])

    return draw


def precision_recall(curves: Sequence[Mapping[str, Any]]) -> Draw:
    """Return scikit-learn's precision-recall curve of each of at most six labels."""

    def draw(axes: Any) -> None:
        import numpy as np
        from sklearn.metrics import PrecisionRecallDisplay

        for at, curve in enumerate(curves[:6]):
            _, precision, recall = np.array(curve["points"]).T
            PrecisionRecallDisplay(precision, recall).plot(ax=axes)
            axes.lines[-1].set(color=COLORS[f"c{at}"], linestyle=DASHES[at], label=_plain(curve["label"]), alpha=1)
        axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02), aspect="auto")
        axes.legend(labelcolor=COLORS["ink"]).set_visible(len(curves) > 1)

    return draw


def histogram(bins: Points, x: str) -> Draw:
    """Return bars of rows."""

    def draw(axes: Any) -> None:
        widths = [stop - start for start, stop, _ in bins]
        axes.bar([one[0] for one in bins], [one[2] for one in bins], widths, align="edge", color=COLORS["c0"])
        axes.set(xlabel=x, ylabel="rows")

    return draw


def steps(edges: Sequence[float], counts: Mapping[str, Sequence[int]], x: str) -> Draw:
    """Return histograms over one another: the first one filled, each with its share of the rows."""

    def draw(axes: Any) -> None:
        for at, (name, some) in enumerate(counts.items()):
            look = {"fill": at == 0, "linestyle": DASHES[at], "alpha": 0.5 if at == 0 else 1.0}
            axes.stairs([one / sum(some) for one in some], edges, color=COLORS[f"c{at}"], label=name, **look)
        axes.set(xlabel=x, ylabel="share of the rows")
        axes.legend(labelcolor=COLORS["ink"])

    return draw


def predicted_against_true(points: Points) -> Draw:
    """Return scikit-learn's prediction error display."""

    def draw(axes: Any) -> None:
        import numpy as np
        from matplotlib.ticker import AutoLocator
        from sklearn.metrics import PredictionErrorDisplay

        true, said = np.array(points).T
        shown = PredictionErrorDisplay(y_true=true, y_pred=said)
        shown.plot(
            ax=axes,
            kind="actual_vs_predicted",
            scatter_kwargs={"s": 8, "color": COLORS["c0"], "alpha": 0.6},
            line_kwargs={"color": COLORS["soft"]},
        )
        axes.set(xlabel="predicted", ylabel="true", aspect="auto")
        for axis in (axes.xaxis, axes.yaxis):  # scikit-learn's ticks are not round
            axis.set_major_locator(AutoLocator())

    return draw


def confusion(counts: Sequence[Sequence[int]], labels: Sequence[str]) -> Draw:
    """Return scikit-learn's confusion matrix, for trackers."""

    def draw(axes: Any) -> None:
        import numpy as np
        from sklearn.metrics import ConfusionMatrixDisplay

        shown = ConfusionMatrixDisplay(np.array(counts), display_labels=[_plain(one) for one in labels])
        shown.plot(
            ax=axes, cmap="Blues", colorbar=False, xticks_rotation="vertical" if len(labels) > 4 else "horizontal"
        )

    return draw
