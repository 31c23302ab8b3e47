"""Generated reviews for the demo, from a small grammar (`demo.yaml`).

Each review has a verdict: stated directly ("the plot is gripping"), by denying its opposite ("not dull at all"), or by
weighing two sides ("a dull first hour, but the ending redeems it"). Neutral sentences extend it to 4 to 60 words.
Counting words predicts the verdict clearly worse than reading them. Training rows do not use the last fifth of a list,
test rows not the first fifth, so some words and phrases of the test are new. 3 % of the labels are wrong on purpose.
"""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchlake.errors import OutputError

NOISE = 0.03
TEST_SHARE = 1 / 6
MIN_WORDS, MAX_WORDS = 4, 60
OPPOSITE = {"positive": "negative", "negative": "positive"}
# Shares of direct verdicts, denials, two sides, and contradicted expectations.
KINDS = {"outright": 0.56, "denial": 0.20, "weighing": 0.16, "expectation": 0.08}

GRAMMAR: dict[str, Any] = yaml.safe_load(files("torchlake.cli").joinpath("demo.yaml").read_text(encoding="utf-8"))
"The lists of words and sentences."


def write_reviews(folder: str | Path, rows: int = 2400, seed: int = 0) -> tuple[Path, Path]:
    """Write `folder`/train.parquet (5/6 of the rows) and test.parquet, and return their paths.

    Columns: id (unique), text (unique), label ("positive" or "negative"), all strings. The same seed gives the same
    tables. rows: 12 to 50,000. Raises OutputError if the folder cannot be created.
    """
    assert 12 <= rows <= 50_000, "sizes for which the grammar has enough texts"
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}. Name another folder.") from error
    test_rows = round(rows * TEST_SHARE)
    seen: set[str] = set()
    paths = (folder / "train.parquet", folder / "test.parquet")
    for stream, (path, count) in enumerate(zip(paths, (rows - test_rows, test_rows), strict=True)):
        rng = np.random.Generator(np.random.Philox([seed, stream]))
        pq.write_table(_reviews(rng, path.stem, count, seen), path, compression="zstd", write_page_checksum=True)
    return paths


def _reviews(rng: np.random.Generator, split: str, count: int, seen: set[str]) -> pa.Table:
    texts: list[str] = []
    labels: list[str] = []
    while len(texts) < count:
        verdict = ("positive", "negative")[len(texts) % 2]
        text = _review(rng, split, verdict)
        if text in seen or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            continue
        seen.add(text)
        texts.append(text)
        labels.append(OPPOSITE[verdict] if rng.random() < NOISE else verdict)
    order = rng.permutation(count)
    return pa.table(
        {
            "id": [f"{split}-{row:05d}" for row in range(count)],
            "text": [texts[row] for row in order],
            "label": [labels[row] for row in order],
        }
    )


def _review(rng: np.random.Generator, split: str, verdict: str) -> str:
    """Return a review: the sentence with the verdict among a random number of neutral ones."""
    sentences = [_sentence(rng, split, verdict) + "."]
    for _ in range(rng.geometric(0.55) - 1):
        sentences.insert(int(rng.integers(len(sentences) + 1)), _fill(rng, split, GRAMMAR["neutral"], verdict))
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", " ".join(sentences))
    return re.sub(r"(?:^|(?<=[.] ))[a-z]", lambda match: match[0].upper(), text)


def _sentence(rng: np.random.Generator, split: str, verdict: str) -> str:
    kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
    if kind != "weighing":
        return _fill(rng, split, GRAMMAR[kind], verdict)
    if rng.random() < 0.4:
        return _fill(rng, split, GRAMMAR["turns"][verdict], verdict)
    win = _fill(rng, split, GRAMMAR["outright" if rng.random() < 0.8 else "denial"], verdict)
    lose = _fill(rng, split, GRAMMAR["outright"], OPPOSITE[verdict])
    return _pick(rng, split, GRAMMAR["weighing"]).format(win=win, lose=lose)


def _fill(rng: np.random.Generator, split: str, templates: Sequence[str], verdict: str) -> str:
    """Return one of the templates with words that this split may use."""
    template, opposite = _pick(rng, split, templates), OPPOSITE[verdict]
    # The order of these draws decides the bytes of the tables.
    lists = {"adj": GRAMMAR["adjectives"][verdict], "opp": GRAMMAR["adjectives"][opposite]}
    lists |= {"noun": GRAMMAR["nouns"][verdict], "oppnoun": GRAMMAR["nouns"][opposite]}
    lists |= {name: GRAMMAR[name] for name in ("aspect", "thing", "people", "folk", "deed", "day")}
    words = {name: _pick(rng, split, options) for name, options in lists.items()}
    return template.format(**words, number=int(rng.integers(12, 240)))


def _pick(rng: np.random.Generator, split: str, options: Sequence[str]) -> str:
    """Return a random option; training never uses the last fifth, the test never the first."""
    held = len(options) // 5
    allowed = options[: len(options) - held] if split == "train" else options[held:]
    return allowed[int(rng.integers(len(allowed)))]
