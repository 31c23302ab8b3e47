"""What the operating system refuses on a path that the user named: one sentence and an exit status, no traceback."""

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.cli.console import explain_os_error
from torchlake.cli.main import main
from torchlake.errors import DataError, OutputError, StorageError

DATA, OUTPUT, USAGE, STORAGE = 65, 73, 64, 74
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model, a table, a job, a space; and with paths that nobody can use, not even root."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    Path("base").symlink_to(model.parent / "encoder")
    pq.write_table(tiny.reviews(12), "t.parquet")
    Path("job.yaml").write_text("data: {train: t.parquet, validation: {fraction: 0.5}}\nmodel: {base: base}\n")
    Path("space.yaml").write_text("train.epochs: {low: 1, high: 2}\n")
    Path("loop").symlink_to("loop")
    Path("file").write_text("x")
    Path("folder").mkdir()
    return tmp_path


LONG = "x" * 300
UNUSABLE = ("loop", "loop/inside", "file/inside", LONG, f"folder/{LONG}", "/proc/no/such", "/dev/full")
AS_TABLE = {
    "predict": (["predict", "model", "PATH", "out"], DATA),
    "evaluate": (["evaluate", "model", "PATH"], DATA),
    "optimize": (["optimize", "model", "--sample", "PATH"], DATA),
    "train": (["train", "job.yaml", "--set", "data.train=PATH", "--run", "run"], DATA),
    "plan": (["plan", "job.yaml", "--set", "data.train=PATH"], DATA),
}
AS_MODEL = {
    "predict": (["predict", "PATH", "t.parquet", "out"], DATA),
    "evaluate": (["evaluate", "PATH", "t.parquet"], DATA),
    "optimize": (["optimize", "PATH", "--sample", "t.parquet"], DATA),
    "train": (["train", "job.yaml", "--set", "model.base=PATH", "--run", "run"], DATA),
}
AS_OUTPUT = {
    "predict": (["predict", "model", "t.parquet", "PATH", "--engine", "local"], OUTPUT),
    "train": (["train", "job.yaml", "--run", "PATH"], OUTPUT),
    "tune": (["tune", "job.yaml", "--space", "space.yaml", "--trials", "1", "--run", "PATH"], OUTPUT),
    "demo": (["demo", "--folder", "PATH"], OUTPUT),
    "report": (["report", "PATH"], DATA),
    "verify": (["verify", "PATH"], DATA),
}
AS_FILE = {
    "train": (["train", "PATH"], DATA),
    "plan": (["plan", "PATH"], DATA),
    "tune": (["tune", "PATH", "--space", "space.yaml", "--trials", "1"], DATA),
    "space": (["tune", "job.yaml", "--space", "PATH", "--trials", "1", "--run", "run"], DATA),
    "launch": (["launch", "PATH"], USAGE),
}
PLACES = {"table": AS_TABLE, "model": AS_MODEL, "output": AS_OUTPUT, "file": AS_FILE}


EVERY = (*UNUSABLE, "folder")
PATHS = [
    (place, command, path)
    for place, known in PLACES.items()
    for command in known
    for path in EVERY
    if (place, path) != ("output", "folder")  # an empty folder is an output
]


QUICK = [
    one
    for number, command in enumerate((place, command) for place, known in PLACES.items() for command in known)
    for shift in (0, 3)
    if (one := (*command, EVERY[(number + shift) % len(EVERY)])) in PATHS
]
"Each command with one or two of the paths, and each path with several commands."


def test_quick_cases_have_each_command_and_each_path() -> None:
    assert {one[:2] for one in QUICK} == {one[:2] for one in PATHS}
    assert {one[2] for one in QUICK} == {one[2] for one in PATHS}


