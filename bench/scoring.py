"""How fast are rows scored, beside the loop that people write by hand?

The peer is the usual notebook: every row padded to 128 tokens, batches of 32 in arrival order, autograd left on. It is
given its tokens ready made; torchlake is timed from text to predictions, so its ratio is a lower bound. Both on one
thread, in one process, in turn: a quarter of the peer's rows, then all of torchlake's, four times over.
"""

import itertools
import time

import numpy as np
import pyarrow.parquet as pq
import torch
from _common import SCRATCH, arguments, finish, random_model, reviews
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import torchlake as tl


def main() -> None:
    options = arguments(__doc__, rows=1066, rounds=4)
    torch.set_num_threads(1)
    folder = random_model(SCRATCH / "roberta-base-shape")
    table = pq.read_table(reviews() / "test.parquet").slice(0, options.rows).select(["text"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    padded = tokenizer(
        table["text"].to_pylist(), padding="max_length", max_length=128, truncation=True, return_tensors="pt"
    )
    ids, mask = padded["input_ids"], padded["attention_mask"]

    peer_probabilities: list[np.ndarray] = []

    def peer(first: int, last: int) -> None:
        for at in range(first, last, 32):
            batch = slice(at, min(at + 32, last))
            logits = model(input_ids=ids[batch], attention_mask=mask[batch]).logits
            peer_probabilities.append(logits.softmax(1).detach().numpy())

    peer_s, ours_s, loading_s = 0.0, [], []
    bounds = np.linspace(0, len(table), options.rounds + 1).astype(int)
    tl.predict(folder, table.slice(0, 64))
    for first, last in itertools.pairwise(bounds):
        began = time.perf_counter()
        peer(first, last)
        peer_s += time.perf_counter() - began
        began = time.perf_counter()
        tl.predict(folder, table.slice(0, 1))
        loading_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        scored = tl.predict(folder, table, all_probabilities=True)
        ours_s.append(time.perf_counter() - began)
    ours = min(ours_s) - min(loading_s)
    probabilities = np.stack([scored[name].to_numpy() for name in scored.column_names if name.startswith("prob_")], 1)
    expected = np.concatenate(peer_probabilities)
    real = int(mask.sum())
    rows = [
        {
            "name": "padded to 128, batch 32, in arrival order, autograd on",
            "kind": "seed",
            "exact": True,
            "rows_per_s": len(table) / peer_s,
            "tokens_per_s": real / peer_s,
            "ratio": 1.0,
            "padding": 1 - real / ids.numel(),
            "agreement": 1.0,
        },
        {
            "name": "torchlake eager, text to predictions",
            "kind": "torchlake",
            "exact": True,
            "rows_per_s": len(table) / ours,
            "tokens_per_s": real / ours,
            "ratio": peer_s / ours,
            "agreement": float((probabilities.argmax(1) == expected.argmax(1)).mean()),
            "largest_probability_difference": float(np.abs(probabilities - expected).max()),
        },
    ]
    note = (
        f"{len(table)} reviews, roberta-base's shape, random weights, one thread; "
        f"torchlake's time is the best of {options.rounds}, less loading the model"
    )
    finish("scoring", rows, as_json=options.json, note=note, keep=options.rows == 1066)


if __name__ == "__main__":
    main()
