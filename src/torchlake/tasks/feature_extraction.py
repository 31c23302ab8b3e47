"""Feature extraction: a text in; one vector out, its embedding, for search, clustering or another model.

It scores the folders of sentence-transformers, and of plain encoders, as they are. `config/embedding.py` says what is
read from them, `_embedder.py` what is computed. Training is not part of it yet.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake import atomic_io
from torchlake.config.embedding import Embedding, read_embedding
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import Features, text_features
from torchlake.errors import TaskError, UsageError
from torchlake.models import load
from torchlake.tasks import ColumnOptions, Inputs, Task, _tokens

if TYPE_CHECKING:
    from torch import nn


class TextReader:
    """A tokenizer, and what happens to a text before it."""

    def __init__(self, tokenizer: Any, how: Embedding) -> None:
        self.tokenizer = tokenizer
        self.how = how

    def __getattr__(self, name: str) -> Any:
        """Return what the tokenizer has."""
        if name == "tokenizer":  # not there yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def prepare(self, text: str) -> str:
        """Return the text that is tokenized."""
        text = self.how.prompt + text
        return text.lower() if self.how.lowercase else text


class FeatureExtraction(Task):
    """An encoder of transformers with pooling; no labels."""

    inputs = {"text": "text"}
    has_labels = False
    trains = False
    problems = {"all": "feature_extraction"}
    hub_task = "sentence-similarity"
    default_metric = {}
    directions = {"loss": "lower"}

    def load_processor(self, folder: Path, spec: TaskSpec, *, scoring: bool) -> TextReader:
        """Return the tokenizer with the folder's prompt."""
        tokenizer = load.load_text_tokenizer(folder) if scoring else load.load_tokenizer(folder)
        return TextReader(tokenizer, read_embedding(folder))

    def features(self, inputs: Inputs, processor: TextReader, spec: TaskSpec) -> Features:
        """Return the tokens of the texts."""
        texts = [processor.prepare(text) for text in inputs["text"].to_pylist()]
        return text_features(_tokens.tokenize(processor, texts, spec.max_length))

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return the encoder with pooling in evaluation mode."""
        from torchlake.tasks._embedder import load_embedder

        if options.get("placement"):
            raise TaskError(f"the task {self.name!r}: its module cannot be split over several devices")
        load.check_folder(folder)
        if (folder / atomic_io.MANIFEST).exists():
            atomic_io.check_manifest(folder)
        module = load_embedder(folder)
        return module if options.get("dtype") is None else module.to(options["dtype"])

    def load_vectors(self, folder: Path) -> "nn.Module":
        """Return what makes vectors of token states, for runtimes with an encoder of their own."""
        from torchlake.tasks._embedder import load_vectors

        return load_vectors(folder)

    def answers(self, outputs: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the vectors (N, D)."""
        return outputs

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return one column of vectors.

        A list of any size, though all have the same: pyarrow 25 cannot read a Parquet file of fixed-size lists with a
        null, and a row with an error has one.
        """
        if options.all_probabilities:
            raise UsageError("all_probabilities: an embedding model has no classes.")
        return pa.schema([("embedding", pa.list_(pa.float32()))])

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the vectors as a column."""
        schema = self.output_schema(spec, options)
        vectors = pa.array(answers.astype(np.float32, copy=False).ravel())
        offsets = pa.array(np.arange(len(answers) + 1, dtype=np.int32) * answers.shape[1])
        return pa.table([pa.ListArray.from_arrays(offsets, vectors)], schema=schema)


task = FeatureExtraction()
