"""Token classification and question answering: labels, windows of long texts, spans and answers, metrics."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import from_arrow
from torchlake.errors import DataError, TableError
from torchlake.tasks import ColumnOptions, _spans, _windows
from torchlake.tasks.question_answering import task as answering
from torchlake.tasks.token_classification import task as tagging

TAGS = ("O", "B-BAD", "I-BAD", "B-GOOD", "I-GOOD")
SPEC = TaskSpec(
    task="token_classification",
    problem="spans",
    labels=TAGS,
    text="text",
    label="label",
    max_length=24,
    options={**tagging.options, "stride": 8},
)
ASKED = TaskSpec(
    task="question_answering",
    problem="answer",
    labels=("start", "end"),
    text="",
    label="answers",
    max_length=40,
    inputs={"question": "question", "context": "context"},
    options={**answering.options, "stride": 10},
)


byte_level = cache(tiny.bpe_tokenizer)
BLANKS = normalizers.Replace(" ", "Ġ")
LEAVE_BLANKS = {
    "llama": (BLANKS, None),
    "mistral": (None, pre_tokenizers.Metaspace("Ġ", prepend_scheme="never", split=False)),
    "gemma": (BLANKS, pre_tokenizers.Split(" ", "merged_with_previous")),
}


def leaving_blanks(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that has the tokens of `byte_level`, and for which a whole text is a word."""
    tokenizer = tiny.bpe_tokenizer()
    backend: Any = tokenizer.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = LEAVE_BLANKS[kind]
    backend.model.unk_token = "<unk>"
    return tokenizer


def columns(table: pa.Table, *names: str) -> dict[str, Any]:
    return {name: table[name].combine_chunks() for name in names}


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O B-A I-A O", [(1, 3, "A")]),
        ("I-A I-A B-A I-B", [(0, 2, "A"), (2, 3, "A"), (3, 4, "B")]),  # IOB1
        ("S-A B-A E-A I-A E-A", [(0, 1, "A"), (1, 3, "A"), (3, 5, "A")]),  # BIOES
        ("U-A B-A L-A", [(0, 1, "A"), (1, 3, "A")]),  # BILOU
        ("A A O B", [(0, 2, "A"), (3, 4, "B")]),
        ("B-x-y I-x-y X-1", [(0, 2, "x-y"), (2, 3, "X-1")]),
        ("", []),
    ],
)
def test_tags_of_every_scheme_become_spans(tags: str, spans: list[Any]) -> None:
    assert _spans.spans_of(tags.split()) == spans


def test_spans_become_tags_of_the_words_that_they_overlap() -> None:
    starts, ends = np.array([0, 2, 7, 12]), np.array([1, 6, 11, 16])
    tags = _spans.tags_of([(3, 9, "A"), (12, 16, "B"), (8, 20, "C")], starts, ends)
    assert tags == ["O", "B-A", "I-A", "B-C"]


def test_agreement_counts_whole_spans() -> None:
    true = [[(0, 2, "A"), (3, 4, "B")], [], [(1, 2, "A")]]
    found = [[(0, 2, "A"), (3, 5, "B")], [(0, 1, "B")], [(1, 2, "B")]]
    assert _spans.agreement(true, found) == {"precision": 1 / 4, "recall": 1 / 3, "f1": pytest.approx(2 / 7)}
    assert _spans.agreement(true, true)["f1"] == 1
    assert _spans.agreement([[]], [[]]) == {"precision": 0, "recall": 0, "f1": 0}


def test_a_wrong_span_beside_a_true_one_does_not_take_its_place() -> None:
    true, found = [[(3, 4, "GOOD")]], [[(2, 3, "GOOD"), (3, 4, "GOOD")]]
    assert _spans.agreement(true, found) == {"precision": 1 / 2, "recall": 1, "f1": pytest.approx(2 / 3)}


def test_windows_cover_a_row_and_decide_each_token_once(tiny_bert: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    texts = ["good", " ".join(f"w{number} film" for number in range(60)), "", "the film " * 15]
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for stride in (0, 1, 6, 11):
        made = _windows.encode(tokenizer, texts, size=24, stride=stride)
        rows = made.ragged(made.ids)
        for row, expected in enumerate(whole):
            part = slice(rows.offsets[row], rows.offsets[row + 1])
            assert made.ids[part][made.counts[part]].tolist() == expected
            sizes = [24] * ((part.stop - part.start) // 24)
            assert all(made.ids[part.start + 24 * window] == 2 for window in range(len(sizes)))  # [CLS]


@given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1), min_size=1))
@settings(max_examples=60)
def test_words_have_the_tokens_of_their_text(words: list[str]) -> None:
    """Byte-level tokenizers keep the blank before a word in its token, also if the words are a list."""
    tokenizer = byte_level()
    text, listed = (
        _windows.encode(tokenizer, [each], size=2_000, stride=0, pretokenized=isinstance(each, list))
        for each in (" ".join(words), words)
    )
    assert listed.ids.tolist() == text.ids.tolist()
    assert set(listed.words.tolist()) == {-1, *range(len(words))}


