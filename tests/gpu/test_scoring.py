"""Every runtime gives on this machine's device what `eager` gives on its CPU."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake import plugins
from torchlake.data.batching import Ragged, pad
from torchlake.errors import UsageError
from torchlake.models import load as models
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.runtimes import write_all

LENGTHS = [1, 9, 9, 30]
ON_GPUS = 0.02
"A probability may differ by this much between fp32 on a CPU and 16 bits on a GPU."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_roberta: Path) -> Path:
    return tiny.build_model(tmp_path_factory.mktemp("gpu") / "model", encoder=tiny_roberta)


def batch(pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).integers(5, 60, sum(LENGTHS)).astype(np.int32)
    return pad(Ragged(values, np.concatenate([[0], np.cumsum(LENGTHS)])), np.arange(len(LENGTHS)), pad_id)


@pytest.mark.parametrize("name", sweep(plugins.names("runtimes"), quick=()))
def test_a_runtime_agrees_with_eager_on_the_cpu(name: str, model: Path, device: str) -> None:
    runtime, spec = plugins.load("runtimes", name), load_spec(model)
    reason = runtime.refusal(model)
    if reason is not None:
        pytest.skip(reason)
    ids, mask = batch(models.load_tokenizer(model).pad_token_id)
    if hasattr(runtime, "prepare"):
        runtime.prepare(model, spec, [(ids, mask)] * 3 if runtime.CALIBRATED else [])
    try:
        forward = runtime.load(model, spec, device=device)
    except UsageError as error:
        if device == "cpu":
            raise
        pytest.skip(str(error))  # a runtime for CPUs only
    task = plugins.load("tasks", spec.task)
    expected = task.answers(
        plugins.load("runtimes", "eager").load(model, spec, device="cpu")(input_ids=ids, attention_mask=mask), spec
    )
    found = task.answers(forward(input_ids=ids, attention_mask=mask), spec)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= runtime.TOLERANCE + (ON_GPUS if device == "cuda" else 0.0)


@pytest.mark.slow
def test_a_table_is_scored_as_on_the_cpu(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processes and the device that `predict` takes by itself."""
    pq.write_table(tiny.reviews(300), tmp_path / "in.parquet")
    tl.predict(model, tmp_path / "in.parquet", tmp_path / "here", chunk_rows=100, engine=tl.Local(), prefix="p_")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tl.predict(
        model,
        tmp_path / "in.parquet",
        tmp_path / "cpu",
        chunk_rows=100,
        engine=tl.Local(processes=1),
        runtime="eager",
        prefix="p_",
    )
    here, cpu = (pq.read_table(tmp_path / name) for name in ("here", "cpu"))
    assert here["row_id"].equals(cpu["row_id"])
    assert here["error"].null_count == 300
    assert np.abs(here["p_score"].to_numpy() - cpu["p_score"].to_numpy()).max() <= ON_GPUS


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [False, True])
def test_two_devices_share_a_model(
    encoder: bool, model: Path, tiny_llama: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama by tensor parallelism; RoBERTa, which has no plan, layer by layer, on GPUs only."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if encoder and device == "cpu":
        pytest.skip("layers are placed over GPUs only")
    folder = model if encoder else tiny.build_model(tmp_path / "llama", encoder=tiny_llama)
    pq.write_table(tiny.reviews(300), tmp_path / "in.parquet")
    tl.predict(folder, tmp_path / "in.parquet", tmp_path / "two", chunk_rows=100, gpus_per_process=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tl.predict(folder, tmp_path / "in.parquet", tmp_path / "one", chunk_rows=100, runtime="eager")
    two, one = (pq.read_table(tmp_path / name) for name in ("two", "one"))
    assert two["row_id"].equals(one["row_id"])
    assert two["label"].equals(one["label"])
    assert np.abs(two["score"].to_numpy() - one["score"].to_numpy()).max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_is_generated_alone_as_among_others(temperature: float, tiny_llama: Path, device: str) -> None:
    spec, options = load_spec(tiny_llama), GenerationOptions(max_new_tokens=8, temperature=temperature)
    writer = plugins.load("runtimes", "eager").open_writer(tiny_llama, spec, device=device, options=options)
    ids, _ = batch(models.load_tokenizer(tiny_llama).pad_token_id)
    prompts = [ids[row, :length] for row, length in enumerate(LENGTHS)]
    together = write_all(writer, prompts, options)
    assert together.shape == (len(LENGTHS), 8)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(write_all(writer, [prompt], options)[0], together[row])
