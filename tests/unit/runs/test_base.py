"""A run belongs to one base model, by its hash."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.errors import FingerprintError, Interrupted


def test_a_run_does_not_continue_with_another_base_model(tiny_bert: Path, tmp_path: Path) -> None:
    """Checkpoints of frozen layers and adapters have only what is trained: the rest comes from the base."""
    base = tmp_path / "base"
    shutil.copytree(tiny_bert, base)
    pq.write_table(tiny.reviews(32), tmp_path / "in.parquet")

    def train(stop: bool = False) -> tl.Run:
        return tl.train(
            run=tmp_path / "run",
            data={"train": str(tmp_path / "in.parquet"), "validation": None, "text": "text", "label": "label"},
            model={"base": str(base), "task": "text_classification", "freeze": "body"},
            train={"epochs": 4, "batch_size": 8},
            on_step=(lambda line: line["step"] >= 2) if stop else None,
        )

    with pytest.raises(Interrupted):
        train(stop=True)
    kept = tmp_path / "kept"
    base.rename(kept)
    shutil.copytree(kept, base)
    vocabulary = base / "tokenizer_config.json"
    vocabulary.write_text(vocabulary.read_text() + " ")
    with pytest.raises(FingerprintError, match="began with another base model"):
        train()
    shutil.rmtree(base)
    kept.rename(base)
    assert not train().complete
    vocabulary.write_text(vocabulary.read_text() + " ")
    with pytest.raises(FingerprintError, match="began with another base model"):
        train()
    shutil.rmtree(base)
    assert train().complete, "a base that was deleted is not missed"
