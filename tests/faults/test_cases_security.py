"""Inputs that attack: case 54, where the unit tests of model folders, jobs and tables leave something open."""

import json
import os
import pickle
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import torchlake as tl
import training_runs as runs
from torchlake import atomic_io
from torchlake.checkpoints import format, location, shards
from torchlake.checkpoints.store import FolderStore
from torchlake.cli.main import main
from torchlake.errors import DataError, OutputError, TableError, TorchlakeError, UnsafeError, UsageError
from torchlake.models import load as models
from torchlake.storage import access, urls, versions
from torchlake.tables.record import COMMIT, PLAN
from torchlake.tables.table import open_table

TENSORS = {"weight": torch.zeros(2, 2)}


class Canary:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def spring(content: bytes, canary: Path) -> bytes:
    """`content`, after a proof that loading it as a pickle creates the canary."""
    pickle.loads(content).close()
    canary.unlink()
    return content


def save(folder: Path, step: int) -> Path:
    draft = format.step_draft(FolderStore(folder), step, attempt="test")
    format.write_shard(draft, dict.fromkeys((format.MODEL, format.OPTIMIZER), shards.whole(TENSORS)))
    format.publish(draft, state={"step": step, "best": None})
    return draft.path


def load(path: Path, kind: str) -> dict[str, torch.Tensor]:
    with format.open_tensors(path, kind) as tensors:
        return {name: tensors.read(name) for name in tensors.shapes}


@pytest.mark.parametrize("name", ["rng_state.pth", "optimizer.pt", ".metadata", "data.pkl", "__0_0.distcp"])
def test_a_pickle_planted_in_a_checkpoint_is_never_opened(tmp_path: Path, name: str) -> None:
    """54a: a checkpoint is the files of its manifest, and these are safetensors and JSON."""
    trap = spring(pickle.dumps(Canary(tmp_path / "canary")), tmp_path / "canary")
    path = save(tmp_path / "checkpoints", 1)
    (path / name).write_bytes(trap)
    found, problems = format.newest(FolderStore(tmp_path / "checkpoints"), "test")
    assert found is not None
    assert problems == []
    for kind in (format.MODEL, format.OPTIMIZER):
        assert load(found.path, kind).keys() == TENSORS.keys()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", [format.MODEL, format.OPTIMIZER])
def test_a_pickle_in_the_place_of_tensors_is_no_tensor(tmp_path: Path, kind: str) -> None:
    """54a: even with a manifest that vouches for it."""
    trap = spring(pickle.dumps(Canary(tmp_path / "canary")), tmp_path / "canary")
    path = save(tmp_path / "checkpoints", 1)
    (path / f"{kind}.safetensors").write_bytes(trap)
    (path / atomic_io.MANIFEST).unlink()
    atomic_io.write_manifest(path, site="test")
    found, _ = format.newest(FolderStore(tmp_path / "checkpoints"), "test")
    assert found is not None
    with pytest.raises(DataError, match=f"{kind}.safetensors: cannot be read"):
        load(found.path, kind)
    assert not (tmp_path / "canary").exists()


def test_a_run_resumes_past_planted_pickles(tmp_path: Path, tiny_bert: Path) -> None:
    """54a, whole: the run that finds them ends well and runs none of them."""
    sections = runs.job(tmp_path, tiny_bert)
    assert runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:5:kill9").exit_code < 0
    trap = spring(pickle.dumps(Canary(tmp_path / "canary")), tmp_path / "canary")
    for name in ("rng_state.pth", ".metadata", "training_args.bin"):
        (tmp_path / "run" / "checkpoints" / "step_00000003" / name).write_bytes(trap)
    assert runs.succeed(tmp_path / "run", sections).steps == 15
    assert not (tmp_path / "canary").exists()


