"""Classes or a number from texts: `torchlake.Task`, from which built-in and users' classifiers inherit.

The label column decides between one class, several classes and a number, once, when a job starts
(`labels/classes_or_numbers.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import Problem, TaskSpec
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS, Array, Features, as_matrix, from_arrow, text_features
from torchlake.errors import TaskError
from torchlake.labels import classes_or_numbers, encoding, predictions
from torchlake.loss import UNWEIGHTED, Objective, focal_loss
from torchlake.metrics import DIRECTIONS, Direction, validation_metrics
from torchlake.models import load
from torchlake.models.tokenizer import TOKEN_TYPES
from torchlake.tasks import _tokens
from torchlake.tasks._columns import ColumnOptions
from torchlake.tasks._contract import BaseTask
from torchlake.tasks._inputs import PAIR, TEXT, Inputs

if TYPE_CHECKING:
    import torch


class Task(BaseTask):
    """A task, by default a classifier or a regression of texts; the label column decides which.

    A subclass overrides the methods in which it differs. The defaults are in this class, which users know, because most
    own tasks predict classes or a number: only their module and their features differ. `torchlake.tasks.BaseTask` is
    the contract without these defaults, for tasks that predict other things.
    """

    inputs: Mapping[str, str] = {"text": TEXT, PAIR: TEXT}
    default_metric: Mapping[Problem, str] = {
        "single_label": "macro_f1",
        "multi_label": "micro_f1",
        "regression": "rmse",
    }
    directions: Mapping[str, Direction] = DIRECTIONS

    # Columns to features.

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Any:
        """Return the tokenizer of a base or model folder; None without a base model or texts."""
        if folder is None or not spec.text:
            return None
        if spec.text_pair is not None:
            return load.load_pair_tokenizer(folder)
        return load.load_text_tokenizer(folder) if scoring else load.load_tokenizer(folder)

    count_labels = staticmethod(classes_or_numbers.count_labels)
    decide_labels = staticmethod(classes_or_numbers.decide_labels)
    target_type = staticmethod(encoding.target_type)
    encode_labels = staticmethod(encoding.encode_labels)
    bad_labels = staticmethod(encoding.bad_labels)

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the Arrow type in which each array of `features` is stored."""
        types = {INPUT_IDS: pa.list_(pa.int32())}
        return types if spec.text_pair is None else {**types, TOKEN_TYPES: pa.list_(pa.uint8())}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the model inputs of rows without an error; by default the tokens of `text` and `text_pair`."""
        texts = inputs["text"].to_pylist()
        if spec.text_pair is None:
            return text_features(_tokens.tokenize(processor, texts, spec.max_length))
        if spec.prompt:
            texts = [spec.prompt + text for text in texts]
        pairs = list(zip(texts, inputs[PAIR].to_pylist(), strict=True))
        tokens, types = _tokens.tokenize_pairs(processor, pairs, spec.max_length)
        return text_features(tokens, **{TOKEN_TYPES: Ragged(types, tokens[1])})

    # The loss and the metrics.

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the summed loss in fp32: (binary) cross entropy, or the squared error in standard deviations.

        `outputs` (B, C); `targets` (B,) int64, (B, C) float32, or (B,) float32. Class weights multiply the loss of a
        row of that class or, for multi label, of a positive class.
        """
        from torch.nn import functional

        assert targets is not None, "rows have labels"
        self._check_width(outputs.shape, spec)
        logits = outputs.float()
        weights = None if objective.class_weights is None else logits.new_tensor(objective.class_weights)
        if objective.focal_gamma:
            return focal_loss(logits, targets if spec.problem == "single_label" else targets.float(), objective)
        if spec.problem == "single_label":
            return functional.cross_entropy(
                logits, targets, weights, label_smoothing=objective.label_smoothing, reduction="sum"
            )
        targets = targets.float()
        if spec.problem == "multi_label":
            return functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="sum")
        if spec.mean is not None and spec.deviation is not None:
            targets = (targets - spec.mean) / spec.deviation
        return functional.mse_loss(logits.squeeze(-1), targets, reduction="sum")

    def divisor(self, targets: Array, spec: TaskSpec, objective: Objective = UNWEIGHTED) -> float:
        """Return, as in PyTorch, the number of targets (rows times classes for multi label), or their class weights."""
        if spec.problem == "single_label" and objective.class_weights is not None and isinstance(targets, np.ndarray):
            return float(np.asarray(objective.class_weights)[targets].sum())
        return super().divisor(targets, spec, objective)

    def answers(self, outputs: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the answers in the outputs of N rows: probabilities, or numbers in the unit of the labels."""
        self._check_width(outputs.shape, spec)
        return predictions.probabilities(outputs, spec)

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return validation metrics, including the default one; `targets` as in `collate_targets`."""
        assert targets is not None, "rows have labels"
        return validation_metrics(answers, targets, spec.problem)

    def metric_names(self, spec: TaskSpec) -> list[str]:
        """Return the metrics that can choose the best model: computed on two rows, unless a subclass has its own."""
        if type(self).metrics is not Task.metrics or not self.measures_outputs:
            return super().metric_names(spec)
        scores = np.eye(2, max(1, len(spec.labels)), dtype=np.float32)
        targets = scores if spec.problem == "multi_label" else np.arange(2)
        return list(validation_metrics(scores, targets, spec.problem))

    # Outputs to columns.

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return the prediction columns, each nullable."""
        return predictions.output_schema(spec, options.all_probabilities)

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the prediction columns of the answers of N rows, in `output_schema`."""
        return predictions.output_columns(answers, spec, options.all_probabilities)

    probability_names = staticmethod(predictions.probability_names)

    def read_answers(self, scored: pa.Table, spec: TaskSpec) -> np.ndarray:
        """Return the answers in prediction columns (all probabilities), NaN where a row has an error."""
        names = self.probability_names(spec)
        return np.column_stack([scored[name].to_numpy(zero_copy_only=False) for name in names])

    def measure(self, scored: pa.Table, labels: pa.Array, spec: TaskSpec) -> dict[str, float]:
        """Return the metrics of prediction columns (all probabilities) and labels, for `evaluate`; every row has
        both."""
        answers = self.read_answers(scored, spec)
        targets = from_arrow(self.encode_labels(labels, spec))
        return self.metrics(answers, self.collate_targets(as_matrix(targets), np.arange(len(labels)), spec), spec)

    @property
    def measures_classes(self) -> bool:
        """Whether the task's metrics are those of `torchlake.metrics`, which `evaluate` computes with intervals."""
        mine = type(self)
        own = (mine.metrics, mine.measure, mine.count_labels, mine.decide_labels)
        return own == (Task.metrics, Task.measure, Task.count_labels, Task.decide_labels)

    def _check_width(self, shape: Sequence[int], spec: TaskSpec) -> None:
        """Raise TaskError for outputs that are not one number per class."""
        wanted = (max(1, len(spec.labels)),)
        if tuple(shape[1:]) != wanted:
            raise TaskError(
                f"the task {self.name!r}: the model's outputs have the shape {tuple(shape)}, but for {spec.problem} "
                f"with {len(spec.labels)} classes the shape must be (rows, {wanted[0]})"
            )
