"""Training, broken at every place: cases 39 to 51 of the reliability contract, for one rank and for several.

The oracles: an interrupted run ends with the weights of one that was not, byte for byte at equal world size; its
metrics tell of every step once; nothing hangs; what is left behind is nobody's.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import forked
import training_runs as runs
from recovery_times import Watch, mark
from sweeps import sweep
from torchlake.config.job import job_to_yaml, load_job

LAST_STEP = 18
EPOCH = 9
NO_RESTART = ("train.max_restarts=0",)


@pytest.fixture(scope="module")
def whole_on_two(tmp_path_factory: pytest.TempPathFactory, sections: dict[str, Any]) -> Path:
    """The same on two ranks."""
    run = tmp_path_factory.mktemp("whole_on_two") / "run"
    runs.succeed(run, sections, ranks=2)
    return run


def assert_same_run(run: Path, expected: Path) -> None:
    """P4: the same weights, the same losses, every step told once; and no leftovers."""
    assert runs.weights_sha256(run) == runs.weights_sha256(expected)
    assert runs.losses(run) == runs.losses(expected)
    validations = [[line for line in runs.metrics(each) if "validation_loss" in line] for each in (run, expected)]
    assert validations[0] == validations[1]
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("step", sweep([1, 4, 9, 10, 18], quick=[9]))
def test_a_kill_at_a_step_costs_no_result(
    tmp_path: Path, sections: dict[str, Any], whole: Path, step: int, recovery: Watch
) -> None:
    recovery(tmp_path / "run", 48 if step in (EPOCH, EPOCH + 1, LAST_STEP) else 39)
    killed = runs.attempt(tmp_path / "run", sections, failpoint=f"rank0.step:{step}:kill9")
    assert killed.exit_code == -signal.SIGKILL
    done = runs.succeed(tmp_path / "run", sections)
    assert done.steps == LAST_STEP - (step - 1) // 3 * 3
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_three_ranks_that_are_killed_go_on_with_the_same_bytes(tmp_path: Path, sections: dict[str, Any]) -> None:
    """The sum of three numbers depends on their order, so the first step of a resumed run shows how it is made."""
    runs.succeed(tmp_path / "whole", sections, ranks=3)
    runs.attempt(tmp_path / "run", sections, ranks=3, failpoint="rank0.step:8:kill9")
    runs.succeed(tmp_path / "run", sections, ranks=3)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_killed_again_and_again_while_it_resumes(tmp_path: Path, sections: dict[str, Any], whole: Path) -> None:
    """Twice within one epoch too."""
    for nth in (5, 3, 1, 4):
        once = str(tmp_path / f"once{time.monotonic_ns()}")
        killed = runs.attempt(
            tmp_path / "run", sections, failpoint=f"rank0.step:{nth}:kill9", TORCHLAKE_FAILPOINT_ONCE=once
        )
        assert killed.exit_code == -signal.SIGKILL
    runs.succeed(tmp_path / "run", sections)
    assert_same_run(tmp_path / "run", whole)


def durable_sites(tmp_path_factory: pytest.TempPathFactory, sections: dict[str, Any]) -> list[str]:
    log = tmp_path_factory.mktemp("sites") / "hits"
    runs.succeed(log.with_name("run"), sections, TORCHLAKE_FAILPOINT_LOG=str(log))
    return [hit for hit in log.read_text().splitlines() if not hit.startswith("rank0.step")]


@pytest.mark.parametrize(
    "hit",
    sweep(
        [
            "checkpoint.model.write:1",
            "checkpoint.rename:1",
            "checkpoint.verify:1",
            "checkpoint.model.done:4",
            "checkpoint.state.rename:4",
            "checkpoint.manifest.done:4",
            "checkpoint.prune:2",
            "best.rename:1",
            "model.rename:1",
            "evaluation.rows.rename:1",
        ],
        quick=["model.rename:1"],
    ),
)
def test_a_kill_while_something_is_written(
    tmp_path: Path, sections: dict[str, Any], whole: Path, hit: str, recovery: Watch
) -> None:
    """Case 45: checkpoints, the best model, the model folder, the page of its rows; the slow sweep has them all.

    The quick test of a checkpoint is the one below.
    """
    recovery(tmp_path / "run", 45)
    page = hit.startswith("evaluation")
    killed = runs.attempt(tmp_path / "run", sections, failpoint=f"{hit}:kill9", page=page)
    assert killed.exit_code == -signal.SIGKILL
    runs.succeed(tmp_path / "run", sections, page=page)
    assert_same_run(tmp_path / "run", whole)


BESIDE = ("train.checkpoint_in_background=true",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hit", ["checkpoint.model.write:1", "checkpoint.rename:1", "checkpoint.prune:1", "best.rename:1"]
)
def test_a_kill_while_something_is_written_beside_the_training(
    tmp_path: Path, sections: dict[str, Any], whole: Path, hit: str, recovery: Watch
) -> None:
    """Wherever the steps are by then: what is not complete is not there, and the run goes on from what is."""
    recovery(tmp_path / "run", 45)
    killed = runs.attempt(tmp_path / "run", sections, failpoint=f"{hit}:kill9", overrides=BESIDE)
    assert killed.exit_code == -signal.SIGKILL
    runs.succeed(tmp_path / "run", sections, overrides=BESIDE)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "hit",
    sweep(
        ["checkpoint.model.write:2", "checkpoint.note.rename:2", "checkpoint.verify:1", "run.validation.rename:1"],
        quick=["checkpoint.note.rename:2", "run.validation.rename:1"],
    ),
)
def test_a_rank_killed_while_it_writes_its_share(
    tmp_path: Path, sections: dict[str, Any], whole_on_two: Path, hit: str, recovery: Watch
) -> None:
    recovery(tmp_path / "run", 45)
    done = runs.succeed(
        tmp_path / "run", sections, ranks=2, failpoint=f"{hit}:kill9", overrides=BESIDE, stub=one_checkpoint_first
    )
    assert done.steps == LAST_STEP
    if hit.endswith(":2"):  # the first checkpoint is complete
        assert "continuing after step 3" in (tmp_path / "run" / "logs" / "rank_1.jsonl").read_text()
    assert_same_run(tmp_path / "run", whole_on_two)


def one_checkpoint_first() -> None:
    """No rank begins its second share before a checkpoint is complete; by itself, only rank 0 waits for that."""
    from torchlake.checkpoints import format

    write, run, shares = format.write_shard, Path(os.environ[runs.RUN]), itertools.count(1)

    def write_shard(*args: Any) -> None:
        if next(shares) > 1:
            wait_for(lambda: runs.checkpoints(run))
        write(*args)

    format.write_shard = write_shard


@pytest.mark.slow
def test_a_full_disk_beside_the_training_ends_the_run(tmp_path: Path, sections: dict[str, Any]) -> None:
    failed = runs.attempt(tmp_path / "run", sections, failpoint="checkpoint.optimizer.write:2:enospc", overrides=BESIDE)
    assert failed.exit_code == 74
    assert "finished work is kept" in failed.error
    assert runs.checkpoints(tmp_path / "run") == ["step_00000003"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kill_at_every_durable_step(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, sections: dict[str, Any], whole: Path
) -> None:
    """The sweep: the run once per hit of any failpoint, from the lease to the model folder."""
    hits = durable_sites(tmp_path_factory, sections)
    assert len(hits) > 50
    for number, hit in enumerate(hits):
        run = tmp_path / str(number) / "run"
        killed = runs.attempt(run, sections, failpoint=f"{hit}:kill9")
        assert killed.exit_code == -signal.SIGKILL, hit
        runs.succeed(run, sections)
        assert_same_run(run, whole)


@pytest.mark.parametrize(
    ("where", "step"),
    sweep(
        [
            ("rank0.start:1", 0),
            ("rank0.step:1", 2),
            ("rank0.step:5", 6),
            ("rank0.step:9", 9),
            ("rank0.validate:1", 9),
            ("checkpoint.state.write:2", 8),
            ("best.model.write:1", 11),
        ],
        quick=[("rank0.validate:1", 9)],
    ),
)
def test_sigterm_saves_and_says_143(
    tmp_path: Path, sections: dict[str, Any], whole: Path, where: str, step: int, recovery: Watch
) -> None:
    """Case 44: before the first batch, during a step, at the end of an epoch, while validating, while saving."""
    recovery(tmp_path / "run", 44)
    stopped = runs.attempt(tmp_path / "run", sections, sigterm_at=where)
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert (f"stopped after step {step} of 18" if step else "stopped before the first step") in stopped.error
    assert runs.checkpoints(tmp_path / "run")[-1] == f"step_{step:08d}"
    assert runs.succeed(tmp_path / "run", sections).steps == LAST_STEP - step
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_sigterm_in_the_last_validation_leaves_only_that(tmp_path: Path, sections: dict[str, Any], whole: Path) -> None:
    stopped = runs.attempt(tmp_path / "run", sections, sigterm_at="rank0.validate:2")
    assert stopped.exit_code == 143
    done = runs.succeed(tmp_path / "run", sections)
    assert done.steps == 0
    assert not done.complete
    assert_same_run(tmp_path / "run", whole)
    assert runs.succeed(tmp_path / "run", sections).complete


@pytest.mark.parametrize("where", sweep(["rank1.step:5", "rank1.validate:1", "rank1.start:1"], quick=["rank1.step:5"]))
def test_sigterm_at_any_rank_stops_all_at_the_same_step(
    tmp_path: Path, sections: dict[str, Any], whole_on_two: Path, where: str, recovery: Watch
) -> None:
    recovery(tmp_path / "run", 44)
    stopped = runs.attempt(tmp_path / "run", sections, sigterm_at=where, ranks=2)
    assert stopped.exit_code == 143, stopped.error
    runs.succeed(tmp_path / "run", sections, ranks=2)
    assert_same_run(tmp_path / "run", whole_on_two)


@pytest.mark.slow  # a quick test kills a rank that writes: its launcher does the same
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again(
    tmp_path: Path, sections: dict[str, Any], whole_on_two: Path, rank: int, recovery: Watch
) -> None:
    """Case 39: the same call ends well, with the bytes of a run that nobody disturbed."""
    recovery(tmp_path / "run", 39)
    done = runs.succeed(tmp_path / "run", sections, ranks=2, failpoint=f"rank{rank}.step:8:kill9")
    assert done.steps == LAST_STEP
    assert "continuing after step 6" in (tmp_path / "run" / "logs" / "rank_1.jsonl").read_text()
    assert_same_run(tmp_path / "run", whole_on_two)


@pytest.mark.parametrize(("first", "second"), sweep([(2, 1), (1, 2), (2, 3)], quick=[(2, 3)]))
def test_resume_on_another_number_of_ranks(
    tmp_path: Path, tiny_bert: Path, first: int, second: int, recovery: Watch
) -> None:
    """Case 47: the same rows in the same steps, losses within 1e-5; a batch of 8 does not divide by 3."""
    recovery(tmp_path / "run", 47)
    sections = runs.job(tmp_path, tiny_bert, rows=72)
    runs.succeed(tmp_path / "whole", sections)
    stopped = runs.attempt(
        tmp_path / "run", sections, ranks=first, failpoint="rank0.step:8:kill9", overrides=NO_RESTART
    )
    assert stopped.exit_code != 0
    runs.succeed(tmp_path / "run", sections, ranks=second)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "whole"), abs=1e-5)
    tokens = [
        [line["tokens"] for line in runs.metrics(run) if "loss" in line]
        for run in (tmp_path / "run", tmp_path / "whole")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_more_ranks_than_rows_in_a_batch(tmp_path: Path, tiny_bert: Path) -> None:
    """Case 50: ranks without rows keep step with the others."""
    sections = runs.job(tmp_path, tiny_bert, rows=12, batch_size=2)
    runs.succeed(tmp_path / "one", sections)
    runs.succeed(tmp_path / "three", sections, ranks=3)
    assert runs.losses(tmp_path / "three") == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)


def test_the_first_failing_rank_is_the_error(tmp_path: Path, sections: dict[str, Any], recovery: Watch) -> None:
    """Case 42: an exception in one rank, before the first collective and in the middle."""
    for where in ("rank1.start:1", "rank1.step:3"):
        recovery(tmp_path / where, 42)
        failed = runs.attempt(tmp_path / where, sections, ranks=2, failpoint=f"{where}:raise", overrides=NO_RESTART)
        assert failed.exit_code == 70
        assert f"RuntimeError: failpoint {where.split(':')[0]}" in failed.error


@pytest.mark.slow
def test_when_restarts_are_used_up_every_attempt_is_told(
    tmp_path: Path, sections: dict[str, Any], recovery: Watch
) -> None:
    """Case 43."""
    recovery(tmp_path / "run", 43)
    failed = runs.attempt(
        tmp_path / "run",
        sections,
        ranks=2,
        stub=fail_in_every_attempt,
        overrides=("train.max_restarts=2",),
    )
    assert failed.exit_code == 70
    assert "failed 3 times (train.max_restarts=2)" in failed.error
    for line in ("attempt 1, from the beginning", "attempt 2, from step 3", "attempt 3, from step 6"):
        assert line in failed.error
    assert runs.checkpoints(tmp_path / "run") == ["step_00000006", "step_00000009"]
    assert runs.succeed(tmp_path / "run", sections, ranks=2).steps == LAST_STEP - 9


def fail_in_every_attempt() -> None:
    """Ranks raise in the fifth step that they take."""
    from torchlake.training import step

    hits = 0

    def failpoint(site: str) -> None:
        nonlocal hits
        hits += site.endswith(".step")
        if hits == 5:
            runs.mark_fault()
            raise RuntimeError("broken hardware")

    step.failpoint = failpoint  # type: ignore[attr-defined]


@pytest.mark.slow  # test_cases_training.py has a quick test of another damage
def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_used(
    tmp_path: Path, sections: dict[str, Any], whole: Path, recovery: Watch
) -> None:
    """Case 46."""
    recovery(tmp_path / "run", 46)
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:8:kill9")
    newest = tmp_path / "run" / "checkpoints" / "step_00000006" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    assert runs.succeed(tmp_path / "run", sections).steps == LAST_STEP - 3
    assert (tmp_path / "run" / "checkpoints" / "step_00000006.torn").is_dir()
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_checkpoint_folder_elsewhere_serves_an_empty_run_folder(
    tmp_path: Path, sections: dict[str, Any], whole: Path
) -> None:
    """The same job goes on from it in another run folder, and another job does not."""
    overrides = (f"train.checkpoint_folder={tmp_path / 'kept'}",)
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:8:kill9", overrides=overrides)
    refused = runs.attempt(tmp_path / "other", sections, overrides=(*overrides, "train.seed=5"))
    assert refused.exit_code == 65
    assert "train.seed: 0 -> 5" in refused.error
    assert runs.succeed(tmp_path / "elsewhere", sections, overrides=overrides).steps == LAST_STEP - 6
    assert runs.weights_sha256(tmp_path / "elsewhere") == runs.weights_sha256(whole)


def test_when_every_checkpoint_is_corrupt_it_says_so(tmp_path: Path, sections: dict[str, Any]) -> None:
    runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:8:kill9")
    for path in (tmp_path / "run" / "checkpoints").glob("step_*/model.safetensors"):
        path.unlink()
    for _ in range(2):
        refused = runs.attempt(tmp_path / "run", sections)
        assert refused.exit_code == 65
        assert "no checkpoint of this run is usable" in refused.error


def loss_is_nan_in_steps(*steps: int) -> None:
    """Make the loss of some steps of this process NaN."""
    from torchlake.tasks.text_classification import task

    calls = 0
    right = task.loss_sum

    def loss_sum(logits: Any, targets: Any, spec: Any, objective: Any) -> Any:
        nonlocal calls
        calls += logits.requires_grad  # not in validations
        if logits.requires_grad and calls in steps:
            runs.mark_fault()
        loss = right(logits, targets, spec, objective)
        return loss * float("nan") if logits.requires_grad and calls in steps else loss

    task.loss_sum = loss_sum


def one_bad_step() -> None:
    loss_is_nan_in_steps(5)


def never_well_again() -> None:
    loss_is_nan_in_steps(*range(8, 99))


@pytest.mark.parametrize("ranks", sweep([1, 2], quick=[2]))
def test_a_step_without_a_finite_loss_is_not_applied(
    tmp_path: Path, sections: dict[str, Any], ranks: int, recovery: Watch
) -> None:
    """Case 49."""
    recovery(tmp_path / "run", 49)
    runs.succeed(tmp_path / "run", sections, stub=one_bad_step, ranks=ranks)
    losses = runs.losses(tmp_path / "run")
    assert [step for step, loss in enumerate(losses, start=1) if loss != loss] == [5]
    assert '"loss": "nan"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_three_in_a_row_end_the_run_and_keep_the_last_good_weights(
    tmp_path: Path, sections: dict[str, Any], recovery: Watch
) -> None:
    recovery(tmp_path / "run", 49)
    diverged = runs.attempt(tmp_path / "run", sections, stub=never_well_again)
    assert diverged.exit_code == 5
    assert "step 10" in diverged.error
    assert [step for step, loss in enumerate(runs.losses(tmp_path / "run"), start=1) if loss != loss] == [8, 9, 10]
    from safetensors.torch import load_file

    for path in (tmp_path / "run" / "checkpoints").glob("step_*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


@pytest.mark.parametrize("ranks", sweep([1, 2], quick={1}))
def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, sections: dict[str, Any], ranks: int, recovery: Watch
) -> None:
    """Case 51, with keep_checkpoints=1."""
    recovery(tmp_path / "run", 51)
    overrides = ("train.keep_checkpoints=1",)
    full = runs.attempt(
        tmp_path / "run", sections, ranks=ranks, failpoint="checkpoint.optimizer.write:3:enospc", overrides=overrides
    )
    assert full.exit_code == 74
    assert "bytes are free" in full.error
    assert runs.checkpoints(tmp_path / "run") == ["step_00000006"]
    assert runs.succeed(tmp_path / "run", sections, ranks=ranks, overrides=overrides).steps == LAST_STEP - 6


def test_two_trainers_of_one_run_folder(tmp_path: Path, sections: dict[str, Any], whole: Path) -> None:
    """The second one is told who is at work and leaves; the first one is not disturbed."""
    refused = runs.attempt(tmp_path / "run", sections, stub=start_another)
    assert refused.exit_code == 0
    told = json.loads((tmp_path / "second.json").read_text())
    assert told[0] == "Locked"
    assert "pid" in told[1]
    assert_same_run(tmp_path / "run", whole)


def start_another() -> None:
    """At the third step, train in the same folder from within."""
    from torchlake.errors import TorchlakeError
    from torchlake.training import loop
    from torchlake.training import train as training

    original, begun = loop.train_step, []
    first = training.train

    def train_step(state: Any, epoch: Any, rows: Any, progress: Any, *rest: Any) -> Any:
        if progress.step == 2 and not begun:
            begun.append(True)
            run = Path(arguments["run"])
            try:
                first(**arguments)
            except TorchlakeError as error:
                run.with_name("second.json").write_text(json.dumps([type(error).__name__, str(error)]))
        return original(state, epoch, rows, progress, *rest)

    arguments: dict[str, Any] = {}

    def train(**given: Any) -> Any:
        arguments.update(given)
        return first(**given)

    import torchlake

    torchlake.train = train  # type: ignore[assignment]
    loop.train_step = train_step


def test_a_trainer_that_was_taken_over_writes_no_more(tmp_path: Path, sections: dict[str, Any]) -> None:
    """P9: a run whose lease another took while it slept is refused at its next checkpoint."""
    refused = runs.attempt(tmp_path / "run", sections, stub=lose_the_lease)
    assert refused.exit_code == 76
    assert "taken this run over" in refused.error
    assert runs.checkpoints(tmp_path / "run") == ["step_00000003"]


def lose_the_lease() -> None:
    """At the fifth step, another's token stands in the lease."""
    from torchlake.training import loop

    original = loop.train_step
    folder: list[Path] = []
    make_train_state = loop.make_train_state

    def remember(settings: Any, group: Any, training: Any) -> Any:
        folder.append(Path(settings.lease[0]))
        return make_train_state(settings, group, training)

    def train_step(state: Any, epoch: Any, rows: Any, progress: Any, *rest: Any) -> Any:
        if progress.step == 4:
            lease = json.loads((folder[0] / "lease.json").read_text())
            (folder[0] / "lease.json").write_text(json.dumps({**lease, "token": "another's", "epoch": 2}))
        return original(state, epoch, rows, progress, *rest)

    loop.make_train_state, loop.train_step = remember, train_step


