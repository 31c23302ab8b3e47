"""How fast are rows scored, beside everything that a user would pick instead?

One table, measured in one run on one core: 1,066 reviews, a model of roberta-base's shape with random weights, from
text to probabilities. Every contender is a process of its own that waits until it is its turn (`_contender.py`), and
turns go round: each contender once per round, so that a noisy machine disturbs all alike; its best round counts.
A slow contender gets a share of the rows in each round, another share in the next, cut so that all have the same
distribution of lengths. Read the ratios, not the rates.

With --model FOLDER (default: what `accuracy.py` left) the int8 contenders and torchlake's runtimes also score all rows
with that fine-tuned model: agreement and accuracy mean something there, while random weights call every row the same.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser, random_model, reviews
from _contender import ONE_THREAD, Contender
from _environments import python_of
from _limit import model_operations
from _scoring_rows import Row, ablation, compare, limit_row, measured, peers, runtimes

from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.tasks._tokens import tokenize

CALIBRATION_ROWS = 200
COLUMNS = ("name", "kind", "exact", "rows_per_s", "tokens_per_s", "ratio", "padding", "peak_memory_mib", "agreement")
TUNED_COLUMNS = ("tuned_agreement", "accuracy")


class Field:
    """The processes of one model: groups share one, and rows of a group that cannot run have its reason."""

    def __init__(self, model: Path, calibration: list[str]) -> None:
        self.model = model
        # An export belongs to these very weights.
        scratch = SCRATCH / "scoring" / f"{model.name}-{(model / 'model.safetensors').stat().st_mtime_ns}"
        self.setup = {"model": str(model), "texts": calibration, "scratch": str(scratch), "tables": str(reviews())}
        self.running: dict[str, Contender] = {}

    def enter(self, row: Row) -> None:
        """Start the row's process, or find it running."""
        name = f"{row.environment}/{row.group}/{row.runtime}"
        if name not in self.running:
            python = python_of(row.environment)
            if isinstance(python, str):
                row.reason = python
                return
            print(f"loading {row.runtime or row.group}", file=sys.stderr)
            self.running[name] = self._start(python, row)
        row.contender = self.running[name]
        row.reason = row.contender.reason
        if row.reason is not None:
            print(f"  {row.name}: {row.reason}", file=sys.stderr)

    def leave(self) -> None:
        """End every process."""
        for contender in self.running.values():
            contender.close()
        self.running.clear()

    def _start(self, python: Path, row: Row) -> Contender:
        log = Path(self.setup["scratch"]) / f"{row.runtime or row.group}.log".replace(" ", "-")
        script = "_scoring_torchlake.py" if row.runtime else "_scoring_peers.py"
        if row.runtime:
            made = Contender(python, script, {**self.setup, "group": "prepare", "runtime": row.runtime}, log)
            made.close()
            if made.reason is not None:
                return made
        return Contender(python, script, {**self.setup, "group": row.group, "runtime": row.runtime}, log)


def take_turn(row: Row, texts: list[str], rows: np.ndarray, answers: np.ndarray) -> None:
    """Let the row score these rows; its turn is kept, its probabilities stand in `answers` (N, C)."""
    if row.contender is None or row.reason is not None:
        return
    turn = row.contender.ask({"go": row.key, "texts": [texts[index] for index in rows]})
    if "reason" in turn:
        row.reason = turn["reason"]
        return
    answers[rows] = turn.pop("probabilities")
    row.turns.append({**turn, "rows": len(rows), "which": rows})


def shares(lengths: np.ndarray, number: int) -> list[np.ndarray]:
    """The rows cut into `number` shares of the same distribution of lengths, each in arrival order."""
    order = np.argsort(lengths, kind="stable")
    return [np.sort(order[share::number]) for share in range(number)]


def speed(rows: list[Row], texts: list[str], calibration: list[str], model: Path, rounds: int) -> dict[str, Any]:
    """All contenders in turn; what came of each by name, and the machine's own rates."""
    lengths = token_lengths(model, texts)
    race = Field(model, calibration)
    answers: dict[str, np.ndarray] = {}
    limit: dict[str, float] = {}
    try:
        for row in rows:
            race.enter(row)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for row in rows:
                mine = answers.setdefault(row.name, np.full((len(texts), 2), np.nan))
                cut = shares(lengths, row.shares)
                take_turn(row, texts, cut[number % row.shares], mine)
                print(f"  {row.name}: {measured(row, lengths).get('rows_per_s', row.reason)}", file=sys.stderr)
            limit = {kind: max(rate, limit.get(kind, 0.0)) for kind, rate in machine_rates().items()}
    finally:
        race.leave()
    reference = answers.get("torchlake eager")
    results = {}
    for row in rows:
        result = measured(row, lengths)
        if result and reference is not None and np.isfinite(reference).any():
            result["agreement"], result["largest_probability_difference"] = compare(answers[row.name], reference)
        results[row.name] = result
    return {"results": results, "limit": limit, "operations": model_operations(model, lengths.tolist())}


