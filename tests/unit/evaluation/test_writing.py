"""Metrics of written texts."""

import pytest

from torchlake.evaluation.writing import measure
from torchlake.metrics import lower_is_better

# By sacreBLEU 2.6.0: CHRF().corpus_score(written, [expected]).
CHRF = [
    (["The cat sat on the mat."], ["The cat sat on a mat."], 71.42247563033848),
    (["abc"], ["abd"], 38.888888888888886),
    (["a"], ["a"], 100.0),
    (["x"], ["y"], 0.0),
    (["", "hello world"], ["empty", "hello there world"], 32.81158142269254),
    (["über straße 日本語"], ["uber straße 日本"], 87.22832118323053),
    (["Niemals in der Geschichte"], ["Nie in der Geschichte hat"], 72.22747215407051),
    ([""], [""], 0.0),
]


@pytest.mark.parametrize(("written", "expected", "score"), CHRF)
def test_chrf_is_that_of_sacrebleu(written: list[str], expected: list[str], score: float) -> None:
    assert measure("chrf", written, expected) == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize(
    ("metric", "written", "expected", "value"),
    [
        ("exact_match", [" yes\n", "no", ""], ["yes", "No", ""], 2 / 3),
        ("token_f1", ["The cat!", "", "", "a b"], ["the cat sat", "", "x", "c"], (0.8 + 1 + 0 + 0) / 4),
        ("json_valid", ['{"a": 1}\n', "NaN", "{", "[]", "", "[" * 100_000], [""] * 6, 2 / 6),
    ],
)
def test_the_others(metric: str, written: list[str], expected: list[str], value: float) -> None:
    assert measure(metric, written, expected) == pytest.approx(value)


def test_metrics_of_texts_have_a_direction_in_every_task() -> None:
    """Folds and tuning ask with the directions of the task, which names its own metrics only."""
    for name in ("exact_match", "token_f1", "chrf", "json_valid"):
        assert not lower_is_better(name, {"loss": "lower", "perplexity": "lower"})
