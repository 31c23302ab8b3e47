"""Writing datasets of the Hugging Face Hub. What every sink keeps is in tests/conformance/test_sinks.py."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

import hub_repositories
from hub_repositories import client_settings, set_faults
from sink_jobs import job, source_rows, write_source
from sweeps import sweep
from torchlake.errors import OutputError, StorageError, UsageError
from torchlake.outputs.find import open as open_output
from torchlake.tables.verification.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
"huggingface_hub's own upload, where hf_xet is not used."
NAME = "hf://datasets/me/scored"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with hub_repositories.serving() as address:
        yield address


@pytest.fixture
def hub(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the Hub; each test has a repository of its own, `repo`."""
    for name, value in client_settings(server, str(tmp_path / "home")).items():
        monkeypatch.setattr(constants, name, value)
    return server


@pytest.fixture
def output(tmp_path: Path) -> str:
    return f"hf://datasets/me/{tmp_path.name.replace('_', '-')}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", source_rows(7))


@pytest.fixture
def more(tmp_path: Path) -> Path:
    return write_source(tmp_path / "more.parquet", source_rows(4, first=100))


def files(address: str, output: str) -> dict[str, bytes]:
    """The files of the newest commit, read by plain requests."""
    repo = output.removeprefix("hf://datasets/")
    listed = json.loads(urllib.request.urlopen(f"{address}/api/datasets/{repo}/tree/main?recursive=true").read())
    names = [one["path"] for one in listed]
    return {name: urllib.request.urlopen(f"{address}/datasets/{repo}/resolve/main/{name}").read() for name in names}


def ids(address: str, output: str) -> list[int]:
    parts = [value for name, value in files(address, output).items() if name.endswith(".parquet")]
    return sorted(one for part in parts for one in pq.read_table(pa.BufferReader(part))["id"].to_pylist())


def test_rows_are_written_in_one_commit_and_replaced(hub: str, output: str, source: Path, more: Path) -> None:
    assert job(source, output) == 4
    assert ids(hub, output) == [*range(7)]
    repo = output.removeprefix("hf://datasets/")
    before = HfApi().dataset_info(repo).sha
    assert job(source, output) == 0
    assert HfApi().dataset_info(repo).sha == before
    assert sorted(open_output(output).to_table()["id"].to_pylist()) == [*range(7)]
    with pytest.raises(OutputError, match="has rows that this job did not write"):
        job(more, output)
    assert job(more, output, mode="overwrite", target_file_size=1 << 20) == 2
    assert ids(hub, output) == [100, 101, 102, 103]
    assert job(more, output, mode="overwrite") == 0
    names = sorted(name.partition("/")[0] for name in files(hub, output))
    assert names == [".gitattributes", ".torchlake", ".torchlake", "data"]


def test_a_folder_of_a_dataset(hub: str, output: str, source: Path, more: Path, tmp_path: Path) -> None:
    for one, folder in ((source, "a/b"), (more, "c")):
        assert job(one, f"{output}/{folder}") > 0
    assert ids(hub, output) == [*range(7), 100, 101, 102, 103]
    assert open_output(f"{output}/c").count_rows() == 4
    shutil.rmtree(tmp_path / "home")
    done = verify(f"{output}/a/b")
    assert (done.rows_out, done.problems) == (7, [])


def test_another_machine_knows_the_commit_and_verifies_it(hub: str, output: str, source: Path, tmp_path: Path) -> None:
    job(source, output)
    shutil.rmtree(tmp_path / "home")
    assert job(source, output) == 0
    shutil.rmtree(tmp_path / "home")
    done = verify(output)
    assert (done.rows_out, done.problems) == (7, [])


@pytest.mark.parametrize("status", sweep([412, 409, 500, 502, 504], quick={412, 500}))
@pytest.mark.parametrize("made", ["made", "lost"])
def test_an_unclear_answer_is_looked_up(hub: str, output: str, source: Path, status: int, made: str) -> None:
    set_faults(hub, (status, made))
    assert job(source, output) == 4
    assert ids(hub, output) == [*range(7)]
    assert job(source, output) == 0


def test_a_commit_that_is_refused_is_an_error_and_work_is_kept(hub: str, output: str, source: Path) -> None:
    set_faults(hub, (403, "lost"))
    with pytest.raises(StorageError, match="the Hub refused the commit: "):
        job(source, output)
    assert ids(hub, output) == []
    assert job(source, output) == 0
    assert ids(hub, output) == [*range(7)]


def test_a_foreign_commit_in_between(hub: str, output: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, original, calls = output.removeprefix("hf://datasets/"), HfApi.create_commit, []

    def create_commit(self: HfApi, *arguments: Any, **options: Any) -> Any:
        calls.append(options.get("parent_commit"))
        if len(calls) == 1:
            card = CommitOperationAdd("notes.txt", b"by another")
            original(self, repo, [card], commit_message="notes", repo_type="dataset")
        return original(self, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    assert job(source, output) == 4
    assert len({*calls}) == 2
    assert files(hub, output)["notes.txt"] == b"by another"
    assert ids(hub, output) == [*range(7)]


def test_what_cannot_be_written_is_refused_before_any_row(hub: str, source: Path) -> None:
    with pytest.raises(
        OutputError, match=r"no such dataset or branch.*hf repos create missing/scored --repo-type dataset"
    ):
        job(source, "hf://datasets/missing/scored")
    with pytest.raises(OutputError, match="no such dataset or branch"):
        job(source, f"{NAME}@no-branch")
    for options in ({"mode": "append"}, {"partition_by": ["p"]}):
        with pytest.raises(UsageError, match="for Delta and Iceberg tables"):
            job(source, NAME, **options)
    with pytest.raises(UsageError, match="write a dataset as hf://datasets/OWNER/NAME"):
        job(source, "hf://me/scored")


def test_the_hub_that_does_not_answer_is_an_error(hub: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="offline mode is enabled"):
        job(source, NAME)
