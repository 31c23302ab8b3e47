"""Every task on this machine's device: it learns and answers as on a CPU."""

from pathlib import Path

import pytest
import torch

import tiny
import torchlake as tl
import training_runs as runs
from scoring_runs import near
from sweeps import sweep
from task_cases import CASES

LOSS, ANSWER = 1e-3, 2e-3
"fp32 on both, but a GPU sums in another order."


@pytest.mark.parametrize("name", sweep([name for name, case in CASES.items() if case.trains], quick=()))
def test_a_task_learns_and_answers_as_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    given = {} if case.task is None else {"task": case.task}
    sections = case.sections(tmp_path, case.build(tmp_path / "base"))
    runs.succeed(tmp_path / "cpu", sections, **given)
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections, **given)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "cpu"), abs=LOSS, rel=LOSS)
    table, answers = case.table(40), []
    for gpu in (True, False):
        with monkeypatch.context() as patch:
            if not gpu:
                patch.setattr(torch.cuda, "is_available", lambda: False)
            options = {**case.predict, **given, "runtime": "eager", "prefix": "p_"}
            answers.append(tl.predict(tmp_path / "run" / "model", table, engine=tiny.Here(), **options))
    ours, theirs = answers
    assert ours.schema == theirs.schema
    for column in ours.column_names:
        assert near(ours[column].to_pylist(), theirs[column].to_pylist(), ANSWER), column
