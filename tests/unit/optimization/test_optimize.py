"""optimize: the sample, the trials and their crashes, agreement, the choice; with real worker processes."""

import json
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import rivals
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from torchlake.cli.main import main
from torchlake.errors import DataError, TableError, TorchlakeError, UsageError
from torchlake.optimization.agreement import CLOSE, compare, outside
from torchlake.optimization.measure import Stopped, run_guarded
from torchlake.optimization.sample import draw_sample
from torchlake.processes.hardware import cores
from torchlake.tables import chunks

ONE = tl.Local(processes=1)


@pytest.fixture
def model(tiny_bert: Path, tmp_path: Path) -> Path:
    return tiny.build_model(tmp_path / "model", encoder=tiny_bert)


def verdicts(done) -> dict[str, str]:
    return {one.runtime.removeprefix("rivals:"): one.verdict for one in done.candidates}


# the whole verb


def test_vectors_are_compared_by_cosines_that_fall_with_a_difference_of_length() -> None:
    spec = replace(tiny.SPEC, task="feature_extraction")
    reference = np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [np.nan, np.nan]], dtype=np.float32)
    same = compare(reference, reference, None, spec)
    assert (same.rows, same.failed, same.agreement, same.difference) == (3, 0, 1.0, 0.0)
    assert outside(same, min_agreement=1.0, max_drop=0.0) is None
    half = compare(reference * [[1], [0.5], [1], [1]], reference, None, spec)
    assert (half.agreement, half.difference) == (pytest.approx(2.5 / 3), 0.5)
    assert outside(half, min_agreement=0.8, max_drop=0.0) is None
    assert outside(half, min_agreement=0.96, max_drop=0.0) == "the mean cosine is 0.8333, the lowest 0.5000"
    one_far = replace(half, agreement=0.995, difference=0.2)
    assert outside(one_far, min_agreement=0.99, max_drop=0.0) == "the mean cosine is 0.9950, the lowest 0.8000"


def test_only_what_agrees_is_chosen_and_what_dies_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager's answers from memory win; what is wrong, killed, leaves, raises or gives NaN is named and skipped."""
    # Large enough that a model computes for most of the time: memory is 20 times as fast on a busy machine, too.
    model = tiny.build_model(tmp_path / "model", encoder=tiny.build_encoder(tmp_path / "encoder", hidden_size=256))
    wrong = [rivals.guessing, rivals.not_a_number, rivals.killed, rivals.leaving, rivals.raising]
    done = tl.optimize(
        model, tiny.reviews(120), runtimes=[*wrong, rivals.remembering], engine=ONE, budget="10min", rows=80
    )
    assert done.runtime == "rivals:remembering"
    assert done.ratio > 1
    said = verdicts(done)
    assert said["remembering"] == "chosen"
    assert said["eager"] == "agrees"
    assert said["guessing"].startswith("outside: ")
    assert said["not_a_number"] == "failed: non_finite: the model gave NaN or infinity"
    assert said["killed"].startswith("crashed: its process died without a traceback")
    assert said["leaving"].startswith("crashed: ")
    assert said["raising"] == "failed: RuntimeError: this engine has no wings"
    assert "nothing is written" in caplog.text, "a function has no name that a file may hold"
    assert not (model / "runtime.json").exists()
    (best,) = (one for one in done.candidates if one.verdict == "chosen")
    assert (best.rows, best.failed, best.agreement, best.metric, best.change) == (80, 0, 1.0, "accuracy", 0.0)
    assert best.difference is not None
    assert best.difference <= CLOSE


