"""What metrics.jsonl says of the speed: tokens a second, waits, memory, the share of the matrix rate."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import training_runs as runs
from torchlake.optim.depth import layers
from torchlake.runs import speed

CPU = torch.device("cpu")
BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_rate", lambda *widths, **options: 1e9)


@pytest.mark.usefixtures("measured")
def test_the_operations_are_those_of_the_layers_matrices() -> None:
    """Per token 6 for each number of the four projections and the two feed-forward matrices, 12 L h for attention."""
    model = BertForSequenceClassification(BertConfig(**BERT))
    found = speed.measure(layers(model), model.config, per_token=False, device=CPU, dtype=torch.float32)
    numbers = 3 * (4 * 32 * 32 + 2 * 32 * 64)
    assert found.per_token == 6 * numbers
    lengths = np.array([5, 11])
    assert found.operations(lengths) == 6 * numbers * 16 + 12 * 3 * 32 * (25 + 121)
    for parameter in model.bert.encoder.layer[0].parameters():
        parameter.requires_grad_(False)
    frozen = speed.measure(layers(model), model.config, per_token=False, device=CPU, dtype=torch.float32)
    assert frozen.per_token == 6 * numbers - 2 * numbers // 3
    assert found.share(2e9, 4.0, ranks=2) is None, "of a CPU no rate is a limit"
    assert speed.Speed(rate=1e9, per_token=1, per_pair=1).share(2e9, 4.0, ranks=2) == 0.25


@pytest.mark.usefixtures("measured")
def test_a_language_model_has_a_head_and_attends_to_the_past() -> None:
    config = LlamaConfig(**BERT, vocab_size=100, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    found = speed.measure(layers(model), config, per_token=True, device=CPU, dtype=torch.float32)
    assert found.per_token == 6 * (3 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 100)
    assert found.per_pair == 6 * 3 * 32


def test_a_matrix_rate_is_measured_without_a_change_of_random_numbers() -> None:
    before = torch.get_rng_state()
    assert 1e8 < speed.matrix_rate(64, 64, device=CPU, dtype=torch.float32, seconds=0.01) < 1e14
    assert torch.equal(before, torch.get_rng_state())


def test_every_step_says_how_fast_it_was(tmp_path: Path, tiny_bert: Path) -> None:
    began = time.monotonic()
    runs.succeed(tmp_path / "run", runs.job(tmp_path, tiny_bert, epochs=1))
    whole = time.monotonic() - began
    steps = [line for line in runs.metrics(tmp_path / "run") if "loss" in line]
    assert len(steps) == 9
    assert sum(line["seconds"] for line in steps) < whole
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["seconds"], rel=1e-3)
        assert 0 < line["data_seconds"] < line["seconds"]
        assert 0 <= line["wait_seconds"] < whole, "after the step, so it may be longer than the step"
        assert 2**25 < line["peak_memory_bytes"] < 2**36
        assert "mfu" not in line, "what a CPU reaches depends on what else it does"
    peaks = [line["peak_memory_bytes"] for line in steps]
    assert peaks == sorted(peaks)
