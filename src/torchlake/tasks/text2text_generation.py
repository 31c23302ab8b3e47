"""Text-to-text generation with an encoder-decoder (T5, BART and similar): text in, other text out.

Training reads text and learns its target, a column of texts: the model sees each token of the target before it
predicts the next. Scoring writes with the options of text generation; `max_length` cuts the text that is read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import LabelColumn, Problem, TaskSpec
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.features import INPUT_IDS, Array, Features, text_features
from torchlake.errors import DataError
from torchlake.labels.values import to_plain_array
from torchlake.models import load
from torchlake.models.config import decoder_start
from torchlake.tasks import EXTRA, TEXT, Inputs, _pretrained, _tokens
from torchlake.tasks._writing import WritingTask

if TYPE_CHECKING:
    from torch import nn

DECODER_IDS = "decoder_input_ids"


class Text2textGeneration(WritingTask):
    """An encoder-decoder of transformers."""

    inputs = {"text": TEXT, "options": EXTRA}
    optional = ("options",)
    auto_class = "AutoModelForSeq2SeqLM"
    hub_task = "text2text-generation"
    options = {"prefix": "", "max_target_tokens": 128}
    token_arrays = (INPUT_IDS, DECODER_IDS)
    default_metric = {"text": "perplexity"}
    directions = {"loss": "lower", "perplexity": "lower"}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for targets without a token."""
        if options["max_target_tokens"] < 2:
            raise ValueError("max_target_tokens must be 2 or more: one and the end token")

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Any:
        """Return the tokenizer of transformers, which decodes, and knows how answers begin."""
        assert folder is not None, "it needs a base"
        tokenizer: Any = load.load_tokenizer(folder)
        tokenizer.decoder_start = decoder_start(load.load_config(folder))
        return tokenizer

    # Labels.

    def count_labels(
        self, arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False
    ) -> int:
        """Return the number of rows with a target."""
        if problem is not None:
            raise DataError(f"data.problem is {problem}, but the task {self.name} learns texts; remove the setting")
        rows = 0
        for array in arrays:
            texts = _texts(array)
            rows += len(texts) - texts.null_count
        return rows

    def decide_labels(self, parts: Iterable[Any], problem: Problem | None = None) -> LabelColumn:
        """Return a label column without classes: targets are texts."""
        rows = sum(parts)
        if not rows:
            raise DataError("the label column is empty, or null in every row")
        return LabelColumn(problem="text", labels=(), counts=(), rows=rows)

    def target_type(self, spec: TaskSpec) -> pa.DataType:
        """Return the type of a target's tokens."""
        return pa.list_(pa.int32())

    def encode_labels(self, array: pa.Array, spec: TaskSpec) -> pa.Array:
        """Return the target texts, nulls kept; `examples` tokenizes them."""
        return _texts(array)

    def bad_labels(self, array: pa.Array, spec: TaskSpec) -> dict[int, str]:
        """Return {}: every text can be learned."""
        _texts(array)
        return {}

    # Features.

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of the text's tokens, and of the target's that the model sees."""
        return {INPUT_IDS: pa.list_(pa.int32()), DECODER_IDS: pa.list_(pa.int32())}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the tokens of the texts; there is no target yet."""
        texts = [spec.options["prefix"] + text for text in inputs["text"].to_pylist()]
        made = text_features(_tokens.tokenize(processor, texts, spec.max_length))
        nothing = Ragged(np.zeros(0, np.int32), np.zeros(len(made) + 1, np.int64))
        return replace(made, arrays={**made.arrays, DECODER_IDS: nothing})

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the tokens of the texts, and of the targets; if there are none, the texts themselves."""
        made = self.features(inputs, processor, spec)
        wanted = (inputs["text"] if labels is None else self.encode_labels(labels, spec)).to_pylist()
        most = spec.options["max_target_tokens"]
        rows = processor(text_target=wanted, truncation=True, max_length=most)["input_ids"] if wanted else []
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        full = np.flatnonzero(lengths == most)
        whole = processor(text_target=[wanted[row] for row in full], verbose=False)["input_ids"] if len(full) else []
        cut = np.zeros_like(lengths)
        cut[full] = [len(row) - most for row in whole]
        learned = Ragged(np.array([token for row in rows for token in row], dtype=np.int32), offsets_of(lengths))
        seen = np.roll(learned.values, 1)
        seen[learned.offsets[:-1][lengths > 0]] = processor.decoder_start
        arrays = {**made.arrays, DECODER_IDS: Ragged(seen, learned.offsets)}
        made = replace(made, arrays=arrays, lengths=made.lengths + lengths, cut=made.cut + cut)
        offsets = pa.array(learned.offsets, pa.int32())
        return made, None if labels is None else pa.ListArray.from_arrays(offsets, pa.array(learned.values))

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the tokens of the texts, and in training those of the targets that the model sees."""
        seen = arrays[DECODER_IDS]
        known = arrays if len(seen.values) else {INPUT_IDS: arrays[INPUT_IDS]}  # type: ignore[union-attr]
        return super().collate(known, rows, processor, spec)

    # The model.

    def base_model(self, base: Path | None, spec: TaskSpec, *, empty: bool = False) -> "nn.Module":
        """Return the model that training starts from, with its head."""
        assert base is not None, "it needs a base"
        return _pretrained.language_model(base, self.auto_class, empty=empty)

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return a trained model; it has no classes to check."""
        return load.load_model(folder, auto_class=self.auto_class, **options)


def _texts(array: pa.Array) -> pa.Array:
    """Return a column of targets as one array of strings. Raises DataError for other types."""
    plain = to_plain_array(array)
    if not (pa.types.is_string(plain.type) or pa.types.is_null(plain.type)):
        raise DataError(f"the label column holds {array.type}, but the task learns texts")
    return plain.cast(pa.string())


task = Text2textGeneration()
