"""runtime.json: what predict makes of it, and of a runtime that is asked for by name."""

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.processes.hardware import CpuClass
from torchlake.runtimes import _exports, eager
from torchlake.scoring.options.job import products_of, say_if_optimizing_pays
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.runtime_choice import chosen, requested, write_choice
from torchlake.scoring.scorer import Scorer

ROWS = tiny.reviews(12).select(["text"])
TASK = "text_classification"


@pytest.fixture
def model(tiny_bert: Path, tmp_path: Path) -> Path:
    return tiny.build_model(tmp_path / "model", encoder=tiny_bert)


def choose(folder: Path, runtime: str = "eager", **changes) -> None:
    """As `optimize` would write it."""
    value = {"runtime": runtime, "batch_tokens": 333, "threads": 1, "device": "cpu", "sample_rows": 5, "measured": []}
    write_choice(folder, task="text_classification", machine={}, **{**value, **changes})


def cpu() -> str:
    return "cpu"


def test_the_default_is_varlen_where_it_is_exact(model: Path, tiny_gpt2: Path, tmp_path: Path) -> None:
    choice = chosen(model, TASK, cpu)
    assert (choice.runtime, choice.batch_tokens, choice.threads, choice.why) == ("varlen", None, None, "default")
    assert chosen(model, TASK, lambda: "cuda").runtime == "eager", "it computes in bf16 there"
    assert chosen(tiny_gpt2, "text_generation", cpu).runtime == "eager"
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert chosen(tmp_path, TASK, cpu).runtime == "eager"


