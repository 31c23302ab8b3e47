"""The tables of docs/explanation/scale.md from the rows of bench/scale.py: measurements, estimates for 10^9 rows."""

from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "scale.md"
BEGIN, END = "<!-- written by bench/scale.py: begin -->", "<!-- written by bench/scale.py: end -->"
ROWS, CHUNK_ROWS = 1_000_000_000, 32_768
ROW_BYTES = 120
"Of a review as it is stored."
RATE = 60
"Rows a second that one core scores (roberta-base's shape in 8 bits, bench/scoring.py)."

SPREAD = ("keys", "hashing", "verify")

Rows = list[dict[str, Any]]


def write_page(rows: Rows, note: str) -> None:
    """Put the tables into the page, between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{page_tables(rows, note)}\n{END}{after}")


def page_tables(rows: Rows, note: str) -> str:
    """All tables as Markdown."""
    named = {name: [row for row in rows if row["name"] == name] for name in {row["name"] for row in rows}}
    parts = [
        f"*{note[0].upper()}{note[1:]}.*",
        "**The table's side**, seconds on the driver, and its memory above what it held before:",
        _table(
            named["tables"],
            {
                "chunks": "chunks",
                "plan": "plan_s",
                "begin": "begin_s",
                "commit": "commit_s",
                "again, all parts there": "resume_s",
                "again, committed": "again_s",
                "plan.json, MiB": "plan_mib",
                "commit.json, MiB": "record_mib",
                "memory, MiB": "driver_mib",
            },
        ),
        "**Handing out** to workers that do nothing:",
        _table(
            [row for name in ("local", "spark", "ray") for row in named.get(name, [])],
            {
                "engine": "name",
                "processes": "processes",
                "chunks": "chunks",
                "first result, s": "first_s",
                "the rest, s": "rest_s",
                "end, s": "end_s",
                "chunks/s": "chunks_per_s",
                "memory, MiB": "driver_mib",
            },
        ),
        "**Files** of one row each:",
        _table(named["files"], {"files": "files", "plan, s": "plan_s", "memory, MiB": "driver_mib"}),
        "**Spread** over child processes of the local engine, seconds with their start:",
        _table(
            [{"rows": "", "mib": "", **row} for name in SPREAD for row in named[name]],
            {"part": "name", "rows": "rows", "MiB": "mib", "processes": "processes", "seconds": "seconds"},
        ),
        f"**{ROWS:,} rows**, worked out from these:",
        _billion(named),
    ]
    return "\n\n".join(parts)


def _billion(named: dict[str, Rows]) -> str:
    """The plan for a billion rows: between measured sizes everything is taken as linear."""
    chunks, processes = -(-ROWS // CHUNK_ROWS), 2
    sizes = [row["chunks"] for row in named["tables"]]

    def at(column: str) -> float:
        measured = [row[column] for row in named["tables"]]
        slope = measured[-1] / sizes[-1]
        return float(np.interp(chunks, sizes, measured)) if chunks <= sizes[-1] else slope * chunks

    gib, cores = ROWS * ROW_BYTES / 2**30, ROWS / RATE / 86400

    def spread(name: str, unit: str, total: float) -> str:
        """What a part costs, by its rate with two processes."""
        row = named[name][-1]
        seconds = row["seconds"] * row["processes"] * total / row[unit]
        return f"{seconds / 60:.0f} core-minutes, {seconds / cores:.0f} s on the cores that score it in a day"

    pairs = {
        "rows of a chunk; chunks": f"{CHUNK_ROWS:,}; {chunks:,}",
        "plan: cutting": f"{at('plan_s'):.1f} s",
        f"sha256 of the input, {gib:.0f} GiB": spread("hashing", "mib", gib * 1024),
        f"is the key unique (with `key`); {ROWS * 8 / 2**30:.1f} GiB of temporary disk": spread("keys", "rows", ROWS),
        "`verify`": spread("verify", "rows", ROWS),
        "begin; commit": f"{at('begin_s'):.1f} s; {at('commit_s'):.1f} s",
        "plan.json; commit.json": f"{at('plan_mib'):.1f} MiB; {at('record_mib'):.1f} MiB",
        "memory of the driver": f"{at('driver_mib'):.0f} MiB above its start",
        "the same command after a kill": f"{at('begin_s') + at('plan_s'):.1f} s, and reading the parts that are there",
        f"scoring, at {RATE} rows/s a core": f"{ROWS / RATE / 3600:,.0f} core-hours; {cores:,.0f} cores for a day",
    }
    for name in ("local", "spark", "ray"):
        rates = [row["chunks_per_s"] for row in named.get(name, []) if row["processes"] == processes]
        if rates:
            fed = rates[-1] * CHUNK_ROWS / RATE
            pairs[f"{name}: handing out; processes that this rate feeds"] = (
                f"{chunks / rates[-1]:.0f} s in all; {fed:,.0f}"
            )
    return _table([{"what": what, "value": value} for what, value in pairs.items()], {"part": "what", "": "value"})


def _table(rows: Rows, columns: dict[str, str]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[column]) for column in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
