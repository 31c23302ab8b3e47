"""Do embeddings trained by torchlake find as much as those of sentence-transformers' own trainer?

A pretrained encoder, pairs made of the two halves of each review, in-batch negatives; the same pairs, batch, steps,
rate and schedule (fp32, linear after a tenth of warm-up) for both, several seeds each, one process on all cores. Both
folders are measured by the same search: each first half of the test reviews among all their second halves.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _recipes import Recipe, by_sentence_transformers, by_torchlake, sentence_model

BATCH, RATE = 64, 5e-5
METRICS = ("recall_at_1", "recall_at_10", "mrr_at_10")
NAMES = {"base": "the base model", "torchlake": "torchlake", "peer": "sentence-transformers"}


def main() -> None:
    options = parser(__doc__, seeds=2, steps=60)
    options.add_argument("--train", help="for a process of this benchmark: what it trains, as JSON")
    given = options.parse_args()
    if given.train:
        print(json.dumps(train(json.loads(given.train))))
        return
    folder = SCRATCH / "embedding-training"
    tables = {part: halves(reviews() / f"{part}.parquet", folder / f"{part}.parquet") for part in ("train", "test")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for seed in range(given.seeds):
        for kind in ("torchlake", "peer"):
            output = folder / f"{kind}-{seed}-{given.steps}"
            setup = {"kind": kind, "train": str(tables["train"]), "output": str(output), "seed": seed}
            command = [sys.executable, __file__, "--train", json.dumps({**setup, "steps": given.steps})]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds = json.loads(done.stdout.splitlines()[-1])
            found[kind].append({**measured(output / "model", tables["test"]), "seconds": seconds})
            print(f"  {kind}, seed {seed}: {found[kind][-1]}", file=sys.stderr, flush=True)
    found["base"].append(measured(minilm(), tables["test"]))
    rows = [
        {
            "name": label,
            "seeds": len(found[name]),
            **{metric: statistics.mean(one[metric] for one in found[name]) for metric in METRICS},
            "seconds": min(one["seconds"] for one in found[name]) if name != "base" else None,
        }
        for name, label in NAMES.items()
    ]
    note = f"halves of reviews; batch {BATCH}, {given.steps} steps, rate {RATE}; seconds: the fastest of the seeds"
    finish("embedding_training", rows, as_json=given.json, note=note)


def halves(source: Path, target: Path) -> Path:
    """A table of the two halves of each review of at least eight words."""
    words = [text.split() for text in pq.read_table(source)["text"].to_pylist()]
    pairs = [(" ".join(w[: len(w) // 2]), " ".join(w[len(w) // 2 :])) for w in words if len(w) >= 8]
    target.parent.mkdir(parents=True, exist_ok=True)
    first, second = zip(*pairs, strict=True)
    pq.write_table(pa.table({"id": range(len(pairs)), "anchor": first, "positive": second}), target)
    return target


def measured(model: Path, table: Path) -> dict[str, float]:
    """The search of the test pairs by a folder of either trainer."""
    import torchlake as tl

    found = tl.evaluate(model, str(table), text="anchor", text_pair="positive", task="feature_extraction")
    return {name: float(found.metrics[name]) for name in METRICS}


def train(setup: dict[str, Any]) -> float:
    """Train with one of the two; returns the seconds of the steps, without imports and the preparation of the table."""
    os.environ.update(TORCHLAKE_PROGRESS="0", WANDB_DISABLED="true")
    table, kind = setup.pop("train"), setup.pop("kind")
    recipe = Recipe(batch=BATCH, rate=RATE, **setup)
    if kind == "torchlake":
        data = {"train": table, "text": "anchor", "text_pair": "positive"}
        return by_torchlake(recipe, data, "feature_extraction")[1]
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model, rows = sentence_model(), pq.read_table(table, columns=["anchor", "positive"]).to_pydict()
    seconds = by_sentence_transformers(recipe, model, rows, MultipleNegativesRankingLoss(model))
    model.save_pretrained(f"{recipe.output}/model")
    return seconds


if __name__ == "__main__":
    main()
