"""Pages in headless Chromium, at the widths of a phone, a tablet and a laptop: light, dark and printed.

Nothing overflows, no text covers another, the keyboard goes from the top to the bottom, scripts have no errors, and
axe-core (`axe-core-python`, or the file that AXE_CORE names) finds nothing to improve.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import judged_rows as made
import tiny
from torchlake.config.job import job_to_yaml, load_job
from torchlake.evaluation.compare import compare
from torchlake.evaluation.evaluate import evaluate
from torchlake.reporting.report import report
from torchlake.runs.folder import FOLDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium"),
]
WIDTHS = (375, 768, 1280)
COMMAND = (
    "chromium",
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--virtual-time-budget=20000",
    "--dump-dom",
)
SCHEMES = {"light": "preferredColorScheme=1", "dark": "preferredColorScheme=0"}
SCRIPT = """
const failed = []; addEventListener("error", event => failed.push(event.message));
function overflow() {
  return Math.max(0, document.documentElement.scrollWidth - innerWidth);
}
function covered() {  // pairs of texts that share more than a pixel; what scrolls inside its box is cut at its edge
  const boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const parent = node.parentElement, range = document.createRange();
    if (!node.data.trim() || !parent.checkVisibility() || parent.closest("script,style")) continue;
    range.selectNodeContents(node);
    const edge = parent.closest(".wide")?.getBoundingClientRect();
    for (const box of range.getClientRects()) {
      const left = Math.max(box.left, edge?.left ?? -1e9), right = Math.min(box.right, edge?.right ?? 1e9);
      const inset = box.height * 0.15;  // the font's height, of which letters take less
      boxes.push({left, right, top: box.top + inset, bottom: box.bottom - inset, node});
    }
  }
  boxes.sort((one, other) => one.top - other.top);
  const found = [];
  boxes.forEach((one, at) => {
    for (let next = at + 1; next < boxes.length && boxes[next].top < one.bottom - 1; next++) {
      const other = boxes[next];
      if (other.node !== one.node && Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1)
        found.push(one.node.data.slice(0, 30) + " / " + other.node.data.slice(0, 30));
    }
  });
  return found;
}
function backwards() {  // places where the next element of the keyboard is above the one before, in the same column
  const stops = [...document.querySelectorAll("a[href],summary,input,[tabindex]")].filter(e => e.checkVisibility());
  const boxes = stops.map(stop => stop.getBoundingClientRect());
  const above = at => at && boxes[at].top < boxes[at - 1].top - 1 && boxes[at].left < boxes[at - 1].right;
  return stops.filter((stop, at) => stop.tabIndex !== 0 || above(at)).map(e => e.outerHTML);
}
"""


def in_browser(
    folder: Path, content: str, expression: str, *, widths: Sequence[int] = WIDTHS, scheme: str = "light"
) -> list[Any]:
    """Return the value of JavaScript, which may be a promise, in a page at each width."""
    content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", content)
    content = content.replace("<style>", f"<script>{SCRIPT}</script><style>", 1)
    outer = "<!doctype html><meta charset=utf-8><script>const all = []; function told(at, value) { all[at] = value;"
    outer += f" if (Object.keys(all).length === {len(widths)}) document.title = JSON.stringify(all) }}</script>"
    for at, width in enumerate(widths):
        told = f"Promise.resolve({expression}).then(value => parent.told({at}, value))"
        shown = f"{content}<script>onload = () => {told}</script>".replace("&", "&amp;").replace('"', "&quot;")
        outer += f'<iframe srcdoc="{shown}" width={width} height=900></iframe>'
    page = folder / "outer.html"
    page.write_text(outer, encoding="utf-8")
    options = [f"--blink-settings={SCHEMES[scheme]}", f"--user-data-dir={folder}/chrome", page.as_uri()]
    dumped = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=180, check=True).stdout
    found = re.search(r"<title>(.+?)</title>", dumped, re.DOTALL)
    assert found is not None, dumped[:300]
    values: list[Any] = json.loads(unescape(found[1]))
    return values


TEXTS = [made.ATTACK, "שלום עולם", "unbroken" * 500, "🐈" * 50, "long " * 20_000]


def of_classes(folder: Path, classes: int = 3, rows: int = 300) -> str:
    return made.page_of(folder, rows, classes, TEXTS, slices={made.ATTACK: ["x" * 300, "שלום " * 9], "": ["a", "b"]})


def of_several_labels(folder: Path) -> str:
    truth = np.random.default_rng(0).random((300, 3)) < 0.4
    chances = np.random.default_rng(1).random(truth.shape)
    scored, spec = made.scored_lists(chances, truth, [*made.STRANGE[1:], "_$a$\n" + "unbroken" * 50])
    scored = scored.set_column(scored.schema.get_field_index("text"), "text", [pa.array(TEXTS * 60)])
    made.evaluated(folder, scored, spec, hints=True)
    return (folder / "eval.html").read_text()


def of_answers(folder: Path) -> str:
    made.evaluated(folder, *made.scored_answers([*TEXTS, "Anna"] * 5), texts=["context"])
    return (folder / "eval.html").read_text()


def of_vectors(folder: Path) -> str:
    """Each text's own second text is its neighbor's, so that every query has an answer that was missed."""
    model = tiny.build_embedder(folder / "model")
    pairs = pa.table({"id": range(50), "a": [f"{text} {row}" for row, text in enumerate(TEXTS * 10)]})
    pairs = pairs.append_column("b", pa.array([*pairs["a"].to_pylist()[1:], TEXTS[0]]))
    evaluate(model, pairs, text="a", text_pair="b", key="id", report=folder / "eval", engine=tiny.Here())
    return (folder / "eval" / "eval.html").read_text()


def of_texts(folder: Path) -> str:
    model = tiny.build_language_model(folder / "model")
    table = pa.table({"text": [*TEXTS[:4], "long " * 90] * 8, "kind": TEXTS * 8})
    evaluate(model, table, slices=["kind"], report=folder / "eval", engine=tiny.Here())
    return (folder / "eval" / "eval.html").read_text()


def of_written_texts(folder: Path) -> str:
    model = tiny.build_language_model(folder / "model")
    table = pa.table({"text": ["a film", "so bad"] * 10, "answer": TEXTS * 4, "kind": TEXTS * 4})
    more: dict[str, Any] = {"slices": ["kind"], "max_new_tokens": 5, "engine": tiny.Here()}
    evaluate(model, table, label="answer", prompt="{text}!", report=folder / "eval", **more)
    return (folder / "eval" / "eval.html").read_text()


def of_a_run(folder: Path) -> str:
    """A finished run whose table, columns and settings have names of any kind."""
    folder.mkdir()
    names = [f"data.train={made.ATTACK}.parquet", f"data.text={'unbroken' * 50}", "data.label=שלום"]
    (folder / "job.yaml").write_text(job_to_yaml(load_job(None, [*names, "model.base=encoder"])))
    step = dict.fromkeys(("learning_rate", "grad_norm", "tokens", "rows", "seconds", "peak_memory_bytes"), 1)
    steps = [{**step, "step": at, "epoch": 1 + at // 51, "loss": 1 / at} for at in range(1, 101)]
    judged = [{"step": at, "validation_loss": 1 / at, "validation_macro_f1": at / 110} for at in (50, 100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, *judged]))
    result = {"steps": 100, "metric": "macro_f1", "metrics": {"macro_f1": 0.9091}}
    (folder / "result.json").write_text(json.dumps(result))
    return report(folder).read_text()


def of_spans(folder: Path) -> str:
    made.evaluated(folder, *made.spans_table())
    return (folder / "eval.html").read_text()


def of_numbers(folder: Path) -> str:
    truth = np.random.default_rng(0).normal(10, 3, 300)
    said = truth + np.random.default_rng(1).normal(0, 1, 300)
    said[7] += 30
    made.evaluated(folder, made.scored_numbers(truth, said), made.NUMBERS)
    return (folder / "eval.html").read_text()


def of_a_comparison(folder: Path) -> str:
    for name, classes in (("one", 3), ("two", 3)):
        of_classes(folder / name, classes)
    compare(folder / "one", folder / "two", report=folder / "compared")
    return (folder / "compared" / "compare.html").read_text()


def of_folds(folder: Path) -> str:
    """The main number is long: a mean and its deviation."""
    folder.mkdir()
    job = {"model": {"task": "text_classification", "base": "bert"}}
    (folder / FOLDS).write_text(json.dumps({"folds": 3, "job": job}))
    result = {"metric": "macro_f1", "metrics": {"macro_f1": 0.5}, "deviations": {"macro_f1": 0.05}, "folds": []}
    (folder / "result.json").write_text(json.dumps(result))
    content = report(folder).read_text()
    assert "0.5000 ± 0.0500" in content
    return content


PAGES: dict[str, Callable[[Path], str]] = {
    "classes": of_classes,
    "two classes": lambda folder: of_classes(folder, 2),
    "150 classes": lambda folder: of_classes(folder, 150, 1000),
    "one row": lambda folder: of_classes(folder, 2, 1),
    "spans": of_spans,
    "several labels": of_several_labels,
    "numbers": of_numbers,
    "answers": of_answers,
    "vectors": of_vectors,
    "texts": of_texts,
    "written texts": of_written_texts,
    "run": of_a_run,
    "comparison": of_a_comparison,
    "folds": of_folds,
}


@pytest.mark.parametrize(("name", "scheme"), [*((name, "light") for name in PAGES), ("classes", "dark")])
@pytest.mark.usefixtures("page_libraries")
def test_text_has_room_and_the_keyboard_an_order(name: str, scheme: str, tmp_path: Path) -> None:
    content = PAGES[name](tmp_path / "page")
    expression = "[overflow(), covered(), backwards(), failed, getComputedStyle(document.body).backgroundColor]"
    ground = {"light": "rgb(251, 250, 247)", "dark": "rgb(18, 21, 26)"}[scheme]
    for found in in_browser(tmp_path, content, expression, scheme=scheme):
        assert found == [0, [], [], [], ground]


def test_what_covers_overflows_or_goes_backwards_is_found(tmp_path: Path) -> None:
    bad = "<head><style></style></head><p>one</p><p style='margin-top:-1.5em'>two</p><input tabindex=2>"
    bad += "<i style='margin-left:99em'>3</i><script>throw new Error('broken')</script>"
    (found,) = in_browser(tmp_path, bad, "[overflow() > 0, covered(), backwards().length, failed.length]", widths=[375])
    assert found == [True, ["one / two"], 1, 1]


def axe() -> Path | None:
    """Return the file of axe-core, if it is here."""
    if named := os.environ.get("AXE_CORE"):
        return Path(named)
    found = find_spec("axe_core_python")
    return None if found is None or found.origin is None else Path(found.origin).with_name("axe.min.js")


@pytest.mark.skipif(axe() is None, reason="needs axe-core")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("page_libraries")
def test_axe_finds_nothing(name: str, scheme: str, tmp_path: Path) -> None:
    """Contrast, names, landmarks, and that what scrolls can be reached by keyboard."""
    library = axe()
    assert library is not None
    content = PAGES[name](tmp_path / "page")
    content = content.replace("<style>", f"<script>{library.read_text(encoding='utf-8')}</script><style>", 1)
    run = "axe.run().then(all => all.violations.map(one => [one.id, one.nodes.length, one.nodes[0].html.slice(0, 90)]))"
    assert in_browser(tmp_path, content, run, scheme=scheme) == [[], [], []]


def test_a_printed_page_is_white_and_clips_nothing(tmp_path: Path) -> None:
    """What holds in print holds always here, on the width of a sheet."""
    content = made.page_of(tmp_path / "page", 400, 20, [made.ATTACK, "plain", "long " * 200])
    content = content.replace("@media print{", "@media all{").replace("@media screen and", "@media print and")
    clipped = "[...document.querySelectorAll('.wide,p')].filter(e=>e.scrollWidth>e.clientWidth+1).length"
    folded = "[...document.querySelectorAll('details>div')].filter(e=>!e.getBoundingClientRect().height).length"
    style = "getComputedStyle(document.body)"
    expression = f"[{clipped},{folded},{style}.backgroundColor,{style}.color,covered()]"
    (found,) = in_browser(tmp_path, content, expression, widths=[700])
    assert found == [0, 0, "rgb(255, 255, 255)", "rgb(0, 0, 0)", []]
