"""What a runtime made of a model: whole and of these very weights, or as good as absent."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from torchlake.errors import StorageError
from torchlake.runtimes import _exports


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files that a model's hash is made of; no library reads them here."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def make(model: Path, content: str = "graph", name: str = "onnx") -> None:
    with _exports.making(model, name, rows=3, versions={"onnx": "1.0"}) as place:
        (place / "model.onnx").write_text(content)


def test_an_export_is_there_when_the_block_is_left(model: Path) -> None:
    assert _exports.current(model, "onnx") is None
    assert _exports.identity(model, "onnx") is None
    with _exports.making(model, "onnx", rows=3, versions={"onnx": "1.0"}) as place:
        (place / "model.onnx").write_text("graph")
        assert _exports.current(model, "onnx") is None
    export = _exports.current(model, "onnx")
    assert export == model / "runtimes" / "onnx"
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["format"] == _exports.FORMAT
    assert manifest["runtime"] == "onnx"
    assert manifest["rows"] == 3
    assert manifest["versions"] == {"onnx": "1.0"}
    assert list(manifest["files"]) == ["model.onnx"]
    assert os.listdir(model / "runtimes") == ["onnx"]


def test_an_export_of_an_older_format_is_as_good_as_absent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exports, "FORMAT", _exports.FORMAT - 1)
    make(model)
    assert _exports.current(model, "onnx") is not None
    monkeypatch.undo()
    assert _exports.current(model, "onnx") is None
    make(model)
    assert _exports.current(model, "onnx") is not None


def test_others_may_read_what_they_may_read_in_the_model(model: Path) -> None:
    make(model)
    assert (model / "runtimes" / "onnx").stat().st_mode == model.stat().st_mode


def test_its_identity_is_that_of_its_bytes(model: Path) -> None:
    make(model)
    first = _exports.identity(model, "onnx")
    make(model)
    assert _exports.identity(model, "onnx") == first
    make(model, "another graph")
    assert _exports.identity(model, "onnx") not in (first, None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", "other weights"),
        ("config.json", '{"other": 1}'),
        ("runtimes/onnx/model.onnx", "g"),
        ("runtimes/onnx/manifest.json", "{}"),
        ("runtimes/onnx/manifest.json", "torn"),
    ],
)
def test_what_was_made_of_something_else_or_was_touched_does_not_count(model: Path, file: str, content: str) -> None:
    make(model)
    (model / file).write_text(content)
    assert _exports.current(model, "onnx") is None
    make(model)
    if not file.endswith("manifest.json"):
        (model / file).write_text(content)
    assert (_exports.current(model, "onnx") is None) == (file == "runtimes/onnx/model.onnx")


def test_a_failure_leaves_the_older_one(model: Path) -> None:
    make(model, "older")
    with pytest.raises(RuntimeError), _exports.making(model, "onnx", rows=0, versions={}) as place:
        (place / "model.onnx").write_text("half")
        raise RuntimeError
    export = _exports.current(model, "onnx")
    assert export is not None
    assert (export / "model.onnx").read_text() == "older"
    assert os.listdir(model / "runtimes") == ["onnx"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_newer_one_takes_the_place_of_an_older_one(
    model: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(_exports, "exchange", lambda one, other: False)
    make(model, "older")
    make(model, "newer")
    export = _exports.current(model, "onnx")
    assert export is not None
    assert (export / "model.onnx").read_text() == "newer"
    assert os.listdir(model / "runtimes") == ["onnx"]


def test_of_two_that_make_it_at_once_the_later_one_stays(model: Path) -> None:
    with _exports.making(model, "onnx", rows=0, versions={}) as first:
        (first / "model.onnx").write_text("first")
        with _exports.making(model, "onnx", rows=0, versions={}) as second:
            (second / "model.onnx").write_text("second")
        assert (first / "model.onnx").exists()
    export = _exports.current(model, "onnx")
    assert export is not None
    assert (export / "model.onnx").read_text() == "first"
    assert os.listdir(model / "runtimes") == ["onnx"]


def _end_half_way(model: Path) -> None:
    with _exports.making(model, "onnx", rows=0, versions={}) as place:
        (place / "model.onnx").write_text("half")
        os._exit(1)


def test_what_a_killed_process_left_is_removed_by_the_next(model: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_end_half_way, args=(model,))
    process.start()
    process.join()
    assert len(os.listdir(model / "runtimes")) == 1
    assert _exports.current(model, "onnx") is None
    make(model)
    assert os.listdir(model / "runtimes") == ["onnx"]


def test_a_folder_that_cannot_be_written_is_said_with_the_remedy(model: Path) -> None:
    (model / "runtimes").write_text("a file is in the way")
    with pytest.raises(StorageError, match="copy the model to a folder that you can write to"):
        make(model)


def test_a_full_disk_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "export.write:1:enospc")
    with pytest.raises(StorageError, match="bytes are free there"):
        make(model)
    assert os.listdir(model / "runtimes") == []
