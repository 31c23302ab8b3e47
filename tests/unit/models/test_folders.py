"""A run's folder stands for its model; a run without one says where its best model is so far."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.cli.main import main
from torchlake.errors import DataError
from torchlake.models import load
from torchlake.models.spec import load_spec

JOB = "data: {train: t.parquet}\nmodel: {base: b}\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Path:
    """A finished run, as far as its folders tell; its caches are no model's."""
    folder = tmp_path / "runs" / "reviews"
    shutil.copytree(built, folder / "model")
    for name in ("cache/train/tokens.bin", "checkpoints/step_00000018/model.safetensors"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
    (folder / "checkpoints" / "best").mkdir()
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/best", "model"])
def test_a_run_folder_is_a_model(run: Path, place: str) -> None:
    assert load.model_folder(run / place).resolve() == run / "model"
    assert load_spec(str(run / place)) == tiny.SPEC
    assert load.model_folder((run / place).resolve().as_uri()) == run / "model"


def test_a_run_folder_in_the_current_one_is_a_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert [load.model_folder(name) for name in (".", "checkpoints", "model")] == [
        Path("model"),
        run / "model",
        Path("model"),
    ]


def test_every_verb_takes_a_run_folder(run: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(12), tmp_path / "t.parquet")
    scored = tl.predict(run, tmp_path / "t.parquet", tmp_path / "out", engine=tiny.Here())
    assert scored.record["provenance"]["model"] == str(run / "model")
    assert tl.evaluate(run, tmp_path / "t.parquet", engine=tiny.Here()).rows == 12
    tl.optimize(run, tmp_path / "t.parquet", runtimes=["eager"], engine=tiny.Here())
    assert (run / "model" / "runtime.json").is_file()


def test_an_unfinished_run_says_so(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "model")
    with pytest.raises(
        DataError, match=r"run that is not finished.* writes its best model to .*/reviews/model"
    ) as caught:
        load.model_folder(run)
    assert "so far" not in str(caught.value)
    for step in (9, 12):
        (run / "checkpoints" / "best" / f"step_{step:08d}").mkdir()
    assert main(["predict", str(run), "t.parquet", "out"]) == 65
    said = capfd.readouterr().err
    assert f"best model so far are in the checkpoint {run}/checkpoints/best/step_00000012." in said
    assert "no pickles" not in said


def test_a_damaged_job_hides_nothing_else(run: Path) -> None:
    shutil.rmtree(run / "model")
    (run / "job.yaml").write_text("nonsense")
    with pytest.raises(DataError, match="is not finished"):
        load.model_folder(run)


def test_a_checkpoint_is_no_model(run: Path) -> None:
    with pytest.raises(
        DataError, match=r"is a checkpoint, not a model folder\. The model of its run is .*/reviews/model"
    ):
        load.model_folder(run / "checkpoints" / "step_00000018")


def test_a_tuning_stands_for_its_best_model(run: Path, built: Path) -> None:
    shutil.rmtree(run / "model")
    (run / "tuning.json").write_text("{}")
    for number in (0, 3):
        shutil.copytree(built, run / "trials" / f"{number:04d}" / "model")
    with pytest.raises(DataError, match=r"tuning that is not finished.*trials/0000/model or .*trials/0003/model\."):
        load.model_folder(run)
    shutil.rmtree(run / "trials" / "0000" / "model")
    assert load.model_folder(run) == run / "trials" / "0003" / "model"
    (run / "job.yaml").unlink()
    with pytest.raises(DataError, match="tuning that is not finished"):
        load.model_folder(run)
