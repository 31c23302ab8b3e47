"""Are labels to look at really wrong? Labels of film reviews are flipped, and the hints of `train --folds` are counted.

Each fold's page has hints for rows that it did not train on. Ranked by confident learning (cleanlab, as on the page),
and by the probability of the given label, as on the page without cleanlab. Real labels are wrong here and there, too,
so a precision below 1 is not only the hints' mistake. A random order has the share of flipped labels as its precision.
"""

import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, minilm, reviews

import torchlake as tl

FIRST = (25, 50, 100)


def main() -> None:
    given = arguments(__doc__, rows=3000, percent=5, folds=3, epochs=2, processes=1)
    folder, generator = SCRATCH / "label-hints", np.random.default_rng(0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = pq.read_table(reviews() / "train.parquet")
    source = source.take(pa.array(np.sort(generator.permutation(len(source))[: given.rows])))
    flipped = np.zeros(given.rows, dtype=bool)
    flipped[generator.permutation(given.rows)[: given.rows * given.percent // 100]] = True
    labels = np.where(flipped, 1 - source["label"].to_numpy(), source["label"].to_numpy())
    table = pa.table({"id": np.arange(given.rows), "text": source["text"], "label": labels})
    pq.write_table(table, folder / "train.parquet")
    data: Any = {"train": str(folder / "train.parquet"), "key": "id"}
    train: Any = {"epochs": given.epochs, "batch_size": 32, "learning_rate": 5e-5}
    run = tl.train(
        run=folder / "run",
        folds=given.folds,
        engine=tl.Local(given.processes),
        data=data,
        model={"base": str(minilm()), "max_length": 64},
        train=train,
    )
    pages = sorted((folder / "run").glob("fold_*/eval/rows.parquet"))
    rows = pa.concat_tables([pq.read_table(page) for page in pages]).to_pandas()
    wrong = rows[~rows["right"].astype(bool)]
    orders = {
        "confident learning": rows[rows["label_issue"].astype(bool)].sort_values("label_quality"),
        "probability of the label": wrong.sort_values("probability"),
    }
    table_of_results = []
    for name, listed in orders.items():
        found = flipped[listed["id"].to_numpy()]
        entry = {
            "name": name,
            "listed": len(listed),
            "flipped": int(flipped.sum()),
            "recall": found.sum() / flipped.sum(),
        }
        table_of_results.append(entry | {f"precision of {k}": float(found[:k].mean()) for k in FIRST})
    note = (
        f"{given.rows:,} reviews, {given.percent} % of the labels flipped, {given.folds} folds, {given.epochs} epochs "
        f"each, accuracy {run.metrics['accuracy']:.3f} with the flipped labels"
    )
    finish("label_hints", table_of_results, as_json=given.json, note=note)


if __name__ == "__main__":
    main()
