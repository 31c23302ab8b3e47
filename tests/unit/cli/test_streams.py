"""Standard streams that are closed or on a full disk, and a current folder that is gone: no job is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchlake as tl

RUN = [sys.executable, "-m", "torchlake"]
COMMON = ("--key", "id", "--columns", "id")
full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


def shell(line: str, *words: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run torchlake in a shell that redirects its streams as in `line`."""
    command = ["sh", "-c", f'exec "$@" {line}', "sh", *RUN, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]}), path)
    return path


def ids(output: Path) -> list[int]:
    return tl.open(output).to_table()["id"].to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("line", ["<&- >&- 2>&-", pytest.param("2>/dev/full", marks=full)])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_needs_no_standard_streams(
    line: str, processes: int, tiny_model: Path, table: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = shell(line, "predict", tiny_model, table, output, *COMMON, "--processes", str(processes))
    assert done.returncode == 0
    assert ids(output) == [1, 2, 3]
    assert tl.verify(output).problems == []


@full
@pytest.mark.parametrize("words", ["version", "version --json", "schema", "schema --json", "--help", "predict --help"])
def test_a_result_that_does_not_fit_on_the_disk_is_an_error(words: str) -> None:
    done = shell(">/dev/full", *words.split())
    assert done.returncode == 74
    assert done.stderr.startswith("error: "), done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@full
def test_an_error_keeps_its_exit_code_if_standard_error_is_full() -> None:
    done = shell("2>/dev/full", "verify", "none", "--json")
    assert done.returncode == 65
    assert json.loads(done.stdout)["error"]["exit_code"] == 65
    assert shell(">/dev/full", "verify", "none", "--json").returncode == 65


def test_results_are_written_when_only_the_other_streams_are_closed() -> None:
    assert json.loads(shell("<&- 2>&-", "version", "--json").stdout)


def test_a_message_that_is_not_unicode_keeps_its_exit_code_if_standard_error_is_closed() -> None:
    for words, code in ((["train", b"job\xff.yaml"], 65), (["verify", b"--nonsense\xff"], 64)):
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *RUN, *words, "--json"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == json.loads(done.stdout)["error"]["exit_code"] == code


def test_a_python_without_standard_error_shows_no_progress(tiny_model: Path, table: Path, tmp_path: Path) -> None:
    code = "import sys, torchlake as tl; sys.stderr = None; tl.predict(*sys.argv[1:], key='id')"
    words = [sys.executable, "-c", code, tiny_model, table, tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, check=True)
    assert done.stdout == done.stderr == b""


def test_a_current_folder_that_was_removed_is_named(table: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    line = f'cd "{gone}" && rmdir "{gone}" && exec "$@"'
    code = "import sys; from torchlake.cli.main import main; sys.exit(main())"  # -m looks into the folder itself

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        gone.mkdir()
        command = ["sh", "-c", line, "sh", sys.executable, "-c", code, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("predict", "model", str(table), "out")
    assert done.returncode == 64
    assert done.stderr == "error: the current folder was removed. Change to another one, and run it again.\n"
    for words in (["version", "--json"], ["--version"], ["schema"], ["predict", "--help"]):  # they read no folder
        assert run(*words).returncode == 0


def test_a_name_that_is_not_utf8_is_refused(tiny_model: Path, table: Path, tmp_path: Path) -> None:
    for words in ((tiny_model, table, b"out\xff"), (tiny_model, b"in\xff", "out"), (b"model\xff", table, "out")):
        done = subprocess.run([*RUN, "predict", *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 64
        assert "is not UTF-8. Rename it, or run Python in UTF-8 mode (PYTHONUTF8=1)." in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["in.parquet"]
