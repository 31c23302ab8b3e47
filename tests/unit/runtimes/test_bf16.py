"""Texts in bf16: the model of `eager` with weights and cache of half the size."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
import torchlake as tl
from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import bf16, eager, write_all

PROMPTS = [np.array(ids) for ids in ([7, 9, 11], [5], [40, 8, 9, 10, 11, 12, 13, 14, 15])]


@pytest.fixture
def here(tiny_llama: Path) -> None:
    if (reason := bf16.refusal(tiny_llama)) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_likely_by_fp32_and_the_same_in_any_company(temperature: float, tiny_llama: Path) -> None:
    options = GenerationOptions(max_new_tokens=10, temperature=temperature, seed=1)
    spec = load_spec(tiny_llama)
    writer = bf16.open_writer(tiny_llama, spec, device="cpu", options=options)
    together = write_all(writer, PROMPTS, options)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(write_all(writer, [prompt], options)[0], together[row])
    answers = [text[text >= 0] for text in together]
    ours, theirs = (
        runtime.load_log_probs(tiny_llama, spec, device="cpu")(PROMPTS, answers) for runtime in (bf16, eager)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


@pytest.mark.usefixtures("here")
def test_a_table_and_a_translator_are_written(tiny_llama: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["a good film", "the", "a good film"]})
    written = tl.predict(tiny_llama, table, engine=tiny.Here(), runtime="bf16", max_new_tokens=5, logprobs=True)
    assert written["error"].null_count == 3
    assert written["generated_text"][0] == written["generated_text"][2]
    t5 = tiny.build_encoder_decoder(tmp_path / "t5")
    made = tl.predict(t5, table, engine=tiny.Here(), task="text2text_generation", runtime="bf16", max_new_tokens=5)
    assert made["error"].null_count == 3


def test_a_machine_without_such_products_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "supports_bf16", lambda: False)
    monkeypatch.setattr(hardware, "gpus", list)
    with pytest.raises(UsageError, match="no product of bf16 numbers"):
        tl.predict(tiny_llama, pa.table({"text": ["a"]}), engine=tiny.Here(), runtime="bf16")
    monkeypatch.setattr(hardware, "gpus", lambda: ["0"])  # one that torch cannot use
    with pytest.raises(UsageError, match="no product of bf16 numbers"):
        bf16.open_writer(tiny_llama, load_spec(tiny_llama), device="cpu", options=GenerationOptions())
