"""Metrics of written texts, beside what was expected; all but chrF are shares from 0 to 1.

exact_match    texts that are equal, but for space around them
token_f1       mean F1 of the words that both have, lower case and without punctuation (SQuAD, without its articles)
chrf           chrF2 from 0 to 100: n-grams of 1 to 6 characters, counted over all texts (Popovic 2015), as
               sacreBLEU computes it
json_valid     texts that are JSON, but for space around them
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

CHRF_ORDER, CHRF_BETA = 6, 2
NOT_WORDS = re.compile(r"[^\w\s]|_")


def measure(metric: str, written: Sequence[str], expected: Sequence[str]) -> float:
    """Return one of `METRICS` over texts and what was expected of each."""
    return METRICS[metric](written, expected)


def exact_match(written: Sequence[str], expected: Sequence[str]) -> float:
    """Return the share of equal texts."""
    return float(np.mean([text.strip() == wanted.strip() for text, wanted in zip(written, expected, strict=True)]))


def token_f1(written: Sequence[str], expected: Sequence[str]) -> float:
    """Return the mean F1 of words; two texts without words are equal."""
    return float(np.mean([_f1(_words(text), _words(wanted)) for text, wanted in zip(written, expected, strict=True)]))


def json_valid(written: Sequence[str], expected: Sequence[str]) -> float:
    """Return the share of texts that a strict parser of JSON accepts."""
    return float(np.mean([_is_json(text) for text in written]))


def chrf(written: Sequence[str], expected: Sequence[str]) -> float:
    """Return chrF2 over all texts, 0 to 100: the F score of the mean precision and the mean recall of the orders."""
    counts = np.zeros((CHRF_ORDER, 3))
    for text, wanted in zip(written, expected, strict=True):
        mine, theirs = "".join(text.split()), "".join(wanted.split())
        for order in range(CHRF_ORDER):
            ours, others = _grams(mine, order + 1), _grams(theirs, order + 1)
            counts[order] += (ours.total(), others.total(), (ours & others).total())
    counted = counts[counts[:, :2].all(axis=1)]  # orders for which both have texts that are long enough
    if not counted[:, 2].any():
        return 0.0
    precision, recall = ((counted[:, 2] / counted[:, side]).mean() for side in (0, 1))
    return float(100 * (1 + CHRF_BETA**2) * precision * recall / (CHRF_BETA**2 * precision + recall))


METRICS: Mapping[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "chrf": chrf,
    "json_valid": json_valid,
}


def _words(text: str) -> list[str]:
    return NOT_WORDS.sub(" ", text.lower()).split()


def _f1(mine: list[str], theirs: list[str]) -> float:
    common = (Counter(mine) & Counter(theirs)).total()
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