@pytest.mark.slow
def test_the_choice_is_written_and_predict_uses_it(model: Path, tmp_path: Path) -> None:
    """Without labels, from a stored table, when nothing but eager agrees."""
    pq.write_table(tiny.reviews(60).select(["text"]), tmp_path / "sample.parquet")
    done = tl.optimize(model, tmp_path / "sample.parquet", runtimes=[rivals.guessing], engine=ONE)
    assert (done.runtime, done.ratio) == ("eager", 1.0)
    (eager,) = (one for one in done.candidates if one.runtime == "eager")
    assert (eager.verdict, eager.agreement, eager.metric) == ("chosen", 1.0, None)
    assert eager.batch_tokens in (eager.by_batch_tokens or {})
    written = json.loads((model / "runtime.json").read_text())
    assert written["runtime"] == "eager"
    assert written["batch_tokens"] == done.batch_tokens
    assert [one["runtime"] for one in written["measured"]] == [one.runtime for one in done.candidates]
    record = tl.predict(model, tmp_path / "sample.parquet", tmp_path / "out", engine=tiny.Here()).record
    assert record["provenance"]["runtime_by"] == "runtime.json"
    assert record["provenance"]["batch_tokens"] == done.batch_tokens


@pytest.mark.slow
def test_pairs_are_measured_with_the_runtimes_that_can(tmp_path: Path) -> None:
    """Columns of other names than in training; what has no input for token types is refused."""
    spec = replace(tiny.SPEC, text="question", text_pair="answer", labels=("False", "True"))
    folder = tiny.build_model(tmp_path / "model", encoder=tiny.build_pair_encoder(tmp_path / "encoder"), spec=spec)
    rows = task_cases.pairs(60).rename_columns({"question": "q"})
    done = tl.optimize(folder, rows, text="q", runtimes=["varlen", "onnx"], engine=ONE, budget="10min")
    said = verdicts(done)
    assert said["varlen"].startswith(("agrees", "chosen"))
    assert said["onnx"].startswith("refused: it has no input for token types")
    (varlen,) = (one for one in done.candidates if one.runtime == "varlen")
    assert (varlen.agreement, varlen.metric) == (1.0, "accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_of_two_columns", "text_and_numbers"])
