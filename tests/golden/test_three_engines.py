"""One job on three engines: the same predictions, the same training curve, the same files, byte for byte."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
import training_runs as runs
from torchlake import plugins

ENGINES = plugins.names("engines")


def digest(folder: Path, pattern: str = "*.parquet") -> str:
    """Names and contents of the files in a folder."""
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    assert files
    both = ((path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    return hashlib.sha256(repr(list(both)).encode()).hexdigest()[:12]


def results(name: str, folder: Path, encoder: Path, model: Path) -> dict[str, Any]:
    """What the engine makes of a table of 120 rows and a training of 10 steps by two ranks."""
    engine = getattr(tl, name.title())(processes=2)
    folder.mkdir()
    reviews = folder.parent / "reviews.parquet"
    scored = tl.predict(model, reviews, folder / "scored", key="id", chunk_rows=30, engine=engine)
    some = {"where": "id >= 20 and label is not null", "sample": 0.7, "seed": 1, "limit": 50, "chunk_rows": 20}
    selected = tl.predict(model, reviews, folder / "selected", engine=engine, **some)
    sections = runs.job(folder.parent, encoder, batch_size=16, max_steps=10, strategy="ddp")
    run = tl.train(run=folder / "run", engine=engine, **sections).path
    return {
        "rows": scored.rows_out,
        "parts": digest(folder / "scored"),
        "selected": f"{selected.rows_out} {digest(folder / 'selected')}",
        "tokens": digest(run / "prepared"),
        "last loss": runs.losses(run)[-1],
        "losses": hashlib.sha256(repr(runs.losses(run)).encode()).hexdigest()[:12],
        "weights": runs.weights_sha256(run)[:12],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("spark", "ray")
def test_three_engines_give_one_table_of_results(
    tmp_path: Path, tiny_bert: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert set(ENGINES) == {"local", "ray", "spark"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    pq.write_table(tiny.reviews(120), tmp_path / "reviews.parquet")
    found = {name: results(name, tmp_path / name, tiny_bert, tiny_model) for name in ENGINES}
    with capsys.disabled():
        print("\n" + "  ".join(f"{column:>20}" for column in ("engine", *found["local"])))
        for name, columns in found.items():
            print("  ".join(f"{value:>20}" for value in (name, *columns.values())))
    assert found["spark"] == found["local"]
    assert found["ray"] == found["local"]


@pytest.mark.slow  # DeepSpeed's import in every rank
@pytest.mark.usefixtures("spark")
def test_deepspeed_shares_a_model_out_between_sparks_processes(tmp_path: Path, tiny_bert: Path) -> None:
    losses = {}
    for name, engine, strategy in (("one", runs.Inline(), "single"), ("two", tl.Spark(processes=2), "deepspeed")):
        sections = runs.job(tmp_path, tiny_bert, batch_size=16, max_steps=10, strategy=strategy, deepspeed={"stage": 3})
        losses[name] = runs.losses(tl.train(run=tmp_path / name, engine=engine, **sections).path)
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5)