def test_a_manifest_may_not_lead_out(tmp_path: Path) -> None:
    """54e: `../` in a name."""
    (tmp_path / "secret").write_text("secret")
    path = save(tmp_path / "checkpoints", 1)
    manifest = json.loads((path / atomic_io.MANIFEST).read_text())
    size = {"bytes": 6, "sha256": atomic_io.sha256_file(tmp_path / "secret")}
    for name in ("../../secret", str(tmp_path / "secret")):
        (path / atomic_io.MANIFEST).write_text(json.dumps({**manifest, "files": {**manifest["files"], name: size}}))
        with pytest.raises(UnsafeError, match="leads out of the folder") as error:
            atomic_io.check_manifest(path)
        assert error.value.exit_code == 77


def test_a_table_with_an_extension_type_is_refused_by_predict(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """54c: exit code 77 with file and rule; that no class hears of the file is in test_tables_table."""
    field = pa.field("text", pa.string(), metadata={"ARROW:extension:name": "ray.data.arrow_tensor"})
    pq.write_table(pa.table([["good film"]], schema=pa.schema([field])), tmp_path / "t.parquet")
    assert main(["predict", str(tiny_model), str(tmp_path / "t.parquet"), str(tmp_path / "out")]) == 77
    said = capfd.readouterr().err
    assert str(tmp_path / "t.parquet") in said
    assert "ray.data.arrow_tensor" in said
    assert os.listdir(tmp_path) == ["t.parquet"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_are_not_unpacked(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    """54d and f: there is no code that unpacks one, as a model or as a table, so nothing slips out or swells."""
    archive = tmp_path / f"model.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("../../slipped", "slipped")
    else:
        with tarfile.open(archive, "w") as packed:
            packed.add(tiny_model / "config.json", "../../slipped")
    with pytest.raises(DataError, match="no such model folder"):
        models.check_folder(archive)
    with pytest.raises(DataError, match="name does not show its format|not read"):
        open_table(archive)
    assert os.listdir(tmp_path) == [archive.name]
    assert not list(tmp_path.parent.glob("slipped"))


REFUSED = [
    "zip://t.parquet::file://{folder}/a.zip",
    "tar://t.parquet::{folder}/a.tar",
    "libarchive://t.parquet::{folder}/a.7z",
    "reference://x.parquet::http://127.0.0.1:{port}/ref.json",
    "reference::http://127.0.0.1:{port}/ref.json",
    "simplecache::http://127.0.0.1:{port}/t.parquet",
    "filecache::https://127.0.0.1:{port}/t.parquet",
    "blockcache::s3://bucket/t.parquet",
    "dir::http://127.0.0.1:{port}/t.parquet",
    "s3://bucket/a.zip::zip://t.parquet",
    "memory://a::http://127.0.0.1:{port}/t.parquet",
    "http://127.0.0.1:{port}/t.parquet",
    "HTTP://127.0.0.1:{port}/t.parquet",
    "webhdfs://127.0.0.1:{port}/t.parquet",
    "ftp://user:hush@127.0.0.1:{port}/t.parquet",
    "sftp://127.0.0.1:{port}/t.parquet",
    "ssh://127.0.0.1:{port}/t.parquet",
    "smb://user:hush@127.0.0.1:{port}/t.parquet",
    "github://org:repo@main/t.parquet",
    "git://{folder}:main@t.parquet",
    "gist://user:0123@/t.parquet",
    "jlab://127.0.0.1:{port}/t.parquet",
    "dask://t.parquet",
    "data://text/csv,a",
    "local://{folder}/t.parquet",
    "reference://{folder}/ref.json",
    "asyncwrapper://{folder}/t.parquet",
    "generic://{folder}/t.parquet",
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_table_url_is_read_from_a_storage_of_files_or_not_at_all(tmp_path: Path, url: str) -> None:
    """54i: no protocol that leads elsewhere, alone, in a list or as a chain; nothing is connected to or unpacked."""
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "t.parquet")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.write(tmp_path / "t.parquet", "t.parquet")
    (tmp_path / "ref.json").write_text('{"version": 1, "refs": {}}')
    before = sorted(os.listdir(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        full = url.format(folder=tmp_path, port=server.getsockname()[1])
        for source in (full, [str(tmp_path / "t.parquet"), full]):
            with pytest.raises(TableError, match="is refused") as refused:
                open_table(source)
            assert "hush" not in str(refused.value)
        for use in (versions.version_of, access.open_binary, versions.content_id, urls.filesystem_of):
            with pytest.raises(TableError, match="is refused"):
                use(full)
        with pytest.raises(UsageError, match="train.checkpoint_folder: .* is refused"):
            location.find_store(full, tmp_path)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert sorted(os.listdir(tmp_path)) == before


def test_every_protocol_of_fsspec_was_decided_on() -> None:
    """54i: a protocol that a new fsspec brings is refused until it is named in the code."""
    from fsspec.registry import known_implementations

    allowed = set()
    for protocol in known_implementations:
        try:
            allowed.add(urls.check_url(f"{protocol}://place/t.parquet"))
        except TableError:
            continue
    assert allowed <= {"abfs", "adl", "az", "gcs", "gs", "hdfs", "hf", "https", "memory", "s3", "s3a"}


def test_an_output_that_is_a_link_to_others_files_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    """54d."""
    pq.write_table(pa.table({"text": ["good film"]}), tmp_path / "t.parquet")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="holds files that torchlake did not write"):
            tl.predict(tiny_model, tmp_path / "t.parquet", tmp_path / "out", engine=tiny.Here(), overwrite=overwrite)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "precious"


JOB = "data: {train: reviews.parquet}\nmodel: {base: encoder}\n"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("train: !!python/object/apply:os.system ['touch canary']", 77, "job.yaml:3: the tag"),
        ("_target_: os.system", 65, "job.yaml:3: _target_: unknown key"),
        ("train: {_target_: os.system}", 65, "job.yaml:3: train._target_: unknown key"),
        ("trust_remote_code: true", 65, "trust_remote_code: unknown key"),
    ],
)
def test_a_job_file_that_asks_for_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, code: int, said: str
) -> None:
    """54e, by the command line."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB + line)
    assert main(["train", "job.yaml", "--run", "run"]) == code
    assert said in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["job.yaml"]


def test_names_of_strategies_and_runtimes_are_names(tiny_model: Path, tmp_path: Path) -> None:
    """54e: what is chosen by name is one of the modules that are there, not a path and not any module."""
    pq.write_table(pa.table({"text": ["good film"]}), tmp_path / "t.parquet")
    for name in ("../../evil", "os", "eager.__init__", "/tmp/evil.py"):
        with pytest.raises(TorchlakeError, match="There is no runtime .* Runtimes: bettertransformer, bf16"):
            tl.predict(tiny_model, tmp_path / "t.parquet", tmp_path / "out", runtime=name, engine=tiny.Here())
    assert os.listdir(tmp_path) == ["t.parquet"]


@pytest.mark.parametrize("file", [COMMIT, PLAN])
def test_a_record_that_nests_too_deep_is_an_error_in_words(tiny_model: Path, tmp_path: Path, file: str) -> None:
    """54f: what torchlake wrote itself is not trusted when it is read again."""
    pq.write_table(pa.table({"text": ["good film"]}), tmp_path / "t.parquet")
    out = tmp_path / "out"
    tl.predict(tiny_model, tmp_path / "t.parquet", out, engine=tiny.Here())
    (out / file).write_text("[" * 200_000)
    with pytest.raises(DataError, match=f"{file}: not valid JSON"):
        raise_problems(tl.verify(out).problems)


def raise_problems(problems: list[str]) -> None:
    """Some damage is an error of `verify`, some a problem that it lists: here both are errors."""
    if problems:
        raise DataError("\n".join(problems))


def test_a_model_folder_with_a_link_out_is_refused_by_predict(tiny_model: Path, tmp_path: Path) -> None:
    """54d: a link in the model folder that leads out ends `predict` with exit code 77 before anything is made."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "vocab.txt").symlink_to("/etc/hostname")
    pq.write_table(pa.table({"text": ["good film"]}), tmp_path / "t.parquet")
    assert main(["predict", str(folder), str(tmp_path / "t.parquet"), str(tmp_path / "out")]) == 77
    assert sorted(os.listdir(tmp_path)) == ["model", "t.parquet"]
