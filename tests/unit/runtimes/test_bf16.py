"""Texts in bf16: the model of `eager` with weights and cache of half the size."""

from pathlib import Path

import pyarrow as pa
import pytest

import families
import tiny
import torchlake as tl
from cpus import needs_bf16
from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import bf16


@needs_bf16
def test_a_table_and_a_translator_are_written(tiny_llama: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["a good film", "the", "a good film"]})
    written = tl.predict(tiny_llama, table, engine=tiny.Here(), runtime="bf16", max_new_tokens=5, logprobs=True)
    assert written["error"].null_count == 3
    assert written["generated_text"][0] == written["generated_text"][2]
    t5 = tiny.build_encoder_decoder(tmp_path / "t5")
    made = tl.predict(t5, table, engine=tiny.Here(), task="text2text_generation", runtime="bf16", max_new_tokens=5)
    assert made["error"].null_count == 3


@needs_bf16
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_perplexity_is_nearly_that_of_eager(kind: str, tiny_llama: Path, tiny_gpt2: Path) -> None:
    """Of a model, too, that the encoders' way does not compute."""
    folder, table = {"llama": tiny_llama, "gpt2": tiny_gpt2}[kind], tiny.reviews(20)
    ours, theirs = (
        tl.evaluate(folder, table, task="text_generation", runtime=name, engine=tiny.Here()).metrics["loss"].value
        for name in ("bf16", "eager")
    )
    assert ours != theirs
    assert ours == pytest.approx(theirs, abs=0.02)


@needs_bf16
def test_a_model_may_write_where_its_vectors_are_refused_before_work(tmp_path: Path) -> None:
    folder, table = families.build(tmp_path, "gemma2", kind="writer"), tiny.reviews(3)
    given = {"engine": tiny.Here(), "runtime": "bf16"}
    assert tl.predict(folder, table, max_new_tokens=2, **given)["error"].null_count == 3
    with pytest.raises(UsageError, match="its attention limits the scores"):
        tl.predict(folder, table, task="feature_extraction", **given)


def test_a_machine_without_such_products_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "supports_bf16", lambda: False)
    monkeypatch.setattr(hardware, "gpus", list)
    with pytest.raises(UsageError, match="no product of bf16 numbers"):
        tl.predict(tiny_llama, pa.table({"text": ["a"]}), engine=tiny.Here(), runtime="bf16")
    monkeypatch.setattr(hardware, "gpus", lambda: ["0"])  # one that torch cannot use
    with pytest.raises(UsageError, match="no product of bf16 numbers"):
        bf16.open_writer(tiny_llama, load_spec(tiny_llama), device="cpu", options=GenerationOptions())
