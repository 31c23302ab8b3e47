"""A model is its hash: what was made for one model notices another one in the same folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.engines import _frames
from torchlake.engines.local import Local
from torchlake.errors import DataError, FingerprintError
from torchlake.models import folders
from torchlake.processes.serialization import pack
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.scorer import Scorer
from torchlake.scoring.workers.tables import make_reading_worker, make_table_worker
from training_runs import Inline

ROWS = tiny.reviews(12).drop_columns("label")


@pytest.fixture
def models(tiny_bert: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model folder, and another model that is put in its place."""
    one = tiny.build_model(tmp_path / "one", encoder=tiny_bert)
    other = tiny.build_model(tmp_path / "other", encoder=tiny_bert, seed=7)
    return one, other


def replace(models: tuple[Path, Path]) -> None:
    one, other = models
    shutil.rmtree(one)
    shutil.copytree(other, one)


def settings(model: Path) -> Any:
    return scoring_settings(model, "eager", {}, text=None)[0]


def test_a_worker_that_is_kept_is_not_used_for_another_model_of_the_folder(models: tuple[Path, Path]) -> None:
    payloads = []
    for _ in range(2):
        made = settings(models[0])
        payloads.append(pack(lambda made=made: make_table_worker(made)))
        scored = _frames.cached_worker(payloads[-1])(ROWS)
        assert scored.equals(tl.predict(models[0], ROWS, runtime="eager", engine=tiny.Here()))
        replace(models)
    assert payloads[0] != payloads[1]


def test_a_process_that_finds_another_model_scores_nothing(models: tuple[Path, Path]) -> None:
    made = settings(models[0])
    Scorer(settings=made)
    replace(models)
    with pytest.raises(FingerprintError, match="the model was replaced after this job or function was made"):
        Scorer(settings=made)
    with pytest.raises(FingerprintError, match="the model was replaced"):
        make_reading_worker(made)


@pytest.mark.parametrize("change", ["written over", "replaced", "removed"])
def test_a_job_notices_a_model_that_is_written_over_in_place(
    models: tuple[Path, Path], tmp_path: Path, change: str
) -> None:
    """Its processes have mapped the file; one that is replaced by a rename, or removed, stays as it was in the map."""
    one, other = (folder / "model.safetensors" for folder in models)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(40), "text": ["good film"] * 40}), tmp_path / "in" / "a.parquet")

    class Changing(Inline):
        def run_chunks(self, *args: Any, **options: Any) -> Iterator[Any]:
            for number, done in enumerate(super().run_chunks(*args, **options)):
                yield done
                if number == 0 and change == "written over":
                    with one.open("r+b") as file:
                        file.write(other.read_bytes())
                elif number == 0:
                    one.unlink()
                    assert change == "removed" or shutil.copy(other, one)

    def scored() -> Any:
        options: dict[str, Any] = {"engine": Changing(), "key": "id", "chunk_rows": 4, "all_probabilities": True}
        return tl.predict(models[0], tmp_path / "in", tmp_path / "out", **options)

    if change == "written over":
        with pytest.raises(FingerprintError, match="model.safetensors was written over while a job scored with it"):
            scored()
    else:
        scored()
        assert len(set(pq.read_table(tmp_path / "out")["prob_good"].to_pylist())) == 1


@pytest.mark.slow
def test_a_model_that_is_truncated_makes_no_row_an_error(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The process that has mapped it is killed by the system, and the next one does not find the model."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(4000), "text": ["good film"] * 4000}), tmp_path / "in" / "a.parquet")

    class Truncating(Local):
        def run_chunks(self, *args: Any, **options: Any) -> Iterator[Any]:
            for done in super().run_chunks(*args, **options):
                os.truncate(models[0] / "model.safetensors", 0)
                yield done

    def scored() -> Any:
        options: dict[str, Any] = {"engine": Truncating(processes=1), "key": "id", "chunk_rows": 100}
        return tl.predict(models[0], tmp_path / "in", tmp_path / "out", max_error_rate=1.0, **options)

    with pytest.raises((FingerprintError, DataError), match="model"):
        scored()
    assert not (tmp_path / "out").exists()


def test_a_record_has_the_hash_of_the_model_that_scored(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is replaced while the job runs: it ends, and nothing is published under either hash."""
    pq.write_table(ROWS, tmp_path / "in.parquet")

    class Replacing(tiny.Here):
        def run_chunks(self, make_worker: Any, chunks: Any, **options: Any) -> Any:
            replace(models)
            return super().run_chunks(make_worker, chunks, **options)

    with pytest.raises(FingerprintError, match="the model was replaced"):
        tl.predict(models[0], tmp_path / "in.parquet", tmp_path / "out", key="id", engine=Replacing())
    assert not (tmp_path / "out").exists()
    record = tl.predict(models[0], tmp_path / "in.parquet", tmp_path / "new", key="id", engine=tiny.Here()).record
    assert record["fingerprint"]["model"] == folders.model_hash(models[0])


def test_a_hash_is_computed_again_when_a_file_has_changed(tmp_path: Path) -> None:
    """Also if its size and its time are those of before, as after `cp -p`."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"a" * 100)
    status = file.stat()
    first = folders.model_hash(folder)
    assert folders.model_hash(folder) == first
    (folder / "new").write_bytes(b"b" * 100)
    (folder / "new").rename(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folders.model_hash(folder) != first


def test_a_hash_is_of_the_files_and_not_of_what_the_manifest_says(models: tuple[Path, Path]) -> None:
    """A base model or a tokenizer is read without a check of its manifest: edited in place, it is another one."""
    folder = models[0]
    before, tokens = folders.model_hash(folder), folders.tokenizer_hash(folder)
    file = folder / "tokenizer.json"
    status = file.stat()
    file.write_text(file.read_text().replace('"good"', '"doog"'))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folders.model_hash(folder) != before
    assert folders.tokenizer_hash(folder) != tokens
