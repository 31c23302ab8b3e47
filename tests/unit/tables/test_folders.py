"""Folders that are written to do the same, in an object store and on file systems that only fsspec opens."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import LocalFileSystem

from torchlake.storage import folders, objects
from torchlake.storage.folders import Objects, objects_at

NUMBER = itertools.count()


@pytest.fixture(params=["s3", "memory", "hdfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """Return an empty folder; that of HDFS is opened by pyarrow, as HDFS is, but on this disk."""
    memory = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(objects, "_store", lambda url: memory)
    monkeypatch.setattr(objects, "PART", 7)
    if request.param == "hdfs":
        disk: Any = (ArrowFSWrapper(LocalFileSystem()), str(tmp_path / "hdfs"))
        monkeypatch.setattr(folders, "filesystem_of", lambda url: disk)
    return objects_at(f"{request.param}://lake/{next(NUMBER)}")


def test_a_write_with_a_condition_is_refused_if_it_does_not_hold(folder: Objects) -> None:
    assert folder.read("a/run.json") is None
    assert folder.replace("a/run.json", b"1", None, site="test")
    assert folder.replace("a/run.json", b"1", None, site="test"), "the answer to the first one may be lost"
    assert not folder.replace("a/run.json", b"2", None, site="test")
    first = folder.read("a/run.json")
    assert first is not None
    assert folder.replace("a/run.json", b"2", first, site="test")
    assert not folder.replace("a/run.json", b"3", first, site="test")
    folder.write("a/run.json", b"4", site="test")
    found = folder.read("a/run.json")
    assert found is not None
    assert found.content == b"4"
    assert found.modified >= first.modified
    folder.delete(["a/run.json"])
    assert not folder.replace("a/run.json", b"5", found, site="test")


@pytest.mark.parametrize("size", [0, 1, 7, 50])
def test_a_file_comes_back_as_it_was(folder: Objects, tmp_path: Path, size: int) -> None:
    content = bytes(range(size))
    (tmp_path / "there").write_bytes(content)
    folder.put_file("step/model", tmp_path / "there")
    (tmp_path / "here").write_bytes(b"something longer that was there before, of an earlier download")
    folder.download("step/model", tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == content
    with pytest.raises(FileNotFoundError):
        folder.download("step/nothing", tmp_path / "here")


def test_files_are_listed_below_a_folder_and_deleted_once(folder: Objects) -> None:
    assert folder.sizes() == {}
    for name in ("run.json", "step_1/a", "step_1/b/c", "step_10/d"):
        folder.write(name, name.encode(), site="test")
    assert folder.sizes() == {"run.json": 8, "step_1/a": 8, "step_1/b/c": 10, "step_10/d": 9}
    assert folder.sizes("step_1") == {"step_1/a": 8, "step_1/b/c": 10}
    folder.delete(["step_1/a", "step_1/nothing", "step_1/b/c"])
    folder.delete(["step_1/a"])
    assert sorted(folder.sizes()) == ["run.json", "step_10/d"]


def test_storages_with_conditions_have_their_own_client() -> None:
    kinds = {name: type(objects_at(f"{name}://lake/x")).__name__ for name in ("s3", "gs", "abfss", "az", "hdfs", "adl")}
    assert [*kinds.values()] == ["ObjectFolder"] * 4 + ["FileSystemFolder"] * 2
