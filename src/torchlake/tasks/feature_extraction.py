"""Feature extraction: text in; one vector out, its embedding, for search, clustering or another model.

It scores the folders of sentence-transformers, and of plain encoders, as they are. `config/model_files/embedding.py`
describes what is read from them, `_embedder.py` what is computed.

It learns from pairs of texts that belong together, from triplets with a negative text
(`data.inputs: {negative: column}`), or from pairs with a number, their similarity (`data.problem: regression`);
`_contrastive.py` has the losses and the metrics. The model folder has the layout of sentence-transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.model_files.embedding import MODULES, Embedding, read_embedding
from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, pad
from torchlake.data.features import INPUT_IDS, Array, Features, text_features, to_arrow
from torchlake.errors import ConfigError, DataError, UsageError
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.metrics import Direction
from torchlake.models import load, write
from torchlake.models.spec import load_spec
from torchlake.tasks import PAIR, TEXT, ColumnOptions, Inputs, Task, _contrastive, _tokens, load_encoder
from torchlake.tasks._contrastive import FURTHER
from torchlake.tasks._inputs import columns_of
from torchlake.tasks._pretrained import refuse_placement

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMS = {"float32": pa.list_(pa.float32()), "int8": pa.list_(pa.int8()), "binary": pa.binary()}
"The types of vectors by `embedding`; binary: the signs, 8 in a byte."
SEARCH_METRICS = ("recall_at_1", "recall_at_10", "mrr_at_10")
BEYOND = "is not from -1 to 1, as the cosine of two texts is: scale the column (scores from 0 to 5: divide by 5)"


class TextReader:
    """A tokenizer, and the preparation of text for it."""

    def __init__(self, tokenizer: Any, how: Embedding, folder: Path) -> None:
        if how.lowercase:
            from tokenizers.normalizers import Lowercase, Sequence

            backend = tokenizer.backend_tokenizer
            backend.normalizer = Sequence([Lowercase(), *([] if backend.normalizer is None else [backend.normalizer])])
        self.tokenizer = tokenizer
        self.how = how
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        """Return the tokenizer's attribute."""
        if name == "tokenizer":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(self.tokenizer)

    def prepare(self, text: str) -> str:
        """Return the text that is tokenized."""
        return self.how.prompt + text


