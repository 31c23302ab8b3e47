"""Every runtime agrees with `eager` within the tolerance that its file declares, on every model kind it says it runs.

A new file in runtimes/ is tested here unasked. The table has rows of one token and of many, equal and ragged lengths.
"""

from pathlib import Path

import numpy as np
import pytest

import tiny
from torchlake import models, plugins
from torchlake.data.batching import Ragged, pad

BATCHES = [[1], [3, 3, 3], [1, 9, 30], [2] * 17]


def batch(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.random.default_rng(sum(lengths)).integers(5, 60, offsets[-1]).astype(np.int32)
    return pad(Ragged(values, offsets), np.arange(len(lengths)), 0)


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp(request.param)
    encoder = tiny.build_encoder(parent / "encoder", kind=request.param)
    return tiny.build_model(parent / "model", encoder=encoder)


@pytest.mark.parametrize("lengths", BATCHES, ids=str)
@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_agrees_with_eager(name: str, lengths: list[int], folder: Path) -> None:
    spec = models.load_spec(folder)
    runtime = plugins.load("runtimes", name)
    task = plugins.load("tasks", spec.task)
    if spec.task in runtime.never:
        pytest.xfail(runtime.never[spec.task])
    ids, mask = batch(lengths)
    forward = runtime.load(folder, spec, device="cpu")
    logits = forward(ids, mask)
    assert logits.dtype == np.float32
    assert logits.shape == (len(lengths), len(spec.labels))
    expected = plugins.load("runtimes", "eager").load(folder, spec, device="cpu")(ids, mask)
    difference = np.abs(task.probabilities(logits, spec) - task.probabilities(expected, spec)).max()
    assert difference <= runtime.TOLERANCE


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_padding_changes_no_answer(name: str, folder: Path) -> None:
    """A row scored alone and in a ragged batch: what a runtime may differ by is rounding, never the padding."""
    spec = models.load_spec(folder)
    forward = plugins.load("runtimes", name).load(folder, spec, device="cpu")
    ids, mask = batch([1, 9, 30])
    together = forward(ids, mask)
    for row, length in enumerate([1, 9, 30]):
        alone = forward(ids[row : row + 1, :length], mask[row : row + 1, :length])
        np.testing.assert_allclose(alone[0], together[row], atol=1e-5)


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_declares_what_it_promises(name: str) -> None:
    runtime = plugins.load("runtimes", name)
    assert runtime.TOLERANCE >= 0
    assert set(runtime.never) <= set(plugins.names("tasks"))
    assert all(reason for reason in runtime.never.values())