@pytest.mark.parametrize("kind", LEAVE_BLANKS)
def test_a_string_is_cut_into_words_at_blanks(kind: str) -> None:
    """Also by a tokenizer that does not: each word has the tokens that it has in a list."""
    tokenizer, text = leaving_blanks(kind), " good   film\nw1  " + "a bad film, " * 20
    places = [each.span() for each in re.finditer(r"\S+", text)]
    made = tagging.features({"text": pa.array([text])}, tokenizer, SPEC)
    starts, ends = (made.arrays[name].values for name in ("starts", "ends"))
    assert list(zip(starts[starts >= 0], ends[starts >= 0], strict=True)) == places
    text = "good film was bad"
    made, listed = (tagging.features({"text": pa.array([one])}, tokenizer, SPEC) for one in (text, text.split()))
    assert made.arrays["input_ids"].values.tolist() == listed.arrays["input_ids"].values.tolist()
    deciding = [np.flatnonzero(one.arrays["starts"].values >= 0).tolist() for one in (made, listed)]
    assert deciding[0] == deciding[1]


@pytest.mark.parametrize("column", [pa.array([[1, 2]]), pa.array([3]), pa.array([[["a"]]])], ids=str)
def test_a_column_without_texts_is_refused(column: pa.Array) -> None:
    with pytest.raises(TableError, match="the column 'text' holds .*, not strings or lists of words; name another"):
        tagging.features({"text": column}, None, SPEC)


def test_a_row_of_windows_is_computed_as_its_windows(tiny_bert: Path) -> None:
    model = tagging.base_model(tiny_bert, SPEC).eval()
    processor = tagging.load_processor(tiny_bert, SPEC, scoring=True)
    made = tagging.features(columns(task_cases.moods(10), "text"), processor, SPEC)
    batch = tagging.collate(made.arrays, np.arange(10), processor, SPEC)
    names = ("input_ids", "attention_mask")
    with torch.inference_mode():
        whole = model(**{name: torch.from_numpy(batch[name]) for name in names}).logits
        for row in range(10):
            for first in range(0, int(made.lengths[row]), 24):
                window = {name: torch.from_numpy(batch[name][row : row + 1, first : first + 24]) for name in names}
                length = int(window["attention_mask"].sum())
                alone = model(**window).logits[0, :length]
                torch.testing.assert_close(whole[row, first : first + length], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("words", "kind"), [(False, ""), (True, ""), (False, "llama")])
def test_what_a_perfect_model_says_are_the_labels(tiny_bert: Path, words: bool, kind: str) -> None:
    table = task_cases.moods(12, words=words)
    processor = leaving_blanks(kind) if kind else tagging.load_processor(tiny_bert, SPEC, scoring=True)
    made = tagging.features(columns(table, "text"), processor, SPEC)
    labels = table["label"].combine_chunks()
    _, targets = tagging.examples(columns(table, "text"), labels, processor, SPEC)
    batch, rows = tagging.collate(made.arrays, np.arange(12), processor, SPEC), np.arange(12)
    wanted = tagging.collate_targets(from_arrow(targets), rows, SPEC)
    marks = np.zeros(batch["input_ids"].shape, dtype=int)
    marks[:, : wanted.shape[1]] = wanted.clip(0)
    logits = np.eye(5, dtype=np.float32)[marks]
    kept = tagging.reduce_outputs(20 * logits, batch, SPEC)
    assert tagging.metrics(kept, wanted, SPEC)["f1"] == 1
    found = tagging.output_columns(tagging.answers(kept, SPEC), processor, SPEC, ColumnOptions(features=made))
    assert found.schema == tagging.output_schema(SPEC)
    assert tagging.measure(found, labels, SPEC)["f1"] == 1
    for text, spans in zip(table["text"].to_pylist(), found["spans"].to_pylist(), strict=True):
        for span in spans:
            said = text[span["start"] : span["end"]]
            assert span["text"] == (" ".join(said) if words else said)
            assert span["text"] in (tiny.GOOD if span["label"] == "GOOD" else tiny.BAD)


