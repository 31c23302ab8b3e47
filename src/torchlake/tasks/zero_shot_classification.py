"""Zero-shot classification: text in, one of the classes that the job names out; for scoring only.

A model for natural language inference reads each text beside a hypothesis for every class ("This example is about
sports."), and predicts how far the text entails it. The model is any text classifier of transformers with a class named
entailment. Cost: one forward pass for each class of a row. The scores are those of transformers' pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, offsets_of, pad, ranges
from torchlake.data.features import INPUT_IDS, Array, Features
from torchlake.errors import DataError, UsageError
from torchlake.labels import predictions
from torchlake.models import load
from torchlake.models.config import class_names, read_head
from torchlake.tasks import TEXT, TOKEN_TYPES, ColumnOptions, Inputs, Task, _tokens
from torchlake.tasks._pretrained import refuse_placement

if TYPE_CHECKING:
    from torch import nn

NAME = "zero_shot_classification"
SIZES = "sizes"
MODEL = "AutoModelForSequenceClassification"
UNCUT = 2**31
"Tokens beyond those of any hypothesis."


class ZeroShotClassification(Task):
    """A model for natural language inference that scores every class."""

    inputs = {"text": TEXT}
    has_labels = False
    trains = False
    problems = {"all": NAME}
    hub_task = "zero-shot-classification"
    checks_padding = True
    options = {"candidate_labels": [], "hypothesis_template": "This example is {}.", "multi_label": False}
    default_metric = {}
    directions = {"loss": "lower"}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for fewer than two classes, or a template without a place for one."""
        labels, template = options["candidate_labels"], options["hypothesis_template"]
        if len(labels) < (1 if options["multi_label"] else 2) or len(set(labels)) < len(labels) or not all(labels):
            raise ValueError("candidate_labels must be the names of at least two different classes")
        if template.count("{}") != 1:
            raise ValueError(f"hypothesis_template is {template!r}; it must contain {{}} once, in place of the class")

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Any:
        """Return the tokenizer of transformers, which tokenizes pairs."""
        assert folder is not None, "it needs a base"
        return load.load_tokenizer(folder)

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of the tokens of all pairs of a row, and of the pairs' sizes."""
        classes = len(spec.options["candidate_labels"])
        types = {INPUT_IDS: pa.list_(pa.int32()), TOKEN_TYPES: pa.list_(pa.uint8())}
        return {**types, SIZES: pa.list_(pa.int32(), classes)}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the tokens of each text beside every hypothesis, one pair after another; long texts are cut."""
        template, labels = spec.options["hypothesis_template"], spec.options["candidate_labels"]
        hypotheses = [template.replace("{}", label) for label in labels]
        pairs = [(text, hypothesis) for text in inputs["text"].to_pylist() for hypothesis in hypotheses]
        self._check_room(processor, hypotheses, spec)
        (ids, offsets, cut), types = _tokens.tokenize_pairs(processor, pairs, spec.max_length, strategy="only_first")
        sizes = np.diff(offsets).reshape(-1, len(labels))
        lengths = sizes.sum(axis=1)
        rows = offsets_of(lengths)
        arrays: dict[str, Array] = {INPUT_IDS: Ragged(ids, rows), TOKEN_TYPES: Ragged(types, rows)}
        arrays[SIZES] = sizes.astype(np.int32)
        return Features(arrays=arrays, lengths=lengths, cut=cut.reshape(sizes.shape).max(axis=1, initial=0))

    def _check_room(self, processor: Any, hypotheses: Sequence[str], spec: TaskSpec) -> None:
        """Raise UsageError for a hypothesis that leaves its text no token: only texts are cut."""
        _, offsets, _ = _tokens.tokenize(processor, [("", hypothesis) for hypothesis in hypotheses], UNCUT)
        if (longest := int(np.diff(offsets).max())) >= spec.max_length:
            raise UsageError(
                f"task_options: a hypothesis of candidate_labels takes {longest} tokens, and the longest input has "
                f"{spec.max_length}, so none is left for the text. Shorten the labels or hypothesis_template, or raise "
                "max_length"
            )

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the tokens (B, K, L) of the pairs of K classes."""
        sizes = np.asarray(arrays[SIZES])[rows].astype(np.int64)
        starts = (np.asarray(arrays[INPUT_IDS].offsets)[rows, None] + sizes.cumsum(axis=1) - sizes).ravel()  # type: ignore[union-attr]
        every = np.arange(len(starts))
        batch: dict[str, np.ndarray] = {}
        for name, fill in ((INPUT_IDS, processor.pad_token_id), (TOKEN_TYPES, 0)):
            values = arrays[name]
            assert isinstance(values, Ragged), "tokens of pairs"
            part = _parts(values.values, starts, sizes.ravel())
            made, mask = pad(part, every, fill)
            batch[name], batch["attention_mask"] = made, mask
        if TOKEN_TYPES not in processor.model_input_names:
            del batch[TOKEN_TYPES]
        return {name: each.reshape(*sizes.shape, -1) for name, each in batch.items()}

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return the classifier, which returns (B, K, 2): the logits of contradiction and entailment.

        Raises DataError if it has no class named entailment.
        """
        refuse_placement(self, options.get("placement"))
        from torchlake.tasks._entailment import Entailment

        names = [name.lower() for name in class_names(folder, read_head(folder).names)]
        entails = next((index for index, name in enumerate(names) if name.startswith("entail")), None)
        if entails is None:
            raise DataError(
                f"{folder / 'config.json'}: no class is named entailment (id2label has {', '.join(names)}). "
                "Use a model for natural language inference."
            )
        contradicts = len(names) - 1 if entails == 0 else 0
        return Entailment(load.load_model(folder, auto_class=MODEL, **options), (contradicts, entails))

    def answers(self, outputs: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the probability (N, K) of each class: among all classes or, with `multi_label`, of each alone."""
        alone = spec.options["multi_label"]
        logits = outputs if alone else outputs[..., 1]
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        chances = powers / powers.sum(axis=-1, keepdims=True)
        return np.asarray(chances[..., 1] if alone else chances, dtype=np.float32)

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return the columns of text classification; with `multi_label` a list of classes."""
        return predictions.output_schema(_of_classes(spec), options.all_probabilities)

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the columns of text classification."""
        return predictions.output_columns(answers, _of_classes(spec), options.all_probabilities)

    def probability_names(self, spec: TaskSpec) -> list[str]:
        """Return the columns of the classes' probabilities."""
        return predictions.probability_names(_of_classes(spec))


def _of_classes(spec: TaskSpec) -> TaskSpec:
    """Return the task as a text classification with the given classes."""
    problem = "multi_label" if spec.options["multi_label"] else "single_label"
    return replace(spec, problem=problem, labels=tuple(spec.options["candidate_labels"]))


def _parts(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> Ragged:
    """Return parts of flat values as rows."""
    return Ragged(values[ranges(starts, sizes)], offsets_of(sizes))


task = ZeroShotClassification()
