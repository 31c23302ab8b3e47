"""Extractive question answering: a question and a context in; the part of the context that answers it out.

A long context is read in windows, each together with the whole question (`_windows.py`). The start and the end of the
answer are each one choice among all tokens of the context, over its windows, so scores of different windows can be
compared; a token in two windows is two choices. A context of one window has the loss of transformers, except that
padding and the question's tokens are not choices here.
Labels are SQuAD's structs: `text` and `answer_start`, in characters, each one value or a list. Of several answers the
first is learned. With the option `no_answer` an empty list means that there is no answer, which the model may predict.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import LabelColumn, Problem, TaskSpec
from torchlake.data.features import INPUT_IDS, Array, Features
from torchlake.errors import DataError, MissingExtra, pip_install
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.tasks import TEXT, TOKEN_TYPES, ColumnOptions, Inputs, _windows
from torchlake.tasks._windows import PLACES, SOURCE, WindowedTask, ragged, stored_texts, texts_of, without_texts

if TYPE_CHECKING:
    import torch

ANSWER = pa.schema({"answer": pa.string(), "start": pa.int32(), "end": pa.int32(), "score": pa.float32()})
NO_ANSWER = -2
"The token in `starts` that stands for no answer."
CHOICE, IS_START, IS_END = 1, 2, 4
"A target is a sum of these, one for each token."
FIRST, LAST, START, END, SCORE = range(5)
"The numbers kept for a row's answer: the places of its tokens, its characters and its probability."

Answer = tuple[int, int] | None
"(first character, one past the last) of an answer; None: no answer."


class QuestionAnswering(WindowedTask):
    """A model of transformers that marks the answer in a context."""

    inputs = {"question": TEXT, "context": TEXT}
    auto_class = "AutoModelForQuestionAnswering"
    hub_task = "question-answering"
    options = {"stride": 128, "max_answer_tokens": 30, "no_answer": False}
    default_metric = {"answer": "exact_match"}
    directions = {"exact_match": "higher", "f1": "higher", "loss": "lower"}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a negative overlap or a maximum answer length below 1."""
        if options["stride"] < 0 or options["max_answer_tokens"] < 1:
            raise ValueError("stride must be 0 or more, and max_answer_tokens 1 or more")

    # Labels.

    def count_labels(
        self, arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False
    ) -> int:
        """Return the number of rows with a label."""
        if problem is not None:
            raise DataError(f"data.problem is {problem}, but the task {self.name} learns answers; remove the setting")
        rows = 0
        for array in arrays:
            _check_type(array.type)
            rows += len(array) - array.null_count
        return rows

    def decide_labels(self, parts: Iterable[Any], problem: Problem | None = None) -> LabelColumn:
        """Return the two outputs of a token: whether an answer starts there, and whether it ends there."""
        rows = sum(parts)
        if not rows:
            raise DataError("the label column is empty, or null in every row")
        return LabelColumn(problem="answer", labels=("start", "end"), counts=(), rows=rows)

    def bad_labels(self, array: pa.Array, spec: TaskSpec) -> dict[int, str]:
        """Return {row: reason} for rows whose label is not an answer."""
        _check_type(array.type)
        bad = {}
        for row, label in enumerate(array.to_pylist()):
            try:
                found = None if label is None else _answers_of(label)
            except ValueError as error:
                bad[row] = f"bad_label: {error}"
                continue
            if found == [] and not spec.options["no_answer"]:
                bad[row] = "bad_label: it has no answer; set model.task_options.no_answer=true"
        return bad

    # Features.

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of tokens, of their places in the text, and of the texts."""
        integers = pa.list_(pa.int32())
        types = {INPUT_IDS: integers, TOKEN_TYPES: pa.list_(pa.uint8())}
        return {**types, **dict.fromkeys(PLACES, integers), SOURCE: pa.large_binary()}

    def largest_stride(self, spec: TaskSpec) -> int:
        """Return the most tokens that two windows share."""
        return spec.max_length // 4

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        """Return the tokens of questions and texts in windows, and the places of the texts' tokens."""
        questions, texts = inputs["question"].to_pylist(), inputs["context"].to_pylist()
        backend, room = processor.backend_tokenizer, spec.max_length // 2
        backend.no_truncation()
        long = {
            row: f"question_too_long: {len(each.ids)} tokens; at most half of {spec.max_length} are for the question"
            for row, each in enumerate(backend.encode_batch_fast(questions, add_special_tokens=False))
            if len(each.ids) > room
        }
        fitting = ["" if row in long else question for row, question in enumerate(questions)]
        pairs = list(zip(fitting, texts, strict=True))
        stride = min(spec.options["stride"], self.largest_stride(spec))
        made = _windows.encode(processor, pairs, size=spec.max_length, stride=stride, strategy="only_second")
        inside = made.sequences == 1
        starts, ends = np.where(inside, made.starts, -1), np.where(inside, made.ends, -1)
        errors = long
        if spec.options["no_answer"]:
            starts[np.cumsum(made.lengths) - made.lengths] = NO_ANSWER
        else:
            every = np.arange(len(pairs))
            empty = np.setdiff1d(every, np.repeat(every, made.lengths)[inside])
            errors = dict.fromkeys(empty.tolist(), "no_tokens: the tokenizer makes no tokens of the context") | long
        arrays: dict[str, Array] = {
            INPUT_IDS: made.ragged(made.ids),
            TOKEN_TYPES: made.ragged(made.types),
            "starts": made.ragged(starts.astype(np.int32)),
            "ends": made.ragged(ends.astype(np.int32)),
            SOURCE: stored_texts(texts),
        }
        return Features(arrays=arrays, lengths=made.lengths, cut=np.zeros(len(texts), dtype=np.int64), errors=errors)

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the tokens, and for each whether it is a choice, the answer's start, and its end."""
        made = without_texts(self.features(inputs, processor, spec))
        if labels is None:
            return made, None
        starts, ends = (ragged(made.arrays, name) for name in PLACES)
        errors, targets = dict(made.errors), (starts.values != -1).astype(np.int32) * CHOICE
        texts = inputs["context"].to_pylist()
        for row, label in enumerate(self.encode_labels(labels, spec).to_pylist()):
            try:
                answer = _first_answer(label, texts[row])
            except ValueError as error:
                errors.setdefault(row, f"bad_label: {error}")
                continue
            part = slice(starts.offsets[row], starts.offsets[row + 1])
            begin, stop = _golden(starts.values[part], ends.values[part], answer)
            if not (begin.any() and stop.any()):
                errors.setdefault(row, "bad_label: no token of the text is in the answer")
            targets[part] += begin * IS_START + stop * IS_END
        offsets = pa.array(starts.offsets, pa.int32())
        return replace(made, errors=errors), pa.ListArray.from_arrays(offsets, pa.array(targets))

    # The model.

    def outputs(self, answer: Any) -> "torch.Tensor":
        """Return the logits (B, L, 2) of starts and ends."""
        import torch

        return torch.stack([answer.start_logits, answer.end_logits], dim=-1)

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the mean of the losses of start and end, summed over rows; targets (B, up to L), -100 for padding."""
        import torch

        assert targets is not None, "rows have answers"
        targets = torch.nn.functional.pad(targets, (0, outputs.shape[1] - targets.shape[1]), value=0).clamp(min=0)
        logits = outputs.float().masked_fill((targets & CHOICE == 0)[..., None], -torch.inf)
        wanted = torch.stack([targets & IS_START, targets & IS_END], dim=-1) > 0
        right = logits.masked_fill(~wanted, -torch.inf)
        return (torch.logsumexp(logits, dim=1) - torch.logsumexp(right, dim=1)).sum() / 2

    def divisor(self, targets: Array, spec: TaskSpec, objective: Objective = UNWEIGHTED) -> float:
        """Return the number of rows."""
        return len(targets)

    # Outputs to answers.

    def reduce_outputs(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return each row's most probable answer, (B, 5) float32: its tokens, its characters, its probability.

        An answer is within one window, of `max_answer_tokens` at most.
        """
        width = outputs.shape[1]
        choices, logits = batch["starts"] != -1, outputs.astype(np.float64)
        logits[~choices] = -np.inf
        top = logits.max(axis=1, keepdims=True)
        chances = np.exp(logits - top)
        chances /= chances.sum(axis=1, keepdims=True)
        texts = batch["starts"] >= 0
        starting, ending = (np.where(texts, chances[..., which], -1.0) for which in range(2))
        rows = np.arange(len(outputs))
        best = np.full((len(outputs), 3), -1.0)  # probability, first token, last token
        for longer in range(min(spec.options["max_answer_tokens"], width)):
            both = np.where(ending[:, longer:] < 0, -1, starting[:, : width - longer] * ending[:, longer:])
            both[:, np.arange(width - longer) % spec.max_length + longer >= spec.max_length] = -1  # over a window's end
            place = both.argmax(axis=1)
            better = both[rows, place] > best[:, 0]
            found = np.stack([both[rows, place], place, place + longer], axis=1)
            best[better] = found[better]
        if spec.options["no_answer"]:
            none = chances[:, 0, 0] * chances[:, 0, 1]
            best[none > best[:, 0]] = np.stack([none, 0 * none, 0 * none], axis=1)[none > best[:, 0]]
        first, last = best[:, 1].astype(int).clip(0), best[:, 2].astype(int).clip(0)
        places = [batch["starts"][rows, first], batch["ends"][rows, last]]
        return np.stack([first, last, *places, best[:, 0].clip(0)], axis=1).astype(np.float32)

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return the share of answers whose first and last token are right."""
        assert targets is not None, "rows have answers"
        rows = np.arange(len(answers))
        found = [np.maximum(0, targets[rows, answers[:, which].astype(int)]) for which in (FIRST, LAST)]
        right = (found[0] & IS_START > 0) & (found[1] & IS_END > 0)
        return {"exact_match": float(right.mean()) if len(right) else 0.0}

    def metric_names(self, spec: TaskSpec) -> list[str]:
        """Return the one metric of a validation, which has tokens and no words; F1 is `evaluate`'s."""
        return ["exact_match"]

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return the answer, null if the model predicts that there is none, its characters and its probability."""
        return ANSWER

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the answers as columns."""
        texts = texts_of(options.features, len(answers))
        some = answers[:, START] >= 0
        places = [pa.array(answers[:, which].astype(np.int32), mask=~some) for which in (START, END)]
        said = [
            text[int(row[START]) : int(row[END])].strip() if there else None
            for text, row, there in zip(texts, answers, some, strict=True)
        ]
        scores = pa.array(answers[:, SCORE], pa.float32())
        return pa.table([pa.array(said, pa.string()), *places, scores], schema=ANSWER)

    def judge(self, scored: pa.Table, labels: pa.Array, spec: TaskSpec) -> dict[str, np.ndarray]:
        """Return SQuAD's exact match and F1 of words of each row (N,), each with the best of its answers."""
        try:
            from torchmetrics.functional.text import squad
        except ImportError:
            raise MissingExtra(f"SQuAD's metrics need 'torchmetrics': {pip_install('torchlake[answers]')}") from None
        rows = []
        for answer, label in zip(scored["answer"].to_pylist(), labels.to_pylist(), strict=True):
            texts = [text for text, _ in _answers_of(label)] or [""]
            true: Any = {"id": "", "answers": {"text": texts, "answer_start": [0] * len(texts)}}
            rows.append(squad({"id": "", "prediction_text": answer or ""}, true))
        return {name: np.array([float(row[name]) / 100 for row in rows]) for name in ("exact_match", "f1")}

    def measure(self, scored: pa.Table, labels: pa.Array, spec: TaskSpec) -> dict[str, float]:
        """Return the means of `judge`."""
        return {name: float(each.mean()) for name, each in self.judge(scored, labels, spec).items()}


