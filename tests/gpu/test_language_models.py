"""Language models on this machine's device: what they write, what they learn, and frozen weights of 4 and 8 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import tiny
import torchlake as tl
import training_runs as runs
import trl_cases
from sweeps import sweep
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.runtimes import bf16, eager, write_all

PROMPTS = [[7, 9, 11], [5], [40, 8, 9, 10, 11, 12, 13, 14, 15], [8, 8, 60, 61] * 9]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "least": {"min_new_tokens": 6, "logprobs": "tokens"},
}
PRECISIONS = {"fp32": 1e-3, "bf16": 0.05}


@pytest.mark.parametrize("way", sweep(WAYS, quick=()))
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_texts_are_those_of_a_cpu(way: str, kind: str, tiny_llama: Path, tiny_gpt2: Path, device: str) -> None:
    folder = {"llama": tiny_llama, "gpt2": tiny_gpt2}[kind]
    options = GenerationOptions(max_new_tokens=12, seed=3, **WAYS[way])
    prompts = [np.array(prompt) for prompt in PROMPTS]
    spec = load_spec(folder)
    here, cpu = (
        write_all(eager.open_writer(folder, spec, device=name, options=options), prompts, options)
        for name in (device, "cpu")
    )
    np.testing.assert_array_equal(here, cpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [{"regex": "(good|bad) film[!.]"}, {"choices": ["good", "bad", "a dull film"]}, {"n": 3, "temperature": 1}]
)
def test_a_table_is_written_as_on_a_cpu(
    form: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "regex" in form:
        pytest.importorskip("llguidance")
    table = tiny.reviews(30)
    options = {"task": "text_generation", "runtime": "eager", "max_new_tokens": 12, "engine": tiny.Here(), **form}
    here = tl.predict(tiny_llama, table, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = tl.predict(tiny_llama, table, **options)
    assert here["generated_text"].equals(cpu["generated_text"])
    assert here["error"].null_count == 30


@pytest.mark.parametrize(
    ("case", "model", "precision"),
    sweep([(case, "llama", precision) for case in trl_cases.SETTINGS for precision in PRECISIONS], quick=()),
)
def test_a_job_learns_as_on_a_cpu(case: str, model: str, precision: str, tmp_path: Path) -> None:
    """Conversations, completions and preferences: TRL's losses, in fp32."""
    rows, settings, columns = trl_cases.read(case)
    base = trl_cases.build_model(tmp_path / "base", model, "marked")
    sections = trl_cases.sections(tmp_path, base, settings, rows, trl_cases.STEPS)
    sections["train"]["precision"] = precision
    tl.train(run=tmp_path / "run", engine=runs.Inline(1), **sections)
    wanted, tolerance = list(columns[model].values()), PRECISIONS[precision]
    assert runs.losses(tmp_path / "run")[:5] == pytest.approx(wanted[:5], abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_texts_in_bf16_are_likely_by_fp32(
    kind: str, temperature: float, tiny_llama: Path, tiny_gpt2: Path, device: str
) -> None:
    """Not equal: where tokens are nearly as likely, the rows beside a text decide by their rounding."""
    folder = {"llama": tiny_llama, "gpt2": tiny_gpt2}[kind]
    if (reason := bf16.writer_refusal(folder)) is not None:
        pytest.skip(reason)
    spec, prompts = load_spec(folder), [np.array(prompt) for prompt in PROMPTS]
    options = GenerationOptions(max_new_tokens=12, temperature=temperature, seed=1)
    writer = bf16.open_writer(folder, spec, device=device, options=options)
    answers = [text[text >= 0] for text in write_all(writer, prompts, options)]
    ours, theirs = (runtime.load_log_probs(folder, spec, device=device)(prompts, answers) for runtime in (bf16, eager))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantized_base_learns_as_on_a_cpu(quantize: str, precision: str, tmp_path: Path, tiny_llama: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sections = runs.job(tmp_path, tiny_llama, rows=64, epochs=3)
    lora = {"rank": 4, "merge": False}
    sections["model"] |= {"task": "text_generation", "max_length": 24, "quantize": quantize, "lora": lora}
    runs.succeed(tmp_path / "cpu", sections)
    sections["train"]["precision"] = precision
    tl.train(run=tmp_path / "here", engine=runs.Inline(1), **sections)
    found, wanted = (runs.losses(tmp_path / name) for name in ("here", "cpu"))
    assert found == pytest.approx(wanted, abs=PRECISIONS[precision])
    assert found[-1] < found[0]
    texts = tl.predict(
        tmp_path / "here" / "model", pa.table({"text": ["a good", "the"]}), engine=tiny.Here(), max_new_tokens=4
    )
    assert texts["error"].null_count == 2


@pytest.mark.slow
def test_a_quantized_layer_has_the_same_weights_on_both(device: str) -> None:
    """Weights are packed in main memory and unpacked on the GPU, by other code of the library."""
    pytest.importorskip("bitsandbytes")
    from torchlake.models.adapters import quantized

    for kind in ("nf4", "int8"):
        for inputs, outputs in ((640, 384), (96, 31), (32, 16), (31, 30)):
            layer = quantized._quantized(torch.nn.Linear(inputs, outputs), kind)
            weights = layer.dequantize()
            torch.testing.assert_close(layer.to(device).dequantize().cpu(), weights)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "lion", "adafactor", "sgd"])
def test_an_optimizer_steps_as_on_a_cpu(optimizer: str, tmp_path: Path, tiny_llama: Path) -> None:
    library = {"adamw_8bit": "bitsandbytes", "lion": "lion_pytorch"}.get(optimizer)
    if library:
        pytest.importorskip(library)
    sections = runs.job(tmp_path, tiny_llama, rows=64, epochs=1, optimizer=optimizer, learning_rate=1e-4)
    sections["model"] |= {"task": "text_generation", "max_length": 24}
    runs.succeed(tmp_path / "cpu", sections)
    tl.train(run=tmp_path / "here", engine=runs.Inline(1), **sections)
    # Moments of 8 bits are rounded to one side or the other.
    rounding = 5e-3 if optimizer == "adamw_8bit" else 1e-3
    assert runs.losses(tmp_path / "here") == pytest.approx(runs.losses(tmp_path / "cpu"), abs=rounding)


@pytest.mark.slow
def test_validations_write_the_texts_of_a_cpu(tmp_path: Path, tiny_llama: Path) -> None:
    sections = runs.job(tmp_path, tiny_llama, rows=48, epochs=2)
    sections["data"]["completion"] = "label"
    sections["model"] |= {"task": "text_generation", "max_length": 48}
    sections["train"]["validate_writing"] = {"rows": 8, "max_new_tokens": 4, "metric": "chrf"}
    runs.succeed(tmp_path / "cpu", sections)
    tl.train(run=tmp_path / "here", engine=runs.Inline(1), **sections)
    found, wanted = (
        [line["validation_chrf"] for line in runs.metrics(tmp_path / name) if "validation_chrf" in line]
        for name in ("here", "cpu")
    )
    assert len(found) == 2
    assert found == pytest.approx(wanted, abs=1e-6)
