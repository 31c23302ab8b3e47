"""Token classification: text in, labeled spans of it out, such as names of people and places.

Texts are strings, whose spans are in characters, or lists of words, whose spans are in words. Labels are spans, or tags
of words (`_spans.py`). The model learns IOB2 tags at the first token of every word, and the tag of that token is the
word's. Text longer than `max_length` is read in windows (`_windows.py`), so nothing is cut.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import LabelColumn, Problem, TaskSpec
from torchlake.data.features import INPUT_IDS, Features
from torchlake.errors import DataError, TableError
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.tables.arrays import from_strings, is_text
from torchlake.tasks import ANY, NO_TARGET, ColumnOptions, Inputs, _spans, _windows
from torchlake.tasks._inputs import columns_of
from torchlake.tasks._null_rows import NULL_INPUT
from torchlake.tasks._spans import METRICS, OUTSIDE
from torchlake.tasks._windows import PLACES, SOURCE, WindowedTask, ragged, stored_texts, texts_of, without_texts

if TYPE_CHECKING:
    import torch

SPANS = pa.list_(
    pa.struct(
        {"start": pa.int32(), "end": pa.int32(), "label": pa.string(), "text": pa.string(), "score": pa.float32()}
    )
)
WORDS = pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32(), "probabilities": pa.list_(pa.float32())}))
TAG, SCORE, START, END, PROBABILITIES = range(5)
"The numbers kept for a word; those of all tags, from PROBABILITIES on, with `all_probabilities`."


class TokenClassification(WindowedTask):
    """A model of transformers that labels tokens."""

    inputs = {"text": ANY}
    auto_class = "AutoModelForTokenClassification"
    hub_task = "token-classification"
    options = {"stride": 64, "tags": []}
    default_metric = {"spans": "f1"}
    directions = {**dict.fromkeys(METRICS, "higher"), "loss": "lower"}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a negative overlap."""
        if options["stride"] < 0:
            raise ValueError("stride, the number of tokens that windows of a long text share, must be 0 or more")

    def sample_inputs(self, spec: TaskSpec, texts: Sequence[str]) -> Inputs | None:
        """Return the texts as strings, not as lists of words; None if a subclass reads more than the text."""
        return {"text": from_strings(tuple(texts))} if columns_of(self.inputs, spec).keys() == {"text"} else None

    # Labels.

    def count_labels(
        self, arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False
    ) -> tuple[int, dict[Any, int]]:
        """Return the number of rows with labels, and the spans of each label, or the words of each numbered tag."""
        rows, counts = 0, dict[Any, int]()
        if problem is not None:
            raise DataError(f"data.problem is {problem}, but the task {self.name} learns spans; remove the setting")
        for array in arrays:
            _spans.check_labels(array.type)
            values = pc.list_flatten(array)
            rows += len(array) - array.null_count
            values = pc.struct_field(values, "label") if _spans.is_spans(array.type) else values
            for pair in pc.value_counts(values.drop_null()).to_pylist():
                counts[pair["values"]] = counts.get(pair["values"], 0) + pair["counts"]
        return rows, counts

    def decide_labels(self, parts: Iterable[Any], problem: Problem | None = None) -> LabelColumn:
        """Return the labels of all spans, or the numbers of all tags."""
        rows, counts = 0, dict[Any, int]()
        for some, found in parts:
            rows += some
            for tag, number in found.items():
                counts[tag] = counts.get(tag, 0) + number
        if len({type(tag) for tag in counts}) > 1:
            raise DataError("the label column holds both numbers and strings as tags")
        return LabelColumn(problem="spans", labels=tuple(sorted(counts)), counts=(), rows=rows)

    def name_labels(self, found: LabelColumn, spec: TaskSpec) -> LabelColumn:
        """Return the IOB2 tags of all labels. Raises DataError for numbers without names, and if there are no spans."""
        tags = [_tag(tag, spec) for tag in found.labels]
        labels = sorted({label for _, label in map(_spans.label_of, tags)} - {""})
        if not labels:
            raise DataError("the label column has no span in any row: there is nothing to learn")
        return replace(found, labels=(OUTSIDE, *(f"{prefix}-{label}" for label in labels for prefix in "BI")))

    def bad_labels(self, array: pa.Array, spec: TaskSpec) -> dict[int, str]:
        """Return {row: reason} for rows with labels that the model does not have, or that are not spans."""
        _spans.check_labels(array.type)
        bad: dict[int, str] = {}
        known = {_spans.label_of(str(tag))[1] for tag in spec.labels}
        for row, labels in enumerate(array.to_pylist()):
            try:
                spans = [] if labels is None else true_spans(labels, spec)
            except ValueError as error:
                bad[row] = f"bad_label: {error}"
                continue
            strange = next((label for _, _, label in spans if label not in known), None)
            if strange is not None:
                bad[row] = f"bad_label: {strange[:80]!r} is not one of the model's labels"
        return bad

    # Features.

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of tokens, of the places of words, and of the texts."""
        integers = pa.list_(pa.int32())
        return {INPUT_IDS: integers, **dict.fromkeys(PLACES, integers), SOURCE: pa.large_binary()}

    def largest_stride(self, spec: TaskSpec) -> int:
        """Return the most tokens that two windows share."""
        return max(0, spec.max_length // 2 - 2)

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the tokens of texts in windows, and where each word starts and ends, at its deciding token."""
        texts = inputs["text"]
        lists = _spans.is_list(texts.type)
        held = texts.type.value_type if lists else texts.type
        held = held.value_type if pa.types.is_dictionary(held) else held
        if not (is_text(held) or pa.types.is_null(held)):
            raise TableError(
                f"the column {spec.text!r} holds {texts.type}, not strings or lists of words; name another."
            )
        rows: list[Any] = texts.to_pylist()
        if lists:
            rows = [["" if word is None else word for word in words] for words in rows]
        blank = [row for row, text in enumerate(rows) if not "".join(text).strip()]
        stride = min(spec.options["stride"], self.largest_stride(spec))
        made = _windows.encode(processor, rows, size=spec.max_length, stride=stride, pretokenized=lists)
        first, last = made.edges_of_words()
        starts, ends = np.full((2, len(made.ids)), -1, dtype=np.int32)
        starts[first] = made.words[first] if lists else made.starts[first]
        ends[first] = made.words[first] + 1 if lists else made.ends[last]
        places = {"starts": made.ragged(starts), "ends": made.ragged(ends)}
        return Features(
            arrays={INPUT_IDS: made.ragged(made.ids), **places, SOURCE: stored_texts(rows)},
            lengths=made.lengths,
            cut=np.zeros(len(rows), dtype=np.int64),
            errors=dict.fromkeys(blank, NULL_INPUT),
        )

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the tokens, and for each its tag's number, or NO_TARGET."""
        made = without_texts(self.features(inputs, processor, spec))
        if labels is None:
            return made, None
        labels, texts = self.encode_labels(labels, spec), inputs["text"]
        lists = _spans.is_list(texts.type)
        sizes = (pc.list_value_length(texts) if lists else pc.utf8_length(texts)).to_pylist()
        errors, numbers = dict(made.errors), {str(tag): place for place, tag in enumerate(spec.labels)}
        starts, ends = (ragged(made.arrays, name) for name in PLACES)
        targets = np.full(len(starts.values), NO_TARGET, dtype=np.int32)
        for row in (row for row in range(len(labels)) if row not in errors):
            given = labels[row].as_py()
            wrong = _mismatch(given, sizes[row], lists=lists)
            if wrong is not None:
                errors[row] = f"bad_label: {wrong}"
                continue
            part = slice(starts.offsets[row], starts.offsets[row + 1])
            deciding = np.flatnonzero(starts.values[part] >= 0)
            tags = _spans.tags_of(true_spans(given, spec), starts.values[part][deciding], ends.values[part][deciding])
            targets[part][deciding] = [numbers[tag] for tag in tags]
        offsets = pa.array(starts.offsets, pa.int32())
        return replace(made, errors=errors), pa.ListArray.from_arrays(offsets, pa.array(targets))

    # The model.

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the cross entropy summed over all words; outputs (B, L, C), targets (B, up to L)."""
        from torch.nn import functional

        assert targets is not None, "words have tags"
        targets = functional.pad(targets.long(), (0, outputs.shape[1] - targets.shape[1]), value=NO_TARGET)
        return functional.cross_entropy(
            outputs.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )

    # Outputs to spans.

    def reduce_outputs(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return each word's tag, the tag's probability, and where the word starts and ends: (B, W, 4) float32."""
        return self.reduce_all(outputs, batch, spec)[:, :, :PROBABILITIES]

    def reduce_all(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the same, and the probabilities of all tags."""
        deciding = batch["starts"] >= 0
        logits = outputs[deciding].astype(np.float64)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        chances = powers / powers.sum(axis=1, keepdims=True)
        places = [batch[name][deciding] for name in PLACES]
        tags = logits.argmax(axis=1) if len(logits) else np.zeros(0)
        values = np.column_stack([tags, chances.max(axis=1, initial=0), *places, chances])
        lengths = deciding.sum(axis=1)
        words = np.full((len(outputs), max(1, int(lengths.max(initial=0))), values.shape[1]), np.nan, dtype=np.float32)
        words[np.arange(words.shape[1]) < lengths[:, None]] = values
        return words

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return precision, recall and F1 of spans of words."""
        assert targets is not None, "words have tags"
        true = [_spans.spans_of(str(spec.labels[tag]) for tag in row[row >= 0]) for row in targets]
        found = [_spans.spans_of(str(spec.labels[int(tag)]) for tag in _words(row)[:, TAG]) for row in answers]
        return _spans.agreement(true, found)

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return one column, with each row's spans; with `all_probabilities` also each word's of all tags."""
        return pa.schema([("spans", SPANS), *([("words", WORDS)] if options.all_probabilities else [])])

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the spans; `score` is the mean probability of the tags of a span's words."""
        texts = texts_of(options.features, len(answers))
        rows = [_spans_with_text(_words(row), text, spec) for row, text in zip(answers, texts, strict=True)]
        columns = [pa.array(rows, SPANS)]
        if options.all_probabilities:
            columns.append(pa.array([_words_with_probabilities(_words(row)) for row in answers], WORDS))
        return pa.table(columns, schema=self.output_schema(spec, options))

    def measure(self, scored: pa.Table, labels: pa.Array, spec: TaskSpec) -> dict[str, float]:
        """Return precision, recall and F1 of the spans."""
        found = [[(span["start"], span["end"], span["label"]) for span in row] for row in scored["spans"].to_pylist()]
        return _spans.agreement([true_spans(row, spec) for row in labels.to_pylist()], found)


def _tag(tag: Any, spec: TaskSpec) -> str:
    """Return a tag's name. Raises DataError for a number without one."""
    if not isinstance(tag, int):
        return str(tag)
    names = spec.options["tags"]
    if not 0 <= tag < len(names):
        raise DataError(
            f"the tag {tag} has no name. Name the tags in their order: model.task_options.tags=[O, B-PER, I-PER, ...]; "
            'in a Hugging Face dataset these are features["ner_tags"].feature.names.'
        )
    return str(names[tag])


def true_spans(labels: Sequence[Any], spec: TaskSpec) -> list[_spans.Span]:
    """Return the spans of one row's labels. Raises ValueError for an invalid span or tag."""
    if labels and isinstance(labels[0], dict):
        return _spans.row_spans(labels)
    if any(tag is None for tag in labels):
        raise ValueError("a tag is null")
    return _spans.spans_of(_tag(tag, spec) for tag in labels)


def _mismatch(labels: Sequence[Any], size: int, *, lists: bool) -> str | None:
    """Return why labels do not belong to text of `size` characters, or a list of as many words."""
    if labels and isinstance(labels[0], dict):
        last = max(span["end"] for span in labels)
        return f"a span ends at {last}, but the text ends at {size}" if last > size else None
    if labels and not lists:
        return "tags are for lists of words; the row is a string, which needs spans"
    return f"{len(labels)} tags for {size} words" if lists and labels and len(labels) != size else None


def _words(row: np.ndarray) -> np.ndarray:
    """Return the words (W, ...) of a row without its padding."""
    return np.asarray(row[~np.isnan(row[:, TAG])])


def _spans_with_text(words: np.ndarray, text: str | list[str], spec: TaskSpec) -> list[dict[str, Any]]:
    """Return a row's spans in the form of the column."""
    spans = []
    for first, stop, label in _spans.spans_of(str(spec.labels[int(tag)]) for tag in words[:, TAG]):
        start, end = int(words[first, START]), int(words[stop - 1, END])
        within = text[start:end]
        if isinstance(within, str):  # some tokenizers count the space before a word as part of it
            start += len(within) - len(within.lstrip())
        said = within.strip() if isinstance(within, str) else " ".join(within)
        score = float(words[first:stop, SCORE].mean())
        spans.append({"start": start, "end": end, "label": label, "text": said, "score": score})
    return spans


def _words_with_probabilities(words: np.ndarray) -> list[dict[str, Any]]:
    return [{"start": int(word[START]), "end": int(word[END]), "probabilities": word[PROBABILITIES:]} for word in words]


task = TokenClassification()
