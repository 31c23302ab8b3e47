"""Texts of equal lengths are computed together where padding would change an answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchlake.runtimes.eager import _length_by_length

LENGTHS = np.array([3, 1, 3, 5, 1])
MASK = (np.arange(5) < LENGTHS[:, None]).astype(np.int64)
IDS = np.arange(1, 26).reshape(5, 5) * MASK
NUMBERS = np.arange(25.0).reshape(5, 5)
"Of each row as many as the longest text has tokens."
PLACES = np.stack([IDS, -IDS], axis=-1)


def a_number(**batch: np.ndarray) -> np.ndarray:
    return batch["input_ids"].sum(axis=-1).astype(np.float32)


def a_vector(**batch: np.ndarray) -> np.ndarray:
    assert batch["numbers"].shape[1:] == (5,)
    return batch["numbers"] + a_number(**batch)[:, None]


def of_tokens(**batch: np.ndarray) -> np.ndarray:
    assert batch["places"].shape[:2] == batch["input_ids"].shape
    return batch["places"] * 1.0


def without_padding(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Check that no text has padding."""

    def checked(**batch: np.ndarray) -> np.ndarray:
        assert batch["attention_mask"].all()
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        return compute(**batch)

    return checked


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (a_number, IDS.sum(axis=1)),
        (a_vector, NUMBERS + IDS.sum(axis=1, keepdims=True)),
        (of_tokens, PLACES),
    ],
)
def test_texts_are_computed_without_padding(compute: Any, expected: np.ndarray) -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "numbers": NUMBERS, "places": PLACES}
    padded = ["input_ids", "attention_mask", "places"]
    found = _length_by_length(without_padding(compute), batch, LENGTHS, padded)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dimensions", [0, 2])
def test_several_texts_of_a_row_are_computed_alone(dimensions: int) -> None:
    lengths = np.array([[3, 1], [3, 5], [2, 2]])
    mask = (np.arange(5) < lengths[..., None]).astype(np.int64)
    ids = np.arange(1, 31).reshape(3, 2, 5) * mask
    numbers = np.arange(12.0).reshape(3, 4)

    def compute(**batch: np.ndarray) -> np.ndarray:
        assert batch["input_ids"].shape[1] == 1
        sums = a_number(**batch) + batch["numbers"].sum(axis=-1).reshape(-1, 1)
        return np.repeat(sums[..., None], dimensions, axis=-1) if dimensions else sums

    batch = {"input_ids": ids, "attention_mask": mask, "numbers": numbers}
    found = _length_by_length(without_padding(compute), batch, lengths, ["input_ids", "attention_mask"])
    expected = ids.sum(axis=-1) + numbers.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], dimensions, -1) if dimensions else expected)
