"""What every task must do, whatever it asks of a model: a new file in torchlake/tasks is tested with the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import tiny
from torchlake import plugins
from torchlake.loss import UNWEIGHTED
from torchlake.models import load
from torchlake.models.generation import END, NOTHING
from torchlake.models.load import TaskSpec
from torchlake.tasks import NO_TARGET, ColumnOptions, Task
from torchlake.tasks._pretrained import base_model

COLUMNS = {
    "strings": (pa.array(["good", "bad", None, "good"]), ("bad", "good")),
    "dictionary": (pa.array(["good", "bad", None, "good"]).dictionary_encode(), ("bad", "good")),
    "integers": (pa.array([3, -1, None, 3], pa.int16()), (-1, 3)),
    "booleans": (pa.array([True, False, None, True]), (False, True)),
    "lists": (pa.array([["x", "y"], [], None, ["y"]]), ("x", "y")),
    "floats": (pa.array([0.5, -1.0, None, 2.5], pa.float64()), ()),
}


TASKS = plugins.names("tasks")
PACKED = [name for name in TASKS if plugins.load("tasks", name).packs]
CLASSIFIERS = [name for name in TASKS if type(plugins.load("tasks", name)).count_labels is Task.count_labels]
CLASSIFIERS = [name for name in CLASSIFIERS if plugins.load("tasks", name).has_labels]


@pytest.fixture(params=CLASSIFIERS)
def task(request: pytest.FixtureRequest) -> Any:
    """A task whose rows have classes or a number."""
    return plugins.load("tasks", request.param)


@pytest.fixture
def reads_text(task: Any) -> None:
    """Skip a task that reads other things than texts."""
    if type(task).features is not Task.features:
        pytest.skip("it reads no texts")


@pytest.fixture(params=PACKED)
def packed(request: pytest.FixtureRequest) -> Any:
    return plugins.load("tasks", request.param)


@pytest.fixture
def packed_spec(packed: Any) -> TaskSpec:
    name = packed.name
    return TaskSpec(task=name, problem=packed.problems["all"], labels=(), text="text", label=None, max_length=12)


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest) -> pa.Array:
    return COLUMNS[request.param][0]


@pytest.fixture
def spec(task: Any, column: pa.Array) -> TaskSpec:
    found = task.find_labels(iter([column.slice(0, 2), column.slice(2)]), None)
    name = task.name
    return TaskSpec(task=name, problem=found.problem, labels=found.labels, text="text", label="label", max_length=12)


def tokens_of(
    task: Any, tokenizer: Any, texts: list[str], spec: TaskSpec, *, training: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, offsets and removed tokens of the task's features."""
    inputs = {"text": pa.array(texts, pa.string())}
    made = task.examples(inputs, None, tokenizer, spec)[0] if training else task.features(inputs, tokenizer, spec)
    tokens = made.arrays["input_ids"]
    return tokens.values, tokens.offsets, made.cut


def outputs(spec: TaskSpec, rows: int) -> np.ndarray:
    shape = (rows, max(1, len(spec.labels)))
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_labels_are_found_and_encoded(task: Any, column: pa.Array, spec: TaskSpec) -> None:
    expected = next(labels for array, labels in COLUMNS.values() if array is column)
    assert spec.labels == expected
    targets = task.encode_labels(column, spec)
    assert targets.type == task.target_type(spec)
    assert targets.is_null().to_pylist() == [False, False, True, False]
    assert task.encode_labels(column.slice(1), spec).equals(targets.slice(1))
    assert task.encode_labels(column.slice(0, 0), spec).type == task.target_type(spec)
    assert task.encode_labels(pa.nulls(3), spec).equals(pa.nulls(3, task.target_type(spec)))