def test_labels_are_found_in_every_form() -> None:
    for words in (False, True):
        found = tagging.find_labels(iter([task_cases.moods(20, words=words)["label"].combine_chunks()]))
        assert tagging.name_labels(found, SPEC).labels == TAGS
    numbers = pa.array([[0, 1, 2], [3, 0, 0]])
    named = replace(SPEC, options={**SPEC.options, "tags": ["O", "B-BAD", "I-BAD", "B-GOOD"]})
    assert tagging.name_labels(tagging.find_labels(iter([numbers])), named).labels == TAGS
    with pytest.raises(DataError, match="the tag 0 has no name"):
        tagging.name_labels(tagging.find_labels(iter([numbers])), SPEC)
    with pytest.raises(DataError, match="no span in any row"):
        tagging.name_labels(tagging.find_labels(iter([pa.array([["O", "O"]])])), SPEC)
    with pytest.raises(DataError, match="holds string"):
        tagging.find_labels(iter([pa.array(["O"])]))


def test_labels_that_do_not_fit_a_row_are_named(tiny_bert: Path) -> None:
    processor = tagging.load_processor(tiny_bert, SPEC, scoring=True)
    span = {"start": 2, "end": 99, "label": "GOOD"}
    made, _ = tagging.examples({"text": pa.array(["a good film"])}, pa.array([[span]]), processor, SPEC)
    assert made.errors == {0: "bad_label: a span ends at 99, but the text ends at 11"}
    made, _ = tagging.examples({"text": pa.array([["a", "good"]])}, pa.array([["O"]]), processor, SPEC)
    assert made.errors == {0: "bad_label: 1 tags for 2 words"}
    bad = tagging.bad_labels(pa.array([["O", "B-X"], ["B-GOOD", "O"], None]), SPEC)
    assert bad == {0: "bad_label: 'X' is not one of the model's labels"}
    assert 0 in tagging.bad_labels(pa.array([[{"start": 3, "end": 3, "label": "GOOD"}]]), SPEC)


def learned(tmp_path: Path, name: str, *, rows: int, **train: Any) -> tuple[Path, Path]:
    """The model of a case after enough rows and steps, and a table that it has not seen."""
    case = task_cases.CASES[name]
    train = {"epochs": 50, "batch_size": 16, "learning_rate": 3e-3, **train}
    sections, table = case.sections(tmp_path, case.build(tmp_path / "base"), **train), case.table(rows + 64)
    pq.write_table(table.slice(0, rows), sections["data"]["train"])
    runs.succeed(tmp_path / "run", sections)
    pq.write_table(table.slice(rows), tmp_path / "test.parquet")
    return tmp_path / "run" / "model", tmp_path / "test.parquet"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "steps"), [("token_classification", 96, 300), ("tags_of_words", 600, 1000)])
def test_spans_are_learned_and_measured(tmp_path: Path, name: str, rows: int, steps: int) -> None:
    model, table = learned(tmp_path, name, rows=rows, max_steps=steps)
    found = tl.evaluate(model, table)
    assert found.metrics["f1"].value > 0.95
    assert found.metrics["f1"].low <= found.metrics["f1"].value <= found.metrics["f1"].high


@pytest.mark.slow
def test_answers_are_learned_and_measured(tmp_path: Path) -> None:
    model, table = learned(tmp_path, "question_answering", rows=1500, max_steps=500, learning_rate=2e-3)
    found = tl.evaluate(model, table)
    assert found.metrics["exact_match"].value > 0.9
    assert found.metrics["f1"].value >= found.metrics["exact_match"].value


def golden(table: pa.Table, folder: Path, spec: TaskSpec) -> tuple[Any, dict[str, np.ndarray], np.ndarray, Any]:
    """A processor, a batch of all rows, its targets, and the features."""
    inputs, processor = columns(table, "question", "context"), answering.load_processor(folder, spec, scoring=True)
    _, targets = answering.examples(inputs, table["answers"].combine_chunks(), processor, spec)
    made, rows = answering.features(inputs, processor, spec), np.arange(len(table))
    batch = answering.collate(made.arrays, rows, processor, spec)
    return processor, batch, answering.collate_targets(from_arrow(targets), rows, spec), made


def test_an_answer_is_the_text_at_its_place(tiny_bert: Path) -> None:
    table = task_cases.questions(20)
    processor, batch, wanted, made = golden(table, tiny_bert, ASKED)
    marks = np.zeros(batch["input_ids"].shape, dtype=int)
    marks[:, : wanted.shape[1]] = wanted.clip(0)
    logits = 30 * np.stack([marks & 2 > 0, marks & 4 > 0], axis=-1).astype(np.float32)
    kept = answering.reduce_outputs(logits, batch, ASKED)
    assert answering.metrics(kept, wanted, ASKED) == {"exact_match": 1.0}
    found = answering.output_columns(kept, processor, ASKED, ColumnOptions(features=made))
    assert found.schema == answering.output_schema(ASKED)
    assert [[one] for one in found["answer"].to_pylist()] == [one["text"] for one in table["answers"].to_pylist()]
    measured = answering.measure(found, table["answers"].combine_chunks(), ASKED)
    assert measured == {"exact_match": 1.0, "f1": 1.0}


