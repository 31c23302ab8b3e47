"""How fast is a table embedded, beside everything that a user would pick instead, and how close are the vectors?

MiniLM over the Rotten Tomatoes reviews, from text to vectors in memory, on one core. Every contender is a process of
its own that waits until it is its turn (`_contender.py`); turns go round, so that a noisy machine disturbs all alike,
and the best turn counts. Each round has another share of the reviews, of the same distribution of lengths. Read the
ratios to sentence-transformers, whose vectors, in fp32, are also the reference of the cosines. `alone` is the largest
difference of a number between a review's vector alone and beside others.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD, Contender
from _environments import python_of

CALIBRATION_ROWS = 200
ALONE_ROWS = 20
REFERENCE = "sentence-transformers 6.2, torch"
RUNTIMES = ("varlen", "eager", "onnx", "openvino", "compiled", "bf16", "zentorch", "int8", "onnx_int8", "openvino_int8")
EXACT = 1 - 1e-5
"The lowest cosine of exact vectors. OpenVINO computes in bf16 where the CPU has it, unless it is forbidden."
COLUMNS = ("name", "exact", "rows_per_s", "ratio", "cosine", "lowest_cosine", "alone", "peak_memory_mib", "reason")


@dataclass(kw_only=True)
class Row:
    """One contender, and what its turns have shown."""

    name: str
    group: str
    key: str
    environment: str = "main"
    runtime: str | None = None
    contender: Contender | None = None
    reason: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)
    "Of each turn, (rows, D)."
    alone: np.ndarray | None = None
    "The first rows of the last turn, each in a turn of its own."


def contenders() -> list[Row]:
    """Every row of the table; the reference first."""

    def peer(name: str, group: str, environment: str, *, key: str = "") -> Row:
        return Row(name=name, group=group, key=key or group, environment=environment)

    peers = [
        peer(REFERENCE, "sentence torch", "main"),
        peer("sentence-transformers 5.2, onnx", "sentence onnx", "sentence-onnx"),
        peer("sentence-transformers 6.2, openvino", "sentence openvino", "embeddings-openvino"),
        peer("fastembed", "fastembed", "fastembed"),
        peer("candle (candding)", "candding", "candle"),
        peer("candle (embed_anything)", "embed_anything", "candle"),
        peer("Daft embed_text", "daft", "daft-embeddings"),
        peer("zentorch bf16, frozen", "zentorch", "zentorch"),
        peer("sentence-transformers 5.2, onnx int8", "sentence onnx", "sentence-onnx", key="sentence onnx int8"),
        peer(
            "sentence-transformers 6.2, openvino int8",
            "sentence openvino",
            "embeddings-openvino",
            key="sentence openvino int8",
        ),
    ]
    ours = [Row(name=f"torchlake {name}", group="score", key="score", runtime=name) for name in RUNTIMES]
    return peers + ours


def start(rows: list[Row], setup: dict[str, Any]) -> None:
    """Start the processes; those of a group share one. What an export takes memory for is another process's."""
    running: dict[tuple[str, str | None], Contender] = {}
    for row in rows:
        python = python_of(row.environment)
        if isinstance(python, str):
            row.reason = python
            continue
        place = (row.group, row.runtime)
        if place not in running:
            print(f"loading {row.name}", file=sys.stderr)
            script = "_scoring_torchlake.py" if row.runtime else "_embedding_peers.py"
            log = Path(setup["scratch"]) / f"{row.runtime or row.group}.log".replace(" ", "-")
            message = {**setup, "group": row.group, "runtime": row.runtime}
            if row.runtime:
                made = Contender(python, script, {**message, "group": "prepare"}, log)
                made.close()
                row.reason = made.reason
            if row.reason is None:
                running[place] = Contender(python, script, message, log)
        row.contender = running.get(place)
        row.reason = row.reason or (row.contender.reason if row.contender else None)