@pytest.mark.usefixtures("reads_text")
def test_tokens_are_those_of_transformers(task: Any, spec: TaskSpec, tiny_bert: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_bert)
    texts = ["a good film", "", "   ", "ünïcödé \x00 \u202e", "the " * 200, "x" * 5000, "good", "a good film " * 5]
    before = tokenizer(texts, truncation=True, max_length=spec.max_length)["input_ids"]
    for _ in range(2):
        values, offsets, lost = tokens_of(task, tokenizer, texts, spec)
        assert (values.dtype, offsets.dtype, lost.dtype) == (np.int32, np.int64, np.int64)
        rows = [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))]
        assert rows == before
        whole = tokenizer(texts, truncation=False)["input_ids"]
        assert lost.tolist() == [max(0, len(ids) - spec.max_length) for ids in whole]
    tokenizer.truncation_side = "left"
    values, offsets, _ = tokens_of(task, tokenizer, texts, spec)
    expected = tokenizer(texts, truncation=True, max_length=spec.max_length)["input_ids"]
    assert [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))] == expected != before
    values, offsets, lost = tokens_of(task, tokenizer, [], spec)
    assert (values.tolist(), offsets.tolist(), lost.tolist()) == ([], [0], [])


@pytest.mark.usefixtures("reads_text")
def test_many_rows_are_tokenized_like_few(task: Any, spec: TaskSpec, tiny_bert: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_bert)
    texts = tiny.reviews(2500)["text"].to_pylist()
    values, offsets, lost = tokens_of(task, tokenizer, texts, spec)
    for first in (0, 999, 1000, 1001, 2499):
        few, _, cut = tokens_of(task, tokenizer, texts[first : first + 1], spec)
        assert values[offsets[first] : offsets[first + 1]].tolist() == few.tolist()
        assert lost[first] == cut[0]


def test_the_loss_is_a_sum_in_fp32(task: Any, column: pa.Array, spec: TaskSpec) -> None:
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
    assert task.divisor(truth.numpy(), spec, UNWEIGHTED) == truth.numel()


@pytest.mark.usefixtures("reads_text")
def test_the_loss_is_that_of_transformers(task: Any, column: pa.Array, spec: TaskSpec, tiny_bert: Path) -> None:
    torch.manual_seed(0)
    model = base_model(tiny_bert, spec, task.auto_class).eval()
    ids = torch.randint(5, 90, (3, 8))
    truth = torch.tensor(task.encode_labels(column.drop_null(), spec).to_pylist())
    with torch.inference_mode():
        theirs = model(ids, labels=truth)
        ours = task.loss_sum(theirs.logits, truth, spec) / task.divisor(truth.numpy(), spec, UNWEIGHTED)
    assert torch.allclose(theirs.loss, ours, atol=1e-6)


def test_output_has_its_schema(task: Any, spec: TaskSpec) -> None:
    for everything in (False, True):
        options = ColumnOptions(all_probabilities=everything)
        schema = task.output_schema(spec, options)
        assert all(field.nullable for field in schema)
        for rows in (0, 1, 7):
            table = task.output_columns(task.answers(outputs(spec, rows), spec), None, spec, options)
            table.validate(full=True)
            assert table.schema == schema
            assert len(table) == rows


def test_all_probabilities_come_back(task: Any, spec: TaskSpec) -> None:
    probabilities = task.answers(outputs(spec, 7), spec)
    assert probabilities.dtype == np.float32
    table = task.output_columns(probabilities, None, spec, ColumnOptions(all_probabilities=True))
    columns = [table[name].to_numpy() for name in task.probability_names(spec)]
    np.testing.assert_array_equal(np.column_stack(columns), probabilities)


def test_the_default_metric_is_among_the_metrics(task: Any, column: pa.Array, spec: TaskSpec) -> None:
    truth = np.array(task.encode_labels(column.drop_null(), spec).to_pylist())
    metrics = task.metrics(task.answers(outputs(spec, 3), spec), truth, spec)
    assert task.default_metric[spec.problem] in metrics
    assert metrics.keys() <= task.directions.keys()
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("name", TASKS)
def test_it_declares_what_it_is(name: str) -> None:
    task = plugins.load("tasks", name)
    assert task.name == name
    own = type(task).build is not Task.build or not task.trains
    assert hasattr(transformers, task.auto_class) or own
    assert task.directions["loss"] == "lower"
    assert set(task.directions.values()) <= {"higher", "lower"}
    assert task.packs in (True, False)