@pytest.mark.parametrize(("place", "command", "path"), sweep(PATHS, quick=QUICK))
def test_a_path_that_cannot_be_used(
    here: Path, place: str, command: str, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words, status = PLACES[place][command]
    words = [word.replace("PATH", path) for word in words]
    assert_refused(words, {status, DATA}, capfd)


def assert_refused(words: list[str], statuses: set[int], capfd: pytest.CaptureFixture[str]) -> str:
    """The command ends with such a status, and with the error alone."""
    assert main(words) in statuses
    out, shown = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in shown
    assert "fault in torchlake" not in shown
    assert shown.splitlines()[-1].startswith("error: ")
    return shown


def test_a_folder_below_the_table_that_cannot_be_listed_is_not_left_out(here: Path, monkeypatch: Any) -> None:
    Path("tables/day=1").mkdir(parents=True)
    for folder in ("tables", "tables/day=1"):
        pq.write_table(tiny.reviews(3), f"{folder}/t.parquet")
    scandir = os.scandir

    def refusing(path: Any = ".") -> Any:
        if str(path).endswith("day=1"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"tables/day=1: Permission denied"):
        tl.predict("model", "tables", "out", engine=tiny.Here())


CLOSED = """
import json, sys
from torchlake.cli.main import main
try:
    open("closed.parquet", "rb")
    print("null")
except PermissionError:
    print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""


def without_privileges() -> None:
    """Before exec: root then has no more rights on files than their modes give their owner."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_path_without_permission(here: Path, model: Path) -> None:
    """As a user without rights on it: nothing is a fault in torchlake."""
    pq.write_table(tiny.reviews(3), "closed.parquet")
    tiny.build_model(here / "closed_weights", encoder=model.parent / "encoder")
    (here / "closed_weights" / "model.safetensors").chmod(0)
    for closed in ("closed.parquet", "closed.yaml"):
        Path(closed).touch()
        Path(closed).chmod(0)
    Path("closed").mkdir()
    Path("closed").chmod(0)
    Path("readonly").mkdir()
    Path("readonly").chmod(0o555)
    cases = {
        DATA: [
            *(
                with_path(AS_TABLE, path)
                for path in ("closed.parquet", "closed/t.parquet", "closed/*.parquet", "closed")
            ),
            *(with_path(AS_MODEL, path) for path in ("closed_weights", "closed", "closed/model")),
            *(
                [words]
                for words in (["train", "closed.yaml"], ["plan", "closed/job.yaml"], ["launch", "closed/job.py"])
            ),
            *([words] for words in (["report", "closed/run"], ["verify", "closed/out"])),
        ],
        OUTPUT: [
            [["predict", "model", "t.parquet", path], ["train", "job.yaml", "--run", path], ["demo", "--folder", path]]
            for path in ("closed/out", "readonly/out")
        ],
    }
    expected = [(status, words) for status, groups in cases.items() for group in groups for words in group]
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, json.dumps([words for _, words in expected])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        preexec_fn=without_privileges,
        capture_output=True,
        text=True,
        check=True,
    )
    Path("closed").chmod(0o755)
    statuses = json.loads(done.stdout.splitlines()[-1])
    if statuses is None:
        pytest.skip("the file system or the user knows no permissions")
    assert [*zip(statuses, [words for _, words in expected], strict=True)] == expected, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == len(expected)


def with_path(known: dict[str, tuple[list[str], int]], path: str) -> list[list[str]]:
    return [[word.replace("PATH", path) for word in words] for words, _ in known.values()]


def at(number: int, path: str | None, words: str = "") -> OSError:
    return OSError(number, words or os.strerror(number), path)


CASES: list[tuple[OSError, type[Exception] | None, str]] = [
    (at(errno.EACCES, "t.parquet"), DataError, "t.parquet: Permission denied. Change its permissions"),
    (at(errno.EACCES, "/somewhere/else"), DataError, "/somewhere/else: Permission denied"),
    (at(errno.EACCES, "folder/new"), OutputError, "folder/new: Permission denied"),
    (at(errno.EROFS, "out"), OutputError, "Name a path that can be written"),
    (at(errno.ENOSPC, "out/part"), StorageError, "bytes are free there"),
    (at(errno.ENAMETOOLONG, LONG * 9), DataError, f"{'x' * 300}...: File name too long. Name a shorter path."),
    (at(errno.ENOENT, "missing.parquet"), DataError, "missing.parquet: No such file or directory"),
    (at(errno.ENOENT, "no"), DataError, "no: No such file or directory"),
    (at(errno.ENOENT, "no/such/table/below"), DataError, "no/such/table/below: No such file or directory"),
    (at(errno.ENOENT, "in/the.job"), DataError, "in/the.job: No such file or directory"),
    (at(errno.EISDIR, "folder"), DataError, "folder: Is a directory. A file is expected there"),
    (at(errno.ENOTDIR, "file/below"), DataError, "A part of this path is a file"),
    (at(errno.EACCES, None, "Failed to open local file '/x'"), DataError, "Failed to open local file '/x'. Change its"),
    (at(errno.ENOENT, "/made/by/torchlake"), None, ""),
    (at(errno.ENOENT, "folder/made/by/torchlake"), None, ""),
    (at(errno.EISDIR, "/somewhere/else"), None, ""),
    (at(errno.EACCES, None), None, ""),
    (at(errno.ECONNREFUSED, None), None, ""),
    (OSError("of a library, without a number"), None, ""),
]


@pytest.mark.parametrize(("error", "kind", "shown"), CASES, ids=[str(error)[:60] for error, _, _ in CASES])
def test_which_errors_are_the_users(here: Path, error: OSError, kind: type[Exception] | None, shown: str) -> None:
    Path("named.yaml").write_text("data: {train: [in/the.job]}\n")
    words = ["predict", "no/such/table", "folder", "--key=missing.parquet", "file", "damaged.yaml", "named.yaml"]
    Path("damaged.yaml").write_text("data: {")
    found = explain_os_error(error, words)
    assert type(found) is (type(None) if kind is None else kind)
    assert shown in str(found)


def test_a_fault_of_ours_stays_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        Path("/made/by/torchlake").read_text()

    fault: Callable[..., Any] = lambda *_, **__: missing()  # noqa: E731
    monkeypatch.setattr("torchlake.tables.verification.verify.verify", fault)
    assert main(["verify", "out"]) == 70
    assert "fault in torchlake" in capfd.readouterr().err
