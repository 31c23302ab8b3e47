"""The plan of texts: prompts of a sample, and the speed that `optimize` stored."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchlake.cli.main import main
from torchlake.errors import TableError, UsageError
from torchlake.models import folders
from torchlake.models.load import load_tokenizer
from torchlake.planning.spending import plan_writing
from torchlake.scoring.runtime_choice import write_choice

TEXTS = ["good", "a good film", None, "so it was a film"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS * 5}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


@pytest.fixture
def measured(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """A copy of the model with a choice of `optimize`."""
    model = tmp_path / "model"
    shutil.copytree(tiny_gpt2, model)
    candidates = [
        {"verdict": "agrees", "rows_per_s": 9.0, "tokens_per_s": 90.0},
        {"verdict": "chosen", "rows_per_s": 0.5, "tokens_per_s": 4.0},
    ]
    plain = {"runtime": "eager", "batch_tokens": 100, "threads": 1, "device": "cpu", "sample_rows": 4, "machine": {}}
    write_choice(model, task="text_generation", measured=candidates, **plain)  # type: ignore[arg-type]
    assert json.loads((model / "runtime.json").read_text())["weights"] == folders.model_hash(model)
    return model


def test_tokens_and_hours_by_the_measured_speed(measured: Path, table: Path) -> None:
    plan = plan_writing(measured, table, max_new_tokens=16)
    assert (plan.rows, plan.sampled, plan.prompts, plan.most_tokens) == (20, 20, 15, 15 * 16)
    ids = load_tokenizer(measured)([text for text in TEXTS if text is not None])["input_ids"]
    assert plan.prompt_tokens == (5 * sum(map(len, ids)),) * 3
    assert (plan.runtime, plan.tokens_per_s) == ("eager", 4.0)
    assert plan.hours == pytest.approx((0, 15 / 0.5 / 3600, 15 * 16 / 4 / 3600))
    assert plan_writing(measured, table, max_new_tokens=1, runtime="eager").hours is None, "another job than measured"
    sampled = plan_writing(measured, table, sample_rows=8, prompt="Is it? {text}", n=3, temperature=1.0)
    assert (sampled.rows, sampled.sampled, sampled.most_tokens) == (20, 8, sampled.prompts * 3 * 64)


def test_the_command_says_what_is_not_known(
    tiny_gpt2: Path, measured: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_gpt2), str(table), "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    assert f"not known; to measure it: torchlake optimize {tiny_gpt2} --sample {table}" in shown
    assert "at most 120 tokens" in shown
    assert main(["plan", str(measured), str(table)]) == 0
    assert "4.0 tokens/s by eager" in capsys.readouterr().out
    for unused, value in (("--flops", "1T"), ("--tokenizer", "other"), ("--set", "train.epochs=1")):
        assert main(["plan", str(measured), str(table), unused, value]) == 64
        assert f"{unused}: not for the plan of texts" in capsys.readouterr().err


def test_what_does_not_write_is_refused(tiny_bert: Path, tiny_gpt2: Path, table: Path) -> None:
    with pytest.raises(UsageError, match="feature_extraction writes nothing"):
        plan_writing(tiny_bert, table, task="feature_extraction")
    with pytest.raises(TableError, match="missing"):
        plan_writing(tiny_gpt2, table, text="missing")