class FeatureExtraction(Task):
    """An encoder of transformers with pooling. Training reads two or three texts a row, scoring one."""

    inputs = {"text": TEXT, PAIR: TEXT, "negative": TEXT}
    optional = ("negative",)
    has_labels = False
    labeled = ("regression",)
    problems = {"all": "feature_extraction"}
    hub_task = "sentence-similarity"
    checks_padding = True
    couples_rows = True
    token_arrays = (INPUT_IDS, *(ids for ids, _ in FURTHER.values()))
    default_metric = {"feature_extraction": "mrr_at_10", "regression": "spearman"}
    directions: Mapping[str, Direction] = {
        "loss": "lower",
        **dict.fromkeys((*SEARCH_METRICS, "spearman", "pearson"), "higher"),
    }

    @property
    def needs_base(self) -> bool:
        """Whether a job must name a base model: the encoder."""
        return True

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> TextReader:
        """Return the tokenizer with the folder's prompt."""
        assert folder is not None, "it needs a base"
        tokenizer = load.load_text_tokenizer(folder) if scoring else load.load_tokenizer(folder)
        return TextReader(tokenizer, read_embedding(folder), folder)

    def max_length(self, base: Path | None, requested: int | None) -> int:
        """Return the maximum tokens of a row: those of the base model, unless `requested`."""
        assert base is not None, "it needs a base"
        if requested is not None or not (base / MODULES).is_file():
            return super().max_length(base, requested)
        return load_spec(base, self.name).max_length

    def complete(self, spec: TaskSpec, base: Path | None) -> TaskSpec:
        """Return the job's spec with the dimensions of the vectors. Raises ConfigError for a job without pairs."""
        assert base is not None, "it needs a base"
        if spec.text_pair is None:
            raise ConfigError(
                f"data.text_pair: {self.name} learns from pairs of texts that belong together. Name the column of the "
                "second text"
            )
        if spec.label is not None and spec.inputs:
            raise ConfigError("data.inputs: pairs with a number (data.problem: regression) have no negative; remove it")
        return replace(spec, dimensions=read_embedding(base).dimensions)

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of the tokens of one to three texts."""
        further = [ids for name, (ids, _) in FURTHER.items() if name in columns_of(self.inputs, spec)]
        return {name: pa.list_(pa.int32()) for name in (INPUT_IDS, *further)}

    def features(self, inputs: Inputs, processor: TextReader, spec: TaskSpec) -> Features:
        """Return the tokens of the texts."""
        names = {"text": INPUT_IDS, **{name: ids for name, (ids, _) in FURTHER.items() if name in inputs}}
        made = {}
        for name, ids in names.items():
            texts = [processor.prepare(text) for text in inputs[name].to_pylist()]
            made[ids] = text_features(_tokens.tokenize(processor, texts, spec.max_length))
        return Features(
            arrays={ids: each.arrays[INPUT_IDS] for ids, each in made.items()},
            lengths=np.add.reduce([each.lengths for each in made.values()]),
            cut=np.add.reduce([each.cut for each in made.values()]),
        )

    def encode_labels(self, array: pa.Array, spec: TaskSpec) -> pa.Array:
        """Return similarities as they are. Raises DataError for values outside -1 to 1."""
        targets = super().encode_labels(array, spec)
        wrong = next(iter(self._beyond(targets)), None)
        if wrong is not None:
            raise DataError(f"the similarity {targets[wrong].as_py():g} {BEYOND}")
        return targets

    def bad_labels(self, array: pa.Array, spec: TaskSpec) -> dict[int, str]:
        """Return {row: reason} for rows with an invalid similarity."""
        bad = super().bad_labels(array, spec)
        known = pc.if_else(pa.array([row not in bad for row in range(len(array))]), array, None)
        targets = super().encode_labels(known, spec)
        return {
            **bad,
            **{row: f"bad_label: the similarity {targets[row].as_py():g} {BEYOND}" for row in self._beyond(targets)},
        }

    def _beyond(self, targets: pa.Array) -> list[int]:
        return pc.indices_nonzero(pc.fill_null(pc.greater(pc.abs(targets), 1.0), False)).to_pylist()  # type: ignore[no-any-return]

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the padded tokens of each text, and their masks."""
        masks = {INPUT_IDS: "attention_mask", **dict(FURTHER.values())}
        batch: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            assert isinstance(array, Ragged), "tokens"
            batch[name], batch[masks[name]] = pad(array, rows, processor.pad_token_id)
        return batch

    def build(self, folder: Path | None, spec: TaskSpec, *, weights: bool) -> "nn.Module":
        """Return the encoder with pooling."""
        assert folder is not None, "it needs a base"
        import torch

        from torchlake.tasks._embedder import Embedder, Vectors

        encoder = load_encoder(folder, weights=weights)
        with torch.device("cpu"):
            vectors = Vectors(read_embedding(folder), folder)
        return Embedder(encoder, vectors if weights else vectors.to("meta"))

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return the encoder with pooling in evaluation mode."""
        refuse_placement(self, options.get("placement"))
        load.check_files(folder)
        module = self.build(folder, spec, weights=True)
        module.train(False)
        return module if options.get("dtype") is None else module.to(options["dtype"])

    def load_vectors(self, folder: Path) -> "nn.Module":
        """Return the layers that make vectors of token states, for runtimes with their own encoder."""
        from torchlake.tasks._embedder import Vectors

        return Vectors(read_embedding(folder), folder)

    def save_model(
        self, folder: Path, model_or_state: Any, config: Any, processor: TextReader, spec: TaskSpec, **card: Any
    ) -> None:
        """Write a folder that sentence-transformers can load, too; its task reads single texts."""
        from torchlake.tasks._embedder_folder import write_folder

        layout = partial(write_folder, base=processor.folder, max_length=spec.max_length)
        about = write.About(auto_class="", hub_task=self.hub_task, write_weights=layout)
        scoring = replace(spec, problem=self.name, label=None, text_pair=None, inputs={}, mean=None, deviation=None)
        write.save_model_folder(folder, model_or_state, config, processor.tokenizer, scoring, about=about, **card)

    def couples(self, spec: TaskSpec) -> bool:
        """Return whether the batch's other texts are negatives; they are if there are no similarities."""
        return spec.label is None

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the summed loss of vectors (B, V, D)."""
        return _contrastive.ranking_loss(outputs) if targets is None else _contrastive.similarity_loss(outputs, targets)

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return the correlation of cosines with similarities, or how well second texts are found in the table."""
        if targets is not None:
            return _contrastive.similarity_metrics(_contrastive.cosines(answers), targets)
        return {name: float(shares.mean()) for name, shares in _contrastive.found_shares(answers).items()}

    def metric_names(self, spec: TaskSpec) -> list[str]:
        """Return the metrics of pairs with or without similarities."""
        return list(SEARCH_METRICS) if spec.label is None else ["spearman", "pearson"]

    def answers(self, outputs: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return the vectors (N, D), of training rows (N, V, D)."""
        return outputs

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return one column of vectors.

        The type is a list of any size, although all have the same size: pyarrow 25 cannot read a Parquet file of
        fixed-size lists with a null, and a row with an error has one.
        """
        if options.all_probabilities:
            raise UsageError("all_probabilities: an embedding model has no classes.")
        return pa.schema([("embedding", FORMS[options.embedding])])

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the vectors as a column; for rows of several texts, those of the first."""
        vectors = (answers[:, 0] if answers.ndim == 3 else answers).astype(np.float32, copy=False)
        numbers: np.ndarray = vectors
        if options.embedding == "int8":
            numbers = _in_8_bits(vectors, np.asarray(options.ranges, dtype=np.float32))
        elif options.embedding == "binary":
            numbers = np.packbits(vectors > 0, axis=1)
        offsets = np.arange(len(numbers) + 1) * numbers.shape[1]
        schema = self.output_schema(spec, options)
        return pa.table([to_arrow(Ragged(numbers.ravel(), offsets), schema.types[0])], schema=schema)

    def read_answers(self, scored: pa.Table, spec: TaskSpec) -> np.ndarray:
        """Return the vectors (N, D)."""
        column = scored["embedding"].combine_chunks()
        vectors = np.full((len(column), spec.dimensions or 0), np.nan, dtype=np.float32)
        vectors[column.is_valid().to_numpy(zero_copy_only=False)] = (
            column.flatten().to_numpy().reshape(-1, vectors.shape[1])
        )
        return vectors


def _in_8_bits(vectors: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Return vectors (N, D) as int8: 256 equal steps of each range (2, D); values outside get the nearest step."""
    steps = (ranges[1] - ranges[0]) / 255
    levels = np.floor((vectors - ranges[0]) / np.where(steps == 0, 1, steps))
    numbers: np.ndarray = (np.clip(levels, 0, 255) - 128).astype(np.int8)
    return numbers


task = FeatureExtraction()
