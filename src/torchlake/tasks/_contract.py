"""The contract of a task: what it has to say, in the order in which torchlake asks.

`BaseTask` decides nothing about what is predicted: methods without a default raise an error that names them. `Task`
(`_classification.py`) adds the answers of a classifier of texts.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import LabelColumn, Problem, TaskSpec
from torchlake.data.batching import Ragged, pad, ranges, rectangle
from torchlake.data.features import INPUT_IDS, Array, Features
from torchlake.errors import DataError, TaskError
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.metrics import Direction
from torchlake.models import load, write
from torchlake.models.tokenizer import MAX_LENGTH, TOKEN_TYPES
from torchlake.tasks import _checks, _pretrained
from torchlake.tasks._columns import ColumnOptions
from torchlake.tasks._inputs import Inputs, sample_inputs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchlake.tables.chunks import RowCost

NO_TARGET = -100
"Fills the targets of rows with fewer than others; losses of PyTorch ignore it."


class BaseTask:
    """What every task has to say; `spec` is a job's or a model's columns, problem and classes (task.json)."""

    name: str = ""
    "The task's name in jobs and in task.json; by default the class's name in lower case with underscores."
    inputs: Mapping[str, str]
    "Each input and what its columns hold: TEXT, PROMPT, NUMBER or ANY (see `_inputs.py`)."
    optional: Collection[str] = ()
    "Inputs that a table may lack, besides the second text of a pair: they are read if `data.inputs` names them."
    has_labels: bool = True
    "Whether the task learns a label column (`data.label`)."
    labeled: Collection[str] = ()
    "Values of `data.problem` with which a task that reads no labels learns a label column after all."
    problems: Mapping[str, Problem] = {}
    "What a task without labels predicts, by `data.learn`; by default the task's name."
    auto_class: str = ""
    "transformers' Auto class of the models; empty: `build` makes the model."
    checks_padding: bool = False
    """Whether the model reads texts by a model of transformers (with `auto_class`: True).

    If so, a test finds out whether padding changes its outputs despite the mask, and `attention_mask` is None for a
    batch without padding. Another module is trusted to ignore padding by its mask.
    """
    hub_task: str = "other"
    "The Hugging Face Hub's name of the task, for the model card."
    trains: bool = True
    "Whether torchlake can train its models; False: it can only score them."
    packs: bool = False
    "Whether training concatenates rows into blocks of tokens, as for a causal language model."
    pairs: bool = False
    "Whether a row is two answers, whose tokens training puts into lines (`data/pairs.py`)."
    generates: bool = False
    "Whether `predict` writes text, with the options of generation."
    couples_rows: bool = False
    "Whether the loss of a row depends on the batch's other rows, as with in-batch negatives."
    measures_outputs: bool = True
    "Whether `metrics` are computed from outputs; False: only from the loss, and a validation keeps no outputs."
    options: Mapping[str, Any] = {}
    "The task's own options (`model.task_options`, `predict(task_options=)`) with their defaults, as JSON values."
    token_arrays: Sequence[str] = (INPUT_IDS,)
    "Arrays of token ids; a row with an id that the model has no embedding for is an error."
    collates_ahead: bool = False
    "Whether `collate` takes long (decoding images): then threads do it while the model computes."
    chunk_rows: "int | RowCost | None" = None
    "Default maximum of rows per chunk, or their cost, if rows take more time or memory than their columns suggest."
    forward_options: Mapping[str, Any] = {}
    "Keyword arguments of the model besides the batch."
    kept_back: Sequence[str] = ()
    "Arrays of a batch that the model does not get, only `reduce_outputs`, such as the places of tokens in the text."
    default_metric: Mapping[Problem, str] = {}
    "The validation metric that chooses the best model, by problem; the loss for problems without an entry."
    directions: Mapping[str, Direction] = {"loss": "lower"}
    "Whether higher or lower is better, for each metric and for loss."

    def __init_subclass__(cls) -> None:
        """Set the task's name from the class's name."""
        cls.name = vars(cls).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        cls.checks_padding = cls.checks_padding or bool(cls.auto_class)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Columns to features.

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Any:
        """Return the processor that turns inputs into numbers, by default transformers' tokenizer of a model folder.

        `folder` is None if the job has no base model.
        """
        return None if folder is None else load.load_tokenizer(folder)

    def max_length(self, base: Path | None, requested: int | None) -> int:
        """Return the maximum tokens of a row in training, if `requested` is the job's `model.max_length`."""
        if base is None or requested is not None:
            return load.max_length(base, requested) if base is not None else requested or MAX_LENGTH
        return min(load.max_length(base), MAX_LENGTH)

    def count_labels(
        self, arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False
    ) -> Any:
        """Count a part of the training table's label column, in any process; return picklable counts."""
        raise self._no_labels()

    def decide_labels(self, parts: Iterable[Any], problem: Problem | None = None) -> LabelColumn:
        """Combine the counts of all parts into the label column; infer the problem if it is None."""
        raise self._no_labels()

    def name_labels(self, found: LabelColumn, spec: TaskSpec) -> LabelColumn:
        """Return the label column with its classes named by the options; by default as found."""
        return found

    def find_labels(
        self, arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False
    ) -> LabelColumn:
        """Return the content of a whole label column."""
        return self.decide_labels([self.count_labels(arrays, problem, drop_bad=drop_bad)], problem)

    def complete(self, spec: TaskSpec, base: Path | None) -> TaskSpec:
        """Return a job's task, completed from the base model. Raises ConfigError for a job that it cannot learn."""
        return spec

    def find_columns(self, schema: pa.Schema, spec: TaskSpec, first: Callable[[str], pa.Table] | None) -> TaskSpec:
        """Return a job's task, completed by what a table holds; `first` reads its first rows of a column."""
        return spec

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the Arrow type in which each array of `features` is stored; by default of token ids."""
        return {INPUT_IDS: pa.list_(pa.int32())}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the model inputs of rows without an error."""
        raise self._lacks("features")

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the model inputs and the targets of training rows; `labels` None: without targets."""
        targets = None if labels is None else self.encode_labels(labels, spec)
        return self.features(inputs, processor, spec), targets

    def sample_inputs(self, spec: TaskSpec, texts: Sequence[str]) -> Inputs | None:
        """Return inputs made of `texts`, if the task reads texts only; a model is tested with them. Else None."""
        return sample_inputs(self.inputs, spec, tuple(texts))

    def target_type(self, spec: TaskSpec) -> pa.DataType:
        """Return the Arrow type of the targets."""
        raise self._no_labels()

    def encode_labels(self, array: pa.Array, spec: TaskSpec) -> pa.Array:
        """Return labels as targets, nulls kept. Raises DataError for labels that the model does not know."""
        raise self._no_labels()

    def bad_labels(self, array: pa.Array, spec: TaskSpec) -> dict[int, str]:
        """Return {row: reason} for rows with an invalid label."""
        raise self._no_labels()

    # Features to a batch.

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the model's keyword arguments for the rows (B,) of the arrays.

        `seed` is different in each epoch, for augmentation that depends on it and on the row's number; None: no
        augmentation. By default `input_ids` are padded with the processor's padding token, beside an `attention_mask`;
        other values are padded with 0.
        """
        batch: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                batch[name] = array[rows]
            elif name == INPUT_IDS:
                batch[name], batch["attention_mask"] = pad(array, rows, processor.pad_token_id)
            elif name != TOKEN_TYPES or TOKEN_TYPES in processor.model_input_names:
                batch[name], _ = pad(array, rows, 0)
        return batch

    def text_lengths(self, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the number of tokens of each text of a batch, (B,), or of several texts per row, (B, K), without
        padding."""
        lengths: np.ndarray = batch["attention_mask"].sum(axis=-1).clip(min=1)
        return lengths

    def collate_targets(self, targets: Array, rows: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the targets of the rows (B,), those of different lengths filled up with NO_TARGET."""
        if isinstance(targets, np.ndarray):
            chosen: np.ndarray = targets[rows]
            return chosen
        lengths = targets.lengths_of(rows)
        return rectangle(targets.values[ranges(targets.offsets[rows], lengths)], lengths, NO_TARGET)[0]

    # The model.

    def build(self, folder: Path | None, spec: TaskSpec, *, weights: bool) -> "nn.Module":
        """Return the task's own module, in fp32; only for tasks without an `auto_class`.

        `folder` is the base model, whose weights are read if `weights` (None: the job has none), or a trained model
        folder, whose weights are loaded into the module afterwards: `load_encoder` handles both.
        """
        raise TaskError(f"the task {self.name!r} has neither an auto_class nor a method build")

    def base_model(self, base: Path | None, spec: TaskSpec, *, empty: bool = False) -> "nn.Module":
        """Return the model that training starts from; `empty`: on the meta device, without weights."""
        if self.auto_class:
            assert base is not None, "checked by draft_spec"
            return _pretrained.base_model(base, spec, self.auto_class, empty=empty)
        return _pretrained.own_model(self, base, spec, empty=empty)

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return a trained model in evaluation mode; `options` are those of `models.load.load_model`."""
        if self.auto_class:
            return load.load_model(folder, spec, auto_class=self.auto_class, **options)
        return _pretrained.load_own(self, folder, spec, **options)

    def save_model(
        self, folder: Path, model_or_state: Any, config: Any, processor: Any, spec: TaskSpec, **card: Any
    ) -> None:
        """Write a model folder; `card` are further arguments of `models.write.save_model_folder`."""
        about = write.About(auto_class=self.auto_class, hub_task=self.hub_task)
        write.save_model_folder(folder, model_or_state, config, processor, spec, about=about, **card)

    def outputs(self, answer: Any) -> "torch.Tensor":
        """Return the outputs (B, ...) in what the model returned: a tensor itself, or its `logits`."""
        outputs: torch.Tensor = answer if hasattr(answer, "shape") else answer.logits
        return outputs

    # The loss and the metrics.

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the summed loss (), in fp32, of outputs (B, ...) and targets (B, ...)."""
        raise self._lacks("loss_sum")

    def couples(self, spec: TaskSpec) -> bool:
        """Return `couples_rows`, which may depend on the problem."""
        return self.couples_rows

    def before_forward(self, rows: int) -> None:
        """Prepare a forward pass of a rank's `rows` in training; if 0, the rank computes a row that does not count."""

    def divisor(self, targets: Array, spec: TaskSpec, objective: Objective = UNWEIGHTED) -> float:
        """Return the divisor of the loss summed over all ranks, whose rows have these targets; by default their
        number."""
        return max(1, int((targets.values != NO_TARGET).sum())) if isinstance(targets, Ragged) else targets.size

    def reduce_outputs(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the part of a batch's outputs (B, ...) to keep; batches of other widths are filled up with NaN or
        -1."""
        return outputs

    def reduce_all(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the part to keep with `all_probabilities`; by default the same."""
        return self.reduce_outputs(outputs, batch, spec)

    def answers(self, outputs: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the answers in the outputs of N rows; by default the outputs themselves."""
        return outputs

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return validation metrics, including the default one; `targets` as in `collate_targets`."""
        raise self._lacks("metrics")

    def metric_names(self, spec: TaskSpec) -> list[str]:
        """Return the metrics that can choose the best model, besides loss; by default those in `directions`."""
        return [name for name in self.directions if name != "loss"]

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics that follow from the mean loss."""
        return {}

    # Outputs to columns.

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return the prediction columns, each nullable."""
        raise self._lacks("output_schema")

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the prediction columns of the answers of N rows, in `output_schema`."""
        raise self._lacks("output_columns")

    def answer_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> tuple[pa.Table, dict[int, str]]:
        """Return `output_columns`, and {row: reason} for answers that are kept beside an error."""
        return self.output_columns(answers, processor, spec, options), {}

    def measure(self, scored: pa.Table, labels: pa.Array, spec: TaskSpec) -> dict[str, float]:
        """Return the metrics of prediction columns (all probabilities) and labels, for `evaluate`; every row has
        both."""
        raise self._lacks("measure")

    @property
    def needs_base(self) -> bool:
        """Whether a job must name a base model."""
        return bool(self.auto_class)

    @property
    def measures_classes(self) -> bool:
        """Whether the task's metrics are those of `torchlake.metrics`, which `evaluate` computes with intervals."""
        return False

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an invalid value of an option; types are checked before."""

    # The checked forms of the methods above, which torchlake calls.

    checked_options = _checks.checked_options
    checked_batch = _checks.checked_batch
    checked_outputs = _checks.checked_outputs
    checked_loss = _checks.checked_loss
    checked_metrics = _checks.checked_metrics

    def _lacks(self, method: str) -> TaskError:
        return TaskError(f"the task {self.name!r} has no method {method}")

    def _no_labels(self) -> DataError:
        return DataError(f"the task {self.name!r} reads no labels")
