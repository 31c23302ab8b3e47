"""What every task goes through, a user's own included: ranks, kills, engines, bad rows. `task_cases.py` has them."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

import task_cases
import torchlake as tl
import training_runs as runs
from golden_losses import BETWEEN_STRATEGIES, check
from sweeps import sweep
from task_cases import CASES, Case
from torchlake import plugins
from torchlake.atomic_io import read_json
from torchlake.config.task_spec import spec_from_json
from torchlake.errors import DataError
from torchlake.runs.metrics_log import VALIDATION, is_validation, read_metrics

QUICK = {"text_and_numbers"}
"It goes through more of the code than the others."


@pytest.fixture(scope="module", params=sweep(CASES, quick=QUICK))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> Case:
    return CASES[name]


@pytest.fixture(scope="module")
def base(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.build(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(name: str, case: Case, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one rank."""
    folder = tmp_path_factory.mktemp(name)
    if not case.trains:
        shutil.copytree(base, folder / "run" / "model")
        return folder / "run"
    runs.succeed(folder / "run", case.sections(folder, base), task=case.task)
    return folder / "run"


@pytest.fixture
def trains(case: Case) -> None:
    """Skip a task whose models are only scored."""
    if not case.trains:
        pytest.skip("its models are only scored")


def given(case: Case) -> dict[str, Any]:
    return {**case.predict, **({} if case.task is None else {"task": case.task})}


def contents(folder: Path) -> str:
    files = sorted(folder.glob("*.parquet"))
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_every_task_has_a_case() -> None:
    assert set(plugins.names("tasks")) <= {case.model.get("task", "text_classification") for case in CASES.values()}


@pytest.mark.usefixtures("trains")
def test_one_rank_gives_the_losses_of_the_golden_file(name: str, trained: Path) -> None:
    check(f"task_{name}", runs.losses(trained))


@pytest.mark.usefixtures("trains")
def test_validations_have_every_metric_that_may_choose_the_best_model(case: Case, trained: Path) -> None:
    spec = spec_from_json(trained / "task.json", read_json(trained / "task.json"))
    lines = [line for line in read_metrics(trained / "metrics.jsonl") if is_validation(line)]
    known = {name.removeprefix(VALIDATION) for line in lines for name in line}
    task = case.task or plugins.load("tasks", spec.task)
    assert {"loss", *task.metric_names(spec)} <= known


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("strategy", sweep(["ddp", "fsdp"], quick={"fsdp"}))
def test_two_ranks_give_the_losses_of_one(tmp_path: Path, case: Case, base: Path, trained: Path, strategy: str) -> None:
    runs.succeed(tmp_path / "run", case.sections(tmp_path, base, strategy=strategy), task=case.task, ranks=2)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(trained), abs=BETWEEN_STRATEGIES)


@pytest.mark.usefixtures("trains")
def test_a_killed_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, case: Case, base: Path, trained: Path) -> None:
    sections = case.sections(tmp_path, base)
    killed = runs.attempt(tmp_path / "run", sections, task=case.task, failpoint="rank0.step:5:kill9")
    assert killed.exit_code == -9
    runs.succeed(tmp_path / "run", sections, task=case.task)
    assert runs.losses(tmp_path / "run") == runs.losses(trained)
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(trained)


@pytest.mark.usefixtures("trains")
def test_plan_counts_the_parameters_or_says_why_not(
    tmp_path: Path, name: str, case: Case, base: Path, trained: Path
) -> None:
    options = {"flops": 1e12} | ({} if case.task is None else {"task": case.task})
    if name in ("image_augmented", "image_batch_norm"):
        with pytest.raises(DataError, match="the layers of ResNetForImageClassification differ"):
            tl.plan(**options, **case.sections(tmp_path, base))
        return
    planned = tl.plan(**options, **case.sections(tmp_path, base))
    files = (trained / "model").rglob("model.safetensors")
    assert planned.parameters.total == sum(each.numel() for file in files for each in load_file(file).values())
    assert planned.tokens.mean > 0


def test_a_bad_row_costs_itself_alone(tmp_path: Path, case: Case, trained: Path) -> None:
    table, expected = task_cases.with_bad_rows(case, 24)
    pq.write_table(table, tmp_path / "in.parquet")
    tl.predict(trained / "model", tmp_path / "in.parquet", tmp_path / "out", key="id", prefix="p_", **given(case))
    scored = pq.read_table(tmp_path / "out")
    reasons = [None if reason is None else reason.partition(":")[0] for reason in scored["error"].to_pylist()]
    assert reasons == [expected.get(row) for row in range(24)]
    fine = case.table(24).slice(len(expected))
    alone = tl.predict(trained / "model", fine, prefix="p_", **given(case))
    for column in set(scored.column_names) - {"id"}:
        ours, theirs = scored[column].to_pylist()[len(expected) :], alone[column].to_pylist()
        first = theirs[0][0] if isinstance(theirs[0], list) and theirs[0] else theirs[0]  # a row may have no spans
        assert ours == theirs or (isinstance(first, float) and np.allclose(ours, theirs, atol=1e-5)), column


def test_what_is_killed_while_scoring_comes_out_once(tmp_path: Path, name: str, case: Case, trained: Path) -> None:
    pq.write_table(case.table(90), tmp_path / "in.parquet")
    options = {"model": trained / "model", "table": tmp_path / "in.parquet", "key": "id", "chunk_rows": 30}
    whole = task_cases.predict(name, {**options, "output": tmp_path / "whole"})
    assert whole.stdout.strip() == "90", whole.stderr
    interrupted = {**options, "output": tmp_path / "out"}
    killed = task_cases.predict(name, interrupted, failpoint="commit.write:1:kill9", once=tmp_path / "once")
    assert killed.returncode == -9
    assert not (tmp_path / "out" / "_torchlake" / "commit.json").exists()
    assert task_cases.predict(name, interrupted).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == list(range(90))


@pytest.mark.slow
@pytest.mark.usefixtures("spark", "ray")
def test_three_engines_give_equal_bytes(
    tmp_path: Path, case: Case, base: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    pq.write_table(case.table(60), tmp_path / "in.parquet")
    task = {} if case.task is None else {"task": case.task}
    found = {}
    for name in plugins.names("engines"):
        engine = getattr(tl, name.title())(processes=2)
        options = {"key": "id", "chunk_rows": 20, "engine": engine, **given(case)}
        tl.predict(trained / "model", tmp_path / "in.parquet", tmp_path / name, **options)
        found[name] = [contents(tmp_path / name)]
        if case.trains:
            sections = case.sections(tmp_path, base, max_steps=5, strategy="ddp")
            run = tl.train(run=tmp_path / f"run_{name}", engine=engine, **task, **sections).path
            found[name] += [runs.losses(run), runs.weights_sha256(run)]
    assert found["spark"] == found["local"]
    assert found["ray"] == found["local"]
