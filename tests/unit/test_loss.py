"""Class weights and label smoothing: the losses are PyTorch's, the balanced weights scikit-learn's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional

import tiny
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError
from torchlake.loss import UNWEIGHTED, Objective, check_objective, find_objective, focal_loss
from torchlake.tasks.text_classification import task

CLASSES = tiny.spec_for("single_label", ("a", "b", "c"))
SETS = tiny.spec_for("multi_label", ("a", "b", "c"))
NUMBERS = st.integers(0, 10**6)


@given(NUMBERS, st.lists(st.floats(0.1, 10), min_size=3, max_size=3) | st.none(), st.sampled_from([0.0, 0.1, 0.5]))
def test_a_batch_in_pieces_has_the_mean_that_pytorch_gives(
    seed: int, weights: list[float] | None, smooth: float
) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(size=(7, 3)))
    targets = generator.integers(0, 3, 7)
    objective = Objective(class_weights=None if weights is None else tuple(weights), label_smoothing=smooth)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    expected = functional.cross_entropy(logits.float(), torch.from_numpy(targets), tensor, label_smoothing=smooth)
    pieces = [slice(0, 2), slice(2, 7), slice(7, 7)]
    summed = sum(task.loss_sum(logits[one], torch.from_numpy(targets)[one], CLASSES, objective) for one in pieces)
    assert float(summed) / task.divisor(targets, CLASSES, objective) == pytest.approx(float(expected), rel=1e-5)


def test_weights_of_several_labels_are_those_of_the_labels_that_a_row_has() -> None:
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(5, 3))).float()
    targets = (generator.random((5, 3)) < 0.4).astype(np.float32)
    weights = (2.0, 1.0, 7.0)
    expected = functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(targets), pos_weight=torch.tensor(weights)
    )
    summed = task.loss_sum(logits, torch.from_numpy(targets), SETS, Objective(class_weights=weights))
    assert float(summed) / task.divisor(targets, SETS, Objective(class_weights=weights)) == pytest.approx(
        float(expected)
    )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 100))
def test_balanced_weights_are_those_of_scikit_learn(classes: list[int], seed: int) -> None:
    targets = np.array(classes)
    rows = np.flatnonzero(np.random.default_rng(seed).random(len(targets)) < 0.7)
    if not len(rows):
        rows = np.arange(len(targets))
    found = find_objective(TrainConfig(class_weights="balanced"), CLASSES, targets, rows).class_weights
    present = np.unique(targets[rows])
    expected = dict(zip(present, compute_class_weight("balanced", classes=present, y=targets[rows]), strict=True))
    assert found == pytest.approx([expected.get(number, 1.0) for number in range(3)])


def test_balanced_labels_weigh_as_much_where_they_are_as_where_they_are_not() -> None:
    targets = np.array([[1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]], np.float32)
    found = find_objective(TrainConfig(class_weights="balanced"), SETS, targets, np.arange(4)).class_weights
    assert found == (3.0, 1.0, 1.0), "one row of four; none; all of them"


def test_weights_by_label_are_in_the_order_of_the_classes() -> None:
    train = TrainConfig(class_weights={"c": 4.0, "a": 0.5}, label_smoothing=0.2)
    found = find_objective(train, CLASSES, np.zeros(2, np.int64), np.arange(2))
    assert found == Objective(class_weights=(0.5, 1.0, 4.0), label_smoothing=0.2)
    for labels, names in (((1, 2), {1: 3.0}), ((False, True), {False: 3.0})):
        train = TrainConfig.model_validate({"class_weights": names})
        spec = tiny.spec_for("single_label", labels)
        assert find_objective(train, spec, np.zeros(2, np.int64), np.arange(2)).class_weights == (3.0, 1.0)
    assert find_objective(TrainConfig(), CLASSES, None, np.arange(0)) == UNWEIGHTED


@pytest.mark.parametrize("weights", [None, (2.0, 1.0, 7.0)])
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_focal_loss_is_the_formula_of_its_paper(weights: tuple[float, ...] | None, gamma: float) -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(9, 3)) * 3
    objective = Objective(class_weights=weights, focal_gamma=gamma)
    alpha = np.array(weights or (1.0, 1.0, 1.0))

    numbers = generator.integers(0, 3, 9)
    powers = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    p = powers[np.arange(9), numbers]
    expected = -(alpha[numbers] * (1 - p) ** gamma * np.log(p)).sum()
    found = task.loss_sum(torch.from_numpy(logits), torch.from_numpy(numbers), CLASSES, objective)
    assert float(found) == pytest.approx(expected, rel=1e-5)

    sets = (generator.random((9, 3)) < 0.4).astype(np.float32)
    sigmoid = 1 / (1 + np.exp(-logits))
    positive = alpha * sets * (1 - sigmoid) ** gamma * np.log(sigmoid)
    negative = (1 - sets) * sigmoid**gamma * np.log(1 - sigmoid)
    found = task.loss_sum(torch.from_numpy(logits), torch.from_numpy(sets), SETS, objective)
    assert float(found) == pytest.approx(-(positive + negative).sum(), rel=1e-5)


def test_a_certain_focal_target_has_a_finite_gradient() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    focal_loss(logits, torch.tensor([0]), Objective(focal_gamma=0.5)).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("problem", ["regression", "next_token", "spans"])
def test_a_focal_loss_needs_classes(problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.focal_gamma: the problem is {problem}; only classes of whole rows"):
        check_objective(TrainConfig(focal_gamma=2.0), tiny.spec_for(problem, ()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing is set too"):
        TrainConfig(focal_gamma=2.0, label_smoothing=0.1)