def tuned(
    rows: list[Row], texts: list[str], calibration: list[str], targets: np.ndarray, model: Path
) -> dict[str, Any]:
    """The rows that take part, on the fine-tuned model: one process at a time, every row of the table once."""
    results: dict[str, Any] = {}
    everything = np.arange(len(texts))
    reference = None
    again = [row.reset() for row in rows if row.tuned]
    again.sort(key=lambda row: (row.runtime != "eager", row.group, row.runtime or ""))
    for _, group in itertools.groupby(again, key=lambda row: (row.group, row.runtime)):
        race = Field(model, calibration)
        try:
            for row in group:
                answers = np.full((len(texts), 2), np.nan)
                race.enter(row)
                take_turn(row, texts, everything, answers)
                if row.reason is not None:
                    results[row.name] = {"tuned_reason": row.reason}
                    continue
                reference = answers if reference is None else reference
                agreement, difference = compare(answers, reference)
                results[row.name] = {
                    "tuned_rows_per_s": len(texts) / row.turns[0]["seconds"],
                    "tuned_agreement": agreement,
                    "tuned_largest_probability_difference": difference,
                    "accuracy": float((answers.argmax(axis=1) == targets).mean()),
                }
                print(f"  {row.name}: {results[row.name]}", file=sys.stderr)
        finally:
            race.leave()
    return results


def make_ready(rows: list[Row], calibration: list[str], model: Path) -> None:
    """Make every environment and export of one model, one after the other, and say what could not be made."""
    for _, group in itertools.groupby(rows, key=lambda row: (row.environment, row.group, row.runtime)):
        race = Field(model, calibration)
        try:
            race.enter(next(group).reset())
        finally:
            race.leave()


def machine_rates() -> dict[str, float]:
    """`_limit.rates` in a process of its own."""
    script = str(Path(__file__).parent / "_limit.py")
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def token_lengths(model: Path, texts: list[str]) -> np.ndarray:
    """(N,) tokens of each text, special ones included."""
    spec = load_spec(model)
    _, offsets, _ = tokenize(load.load_tokenizer(model), texts, spec.max_length)
    return np.diff(offsets)


def main() -> None:
    options_parser = parser(__doc__, rows=1066, rounds=2)
    options_parser.add_argument("--model", help="a fine-tuned model folder (default: the one that accuracy.py left)")
    options_parser.add_argument("--only", nargs="*", default=[], help="torchlake runtimes to measure (default: all)")
    options_parser.add_argument("--skip-peers", action="store_true", help="the seed's baseline and torchlake alone")
    options_parser.add_argument("--prepare", action="store_true", help="make environments and exports, measure nothing")
    options = options_parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.update(ONE_THREAD)
    test = pq.read_table(reviews() / "test.parquet")
    # Rows at regular intervals: the table is sorted by label.
    test = test.take(np.linspace(0, len(test) - 1, options.rows).astype(int)) if options.rows < len(test) else test
    train = pq.read_table(reviews() / "train.parquet")
    calibration = train["text"].take(np.linspace(0, len(train) - 1, CALIBRATION_ROWS).astype(int)).to_pylist()
    texts = test["text"].to_pylist()
    shape = random_model(SCRATCH / "roberta-base-shape")
    model = Path(options.model) if options.model else SCRATCH / "accuracy-run" / "model"
    contenders = [row for row in peers() if not options.skip_peers or row.key == "seed"] + runtimes(options.only)
    has_tuned = (model / "config.json").exists()
    if options.prepare:
        make_ready(sorted(contenders, key=lambda row: row.group), calibration, shape)
        if has_tuned:
            make_ready([row for row in contenders if row.tuned], calibration, model)
        return
    found = speed(contenders, texts, calibration, shape, options.rounds)
    on_tuned = tuned(contenders, texts, calibration, test["label"].to_numpy(), model) if has_tuned else {}
    base = found["results"][contenders[0].name].get("rows_per_s")
    table = []
    for row in contenders:
        result = found["results"][row.name]
        ratio = {"ratio": result["rows_per_s"] / base} if result and base else {}
        table.append(
            {
                "name": row.name,
                "kind": row.kind,
                "exact": row.exact,
                **result,
                **ratio,
                **on_tuned.get(row.name, {}),
                **({"reason": row.reason} if row.reason else {}),
            }
        )
    steps = ablation(table)
    table = [row for row in table if row["kind"] != "ablation"] + steps
    table.append(limit_row(table, found["limit"], found["operations"]))
    note = (
        f"{len(texts)} reviews, roberta-base's shape, random weights, one core, text to probabilities, best of "
        f"{options.rounds} rounds; tuned and accuracy: {'a fine-tuned MiniLM' if on_tuned else 'not measured'}"
    )
    keep = options.rows == 1066 and not options.only and not options.skip_peers
    finish("scoring", table, as_json=options.json, note=note, keep=keep, columns=(*COLUMNS, *TUNED_COLUMNS, "reason"))


if __name__ == "__main__":
    main()