def test_a_prompt_is_open_and_a_document_is_closed(
    packed: Any, packed_spec: TaskSpec, tiny_gpt2: Path, tiny_roberta: Path
) -> None:
    """Also for a tokenizer that closes every text itself."""
    texts = ["a good film", "", "ünïcödé \x00 \u202e", "the " * 200]
    for folder in (tiny_gpt2, tiny_roberta):
        tokenizer = load.load_tokenizer(folder)
        theirs = [[token for token in ids if token != tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
        values, offsets, lost = tokens_of(packed, tokenizer, texts, packed_spec, training=True)
        assert (values.dtype, offsets.dtype, lost.dtype) == (np.int32, np.int64, np.int64)
        rows = [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))]
        assert rows == [[*ids, tokenizer.eos_token_id] for ids in theirs]
        values, offsets, lost = tokens_of(packed, tokenizer, texts, packed_spec)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        rows = [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(texts))]
        assert rows == [ids or [begin] for ids in theirs]
        assert not lost.any()
    values, offsets, lost = tokens_of(packed, tokenizer, [], packed_spec)
    assert (values.tolist(), offsets.tolist(), lost.tolist()) == ([], [0], [])


def test_many_texts_are_tokenized_like_few(packed: Any, packed_spec: TaskSpec, tiny_gpt2: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_gpt2)
    texts = tiny.reviews(2500)["text"].to_pylist()
    values, offsets, _ = tokens_of(packed, tokenizer, texts, packed_spec, training=True)
    for row in (0, 999, 1000, 2499):
        few, _, _ = tokens_of(packed, tokenizer, texts[row : row + 1], packed_spec, training=True)
        assert values[offsets[row] : offsets[row + 1]].tolist() == few.tolist()


def test_the_loss_of_texts_is_that_of_transformers(packed: Any, packed_spec: TaskSpec, tiny_gpt2: Path) -> None:
    """Padding on the right is no target, and the sum over rows is the sum of the rows."""
    model = base_model(tiny_gpt2, packed_spec, packed.auto_class)
    ids = np.random.default_rng(0).integers(5, 90, (3, 8))
    lengths = np.array([8, 5, 1])
    mask = (np.arange(8) < lengths[:, None]).astype(np.int64)
    truth = torch.from_numpy(packed.targets(ids, mask))
    labels = torch.from_numpy(np.where(mask, ids, -100))
    with torch.inference_mode():
        theirs = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), labels=labels)
        total = packed.loss_sum(theirs.logits, truth, packed_spec)
        rows = [packed.loss_sum(theirs.logits[row : row + 1], truth[row : row + 1], packed_spec) for row in range(3)]
    number = packed.num_targets(lengths, packed_spec)
    assert number == (truth != NO_TARGET).sum() == lengths.sum() - 3
    assert (total.shape, total.dtype) == ((), torch.float32)
    assert torch.allclose(theirs.loss, total / number, atol=1e-6)
    assert torch.allclose(total, torch.stack(rows).sum())
    assert packed.loss_sum(theirs.logits.bfloat16(), truth, packed_spec).dtype == torch.float32
    metrics = packed.loss_metrics(float(theirs.loss))
    assert {packed.default_metric[problem] for problem in packed.problems.values()} <= metrics.keys()
    assert metrics.keys() <= packed.directions.keys()
    assert all(isinstance(value, float) for value in packed.loss_metrics(1e9).values())


def test_answers_have_their_schema(packed: Any, packed_spec: TaskSpec, tiny_gpt2: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_gpt2)
    answers = np.full((4, 6), NOTHING, dtype=np.int32)
    for row, (text, end) in enumerate(
        [(" good film", True), ("", True), (" good film story", False), (" a bad", False)]
    ):
        ids = tokenizer(text)["input_ids"]
        answers[row, : len(ids) + end] = [*ids, END] if end else ids
    schema = packed.output_schema(packed_spec)
    assert all(field.nullable for field in schema)
    for rows in (0, 1, 4):
        table = packed.output_columns(answers[:rows], tokenizer, packed_spec, ColumnOptions(stop=[" story"]))
        table.validate(full=True)
        assert table.schema == schema
        assert len(table) == rows
    assert table["generated_text"].to_pylist() == [" good film", "", " good film", " a bad"]
    assert table["finish_reason"].to_pylist() == ["stop", "stop", "stop", "length"]
    assert table["generated_tokens"].to_pylist() == [(answers[row] >= 0).sum() for row in range(4)]