def take_turns(rows: list[Row], texts: list[str], *, last: bool) -> None:
    """Let each contender embed the texts, and in the last round some of them alone."""
    for row in rows:
        if row.contender is None or row.reason is not None:
            continue
        turn = row.contender.ask({"go": row.key, "texts": texts})
        if "reason" in turn:
            row.reason = turn["reason"]
            continue
        row.vectors.append(np.array(turn.pop("probabilities"), dtype=np.float32))
        row.turns.append({**turn, "rows": len(texts)})
        print(f"  {row.name}: {len(texts) / turn['seconds']:,.0f} rows/s", file=sys.stderr)
        if last:
            singles = [row.contender.ask({"go": row.key, "texts": [text]}) for text in texts[:ALONE_ROWS]]
            row.alone = np.array([single["probabilities"][0] for single in singles], dtype=np.float32)


def result_of(row: Row, reference: Row) -> dict[str, Any]:
    """What the row's turns show, beside the reference's."""
    found: dict[str, Any] = {"name": row.name}
    if row.reason is not None:
        found["reason"] = row.reason
    if not row.turns:
        return found
    rate, base = (max(turn["rows"] / turn["seconds"] for turn in one.turns) for one in (row, reference))
    ours, theirs = (np.concatenate(one.vectors[: len(row.vectors)]) for one in (row, reference))
    products = (ours * theirs).sum(axis=1)
    cosines = products / (np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))
    found |= {"rows_per_s": rate, "ratio": rate / base}
    found |= {"exact": bool(cosines.min() >= EXACT)}
    found |= {"cosine": float(cosines.mean()), "lowest_cosine": float(cosines.min())}
    if row.alone is not None:
        found["alone"] = float(np.abs(row.alone - row.vectors[-1][: len(row.alone)]).max())
    found["peak_memory_mib"] = max(turn["peak_memory_mib"] or 0.0 for turn in row.turns)
    return found


def main() -> None:
    options_parser = parser(__doc__, shares=8, rounds=2)
    options_parser.add_argument("--prepare", action="store_true", help="make environments and exports, measure nothing")
    options_parser.add_argument("--only", nargs="*", default=[], help="contenders whose name has one of these words")
    options = options_parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.update(ONE_THREAD)
    scratch = SCRATCH / "embeddings"
    model = scratch / "minilm"
    if not model.exists():
        copytree(minilm(), model)
    table = pa.concat_tables([pq.read_table(path) for path in sorted(reviews().glob("*.parquet"))])
    lengths = np.array([len(text) for text in table["text"].to_pylist()])
    order = np.argsort(lengths, kind="stable")
    shares = [np.sort(order[number :: options.shares]) for number in range(options.shares)]
    calibration = table["text"].take(pa.array(shares[-1][:: len(shares[-1]) // CALIBRATION_ROWS])).to_pylist()
    setup = {"model": str(model), "texts": calibration, "scratch": str(scratch), "tables": str(reviews())}
    everyone = contenders()
    rows = [row for row in everyone if not options.only or any(word in row.name for word in options.only)]
    rows = [everyone[0], *(row for row in rows if row is not everyone[0])]
    start(rows, setup)
    try:
        if not options.prepare:
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
                texts = table["text"].take(pa.array(shares[number])).to_pylist()
                take_turns(rows, texts, last=number == options.rounds - 1)
    finally:
        for contender in {id(row.contender): row.contender for row in rows if row.contender is not None}.values():
            contender.close()
    if options.prepare:
        print("\n".join(f"{row.name}: {row.reason or 'ready'}" for row in rows))
        return
    note = (
        f"MiniLM, {len(table):,} reviews, of which each round has one in {options.shares}; one core, text to vectors, "
        f"best of {options.rounds} rounds; ratio and cosine: to sentence-transformers in fp32"
    )
    keep = not options.only
    results = [result_of(row, everyone[0]) for row in rows]
    finish("embeddings", results, as_json=options.json, note=note, keep=keep, columns=COLUMNS)


if __name__ == "__main__":
    main()