def _check_type(kind: pa.DataType) -> None:
    """Raise DataError for a column whose type cannot hold answers."""
    if not (pa.types.is_struct(kind) and {"text", "answer_start"} <= {field.name for field in kind}):
        raise DataError(
            f"the label column holds {kind}; answers must be structs of `text` and `answer_start` (characters), each "
            "one value or a list, as in SQuAD"
        )


def _answers_of(label: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the text and the first character of a row's answers. Raises ValueError for an invalid answer."""
    texts, starts = label["text"], label["answer_start"]
    if not isinstance(texts, list):
        texts, starts = [] if texts is None else [texts], [] if starts is None else [starts]
    if not isinstance(starts, list) or len(texts) != len(starts):
        raise ValueError("it has different numbers of text and answer_start")
    if any(not text or start is None or start < 0 for text, start in zip(texts, starts, strict=True)):
        raise ValueError("an answer has no text, or no position in the text")
    return list(zip(texts, starts, strict=True))


def _first_answer(label: Mapping[str, Any], text: str) -> Answer:
    """Return the place of a row's first answer. Raises ValueError if the text has something else there."""
    answers = _answers_of(label)
    if not answers:
        return None
    said, start = answers[0]
    if text[start : start + len(said)] != said:
        raise ValueError(f"the text has no {said[:80]!r} at character {start}")
    return start, start + len(said)


def _golden(starts: np.ndarray, ends: np.ndarray, answer: Answer) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens (L,) of a row are the answer's first, and which its last; of each there are several if
    windows share it."""
    if answer is None:
        return starts == NO_ANSWER, starts == NO_ANSWER
    inside = (starts >= 0) & (starts < answer[1]) & (ends > answer[0])
    if not inside.any():
        return inside, inside
    return inside & (starts == starts[inside].min()), inside & (ends == ends[inside].max())


task = QuestionAnswering()
