"""How long does one row take beside its bare forward pass, and beside the same rows in one call?

64 reviews, one by one and in one call, from texts to answers in this process: vectors of MiniLM beside
sentence-transformers, classes of a random model of MiniLM's shape beside transformers' pipeline, each also beside the
forward pass of transformers alone, on tokens that are made. One thread, fp32. The contenders take turns at every text;
CPU time, the shortest of the rounds of each text, of these the median. `allowed` is 1.1 times the bare forward pass
and 1 ms. `lowest` and `difference` compare the answers with those of the library.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, random_model, reviews
from _contender import ONE_THREAD

os.environ.update(ONE_THREAD, TOKENIZERS_PARALLELISM="false")

import torch
import transformers

import torchlake as tl

SHAPE = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
Way = Callable[[list[str]], Any]


def vectors() -> tuple[str, dict[str, Way]]:
    """Ways to embed texts as (N, D), the bare forward pass last."""
    from sentence_transformers import SentenceTransformer

    folder = SCRATCH / "one-row-minilm"
    if not folder.exists():
        shutil.copytree(minilm(), folder)
    peer, model = SentenceTransformer(str(folder), device="cpu"), tl.load(folder, task="feature_extraction")
    ways: dict[str, Way] = {
        "sentence-transformers": lambda texts: peer.encode(texts, show_progress_bar=False),
        "torchlake": lambda texts: np.array([row["embedding"] for row in model(texts)], dtype=np.float32),
    }
    return "vectors", ways | {"bare forward": bare(folder, peer[0].auto_model)}


def classes() -> tuple[str, dict[str, Way]]:
    """Ways to get the score of each text's class, the bare forward pass last."""
    folder = random_model(SCRATCH / "one-row-classes", base="bert", **SHAPE)
    peer, model = transformers.pipeline("text-classification", model=str(folder), device=-1), tl.load(folder)
    ways: dict[str, Way] = {
        "transformers pipeline": lambda texts: scores(peer(texts, batch_size=len(texts))),
        "torchlake": lambda texts: scores(model(texts)),
    }
    return "classes", ways | {"bare forward": bare(folder, peer.model)}


def scores(answers: Any) -> np.ndarray:
    """The score of each answer, negated if it is not that of the first class."""
    return np.array([one["score"] if one["label"] == "LABEL_0" else -one["score"] for one in answers])


def bare(folder: Path, model: Any) -> Way:
    """The forward pass of transformers alone; the tokens of texts are made in the first round, which does not count."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made: dict[tuple[str, ...], Any] = {}

    def forward(texts: list[str]) -> None:
        key = tuple(texts)
        if key not in made:
            made[key] = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            model(**made[key])

    return forward


def shortest(ways: dict[str, Way], calls: list[list[str]], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of each way for each call, the shortest of the rounds."""
    took = {name: [float("inf")] * len(calls) for name in ways}
    for number in range(rounds + 1):
        for at, texts in enumerate(calls):
            for name, way in ways.items():
                began = time.process_time()
                way(texts)
                seconds = time.process_time() - began
                if number:
                    took[name][at] = min(took[name][at], 1e3 * seconds)
    return took


def result_of(question: str, ways: dict[str, Way], texts: list[str], rounds: int) -> list[dict[str, Any]]:
    one = shortest(ways, [[text] for text in texts], rounds)
    together = {name: row[0] / len(texts) for name, row in shortest(ways, [texts], rounds).items()}
    library = next(iter(ways))
    expected = np.concatenate([ways[library]([text]) for text in texts])
    allowed = statistics.median(1.1 * each + 1 for each in one["bare forward"])
    rows = []
    for name, way in ways.items():
        row: dict[str, Any] = {"name": f"{question}: {name}", "one_row_ms": statistics.median(one[name])}
        row |= {"ratio": statistics.median(one[library]) / row["one_row_ms"], "together_ms": together[name]}
        row["ratio_together"] = together[library] / together[name]
        if name == "torchlake":
            row |= {"allowed_ms": allowed, "within": bool(row["one_row_ms"] <= allowed)}
        if name != "bare forward":
            found = np.concatenate([way([text]) for text in texts])
            row["difference"] = float(np.abs(found - expected).max())
        rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__, rows=64, rounds=5).parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = pa.concat_tables([pq.read_table(path) for path in sorted(reviews().glob("*.parquet"))])
    texts = table["text"].take(pa.array(np.linspace(0, len(table) - 1, options.rows).astype(int))).to_pylist()
    rows = []
    for make in (vectors, classes):
        question, ways = make()
        rows += result_of(question, ways, texts, options.rounds)
    note = (
        f"{options.rows} reviews, MiniLM's shape, fp32, one thread; CPU ms a row, one by one and all in one call; "
        "ratios: to the library; difference: the largest of a number from the library's; allowed: 1.1 times bare + 1 ms"
    )
    finish("one_row", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