def test_a_worker_that_finds_a_gpu_runs_the_default_as_eager(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of a cluster may have no GPU where its workers have one."""
    settings, _, _ = scoring_settings(model, None, {}, text=None)
    loaded = []
    monkeypatch.setattr("torchlake.scoring.scorer.device", lambda: "cuda")
    monkeypatch.setattr(eager, "load", lambda folder, spec, *, device: loaded.append(device))
    assert (Scorer(settings=settings).runtime, loaded) == ("eager", ["cuda"])


def test_predict_uses_the_choice_and_names_it(model: Path, tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "in.parquet")
    choose(model)
    record = tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", engine=tiny.Here()).record
    provenance = record["provenance"]
    assert (provenance["runtime"], provenance["runtime_by"]) == ("eager", "runtime.json")
    assert (provenance["batch_tokens"], provenance["threads"]) == (333, 1)
    assert record["fingerprint"]["batch_tokens"] == 333
    given = tl.predict(model, tmp_path / "in.parquet", tmp_path / "other", batch_tokens=64, engine=tiny.Here()).record
    assert given["fingerprint"]["batch_tokens"] == 64
    named = tl.predict(model, tmp_path / "in.parquet", tmp_path / "third", runtime="eager", engine=tiny.Here()).record
    assert (named["provenance"]["runtime_by"], named["provenance"]["batch_tokens"]) == ("requested", None)
    assert tl.predict(model, ROWS, engine=tiny.Here()).num_rows == len(ROWS)


def test_threads_of_the_choice_reach_the_engine(model: Path, tmp_path: Path) -> None:
    class Asked(tiny.Here):
        def run_chunks(self, make_worker, chunks, **options):
            seen.append(options["resources"].threads)
            return super().run_chunks(make_worker, chunks)

    seen: list[int | None] = []
    pq.write_table(ROWS, tmp_path / "in.parquet")
    choose(model, threads=2)
    tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", engine=Asked())
    assert seen == [2]


def test_a_changed_model_ignores_the_choice_with_a_warning(
    model: Path, tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choose(model)
    other = tiny.build_model(tmp_path / "other", encoder=tiny_bert, seed=7)
    (other / "runtime.json").write_bytes((model / "runtime.json").read_bytes())
    pq.write_table(ROWS, tmp_path / "in.parquet")
    with caplog.at_level(logging.WARNING):
        record = tl.predict(other, tmp_path / "in.parquet", tmp_path / "out", engine=tiny.Here()).record
    assert record["provenance"]["runtime_by"] == "default"
    assert record["provenance"]["batch_tokens"] is None
    assert "other weights" in caplog.text
    assert "torchlake optimize" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"runtime": "warp"}, "here is no runtime 'warp'"),
        ({"runtime": 7}, "runtime is not a string"),
        ({"batch_tokens": 0}, "batch_tokens is not an integer"),
        ({"threads": True}, "threads is not an integer"),
        ({"format": 2}, "this version reads format 1"),
        ({"device": "cuda"}, "measured on cuda"),
    ],
)
def test_a_choice_that_does_not_hold_here_costs_speed_only(
    model: Path, caplog: pytest.LogCaptureFixture, spoil: dict, said: str
) -> None:
    choose(model)
    value = json.loads((model / "runtime.json").read_text())
    (model / "runtime.json").write_text(json.dumps({**value, **spoil}))
    with caplog.at_level(logging.WARNING):
        assert chosen(model, TASK, cpu).why == "default"
    assert said in caplog.text


def test_a_torn_choice_costs_speed_only(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    choose(model)
    (model / "runtime.json").write_text('{"format": 1, ')
    assert chosen(model, TASK, cpu).why == "default"
    assert "not valid JSON" in caplog.text


class Fake:
    """A runtime as a module, found by plugins under the name "fake": eager, with an export that is one file."""

    TOLERANCE = 0.0
    TOKEN_TYPES = True

    def __init__(self, *, calibrated: bool = False, never: dict[str, str] | None = None, why: str | None = None):
        self.never, self.CALIBRATED, self.why = never or {}, calibrated, why
        self.tasks = () if TASK in self.never else (TASK,)
        self.prepared: list[int] = []
        self.load = eager.load

    def refusal(self, folder: Path) -> str | None:
        return self.why

    def prepare(self, folder: Path, spec: TaskSpec, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.prepared.append(sum(len(ids) for ids, _ in batches))
        with _exports.making(folder, "fake", rows=0, versions={"fake": "1"}) as export:
            (export / "fake.json").write_text("{}")


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch):
    """`plug_in(runtime)` puts it among the runtimes, in this process."""
    real_load, real_names = plugins.load, plugins.names

    def arm(runtime: Fake) -> Fake:
        monkeypatch.setattr(plugins, "load", lambda kind, name: runtime if name == "fake" else real_load(kind, name))
        monkeypatch.setattr(
            plugins, "names", lambda kind: [*real_names(kind), *(["fake"] if kind == "runtimes" else [])]
        )
        return runtime

    return arm


def test_a_runtime_that_cannot_is_refused_before_any_work(model: Path, plug_in) -> None:
    plug_in(Fake(why="the library 'fake' is not installed: pip install fake"))
    with pytest.raises(UsageError, match=r"The runtime 'fake' cannot run .*model: the library 'fake' is not installed"):
        requested(model, TASK, "fake")
    plug_in(Fake(never={TASK: "it cannot read"}))
    with pytest.raises(UsageError, match="cannot run text_classification: it cannot read"):
        tl.predict(model, ROWS, runtime="fake")


def test_a_chosen_runtime_that_cannot_any_more_is_passed_over(
    model: Path, plug_in, caplog: pytest.LogCaptureFixture
) -> None:
    choose(model, "fake")
    plug_in(Fake(why="the library 'fake' is not installed"))
    assert chosen(model, TASK, cpu).runtime == "varlen"
    assert "cannot run here: the library 'fake' is not installed" in caplog.text
    caplog.clear()
    plug_in(Fake())
    assert chosen(model, TASK, cpu).runtime == "varlen"
    assert "missing, damaged or made from other weights" in caplog.text


def test_an_export_is_made_once_and_stands_in_the_fingerprint(
    model: Path, plug_in, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = plug_in(Fake())
    pq.write_table(ROWS, tmp_path / "in.parquet")
    with caplog.at_level(logging.INFO):
        first = tl.predict(model, tmp_path / "in.parquet", tmp_path / "1", runtime="fake", engine=tiny.Here()).record
    assert "done once" in caplog.text
    second = tl.predict(model, tmp_path / "in.parquet", tmp_path / "2", runtime="fake", engine=tiny.Here()).record
    assert fake.prepared == [0], "made the first time, without rows"
    assert first["fingerprint"]["export"] == second["fingerprint"]["export"] == _exports.identity(model, "fake")
    choose(model, "fake")
    assert chosen(model, TASK, cpu).runtime == "fake"
    assert tl.predict(model, ROWS, engine=tiny.Here()).num_rows == len(ROWS)


def test_a_calibrated_runtime_needs_the_users_rows_first(model: Path, plug_in, tmp_path: Path) -> None:
    fake = plug_in(Fake(calibrated=True))
    pq.write_table(ROWS, tmp_path / "in.parquet")
    for table, output in ((ROWS, None), (tmp_path / "in.parquet", tmp_path / "out")):
        with pytest.raises(UsageError, match=r"torchlake optimize .* --sample TABLE --runtimes fake"):
            tl.predict(model, table, output, runtime="fake", engine=tiny.Here())
    assert fake.prepared == []
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [True, False])
def test_optimize_makes_exports_with_rows_of_the_sample(
    model: Path, plug_in, monkeypatch: pytest.MonkeyPatch, calibrated: bool
) -> None:
    """In this process, where the fake is: a calibration is made anew each time, an export once."""
    for name in ("enable", "disable"):
        monkeypatch.setattr(f"faulthandler.{name}", lambda **_: None)  # pytest has its own
    fake = plug_in(Fake(calibrated=calibrated))
    for _ in range(2):
        done = tl.optimize(model, tiny.reviews(50), runtimes=["fake"], engine=tiny.Here(), budget="10min")
        assert {one.runtime: one.agreement for one in done.candidates} == {"eager": 1.0, "fake": 1.0}
        assert json.loads((model / "runtime.json").read_text())["runtime"] == done.runtime
    assert fake.prepared == ([10, 10] if calibrated else [10])
    assert _exports.current(model, "fake") is not None
    one_row = tl.optimize(model, tiny.reviews(1), runtimes=["fake"], engine=tiny.Here(), budget="10min")
    verdict = next(one.verdict for one in one_row.candidates if one.runtime == "fake")
    assert verdict.startswith("not tried: the sample has no rows") == calibrated


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, library: str, rates: dict[str, float]) -> None:
    here = CpuClass(name=name, products={"few": library, "many": library}, rates=rates)
    for place in ("options.job", "table_work"):
        monkeypatch.setattr(f"torchlake.scoring.{place}.cpu_class", lambda: here)


def test_an_output_keeps_the_products_that_it_began_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(ROWS, tmp_path / "in" / "1.parquet")
    on_a_cpu(monkeypatch, "one", "torch", {})
    first = tl.predict(model, tmp_path / "in", tmp_path / "out", engine=tiny.Here()).record
    assert first["fingerprint"]["products"] == {"few": "torch", "many": "torch"}
    assert [each["cpu"] for each in first["environments"]] == ["one"]
    pq.write_table(ROWS.slice(0, 5), tmp_path / "in" / "2.parquet")
    on_a_cpu(monkeypatch, "other", "onednn", {})
    scored = tl.predict(model, tmp_path / "in", tmp_path / "out", accept_new_input=True, engine=tiny.Here())
    second = scored.record
    assert (scored.rows_out, second["fingerprint"]) == (17, first["fingerprint"])
    assert [each["cpu"] for each in second["environments"]] == ["one", "other"]
    assert "matrix products by torch's default; it keeps them here, where the CPU's class (other)" in caplog.text
    fresh = tl.predict(model, tmp_path / "in", tmp_path / "new", engine=tiny.Here()).record
    assert fresh["fingerprint"]["products"] == {"few": "onednn", "many": "onednn"}
    other = tl.predict(model, tmp_path / "in", tmp_path / "mine", runtime=fake_runtime, engine=tiny.Here()).record
    assert "products" not in other["fingerprint"], "a function has its own"


def test_an_output_of_a_version_without_products_is_continued(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, "one", "onednn", {})
    settings, _, _ = scoring_settings(model, None, {}, text=None)
    earlier = {"model": settings.model_hash, "runtime": "varlen"}
    assert products_of(settings, earlier) is None
    assert products_of(settings, {**earlier, "model": "other"}) == {"few": "onednn", "many": "onednn"}
    assert products_of(settings, {}) == {"few": "onednn", "many": "onednn"}


@pytest.mark.parametrize(
    ("rates", "rows", "why", "said"),
    [
        ({"openvino": 1.3, "onnx": 1.25}, 100_000, "default", True),
        ({"openvino": 1.3}, 99_999, "default", False),
        ({"openvino": 1.3}, 100_000, "requested", False),
        ({"openvino": 1.19, "openvino_int8": 3.0}, 100_000, "default", False),
        ({}, 100_000, "default", False),
    ],
    ids=["pays", "small", "requested", "not exact", "unknown"],
)
def test_a_large_table_says_where_optimizing_pays(
    rates: dict[str, float],
    rows: int,
    why: str,
    said: bool,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("openvino")
    on_a_cpu(monkeypatch, "one", "torch", rates)
    settings, _, choice = scoring_settings(model, None if why == "default" else "varlen", {}, text=None)
    say_if_optimizing_pays(choice, settings, rows)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == said
    assert not said or ("(one) 'openvino' is 1.3 times as fast" in lines[0] and "torchlake optimize" in lines[0])
    module = plugins.load("runtimes", "openvino")
    monkeypatch.setattr(module, "refusal", lambda folder: "the library is not installed")
    caplog.clear()
    say_if_optimizing_pays(choice, settings, rows)
    assert not caplog.records, "only what can run here is known to help"


def test_a_job_says_it_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openvino")
    on_a_cpu(monkeypatch, "one", "torch", {"openvino": 1.3})
    monkeypatch.setattr("torchlake.scoring.options.job.LARGE_ROWS", len(ROWS))
    pq.write_table(ROWS, tmp_path / "in.parquet")
    for _ in range(2):
        tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", engine=tiny.Here())
    assert [record.getMessage().count("torchlake optimize") for record in caplog.records] == [1]


def fake_runtime(folder: Path, spec: TaskSpec, *, device: str):
    return eager.load(folder, spec, device=device)
