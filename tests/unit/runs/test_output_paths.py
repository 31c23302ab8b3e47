"""An output that a user names is a local folder, or it is refused; never a folder that is called like a URL."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.cli.main import main
from torchlake.errors import UsageError
from torchlake.runs import folder as run_folder
from torchlake.tables.record import local_output

URLS = ("s3://bucket/out", "gs://bucket/out", "memory://out", "https://example.org/out", "S3://bucket/out")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder but for a job, its table and a search space."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(tiny.reviews(8), "t.parquet")
    Path("job.yaml").write_text("data: {train: t.parquet}\nmodel: {base: no-such-model}\n")
    Path("space.yaml").write_text("train.epochs: {low: 1, high: 2}\n")
    return tmp_path


COMMANDS = {
    "predict": ["predict", "MODEL", "t.parquet", "URL"],
    "train": ["train", "job.yaml", "--run", "URL"],
    "tune": ["tune", "job.yaml", "--space", "space.yaml", "--trials", "1", "--run", "URL"],
    "report": ["report", "URL"],
    "verify": ["verify", "URL"],
    "demo": ["demo", "--folder", "URL"],
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"predict", "verify"}))
def test_a_url_is_refused(command: str, url: str, model: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(here))
    words = [{"MODEL": str(model), "URL": url}.get(word, word) for word in COMMANDS[command]]
    assert main(words) == UsageError.exit_code
    said = capfd.readouterr().err
    assert f"{url}: has to be a local path" in said
    assert "upload the folder afterwards" in said
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("url", ["memory://out", "https://example.org/out", "S3://bucket/out"])
@pytest.mark.parametrize("command", ["predict", "verify"])
def test_a_url_that_no_output_can_have_is_refused(
    command: str, url: str, model: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(here))
    words = [{"MODEL": str(model), "URL": url}.get(word, word) for word in COMMANDS[command]]
    assert main(words) == UsageError.exit_code
    assert f"{url}: cannot be written to. Give a local path, a URL of s3" in capfd.readouterr().err
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_became_a_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="has to be a local path"):
        local_output(Path(url))


def test_file_urls_are_paths(model: Path, here: Path) -> None:
    out = here / "some where" / "out"
    scored = tl.predict(model, "t.parquet", out.as_uri(), key="id", engine=tiny.Here())
    assert scored.path == out
    assert tl.verify(out.as_uri()).problems == []
    for url in (out.as_uri(), f"file://{out}", f"file:{out}", f"file://localhost{out}"):
        assert run_folder.find(None, url) == local_output(url) == out
    assert local_output(Path(f"file://{out}")) == out
    assert sorted(os.listdir(here)) == ["job.yaml", "some where", "space.yaml", "t.parquet"]


def test_other_paths_stay_as_they_are() -> None:
    assert local_output("a:b/c") == Path("a:b/c")
    assert local_output("./s3:/c") == Path("./s3:/c")
    assert local_output("~/out") == Path.home() / "out"
