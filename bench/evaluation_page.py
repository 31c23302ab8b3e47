"""What the page of an evaluation costs, and a comparison of two: CPU time of `evaluate` with and without `report`.

The model has two layers of 32 numbers, so scoring is as cheap as it gets, and the share of the page is at its largest.
All runs are processes of their own, on one worker; CPU time is user and system time of the process and its workers.
"""

import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model
from _fresh import alone

FOLDER = SCRATCH / "evaluation_page"
LIMIT_S = 900.0
LABELS = ["LABEL_0", "LABEL_1"]
WORDS = ("a", "the", "film", "story", "good", "bad", "dull", "bright", "long", "short", "is", "was", "and", "but")


def texts(rows: int) -> Path:
    """A table of `rows` distinct short texts with labels."""
    path = FOLDER / f"texts_{rows}.parquet"
    if path.exists():
        return path
    random = np.random.default_rng(0)
    words = np.array(WORDS)[random.integers(0, len(WORDS), (rows, 6))]
    said = [f"{' '.join(row)} {number}" for number, row in enumerate(words)]
    labels = np.array(LABELS)[random.integers(0, 2, rows)]
    pq.write_table(pa.table({"id": np.arange(rows), "text": said, "label": labels}), path)
    return path


def model(seed: int) -> Path:
    """A small classifier."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    folder = random_model(FOLDER / f"model_{seed}", base="bert", **shape)
    if seed:
        import torch
        from transformers import AutoModelForSequenceClassification as AutoModel

        torch.manual_seed(seed)
        AutoModel.from_config(AutoModel.from_pretrained(folder).config).save_pretrained(folder)
    return folder


def evaluated(rows: int, seed: int, report: str | None) -> dict[str, Any]:
    """Evaluate, with a page or without."""
    import torchlake as tl

    more: dict[str, Any] = {} if report is None else {"report": FOLDER / report, "key": "id"}
    tl.evaluate(model(seed), texts(rows), label="label", engine=tl.Local(processes=1), **more)
    return cost()


def compared() -> dict[str, Any]:
    """Compare the two evaluations, with a page."""
    import torchlake as tl

    tl.compare(FOLDER / "one", FOLDER / "other", report=FOLDER / "compared")
    return cost()


def cost() -> dict[str, Any]:
    """The CPU time of this process and its workers so far, and its peak memory."""
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(each.ru_utime + each.ru_stime for each in (own, workers))
    return {"cpu_s": round(seconds, 1), "peak_mb": round(own.ru_maxrss / 1024)}


def main() -> None:
    """Measure."""
    options = arguments(__doc__ or "", rows=1_000_000)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stale in ("one", "other", "compared"):
        shutil.rmtree(FOLDER / stale, ignore_errors=True)
    rows = options.rows
    texts(rows), model(0), model(1)
    out = FOLDER / "cost.json"
    work: dict[str, Any] = {
        "evaluate": (evaluated, rows, 0, None),
        "evaluate with a page": (evaluated, rows, 0, "one"),
        "the same of another model": (evaluated, rows, 1, "other"),
        "compare": (compared,),
    }
    found = [{"name": name, "rows": rows, **alone(*one, out=out, limit_s=LIMIT_S)} for name, one in work.items()]
    found[1]["ratio"] = round(found[1]["cpu_s"] / found[0]["cpu_s"], 2)
    for line, folder in ((1, "one"), (3, "compared")):
        found[line]["html_kb"] = max(path.stat().st_size for path in (FOLDER / folder).glob("*.html")) // 1000
    finish("evaluation_page", found, as_json=options.json)


if __name__ == "__main__":
    main()
