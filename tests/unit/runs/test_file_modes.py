"""Every file and folder that torchlake makes has the mode that the umask gives: other accounts read what they may."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake import atomic_io
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import prepare_runtime

UMASKS = {0o022: 0o644, 0o077: 0o600}
"The mode of a file by the umask."
UMASK = "TORCHLAKE_TEST_UMASK"


def set_umask() -> None:
    """In the process of a training."""
    os.umask(int(os.environ[UMASK]))


@pytest.fixture(params=[pytest.param(0o022, marks=pytest.mark.slow), 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def assert_usual(folder: Path, umask: int) -> None:
    """Every file and folder below has the mode of one that `open` and `mkdir` make."""
    unusual = {}
    for path in [folder, *folder.rglob("*")]:
        usual = UMASKS[umask] | (0o111 & ~umask if path.is_dir() else 0)
        if stat.S_IMODE(path.stat().st_mode) != usual:
            unusual[str(path.relative_to(folder))] = oct(path.stat().st_mode)
    assert unusual == {}


@pytest.mark.parametrize("lora", sweep([False, True], quick={True}))
def test_train(umask: int, lora: bool, tmp_path: Path, tiny_bert: Path) -> None:
    """The run folder: checkpoints, model, adapter, report, tokens, logs."""
    sections = runs.job(tmp_path / "in", tiny_bert)
    sections["model"] |= {"lora": {"rank": 2}} if lora else {}
    runs.succeed(tmp_path / "run", sections, stub=set_umask, **{UMASK: str(umask)})
    assert (tmp_path / "run" / "model" / "adapter").is_dir() == lora
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) >= 4
    assert_usual(tmp_path / "run", umask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_and_predict(umask: int, tmp_path: Path, tiny_bert: Path) -> None:
    model = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    for runtime in ("onnx", "onnx_int8", "openvino", "openvino_int8"):
        settings = ScoringSettings(model=str(model), runtime=runtime, text="text", keep=(), key=None)
        prepare_runtime(settings, runtime, tiny.reviews(20).select(["text"]))
    pq.write_table(tiny.reviews(4), tmp_path / "in.parquet")
    tl.predict(model, tmp_path / "in.parquet", tmp_path / "out" / "scored", engine=tiny.Here())
    assert len(list(model.rglob(atomic_io.MANIFEST))) == 5
    assert_usual(model, umask)
    assert_usual(tmp_path / "out", umask)


def test_the_umask_itself_is_left_alone(umask: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    atomic_io.set_default_modes([file])
    assert stat.S_IMODE(file.stat().st_mode) == UMASKS[umask]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert os.umask(umask) == umask
