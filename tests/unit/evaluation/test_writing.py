"""Metrics of written texts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
import torchlake as tl
from torchlake.errors import UsageError
from torchlake.evaluation.writing import estimator, measure
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
        ("rouge_l", ["the cat sat on it", "", "x", "A b, c!"], ["the cat on the mat", "", "y", "a c b"], 0.5666666),
        ("json_valid", ['{"a": 1}\n', "NaN", "{", "[]", "", "[" * 100_000], [""] * 6, 2 / 6),
    ],
)
def test_the_others(metric: str, written: list[str], expected: list[str], value: float) -> None:
    assert measure(metric, written, expected) == pytest.approx(value)


def test_metrics_of_texts_have_a_direction_in_every_task() -> None:
    """Folds and tuning ask with the directions of the task, which names its own metrics only."""
    for name in ("exact_match", "token_f1", "chrf", "rouge_l", "json_valid"):
        assert not lower_is_better(name, {"loss": "lower", "perplexity": "lower"})


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12)


@given(WORDS, WORDS)
def test_rouge_is_that_of_the_table_of_common_sequences(written: list[str], expected: list[str]) -> None:
    common = np.zeros((len(written) + 1, len(expected) + 1), int)
    for row, mine in enumerate(written):
        for column, theirs in enumerate(expected):
            longer = max(common[row, column + 1], common[row + 1, column])
            common[row + 1, column + 1] = common[row, column] + 1 if mine == theirs else longer
    both = len(written) + len(expected)
    wanted = 2 * common[-1, -1] / both if both else 1.0
    assert measure("rouge_l", [" ".join(written)], [" ".join(expected)]) == pytest.approx(wanted)


def test_fields_of_objects_are_measured() -> None:
    expected = ['{"a": 1, "b": {"c": "x"}}', '{"a": true, "d": []}']
    found = estimator(['{"a": 1, "b": {"c": "y"}}', "a = 1"], expected)(np.arange(2))
    fields = {name: value for name, value in found.items() if name.startswith(("field", "json"))}
    assert fields == {"json_valid": 0.5, "field.a": 0.5, "field.b.c": 0.0, "field.d": 0.0}
    found = estimator(['{"a": 1}'], ['{"a": true}'])(np.arange(1))
    assert found["field.a"] == 0
    assert "json_valid" not in estimator(["{}"], ["text"])(np.arange(1))


def test_written_texts_are_measured_beside_a_column(tiny_gpt2: Path, tmp_path: Path) -> None:
    table = pa.table({"title": ["a film", "so bad", None], "answer": ["", "x", "y"]})
    options = {"prompt": "{title}!", "max_new_tokens": 5}
    texts = tl.predict(tiny_gpt2, table, max_error_rate=1.0, engine=tiny.Here(), **options)["generated_text"]
    table = table.set_column(1, "answer", pa.array([texts[0].as_py(), "x", "y"]))
    pq.write_table(table, tmp_path / "rows.parquet")
    for given_ in (table, tmp_path / "rows.parquet"):
        found = tl.evaluate(tiny_gpt2, given_, label="answer", engine=tiny.Here(), **options)
        assert (found.rows, found.errors) == (3, {"null_input": 1})
        assert found.metrics["exact_match"].value == 0.5
        assert set(found.metrics) == {"exact_match", "token_f1", "rouge_l", "chrf"}
        assert found.metrics["chrf"].low < found.metrics["chrf"].value <= found.metrics["chrf"].high
    for wrong, words in (({"label": "answer", "n": 2}, "one answer"), ({"prompt": "{title}"}, "name a label")):
        with pytest.raises(UsageError, match=words):
            tl.evaluate(tiny_gpt2, table, **wrong)


def test_answers_that_were_cut_are_measured(tiny_gpt2: Path) -> None:
    """As they are; a column of the frame that has the name of a prediction is not one."""
    table = pa.table({"text": ["a film", "so bad"], "answer": ['{"a": "x"}'] * 2, "generated_text": ['{"a": "x"}'] * 2})
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 9}}, "required": ["a"]}
    options = {"json_schema": schema, "max_new_tokens": 19, "engine": tiny.Here()}
    found = tl.evaluate(tiny_gpt2, table, label="answer", **options)
    assert (found.rows, found.errors) == (2, {"length": 2})
    assert (found.metrics["json_valid"].value, found.metrics["exact_match"].value) == (0, 0)
