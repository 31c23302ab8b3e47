"""Metrics of written texts, beside what was expected; all but chrF are shares from 0 to 1.

exact_match    texts that are equal, but for space around them
token_f1       mean F1 of the words that both have, lower case and without punctuation (SQuAD, without its articles)
chrf           chrF2 from 0 to 100: n-grams of 1 to 6 characters, counted over all texts (Popovic 2015), as
               sacreBLEU computes it
rouge_l        mean F1 of the longest common sequence of words, of texts in lower case and without punctuation (Lin
               2004), as rouge_score computes it of ASCII without stemming
json_valid     texts that are JSON, but for space around them

Where all that is expected is JSON objects, `field.NAME` is the share of texts that have the expected value there; a
field of an object in an object has a name with a dot.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

CHRF_ORDER, CHRF_BETA = 6, 2
NOT_WORDS = re.compile(r"[^\w\s]|_")


def measure(metric: str, written: Sequence[str], expected: Sequence[str]) -> float:
    """Return chrF over texts and what was expected of each, or the mean of one of the metrics `OF_EACH`."""
    if metric == "chrf":
        return _chrf(sum(map(_chrf_counts, written, expected), start=np.zeros((CHRF_ORDER, 3))))
    return float(np.mean([OF_EACH[metric](*pair) for pair in zip(written, expected, strict=True)]))


def estimator(written: Sequence[str], expected: Sequence[str]) -> Callable[[np.ndarray], dict[str, float]]:
    """Return the function from row numbers (N,) to all metrics that apply; each text is read once."""
    pairs = list(zip(written, expected, strict=True))
    each = {
        name: np.array([OF_EACH[name](*pair) for pair in pairs], np.float64)
        for name in ("exact_match", "token_f1", "rouge_l")
    }
    counts = np.array([_chrf_counts(*pair) for pair in pairs])
    wanted = [_fields(text) for text in expected]
    if pairs and all(fields is not None for fields in wanted):
        each["json_valid"] = np.array([_is_json(text) for text in written], np.float64)
        found = [_fields(text) or {} for text in written]
        for name in dict.fromkeys(name for fields in wanted for name in fields or ()):
            same = [_same(has.get(name), (needs or {}).get(name)) for has, needs in zip(found, wanted, strict=True)]
            known = np.array([name in (needs or {}) for needs in wanted])
            each[f"field.{name}"] = np.where(known, np.array(same, np.float64), np.nan)

    def estimate(rows: np.ndarray) -> dict[str, float]:
        values = {name: _mean(one[rows]) for name, one in each.items()}
        return {**values, "chrf": _chrf(counts[rows].sum(axis=0))}

    return estimate


def _same(found: Any, wanted: Any) -> bool:
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def _mean(values: np.ndarray) -> float:
    """Return the mean of those that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _fields(text: str) -> dict[str, Any] | None:
    """Return the values in a JSON object by name; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None

    def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, each in value.items():
            if isinstance(each, dict) and each:
                yield from leaves(each, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", each

    return dict(leaves(value)) if isinstance(value, dict) else None


def _chrf_counts(text: str, wanted: str) -> np.ndarray:
    """Return the n-grams of what was written and of what was expected, and common ones, for each order, (6, 3)."""
    counts = np.zeros((CHRF_ORDER, 3))
    mine, theirs = "".join(text.split()), "".join(wanted.split())
    for order in range(CHRF_ORDER):
        ours, others = _grams(mine, order + 1), _grams(theirs, order + 1)
        counts[order] = (ours.total(), others.total(), (ours & others).total())
    return counts


def _chrf(counts: np.ndarray) -> float:
    counted = counts[counts[:, :2].all(axis=1)]  # orders for which both have texts that are long enough
    if not counted[:, 2].any():
        return 0.0
    precision, recall = ((counted[:, 2] / counted[:, side]).mean() for side in (0, 1))
    return float(100 * (1 + CHRF_BETA**2) * precision * recall / (CHRF_BETA**2 * precision + recall))


def _words(text: str) -> list[str]:
    return NOT_WORDS.sub(" ", text.lower()).split()


def _token_f1(text: str, wanted: str) -> float:
    mine, theirs = _words(text), _words(wanted)
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs)) if mine or theirs else 1.0


def _rouge(text: str, wanted: str) -> float:
    """Return the F1 of the longest common sequence of words; its length by bits of whole numbers (Hyyro 2004)."""
    mine, theirs = _words(text), _words(wanted)
    places = Counter[str]()
    for place, word in enumerate(mine):
        places[word] |= 1 << place
    every = row = (1 << len(mine)) - 1
    for word in theirs:
        matched = row & places[word]
        row = ((row + matched) | (row - matched)) & every
    common = len(mine) - row.bit_count()
    return 2 * common / (len(mine) + len(theirs)) if mine or theirs else 1.0


def _grams(text: str, order: int) -> Counter[str]:
    return Counter(text[start : start + order] for start in range(len(text) - order + 1))


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


OF_EACH: Mapping[str, Callable[[str, str], float]] = {
    "exact_match": lambda text, wanted: text.strip() == wanted.strip(),
    "token_f1": _token_f1,
    "rouge_l": _rouge,
    "json_valid": lambda text, _: _is_json(text),
}
"Metrics of what was written and what was expected; two texts without words are equal."
