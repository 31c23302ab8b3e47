"""Every runtime agrees with `eager` within the tolerance that its file declares, on every model kind it says it runs.

A new file in runtimes/ is tested here unasked. The table has rows of one token and of many, equal and ragged lengths.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from sweeps import sweep
from torchlake import plugins
from torchlake.data.batching import Ragged, pad
from torchlake.models import load as models
from torchlake.models.spec import load_spec
from torchlake.processes import hardware
from torchlake.runtimes import Forward

KINDS = ["bert", "distilbert", "roberta"]
BATCHES = [[1], [3, 3, 3], [1, 9, 30], [2] * 17]

COMPILED = {"compiled", "zentorch"}
"Compiling takes half a minute a test: quick tests see that they agree with eager."

Load = Callable[[str, str], tuple[Path, Forward]]


def batch(lengths: list[int], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.random.default_rng(sum(lengths)).integers(5, 60, offsets[-1]).astype(np.int32)
    return pad(Ragged(values, offsets), np.arange(len(lengths)), pad_id)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A function that gives the model folder of a kind and a runtime's forward pass over it, prepared if need be.

    It skips where the runtime says that it cannot run here.
    """
    parent = tmp_path_factory.mktemp("models")

    @cache
    def folder_of(kind: str) -> Path:
        encoder = tiny.build_encoder(parent / f"{kind}-encoder", kind=kind)  # type: ignore[arg-type]
        return tiny.build_model(parent / kind, encoder=encoder)

    @cache
    def forward_of(name: str, kind: str) -> Forward:
        folder, runtime = folder_of(kind), plugins.load("runtimes", name)
        spec = load_spec(folder)
        if hasattr(runtime, "prepare"):
            pad_id = models.load_tokenizer(folder).pad_token_id
            rows = [batch(lengths, pad_id) for lengths in ([5, 8], [12, 20], [30, 31], [1, 2])]
            runtime.prepare(folder, spec, rows if runtime.CALIBRATED else [])
        forward: Forward = runtime.load(folder, spec, device="cpu")
        return forward

    def get(name: str, kind: str) -> tuple[Path, Forward]:
        folder, runtime = folder_of(kind), plugins.load("runtimes", name)
        reason = runtime.refusal(folder) or runtime.never.get(load_spec(folder).task)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
        return folder, forward_of(name, kind)

    return get


QUICK = set(plugins.names("runtimes")) - COMPILED
OWN_LAYERS = {"bf16", "bettertransformer", "int8", "onnx", "varlen"}
"Runtimes with layers of their own for each kind, and the export that the others' are made from."
QUICK_CASES = {(name, kind) for name in QUICK for kind in KINDS if kind == "bert" or name in OWN_LAYERS}
every_kind = pytest.mark.parametrize(
    ("name", "kind"), sweep(product(plugins.names("runtimes"), KINDS), quick=QUICK_CASES)
)


@every_kind
def test_agrees_with_eager(name: str, kind: str, load: Load) -> None:
    folder, forward = load(name, kind)
    spec, pad_id = load_spec(folder), models.load_tokenizer(folder).pad_token_id
    task = plugins.load("tasks", spec.task)
    for lengths in BATCHES:
        ids, mask = batch(lengths, pad_id)
        logits = forward(input_ids=ids, attention_mask=mask)
        assert logits.dtype == np.float32
        assert logits.shape == (len(lengths), len(spec.labels))
        expected = load("eager", kind)[1](input_ids=ids, attention_mask=mask)
        difference = np.abs(task.answers(logits, spec) - task.answers(expected, spec)).max()
        assert difference <= plugins.load("runtimes", name).TOLERANCE, lengths


@every_kind
def test_neither_padding_nor_neighbors_change_an_answer(name: str, kind: str, load: Load) -> None:
    """A row scored alone and in a ragged batch may differ by rounding: in fp32, or at times by a step of 8 bits."""
    folder, forward = load(name, kind)
    lengths = [1, 9, 30]
    ids, mask = batch(lengths, models.load_tokenizer(folder).pad_token_id)
    together = forward(input_ids=ids, attention_mask=mask)
    tolerance = max(1e-5, plugins.load("runtimes", name).TOLERANCE / 10)
    for row, length in enumerate(lengths):
        alone = forward(input_ids=ids[row : row + 1, :length], attention_mask=mask[row : row + 1, :length])
        np.testing.assert_allclose(alone[0], together[row], atol=tolerance)


@pytest.mark.parametrize("name", sweep(plugins.names("runtimes"), quick=QUICK))
def test_loud_neighbors_cost_no_precision(name: str, load: Load) -> None:
    """The same row twenty times over beside others: a scale taken from the batch would give it other answers."""
    folder, forward = load(name, "bert")
    pad_id = models.load_tokenizer(folder).pad_token_id
    ids, mask = batch([12] * 8, pad_id)
    together = forward(input_ids=ids, attention_mask=mask)
    with_itself = forward(input_ids=np.repeat(ids[:1], 8, axis=0), attention_mask=mask)
    tolerance = max(1e-5, plugins.load("runtimes", name).TOLERANCE / 10)
    np.testing.assert_allclose(with_itself, np.repeat(together[:1], 8, axis=0), atol=tolerance)


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_declares_what_it_promises(name: str, tmp_path: Path) -> None:
    runtime = plugins.load("runtimes", name)
    assert runtime.TOLERANCE >= 0
    assert set(runtime.never) <= set(plugins.names("tasks"))
    assert all(reason for reason in runtime.never.values())
    assert hasattr(runtime, "prepare") == hasattr(runtime, "CALIBRATED")


OF_THE_FAMILY = ["bettertransformer", "bf16", "int8", "varlen"]


@pytest.mark.parametrize("name", OF_THE_FAMILY)
@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "t5"}, "'t5'"), ({"is_decoder": True}, "absolute positions")],
    ids=lambda value: "",
)
def test_other_models_are_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every CPU with the same words, also where the CPU could not run the runtime either."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bert", "hidden_act": "gelu", "num_attention_heads": 2, **change})
    )
    for cpu in hardware.CPU_CLASSES:
        monkeypatch.setenv(hardware.TEST_CPU, cpu)
        assert words in plugins.load("runtimes", name).refusal(folder)