# Real processes of the local engine from here on.


@pytest.mark.slow
def test_local_ranks_give_the_same_bytes(
    tmp_path: Path, sections: dict[str, Any], whole_on_two: Path, recovery: Watch
) -> None:
    recovery(tmp_path / "run", 39)
    done = runs.succeed(tmp_path / "run", sections, ranks=2, local=True, failpoint="rank1.step:8:kill9")
    assert done.steps == LAST_STEP
    assert_same_run(tmp_path / "run", whole_on_two)


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_and_started_again(
    tmp_path: Path, sections: dict[str, Any], whole_on_two: Path, recovery: Watch
) -> None:
    """Case 41: the peers give up after collective_timeout, the stopped rank is killed, the run ends well."""
    recovery(tmp_path / "run", 41)
    done = runs.succeed(
        tmp_path / "run",
        sections,
        ranks=2,
        local=True,
        failpoint="rank1.step:8:stop",
        overrides=("train.collective_timeout=6s",),
    )
    assert done.steps == LAST_STEP
    assert_same_run(tmp_path / "run", whole_on_two)
    log = (tmp_path / "run" / "logs" / "rank_0.jsonl").read_text()
    assert "gave up waiting for the other ranks while working on step 8" in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher(
    tmp_path: Path, sections: dict[str, Any], number: signal.Signals, recovery: Watch
) -> None:
    """Cases 40 and 44: SIGTERM is passed on and saved; SIGKILL leaves no rank behind. Both resume."""
    run = tmp_path / "run"
    recovery(run, 44 if number == signal.SIGTERM else 40)
    launcher = start_launcher(run, sections)
    wait_for(lambda: (run / "checkpoints" / "step_00000003").is_dir() or launcher.poll() is not None)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    assert len(ranks) >= 2
    mark(run, "fault")
    launcher.send_signal(number)
    _, told = launcher.communicate(timeout=60)
    wait_for(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), 10)
    mark(run, "ended")
    assert launcher.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert number == signal.SIGKILL or "saved" in told
    saved = json.loads((run / "checkpoints" / runs.checkpoints(run)[-1] / "state.json").read_text())["step"]
    finished = len(runs.losses(run))
    assert finished == saved or number == signal.SIGKILL

    again = start_launcher(run, sections)
    wait_for(lambda: len(runs.losses(run)) > finished or again.poll() is not None)
    again.terminate()
    _, told = again.communicate(timeout=60)
    assert again.returncode == 143, told
    assert f"continuing after step {saved}" in (run / "logs" / "rank_1.jsonl").read_text()


def start_launcher(run: Path, sections: dict[str, Any]) -> subprocess.Popen[str]:
    """`torchlake train` with two ranks, for longer than any test."""
    job = run.with_name("job.yaml")
    job.write_text(job_to_yaml(load_job(None, **sections)))
    command = [sys.executable, "-m", "torchlake", "train", str(job), "--run", str(run), "--processes", "2"]
    return subprocess.Popen(
        [*command, "--set", "train.epochs=200"],
        env={**os.environ, **forked.ALONE, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Any, deadline_s: float = 90.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true in time"
        time.sleep(0.02)
