"""Who takes part in `scoring.py`, and what their turns come to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from _contender import Contender

from torchlake import plugins


@dataclass(kw_only=True)
class Row:
    """One contender: where it runs, and what its turns have shown."""

    name: str
    kind: str
    exact: bool
    "The mathematics is fp32's, unchanged."
    key: str
    "Its name in its process."
    group: str
    environment: str = "main"
    shares: int = 1
    "The table is divided into this number of shares; each turn has the rows of one."
    tuned: bool = False
    "Also run on the fine-tuned model."
    runtime: str | None = None
    contender: Contender | None = None
    reason: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> "Row":
        """The same contender before it has begun."""
        return replace(self, contender=None, reason=None, turns=[])


def peers() -> list[Row]:
    """Everything that is not torchlake. How many shares follows from how slow it is: a turn takes 5 to 30 s."""

    def row(name: str, key: str, group: str, shares: int, **more: Any) -> Row:
        return Row(
            **{"kind": "peer", "exact": True, "name": name, "key": key, "group": group, "shares": shares, **more}
        )

    int8: dict[str, Any] = {"exact": False, "tuned": True}
    sentence = "sentence-transformers CrossEncoder"
    return [
        row("padded to 128, batch 32, autograd on", "seed", "transformers", 12, kind="seed"),
        row(
            "padded to 128, batch 32, BetterTransformer (optimum 1.27)",
            "bettertransformer",
            "bettertransformer",
            12,
            kind="seed",
            environment="bettertransformer",
        ),
        row("autograd off", "autograd off", "transformers", 12, kind="ablation"),
        row("dynamic padding, arrival order", "dynamic padding", "transformers", 4, kind="ablation"),
        row("sorted by length", "sorted", "transformers", 2, kind="ablation"),
        row("transformers pipeline", "pipeline", "transformers", 4),
        row("transformers pipeline, batch 32", "pipeline 32", "transformers", 4),
        row("ONNX Runtime int8, arrival order, batch 32", "onnxruntime int8", "onnxruntime int8", 2, **int8),
        row("ONNX Runtime int8, sorted, batch 16", "onnxruntime int8 sorted", "onnxruntime int8", 1, **int8),
        row("OpenVINO int8, arrival order, batch 32", "openvino int8", "openvino int8", 2, **int8),
        row("OpenVINO int8, sorted, batch 16", "openvino int8 sorted", "openvino int8", 1, **int8),
        row("torch quantize_dynamic int8, sorted, batch 16", "torch int8 sorted", "torch int8", 1, **int8),
        row(f"{sentence}, torch", "sentence torch", "sentence torch", 4, environment="sentence-onnx"),
        row(
            f"{sentence}, onnx int8", "sentence onnx int8", "sentence onnx int8", 2, environment="sentence-onnx", **int8
        ),
        row(
            f"{sentence}, openvino int8",
            "sentence openvino int8",
            "sentence openvino int8",
            2,
            environment="sentence-openvino",
            **int8,
        ),
        row("DeepSpeed inference", "deepspeed", "deepspeed", 2, environment="deepspeed"),
    ]


def runtimes(only: Sequence[str]) -> list[Row]:
    """A row for each runtime, those that refuse included: they say why."""
    rows = []
    for name in plugins.names("runtimes"):
        if only and name not in only:
            continue
        exact = plugins.load("runtimes", name).TOLERANCE <= 1e-4
        rows.append(
            Row(
                name=f"torchlake {name}",
                kind="torchlake",
                exact=exact,
                key="score",
                group="score",
                shares=2 if exact else 1,
                tuned=True,
                runtime=name,
            )
        )
    return rows


def compare(answers: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The share of rows with the reference's label, and the largest difference of a probability; (N, C) each."""
    both = np.isfinite(answers).all(axis=1) & np.isfinite(reference).all(axis=1)
    agreement = (answers[both].argmax(axis=1) == reference[both].argmax(axis=1)).mean()
    return float(agreement), float(np.abs(answers[both] - reference[both]).max())


def measured(row: Row, lengths: np.ndarray) -> dict[str, Any]:
    """What the row's best turn shows."""
    if not row.turns:
        return {}
    best = max(row.turns, key=lambda turn: turn["rows"] / turn["seconds"])
    tokens = int(lengths[best["which"]].sum())
    return {
        "rows_per_s": best["rows"] / best["seconds"],
        "tokens_per_s": tokens / best["seconds"],
        "padding": 1 - tokens / best["computed_tokens"],
        "peak_memory_mib": max(turn["peak_memory_mib"] or 0 for turn in row.turns) or None,
    }


def ablation(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The seed's factors one at a time, each on top of those before; the last two are torchlake's best runtimes."""

    def best(exact: bool) -> dict[str, Any] | None:
        found = [row for row in table if row["kind"] == "torchlake" and row["exact"] is exact and "rows_per_s" in row]
        return max(found, key=lambda row: row["rows_per_s"], default=None)

    steps = [next(row for row in table if row["kind"] == "seed")]
    steps += [row for row in table if row["kind"] == "ablation"]
    kernel, int8 = best(True), best(False)
    named = [("seed's baseline", steps[0]), *((f"+ {row['name']}", row) for row in steps[1:])]
    named += [(f"+ kernel ({row['name']})", row) for row in (kernel,) if row]
    named += [(f"+ int8 ({row['name']})", row) for row in (int8,) if row]
    rows, before = [], None
    for name, row in named:
        rate = row.get("rows_per_s")
        step = rate / before if rate and before else None
        before = rate or before
        rows.append({**row, "name": f"ablation: {name}", "kind": "ablation", "step": step})
    return rows


def limit_row(table: list[dict[str, Any]], limit: dict[str, float], operations: float) -> dict[str, Any]:
    """The machine's matrix rates, and the share of them that the best fp32 and int8 runtimes turn into rows."""
    row: dict[str, Any] = {"kind": "limit", "operations_per_row": operations}
    said = []
    for kind, exact in (("fp32", True), ("int8", False)):
        found = [
            other for other in table if other["kind"] == "torchlake" and other["exact"] is exact and "ratio" in other
        ]
        best = max(found, key=lambda other: other["rows_per_s"], default=None)
        share = best["rows_per_s"] * operations / (limit[kind] * 1e9) if best and limit[kind] else None
        row |= {f"{kind}_gops": limit[kind], f"{kind}_share": share, f"{kind}_runtime": best and best["name"]}
        said.append(
            f"{kind} {limit[kind]:.0f} Gop/s" + (f", {best['name']} {share:.0%} of it" if best and share else "")
        )
    return {"name": f"limit, matrix products on one core: {'; '.join(said)}", **row}
