"""What every task must do, whatever it asks of a model: a new file in torchlake/tasks is tested unasked."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import tiny
from torchlake import models, plugins
from torchlake.models import TaskSpec

COLUMNS = {
    "strings": (pa.array(["good", "bad", None, "good"]), ("bad", "good")),
    "dictionary": (pa.array(["good", "bad", None, "good"]).dictionary_encode(), ("bad", "good")),
    "integers": (pa.array([3, -1, None, 3], pa.int16()), (-1, 3)),
    "booleans": (pa.array([True, False, None, True]), (False, True)),
    "lists": (pa.array([["x", "y"], [], None, ["y"]]), ("x", "y")),
    "floats": (pa.array([0.5, -1.0, None, 2.5], pa.float64()), ()),
}


@pytest.fixture(params=plugins.names("tasks"))
def task(request: pytest.FixtureRequest) -> ModuleType:
    return plugins.load("tasks", request.param)


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest) -> pa.Array:
    return COLUMNS[request.param][0]


@pytest.fixture
def spec(task: ModuleType, column: pa.Array) -> TaskSpec:
    problem, labels = task.find_labels(iter([column.slice(0, 2), column.slice(2)]))
    name = task.__name__.rpartition(".")[2]
    return TaskSpec(task=name, problem=problem, labels=labels, text="text", label="label", max_length=12)


def outputs(spec: TaskSpec, rows: int) -> np.ndarray:
    shape = (rows, max(1, len(spec.labels)))
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_labels_are_found_and_encoded(task: ModuleType, column: pa.Array, spec: TaskSpec) -> None:
    expected = next(labels for array, labels in COLUMNS.values() if array is column)
    assert spec.labels == expected
    targets = task.encode_labels(column, spec)
    assert targets.type == task.target_type(spec)
    assert targets.is_null().to_pylist() == [False, False, True, False]
    assert task.encode_labels(column.slice(1), spec).equals(targets.slice(1))
    assert task.encode_labels(column.slice(0, 0), spec).type == task.target_type(spec)
    assert task.encode_labels(pa.nulls(3), spec).equals(pa.nulls(3, task.target_type(spec)))


def test_tokens_are_those_of_transformers(task: ModuleType, spec: TaskSpec, tiny_bert: Path) -> None:
    tokenizer = models.load_tokenizer(tiny_bert)
    texts = ["a good film", "", "   ", "ünïcödé \x00 \u202e", "the " * 200, "x" * 5000, "good", "a good film " * 5]
    before = tokenizer(texts, truncation=True, max_length=spec.max_length)["input_ids"]
    for _ in range(2):
        values, offsets, truncated = task.tokenize(tokenizer, texts, spec)
        assert (values.dtype, offsets.dtype, truncated.dtype) == (np.int32, np.int64, np.bool_)
        rows = [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))]
        assert rows == before
        whole = tokenizer(texts, truncation=False)["input_ids"]
        assert truncated.tolist() == [len(ids) > spec.max_length for ids in whole]
    tokenizer.truncation_side = "left"
    values, offsets, _ = task.tokenize(tokenizer, texts, spec)
    expected = tokenizer(texts, truncation=True, max_length=spec.max_length)["input_ids"]
    assert [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))] == expected != before
    values, offsets, truncated = task.tokenize(tokenizer, [], spec)
    assert (values.tolist(), offsets.tolist(), truncated.tolist()) == ([], [0], [])


def test_many_rows_are_tokenized_like_few(task: ModuleType, spec: TaskSpec, tiny_bert: Path) -> None:
    tokenizer = models.load_tokenizer(tiny_bert)
    texts = tiny.reviews(2500)["text"].to_pylist()
    values, offsets, truncated = task.tokenize(tokenizer, texts, spec)
    for first in (0, 999, 1000, 1001, 2499):
        few, _, cut = task.tokenize(tokenizer, texts[first : first + 1], spec)
        assert values[offsets[first] : offsets[first + 1]].tolist() == few.tolist()
        assert truncated[first] == cut[0]


def test_the_loss_is_a_sum_in_fp32(task: ModuleType, column: pa.Array, spec: TaskSpec) -> None:
    targets = task.encode_labels(column.drop_null(), spec)
    truth = torch.tensor(targets.to_pylist())
    logits = torch.from_numpy(outputs(spec, 3)).requires_grad_()
    total = task.loss_sum(logits, truth, spec)
    parts = [task.loss_sum(logits[row : row + 1], truth[row : row + 1], spec) for row in range(3)]
    assert total.shape == ()
    assert total.dtype == torch.float32
    assert torch.allclose(total, torch.stack(parts).sum())
    assert task.loss_sum(logits.bfloat16(), truth, spec).dtype == torch.float32
    assert task.loss_sum(logits[:0], truth[:0], spec).item() == 0.0
    assert task.num_targets(3, spec) == truth.numel()


def test_the_loss_is_that_of_transformers(task: ModuleType, column: pa.Array, spec: TaskSpec, tiny_bert: Path) -> None:
    torch.manual_seed(0)
    model = models.base_model(tiny_bert, spec, task.AUTO_CLASS).eval()
    ids = torch.randint(5, 90, (3, 8))
    truth = torch.tensor(task.encode_labels(column.drop_null(), spec).to_pylist())
    with torch.inference_mode():
        theirs = model(ids, labels=truth)
        ours = task.loss_sum(theirs.logits, truth, spec) / task.num_targets(3, spec)
    assert torch.allclose(theirs.loss, ours, atol=1e-6)


def test_output_has_its_schema(task: ModuleType, spec: TaskSpec) -> None:
    for everything in (False, True):
        schema = task.output_schema(spec, everything)
        assert all(field.nullable for field in schema)
        for rows in (0, 1, 7):
            table = task.output_columns(task.probabilities(outputs(spec, rows), spec), spec, everything)
            table.validate(full=True)
            assert table.schema == schema
            assert len(table) == rows


def test_all_probabilities_come_back(task: ModuleType, spec: TaskSpec) -> None:
    probabilities = task.probabilities(outputs(spec, 7), spec)
    assert probabilities.dtype == np.float32
    table = task.output_columns(probabilities, spec, True)
    columns = [table[name].to_numpy() for name in task.probability_names(spec)]
    np.testing.assert_array_equal(np.column_stack(columns), probabilities)


def test_the_default_metric_is_among_the_metrics(task: ModuleType, column: pa.Array, spec: TaskSpec) -> None:
    truth = np.array(task.encode_labels(column.drop_null(), spec).to_pylist())
    metrics = task.metrics(task.probabilities(outputs(spec, 3), spec), truth, spec)
    assert task.DEFAULT_METRIC[spec.problem] in metrics
    assert all(isinstance(value, float) for value in metrics.values())
    assert isinstance(task.LOWER_IS_BETTER, frozenset)


def test_the_auto_class_is_one_of_transformers(task: ModuleType) -> None:
    assert hasattr(transformers, task.AUTO_CLASS)