def test_the_loss_of_one_window_is_that_of_transformers(tiny_bert: Path) -> None:
    """transformers masks the tokens that cannot be chosen."""
    table = task_cases.questions(12).take(pa.array([1, 2, 3, 4, 6, 7]))
    spec = replace(ASKED, max_length=64)
    _, batch, wanted, _ = golden(table, tiny_bert, spec)
    model = answering.base_model(tiny_bert, spec).eval()
    names = ("input_ids", "attention_mask")
    with torch.inference_mode():
        answer = model(**{name: torch.from_numpy(batch[name]) for name in names})
        ours = answering.loss_sum(answering.outputs(answer), torch.from_numpy(wanted), spec) / len(wanted)
        choices = torch.from_numpy(wanted.clip(0) & 1 > 0)
        logits = answering.outputs(answer).masked_fill(~choices[..., None], -torch.inf)
        places = [torch.from_numpy((wanted.clip(0) & bit > 0).argmax(axis=1)) for bit in (2, 4)]
        parts = [torch.nn.functional.cross_entropy(logits[..., which], places[which]) for which in range(2)]
    torch.testing.assert_close(ours, sum(parts) / 2)


def test_answers_are_those_of_the_pipeline(tmp_path: Path) -> None:
    case = task_cases.CASES["question_answering"]
    sections = case.sections(tmp_path, case.build(tmp_path / "base"), max_steps=20, learning_rate=3e-3)
    sections["model"]["max_length"] = 128
    runs.succeed(tmp_path / "run", sections)
    table = case.table(8).slice(1, 4)
    ours = tl.predict(tmp_path / "run" / "model", table)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for row in ours.to_pylist():
        inputs = tokenizer(row["question"], row["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets, inside = inputs.pop("offset_mapping")[0], torch.tensor([one == 1 for one in inputs.sequence_ids(0)])
        with torch.inference_mode():
            answer = model(**inputs)
        chances = [
            one[0].masked_fill(~inside, -torch.inf).softmax(0) for one in (answer.start_logits, answer.end_logits)
        ]
        both = torch.outer(*chances).triu().tril(29)
        first, last = divmod(int(both.argmax()), both.shape[1])
        assert (row["start"], row["end"]) == (int(offsets[first][0]), int(offsets[last][1]))
        assert row["score"] == pytest.approx(float(both.max()), abs=1e-5)


def test_there_may_be_no_answer(tiny_bert: Path) -> None:
    nothing = {"text": [], "answer_start": []}
    table = task_cases.questions(3).to_pylist()
    table[1]["answers"] = nothing
    wide = pa.Table.from_pylist(table, task_cases.questions(3).schema)
    assert list(answering.bad_labels(wide["answers"].combine_chunks(), ASKED)) == [1]
    spec = replace(ASKED, options={**ASKED.options, "no_answer": True})
    processor, batch, wanted, made = golden(wide, tiny_bert, spec)
    assert wanted[1, 0] == 7
    logits = np.zeros((*batch["input_ids"].shape, 2), dtype=np.float32)
    logits[:, 0] = 30
    kept = answering.reduce_outputs(logits, batch, spec)
    found = answering.output_columns(kept, processor, spec, ColumnOptions(features=made)).to_pylist()
    assert [(one["answer"], one["start"], one["end"]) for one in found] == [(None, None, None)] * 3
    assert answering.metrics(kept, wanted, spec)["exact_match"] == pytest.approx(1 / 3)
    assert answering.measure(pa.Table.from_pylist(found), wide["answers"].combine_chunks(), spec)["f1"] > 0
    empty = {"question": pa.array(["good?"]), "context": pa.array(["\u200b"])}
    assert not answering.features(empty, processor, spec).errors, "it has no answer"
    assert answering.features(empty, processor, ASKED).errors[0].startswith("no_tokens: ")


def test_answers_that_are_not_in_the_text_are_named(tiny_bert: Path) -> None:
    table = task_cases.questions(2)
    processor = answering.load_processor(tiny_bert, ASKED, scoring=True)
    label = pa.array([{"text": ["nowhere"], "answer_start": [3]}, {"text": "x", "answer_start": None}][:1])
    made, _ = answering.examples(columns(table.slice(0, 1), "question", "context"), label, processor, ASKED)
    assert made.errors == {0: "bad_label: the text has no 'nowhere' at character 3"}
    with pytest.raises(DataError, match="holds string"):
        answering.find_labels(iter([pa.array(["x"])]))
