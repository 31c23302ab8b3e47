"""Pairs of texts on every runtime: eager's answers with the types of the tokens, or a refusal that says why."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tiny
from sweeps import sweep
from task_cases import pairs
from torchlake import plugins
from torchlake.models.spec import uses_token_types
from torchlake.models.tokenizer import TOKEN_TYPES
from torchlake.runtimes import Forward
from torchlake.scoring.rows import RowReader, ScoringSettings
from torchlake.scoring.runtime_choice import refusal
from torchlake.scoring.scorer import prepare_runtime

SPEC = replace(tiny.SPEC, text="question", text_pair="answer")
RUNTIMES = plugins.names("runtimes")
WITHOUT_TYPES = {"bettertransformer", "deepspeed", "onnx", "onnx_int8", "openvino", "openvino_int8"}
"Runtimes whose graphs have no input for them."
QUICK = {
    ("eager", "bert"),
    *product(["varlen", "int8"], ["bert", "roberta"]),
    *product(["onnx"], ["bert", "distilbert"]),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the model folder of a kind of encoder for pairs."""
    parent = tmp_path_factory.mktemp("models")

    @cache
    def build(kind: Any) -> Path:
        encoder = tiny.build_pair_encoder(parent / f"{kind}-encoder", kind=kind)
        return tiny.build_model(parent / kind, encoder=encoder, spec=SPEC)

    return build


def settings(folder: Path, runtime: str) -> ScoringSettings:
    return ScoringSettings(model=str(folder), runtime=runtime, text="question", text_pair="answer", keep=(), key=None)


def loaded(folder: Path, runtime: str, rows: pa.Table) -> Forward:
    """The runtime's forward pass over pairs, exported and calibrated on `rows` if need be."""
    module = plugins.load("runtimes", runtime)
    if hasattr(module, "prepare"):
        prepare_runtime(settings(folder, runtime), runtime, rows)
    forward: Forward = module.load(folder, SPEC, device="cpu")
    return forward


def batches(folder: Path, rows: pa.Table) -> list[dict[str, np.ndarray]]:
    """A row alone, rows of all lengths, and the longest twice over."""
    reader = RowReader(settings=settings(folder, "eager"))
    features = reader.read(rows, {}).features
    longest = int(np.argmax(features.lengths))
    chosen = (np.array([0]), np.argsort(features.lengths)[:12], np.array([longest, longest]))
    return [reader.task.checked_batch(features.arrays, each, reader.processor, SPEC) for each in chosen]


@pytest.mark.parametrize(("name", "kind"), sweep(product(RUNTIMES, ["bert", "roberta", "distilbert"]), quick=QUICK))
def test_pairs_have_the_answers_of_eager(name: str, kind: str, folder_of: Callable[[str], Path]) -> None:
    folder, rows = folder_of(kind), pairs(40)
    reason = refusal(name, folder, SPEC.task)
    if kind == "bert" and name in WITHOUT_TYPES and plugins.load("runtimes", name).refusal(folder) is None:
        assert reason is not None
        assert "token types" in reason
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    task, eager = plugins.load("tasks", SPEC.task), loaded(folder, "eager", rows)
    forward = loaded(folder, name, rows)
    for batch in batches(folder, rows):
        assert (TOKEN_TYPES in batch) == (kind == "bert")
        ours, expected = (task.answers(run(**batch), SPEC) for run in (forward, eager))
        assert np.abs(ours - expected).max() <= plugins.load("runtimes", name).TOLERANCE


def test_the_types_of_tokens_decide(folder_of: Callable[[str], Path]) -> None:
    """A BERT gives a pair another answer than the same tokens as one text, under each runtime that takes types."""
    folder, rows = folder_of("bert"), pairs(8)
    batch = batches(folder, rows)[1]
    assert uses_token_types(folder)
    assert set(np.unique(batch[TOKEN_TYPES])) == {0, 1}
    plain = {name: array for name, array in batch.items() if name != TOKEN_TYPES}
    for name in ("eager", "varlen"):
        forward = loaded(folder, name, rows)
        assert np.abs(forward(**batch) - forward(**plain)).max() > 0.01