def test_several_columns_and_a_task_of_ones_own(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    case = task_cases.CASES[name]
    runs.succeed(tmp_path / "run", case.sections(tmp_path, tiny_bert, max_steps=2), task=case.task)
    given = {} if case.task is None else {"task": case.task}
    done = tl.optimize(
        tmp_path / "run" / "model", case.table(60), runtimes=["varlen"], engine=ONE, budget="10min", **given
    )
    said = verdicts(done)
    if case.task is None:
        assert said["varlen"].startswith(("agrees", "chosen"))
    else:
        assert said["varlen"].startswith("refused: The runtime 'varlen' cannot run text_and_numbers")
        assert done.runtime == "eager"


@pytest.mark.slow
def test_several_processes_are_measured_at_once(model: Path) -> None:
    done = tl.optimize(model, tiny.reviews(700), runtimes=["eager"], engine=tl.Local(processes=2), rows=520)
    (eager,) = done.candidates
    assert eager.processes == 2
    assert eager.threads == int(os.environ.get("OMP_NUM_THREADS", max(1, cores() // 2)))
    assert eager.rows == 520, "each had half of them"


@pytest.mark.slow
def test_a_hang_costs_the_budget_and_no_more(model: Path) -> None:
    done = tl.optimize(model, tiny.reviews(40), runtimes=[rivals.hanging], engine=ONE, budget="20s")
    # On a machine so slow that eager takes the 20 s, nothing else is tried.
    assert verdicts(done)["hanging"].startswith(("hung: no result", "not tried (budget)"))
    assert done.runtime == "eager"


@pytest.mark.slow
def test_what_the_budget_does_not_reach_is_named(model: Path) -> None:
    done = tl.optimize(model, tiny.reviews(40), runtimes=[rivals.remembering], engine=ONE, budget=0.001)
    assert verdicts(done) == {"eager": "chosen", "remembering": "not tried (budget)"}


@pytest.mark.slow
def test_the_command_prints_a_line_per_candidate_or_json(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(tiny.reviews(40), tmp_path / "sample.parquet")
    words = ["optimize", str(model), "--sample", str(tmp_path / "sample.parquet"), "--runtimes", "eager"]
    assert main([*words, "--processes", "1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["runtime", "threads", "batch"]
    assert lines[1].split()[0] == "eager"
    assert lines[1].endswith("  chosen")
    assert lines[-1].startswith(f"predict will use eager for {model}")
    assert main([*words, "--processes", "1", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told.keys() == {"runtime", "batch_tokens", "threads", "rows_per_s", "tokens_per_s", "ratio", "candidates"}
    assert told["candidates"][0]["runtime"] == "eager"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": "soon"}, UsageError, "budget: expected a length of time"),
        ({"max_drop": -1}, UsageError, "shares from 0 to 1"),
        ({"rows": 0}, UsageError, "rows must be 1 or more"),
        ({"runtimes": ["eagre"]}, UsageError, "Did you mean 'eager'"),
        ({"text": "txt"}, TableError, "no text column 'txt'"),
        ({"label": "stars"}, TableError, "no column 'stars'"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(model: Path, options: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        tl.optimize(model, tiny.reviews(10), **options)


def test_a_folder_that_is_not_the_users_own_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    with pytest.raises(UsageError, match=r"snapshot in the cache of the Hugging Face Hub .*\(cp -rL"):
        tl.optimize(snapshot, tiny.reviews(10))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written"):
        tl.optimize(model, tiny.reviews(10))


def test_a_model_that_eager_cannot_run_has_no_reference(model: Path) -> None:
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(TorchlakeError, match="eager, the reference of all others"):
        tl.optimize(model, tiny.reviews(10), runtimes=[], engine=ONE)


# processes that end badly


@pytest.mark.parametrize(
    ("work", "deadline_s", "said"),
    [
        (rivals.die, 60.0, "crashed: Segmentation fault, in die (rivals.py:"),
        (rivals.hang, 0.3, "hung: no result in the remaining 0 s, in wait (threading.py:"),
        (rivals.one_of_two_dies, 60.0, "crashed: its process died without a traceback"),
    ],
)
def test_a_process_that_ends_badly_is_an_answer(work, deadline_s: float, said: str, tmp_path: Path) -> None:
    stopped = run_guarded(tl.Local(), work, tmp_path, 2, deadline_s)
    assert isinstance(stopped, Stopped)
    assert stopped.verdict.startswith(said)


def test_processes_that_end_well_give_what_they_have(tmp_path: Path) -> None:
    assert sorted(run_guarded(tl.Local(), partial(pow, 2), tmp_path, 2, 60.0)) == [1, 2]


# agreement

ONE_HOT = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]


def test_agreement_of_one_class_a_row() -> None:
    reference = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]], dtype=np.float32)
    ours = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.4, 0.6]], dtype=np.float32)
    found = compare(ours, reference, np.array([0, 1, 0, 0]), tiny.SPEC)
    assert (found.rows, found.failed, found.agreement, found.metric) == (4, 0, 0.75, "accuracy")
    assert found.difference == pytest.approx(0.2)
    assert found.change == -0.25
    assert found.drop == 0.25
    assert -1 <= found.change_low <= -0.25 <= found.change_high <= 0
    assert outside(found, min_agreement=0.75, max_drop=0.25) is None
    assert "75.00% of the predictions agree" in str(outside(found, min_agreement=0.76, max_drop=0.25))
    assert "accuracy is worse by 0.2500" in str(outside(found, min_agreement=0.75, max_drop=0.24))


def test_a_row_that_fails_is_outside_and_so_is_what_is_undefined() -> None:
    ours = ONE_HOT.copy()
    ours[2] = np.nan
    found = compare(ours, ONE_HOT, None, tiny.SPEC)
    assert (found.failed, found.agreement, found.metric) == (1, 0.75, None)
    assert outside(found, min_agreement=0.0, max_drop=1.0) == "1 of 4 rows failed"
    nothing = replace(found, failed=0, agreement=float("nan"), difference=float("nan"))
    assert outside(nothing, min_agreement=0.0, max_drop=1.0) is not None
    unknown = replace(found, failed=0, agreement=1.0, difference=0.1, drop=float("nan"))
    assert outside(unknown, min_agreement=0.0, max_drop=1.0) is not None


def test_the_same_answers_are_inside_whatever_is_asked() -> None:
    found = compare(ONE_HOT + np.float32(5e-4), ONE_HOT, None, tiny.SPEC)
    assert outside(replace(found, agreement=0.5), min_agreement=1.0, max_drop=0.0) is None


def test_rows_that_eager_cannot_score_are_not_compared() -> None:
    reference = ONE_HOT.copy()
    reference[0] = np.nan
    assert compare(ONE_HOT, reference, None, tiny.SPEC).rows == 3


def test_agreement_of_several_labels_a_row() -> None:
    spec = tiny.spec_for("multi_label", ("a", "b"))
    ours = ONE_HOT.copy()
    ours[0] = [1, 1]
    found = compare(ours, ONE_HOT, ONE_HOT, spec)
    assert (found.agreement, found.metric) == (0.75, "micro_f1")
    assert found.change == pytest.approx(8 / 9 - 1)
    assert found.drop == pytest.approx(1 - 8 / 9)


def test_agreement_of_numbers_is_in_standard_deviations() -> None:
    spec = tiny.spec_for("regression", ())
    targets = np.array([0.0, 10.0, 20.0, 30.0], dtype=np.float32)
    reference = targets[:, None].copy()
    ours = reference + np.array([[0.0], [0.0], [0.1], [5.0]], dtype=np.float32)
    found = compare(ours, reference, targets, spec)
    spread = float(targets.std())
    assert (found.agreement, found.metric) == (0.75, "rmse")
    assert found.difference == pytest.approx(5 / spread)
    assert found.drop == pytest.approx(found.change / spread)
    assert found.change > 0


# the sample


def table(good: int, bad: int) -> pa.Table:
    """Texts of 1 to n words, all of them different, sorted by label."""
    texts = [f"{label} {number} " + "word " * number for label, n in (("g", good), ("b", bad)) for number in range(n)]
    return pa.table({"text": texts, "label": ["good"] * good + ["bad"] * bad})


def test_the_sample_has_the_tables_proportions() -> None:
    sample = draw_sample(table(300, 100), tiny.SPEC, label=None, rows=40)
    targets = sample.targets
    assert targets is not None
    assert len(sample.rows) == len(targets) == 40
    assert (targets == 1).sum() == 30, "three in four are good"
    lengths = np.array([len(text) for text in sample.rows["text"].to_pylist()])[targets == 1]
    whole = np.array([len(text) for text in table(300, 0)["text"].to_pylist()])
    assert np.median(lengths) == pytest.approx(np.median(whole), rel=0.05)
    assert (lengths.min() < np.quantile(whole, 0.05), lengths.max() > np.quantile(whole, 0.95)) == (True, True)


def test_calibration_rows_are_other_rows() -> None:
    sample = draw_sample(table(300, 100), tiny.SPEC, label=None, rows=1000)
    assert (len(sample.rows), len(sample.calibration)) == (320, 80), "a fifth, in a small table"
    assert not set(sample.rows["text"].to_pylist()) & set(sample.calibration["text"].to_pylist())
    many = draw_sample(table(1500, 500), tiny.SPEC, label=None, rows=1000)
    assert (len(many.rows), len(many.calibration)) == (1000, 200)
    assert not set(many.rows["text"].to_pylist()) & set(many.calibration["text"].to_pylist())


def test_the_sample_is_the_same_every_time_and_in_every_format(tmp_path: Path) -> None:
    rows = table(90, 60)
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=40)
    pyarrow.csv.write_csv(rows, tmp_path / "t.csv")
    samples = [
        draw_sample(source, tiny.SPEC, label=None, rows=50)
        for source in (rows, tmp_path / "t.parquet", tmp_path / "t.csv")
    ]
    assert samples[0].rows == samples[1].rows == samples[2].rows
    assert samples[0].calibration == samples[1].calibration


def test_files_may_differ_in_columns_that_are_not_read(tmp_path: Path) -> None:
    for name, other in (("a", 1), ("b", "one")):
        rows = table(20, 10)
        pq.write_table(rows.append_column("other", pa.array([other] * 30)), tmp_path / f"{name}.parquet")
    assert len(draw_sample(tmp_path, tiny.SPEC, label=None, rows=1000).rows) > 1


def test_a_large_table_is_read_in_a_few_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SAMPLED_CHUNKS", 10)
    monkeypatch.setattr(chunks, "SAMPLED_CHUNK_ROWS", 10)
    rows = 2_000
    pq.write_table(pa.table({"text": [f"row {row}" for row in range(rows)]}), tmp_path / "t.parquet")
    read: list[int] = []
    real = chunks.ChunkReader.read
    monkeypatch.setattr(chunks.ChunkReader, "read", lambda self, one: read.append(one.first_row) or real(self, one))
    sample = draw_sample(tmp_path / "t.parquet", tiny.SPEC, label=None, rows=1000)
    assert len(sample.rows) + len(sample.calibration) == len(read) * 10 == 100
    assert read == sorted(read)
    gaps = np.diff([0, *read, rows])
    assert gaps.max() < 3 * rows / len(read), "spread over the whole table"


def test_rows_that_lack_an_input_are_left_out() -> None:
    spec = replace(tiny.SPEC, text="question", text_pair="answer")
    rows = pa.table({"question": ["a", None, "b", "c"], "answer": ["d", "e", " ", "f"], "other": [1, 2, 3, 4]})
    sample = draw_sample(rows, spec, label=None, rows=10)
    assert sample.rows.column_names == sample.calibration.column_names == ["question", "answer"]
    assert sorted([*sample.rows["question"].to_pylist(), *sample.calibration["question"].to_pylist()]) == ["a", "c"]
    with pytest.raises(DataError, match="no row with a value in 'question', 'answer'"):
        draw_sample(rows.slice(1, 2), spec, label=None, rows=10)


def test_rows_without_a_text_or_a_label_are_left_out() -> None:
    rows = pa.table(
        {"text": ["fine", None, "  ", "dull", "lovely", "awful"], "label": ["good", "bad", "bad", None, "good", "bad"]}
    )
    sample = draw_sample(rows, tiny.SPEC, label=None, rows=10)
    assert sorted([*sample.rows["text"].to_pylist(), *sample.calibration["text"].to_pylist()]) == [
        "awful",
        "fine",
        "lovely",
    ]
    with pytest.raises(DataError, match="no row with a value in 'text'"):
        draw_sample(pa.table({"text": pa.array([None, ""], pa.string())}), tiny.SPEC, label=None, rows=10)


def test_labels_of_another_kind_are_not_used_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    rows = pa.table({"text": ["fine", "dull"], "label": ["superb", "bad"]})
    with caplog.at_level(logging.WARNING):
        assert draw_sample(rows, tiny.SPEC, label=None, rows=10).targets is None
    assert "'superb'" in caplog.text
    with pytest.raises(DataError, match="'superb'"):
        draw_sample(rows, tiny.SPEC, label="label", rows=10)


def test_a_single_row_is_a_sample() -> None:
    sample = draw_sample(pa.table({"text": ["fine"]}), tiny.SPEC, label=None, rows=10)
    assert (len(sample.rows), len(sample.calibration), sample.targets) == (1, 0, None)


@pytest.mark.parametrize(
    ("spec", "labels", "shape"),
    [
        (tiny.spec_for("multi_label", ("a", "b")), [["a"], ["a", "b"], [], ["b"]] * 5, (16, 2)),
        (tiny.spec_for("regression", ()), [0.5 * row for row in range(20)], (16,)),
    ],
)
def test_targets_of_every_problem(spec, labels: list, shape: tuple[int, ...]) -> None:
    rows = pa.table({"text": [f"row {row}" for row in range(20)], "label": labels})
    sample = draw_sample(rows, spec, label=None, rows=100)
    assert sample.targets is not None
    assert sample.targets.shape == shape
