"""A task of a user's own: given in Python or installed, wrong in every way that its author may get it wrong."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

import families
import forked
import own_task
import scoring_runs
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from golden_losses import BETWEEN_STRATEGIES
from torchlake import plugins
from torchlake.errors import ConfigError, DataError, TaskError, UsageError
from torchlake.models.spec import load_spec
from torchlake.tasks import BaseTask

CASE = task_cases.CASES["text_and_numbers"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("own")
    runs.succeed(
        folder / "run", CASE.sections(folder, tiny_bert, max_steps=150, epochs=20, learning_rate=3e-3), task=CASE.task
    )
    return folder / "run"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (own_task.LosesRow(), "'loses_row': collate returned 'numbers' of shape (0, 2) for 1 rows"),
        (own_task.LossOfEachRow(), "'loss_of_each_row': loss_sum returned a tensor of shape (8,)"),
        (own_task.OutputsOfAllRows(), "'outputs_of_all_rows': the model's outputs have the shape (2,) for 1 rows"),
        (
            own_task.TooManyOutputs(),
            "'too_many_outputs': the model's outputs have the shape (1, 5), but for single_label",
        ),
        (own_task.Detached(), "'detached': the loss does not depend on the model's outputs"),
        (own_task.NoModule(), "'no_module': build returned a function, not a torch.nn.Module"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_wrong_task_is_refused_by_name_before_the_first_step(
    tmp_path: Path, tiny_bert: Path, task: Any, message: str
) -> None:
    sections = CASE.sections(tmp_path, tiny_bert)
    sections["train"]["micro_batch_tokens"] = 100_000  # the batch of 8 rows at once
    with pytest.raises(TaskError, match=re.escape(message)):
        tl.train(run=tmp_path / "run", engine=runs.Inline(), task=task, **sections)
    written = tmp_path / "run" / "metrics.jsonl"
    assert not written.exists() or not written.read_text()


def test_what_a_validation_of_an_own_task_returns(tmp_path: Path, tiny_bert: Path) -> None:
    sections = CASE.sections(tmp_path, tiny_bert, max_steps=2)
    for found, message in (
        ({"f1": 0.5}, "'other_metrics': a validation has loss, f1, but not 'accuracy', by which the best model"),
        ({"accuracy": "high"}, "'other_metrics': metrics returned {'accuracy': 'high'}; it must return {name: number}"),
    ):
        with pytest.raises(TaskError, match=re.escape(message)):
            tl.train(run=tmp_path / "run", engine=runs.Inline(), task=own_task.OtherMetrics(found), **sections)
        shutil.rmtree(tmp_path / "run")
    right = own_task.OtherMetrics({"accuracy": np.float32(0.5)})
    assert tl.train(run=tmp_path / "run", engine=runs.Inline(), task=right, **sections).metrics["accuracy"] == 0.5
    right.default_metric = {"single_label": "wins"}
    with pytest.raises(TaskError, match="'other_metrics': its directions lack 'wins', its default_metric for single_l"):
        tl.train(run=tmp_path / "other", engine=runs.Inline(), task=right, **sections)


def test_a_model_needs_its_task_where_it_is_scored(tmp_path: Path, trained: Path) -> None:
    """Its code is nowhere in the folder; a process that does not have the task says so at once."""
    pq.write_table(CASE.table(20), tmp_path / "in.parquet")
    script = "import sys, torchlake as tl; tl.predict(sys.argv[1], sys.argv[2], sys.argv[3])"
    given = [str(trained / "model"), str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    done = forked.run_script(script, given)
    assert "the model's task 'text_and_numbers' is not installed here" in done.stderr
    assert not list((trained / "model").rglob("*.py"))
    assert not (tmp_path / "out").exists()


def test_a_task_of_an_installed_package_is_found_by_its_name(tmp_path: Path, trained: Path) -> None:
    about = tmp_path / "packages" / "own_task-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-task\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torchlake.tasks]\ntext_and_numbers = own_task:TextAndNumbers\n")
    pq.write_table(CASE.table(20), tmp_path / "in.parquet")
    command = ["predict", str(trained / "model"), str(tmp_path / "in.parquet"), str(tmp_path / "out"), "--key", "id"]
    done = forked.run_script(forked.MAIN, command, path=[str(about.parent), *sys.path])
    assert done.returncode == 0, done.stderr
    given = tl.predict(trained / "model", CASE.table(20), prefix="p_", task=CASE.task)
    assert pq.read_table(tmp_path / "out")["label"].to_pylist() == given["p_label"].to_pylist()


def test_the_contract_alone_names_what_a_task_lacks() -> None:
    class Bare(BaseTask):
        """A task without methods of its own."""

    spec = tiny.spec_for("single_label", ("a", "b"))
    with pytest.raises(TaskError, match="the task 'bare' has no method features"):
        Bare().features({}, None, spec)
    with pytest.raises(DataError, match="the task 'bare' reads no labels"):
        Bare().find_labels(iter([pa.array(["a"])]))
    assert issubclass(tl.Task, BaseTask)


def test_what_is_no_task_and_a_name_that_is_taken(tmp_path: Path) -> None:
    class TextClassification(tl.Task):
        """A name that torchlake has."""

    for wrong, message in (
        (own_task.TextAndNumbers, r"give an instance: TextAndNumbers\(\)"),
        ("text_and_numbers", "not an instance of a subclass of torchlake.Task"),
        (TextClassification(), "There is already a task 'text_classification'"),
    ):
        with pytest.raises(UsageError, match=message):
            tl.train(run=tmp_path / "run", task=wrong, data={"train": "none"}, model={"base": "none"})


def test_the_task_of_another_model_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match="the model's task is 'text_and_numbers', not 'no_module'"):
        tl.predict(trained / "model", CASE.table(3), prefix="p_", task=own_task.NoModule())


def test_other_runtimes_refuse_it(trained: Path) -> None:
    with pytest.raises(UsageError, match="'varlen' cannot run text_and_numbers: .*'eager' computes every task"):
        tl.predict(trained / "model", CASE.table(3), prefix="p_", task=CASE.task, runtime="varlen")


def test_evaluate_and_load_take_the_task(trained: Path) -> None:
    found = tl.evaluate(trained / "model", CASE.table(60), task=CASE.task)
    assert (found.rows, found.failed) == (60, 0)
    assert float(found.metrics["accuracy"]) > 0.9, "the numbers say the label"
    classify = tl.load(trained / "model", task=CASE.task)
    one = classify([{"text": "a good film", "stars": 1.25, "helpful": 3}, {"text": None, "stars": 1, "helpful": 0}])
    assert one[0]["label"] in ("good", "bad")
    assert one[1]["error"] == "null_input"
    with pytest.raises(UsageError, match="Row 0 has no 'stars'"):
        classify([{"text": "a good film"}])
    with pytest.raises(UsageError, match="pass mappings with the keys text, stars, helpful"):
        classify("a good film")


def test_a_row_that_kills_a_thread_ahead_of_the_model_is_found_at_its_second_death(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = CASE.table(200)
    texts = [text.replace(own_task.KILLER, "bad") for text in table["text"].to_pylist()]
    harmless = table.set_column(table.column_names.index("text"), "text", [texts])
    texts[100] = f"a {own_task.KILLER} film"
    pq.write_table(harmless.set_column(table.column_names.index("text"), "text", [texts]), tmp_path / "in.parquet")
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    options = {"task": own_task.KillsCollating(), "batch_tokens": 64, "key": "id", "engine": tl.Local(processes=1)}
    scored = tl.predict(trained / "model", tmp_path / "in.parquet", tmp_path / "out", **options)
    assert (scored.rows_out, scored.rows_failed) == (200, 1)
    assert scoring_runs.errors(tmp_path / "out") == {100: "killed_process: twice"}
    assert (tmp_path / "killed").read_text().splitlines() == ["killed"] * 2
    expected = tl.predict(trained / "model", harmless, prefix="p_", task=CASE.task)["p_label"].to_pylist()
    expected[100] = None
    assert pq.read_table(tmp_path / "out").sort_by("id")["label"].to_pylist() == expected


def test_plan_counts_its_module(tmp_path: Path, tiny_bert: Path, trained: Path) -> None:
    sections = CASE.sections(tmp_path, tiny_bert)
    planned = tl.plan(task=CASE.task, flops=1e12, **sections)
    tensors = load_file(trained / "model" / "model.safetensors")
    assert planned.parameters.total == sum(tensor.numel() for tensor in tensors.values())
    assert (planned.rows, planned.shape.outputs, planned.shape.output_per_token) == (96, 2, False)
    assert planned.choice is not None


def test_a_module_without_a_base_model(tmp_path: Path) -> None:
    task, table = own_task.OnlyNumbers(), CASE.table(96)
    sections = CASE.sections(tmp_path, tmp_path, max_steps=60, epochs=10, learning_rate=3e-2)
    sections["model"] = {"base": None}
    sections["data"] = {name: each for name, each in sections["data"].items() if name != "text"}
    runs.succeed(tmp_path / "run", sections, task=task)
    model = tmp_path / "run" / "model"
    assert "base_model" not in (model / "README.md").read_text()
    assert float(tl.evaluate(model, table, task=task).metrics["accuracy"]) > 0.9
    pq.write_table(table, tmp_path / "in.parquet")
    tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", task=task, key="id")
    assert pq.read_table(tmp_path / "out")["error"].null_count == 96
    sections["model"] = {"base": None, "task": "text_classification"}
    with pytest.raises(ConfigError, match="model.base: text_classification starts from a model; name its folder"):
        tl.train(run=tmp_path / "other", engine=runs.Inline(), data=sections["data"], model=sections["model"])


def test_the_columns_of_its_inputs_may_have_other_names(trained: Path) -> None:
    table = CASE.table(20)
    renamed = table.rename_columns({"text": "body", "stars": "points"})
    options = {"task": CASE.task, "prefix": "p_", "text": "body", "inputs": {"numbers": ["points", "helpful"]}}
    expected = tl.predict(trained / "model", table, task=CASE.task, prefix="p_")["p_score"]
    assert tl.predict(trained / "model", renamed, **options)["p_score"].equals(expected)
    with pytest.raises(UsageError, match="has no input 'numbres'; its other inputs are numbers"):
        tl.predict(trained / "model", renamed, **{**options, "inputs": {"numbres": "points"}})
    with pytest.raises(tl.TorchlakeError, match="there is no numbers column 'stars'"):
        tl.predict(trained / "model", renamed, task=CASE.task, text="body", prefix="p_")


def test_unknown_inputs_of_a_job_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    sections = CASE.sections(tmp_path, tiny_bert)
    sections["data"]["inputs"] = {"number": ["stars"]}
    with pytest.raises(ConfigError, match="has no input 'number'; its other inputs are numbers"):
        tl.train(run=tmp_path / "run", task=CASE.task, engine=runs.Inline(), **sections)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_a_loss_that_couples_rows_is_equal_on_any_number_of_ranks(
    tmp_path: Path, tiny_bert: Path, strategy: str | None
) -> None:
    """And with any micro-batches: the negatives of a row are all other rows of the batch."""
    found = {}
    for name, ranks, train in (
        ("one", 1, {"micro_batch_tokens": 100_000}),
        ("other", 2 if strategy else 1, {"micro_batch_tokens": 64, **({"strategy": strategy} if strategy else {})}),
    ):
        sections = CASE.sections(tmp_path / name, tiny_bert, max_steps=6, **train)
        runs.succeed(tmp_path / name / "run", sections, task=own_task.Contrastive(), ranks=ranks)
        lines = [line for line in runs.metrics(tmp_path / name / "run") if "validation_loss" in line]
        found[name] = (runs.losses(tmp_path / name / "run"), [line["validation_loss"] for line in lines])
    for losses, validations in found.values():
        assert losses == pytest.approx(found["one"][0], abs=BETWEEN_STRATEGIES)
        assert validations == pytest.approx(found["one"][1], abs=BETWEEN_STRATEGIES)
    assert found["one"][0][-1] < found["one"][0][0]


def stop_at_four(numbers: dict[str, Any]) -> bool:
    """Stop after step 4, and write what it was called with."""
    with open(os.environ["CALLED"], "a") as file:
        file.write(json.dumps(numbers) + "\n")
    return numbers["step"] == 4


def test_a_callback_gets_the_numbers_of_each_step_and_may_stop_the_run(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    called = tmp_path / "called.jsonl"
    stopped = runs.attempt(tmp_path / "run", sections, on_step=stop_at_four, ranks=2, CALLED=str(called))
    assert (stopped.exit_code, stopped.error.partition(":")[0]) == (143, "StopAsked")
    lines = [json.loads(line) for line in called.read_text().splitlines()]
    assert lines == runs.metrics(tmp_path / "run")[: len(lines)]
    assert [line["step"] for line in lines][:4] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in lines)
    done = runs.succeed(tmp_path / "run", sections, ranks=2)
    runs.succeed(tmp_path / "whole", sections, ranks=2)
    assert 0 < done.steps < len(runs.losses(tmp_path / "run"))
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")


def raise_at_two(numbers: dict[str, Any]) -> None:
    if numbers["step"] == 2:
        raise KeyError("a mistake")


def return_a_word(numbers: dict[str, Any]) -> str:
    return "stop"


@pytest.mark.parametrize(
    ("function", "message"),
    [(raise_at_two, "on_step raised KeyError at step 2"), (return_a_word, "on_step returned 'stop'")],
)
def test_a_wrong_callback_is_named(tmp_path: Path, tiny_bert: Path, function: Any, message: str) -> None:
    refused = runs.attempt(tmp_path / "run", runs.job(tmp_path, tiny_bert), on_step=function)
    assert refused.exit_code == 64
    assert message in refused.error


def test_task_json_has_the_inputs_and_the_weights_are_safetensors(trained: Path) -> None:
    spec = load_spec(trained / "model")
    assert spec.inputs == {"numbers": ("stars", "helpful")}
    assert spec.columns == ("text", "stars", "helpful", "label")
    names = {each.name for each in (trained / "model").iterdir()}
    assert "model.safetensors" in names
    assert json.loads((trained / "model" / "config.json").read_text())["architectures"] == []


def test_weights_that_the_task_does_not_build_are_refused(trained: Path) -> None:
    class TextAndNumbers(own_task.TextAndNumbers):
        def build(self, folder: Path, spec: Any, *, weights: bool) -> Any:
            module = super().build(folder, spec, weights=weights)
            module.other = module.head
            module.head = None
            return module

    before = plugins._given.pop("text_and_numbers", None)
    try:
        with pytest.raises(
            UsageError, match="'text_and_numbers': build returned a module whose tensors are not those in"
        ):
            tl.load(trained / "model", task=TextAndNumbers())
    finally:
        plugins._given["text_and_numbers"] = before
    table = pa.table({"text": ["good"], "stars": [1.0], "helpful": np.array([1])})
    assert tl.predict(trained / "model", table, task=CASE.task)["error"].to_pylist() == [None]


def test_padding_changes_no_answer_of_an_own_module_that_asks_for_it(tmp_path: Path) -> None:
    base = families.build(tmp_path / "base", "fnet", kind="classifier")
    table = tiny.reviews(24)
    pq.write_table(table, tmp_path / "train.parquet")
    sections = {
        "data": {"train": str(tmp_path / "train.parquet"), "label": "label", "key": "id"},
        "model": {"base": str(base)},
        "train": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-3},
    }
    task = own_task.TextAlone()
    run = tl.train(run=tmp_path / "run", engine=runs.Inline(), task=task, **sections)
    settings = {"task": task, "engine": tiny.Here(), "all_probabilities": True}
    table = table.select(["text"])
    together = tl.predict(run.model, table, **settings)["prob_good"].to_numpy()
    few = range(0, 24, 4)
    alone = [tl.predict(run.model, table.slice(row, 1), **settings)["prob_good"][0].as_py() for row in few]
    np.testing.assert_allclose(together[few], alone, atol=1e-5)
    assert len(set(np.round(alone, 4))) > 1
