"""A job, a table and bad rows for every task: what the conformance suite of tasks runs."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import own_task
import tiny
import training_runs as runs

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task as a job trains it and `predict` scores it."""

    build: Callable[[Path], Path]
    "Writes the base model."
    table: Callable[[int], pa.Table]
    "A learnable table of so many rows, with `id`."
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    task: Any = None
    "The task that is given in Python; None: it comes with torchlake."
    bad: tuple[tuple[str, Row], ...] = ()
    "Reasons of error rows, and what such a row has in some of its columns."
    predict: dict[str, Any] = field(default_factory=dict)
    "Options of `predict`."
    trains: bool = True
    "Whether `build` writes what a run starts from; False: what is scored."

    def sections(self, folder: Path, base: Path, **train: Any) -> dict[str, Any]:
        """Sections of a job over 96 rows; 20 steps."""
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(self.table(96), folder / "reviews.parquet")
        sections = runs.job(folder, base, **{"batch_size": 8, "epochs": 3, "max_steps": 20, **train})
        sections["data"] |= self.data
        sections["model"] |= self.model
        return sections


def pairs(rows: int) -> pa.Table:
    """Whether a question and an answer have the same mood."""
    first, second = tiny.reviews(rows, seed=1), tiny.reviews(rows, seed=2)
    same = [str(one == other) for one, other in zip(first["label"], second["label"], strict=True)]
    return pa.table({"id": first["id"], "question": first["text"], "answer": second["text"], "label": same})


def stars(rows: int) -> pa.Table:
    """Reviews whose label is in the text and in two columns of numbers."""
    table = tiny.reviews(rows, seed=3)
    good = [label == "good" for label in table["label"].to_pylist()]
    numbers = [float(one) + row % 3 / 4 for row, one in enumerate(good)]
    helpful = pa.array([row % 5 for row in range(rows)], pa.int32())
    return table.append_column("stars", pa.array(numbers)).append_column("helpful", helpful)


def titles(rows: int) -> pa.Table:
    """Reviews in two columns, of which the first is null in every third row."""
    table = tiny.reviews(rows, seed=4)
    title = [None if row % 3 == 0 else text.split()[0] for row, text in enumerate(table["text"].to_pylist())]
    return table.append_column("title", pa.array(title))


def searches(rows: int) -> pa.Table:
    """Reviews, their first words as queries, a review that is not theirs, and how similar the two are."""
    table, others = tiny.reviews(rows, seed=6), tiny.reviews(rows, seed=7)
    queries = [" ".join(text.split()[:3]) for text in table["text"].to_pylist()]
    same = [float(one == other) for one, other in zip(table["label"], others["label"], strict=True)]
    columns = {"query": queries, "passage": table["text"], "other": others["text"], "same": same}
    return pa.table({"id": table["id"], **columns})


def moods(rows: int, *, words: bool = False) -> pa.Table:
    """Reviews with the spans of their good and bad words, or lists of words with tags; every fifth is four long."""
    texts, labels = tiny.reviews(4 * rows, seed=5)["text"].to_pylist(), []
    texts = [" ".join(texts[row : row + (4 if row % 5 == 0 else 1)]) for row in range(rows)]
    for text in texts:
        found, start = [], 0
        for word in text.split():
            mood = "GOOD" if word in tiny.GOOD else "BAD" if word in tiny.BAD else ""
            if words:
                found.append(f"B-{mood}" if mood else "O")
            elif mood:
                found.append({"start": start, "end": start + len(word), "label": mood})
            start += len(word) + 1
        labels.append(found)
    ids = pa.array(range(rows), pa.int64())
    return pa.table({"id": ids, "text": [text.split() for text in texts] if words else texts, "label": labels})


def verdicts(rows: int) -> pa.Table:
    """Reviews, and what they come to in words."""
    table = tiny.reviews(rows, seed=7)
    return table.set_column(2, "summary", pa.array([f"it is {label}" for label in table["label"].to_pylist()]))


def preferences(rows: int) -> pa.Table:
    """Openings of reviews with a good and a bad ending, of different lengths."""
    random = np.random.default_rng(8)
    opening = [f"the {random.choice(tiny.OTHER[2:8])} was" for _ in range(rows)]
    answers = {
        name: [" ".join(["", *random.choice(kind, random.integers(1, 7))]) for _ in range(rows)]
        for name, kind in (("better", tiny.GOOD), ("worse", tiny.BAD))
    }
    return pa.table({"id": range(rows), "opening": opening, **answers})


def questions(rows: int) -> pa.Table:
    """What the one good, or the one bad word of a text is; every fifth text is long."""
    random = np.random.default_rng(6)
    made: list[Row] = []
    for row in range(rows):
        words = random.choice(tiny.OTHER, size=90 if row % 5 == 0 else 12).tolist()
        moods = {"good": random.choice(tiny.GOOD), "bad": random.choice(tiny.BAD)}
        for place, word in zip(random.choice(len(words), size=2, replace=False), moods.values(), strict=True):
            words[place] = str(word)
        text, asked = " ".join(words), str(random.choice(["good", "bad"]))
        start = len(" ".join(words[: words.index(moods[asked])])) + (words.index(moods[asked]) > 0)
        answer = {"text": [str(moods[asked])], "answer_start": [start]}
        made.append({"id": row, "question": f"is it {asked} ?", "context": text, "answers": answer})
    return pa.Table.from_pylist(made)


def build_entailment(folder: Path) -> Path:
    """A classifier of pairs with the classes of natural language inference, and a head drawn at random."""
    spec = tiny.spec_for("single_label", ("contradiction", "entailment", "neutral"))
    tiny.build_model(folder, encoder=tiny.build_encoder(folder.parent / "encoder"), spec=spec)
    (folder / "task.json").unlink()
    (folder / "manifest.json").unlink()
    return folder


IMAGE = {"model": {"task": "image_classification"}, "predict": {"batch_tokens": 16}}
BAD_IMAGES = (
    ("null_input", {"image": None}),
    ("null_input", {"image": {"bytes": None, "path": None}}),
    ("corrupt_image", {"image": {"bytes": b"", "path": None}}),
    ("corrupt_image", {"image": {"bytes": b"no image", "path": None}}),
    ("corrupt_image", {"image": {"bytes": tiny.digits(1)["image"][0].as_py()["bytes"][:-60], "path": None}}),
    ("image_too_large", {"image": {"bytes": tiny.huge_png(), "path": None}}),
    ("missing_image", {"image": {"bytes": None, "path": "/nowhere/cat.png"}}),
    ("missing_image", {"image": {"bytes": None, "path": "cat.png"}}),
)

CASES = {
    "text_classification": Case(
        build=tiny.build_encoder,
        table=lambda rows: tiny.reviews(rows, seed=3),
        bad=(("null_input", {"text": None}), ("null_input", {"text": " \n"})),
    ),
    "text_of_two_columns": Case(
        build=tiny.build_encoder,
        table=titles,
        data={"text": ["title", "text"], "template": "{title}: {text}"},
        bad=(("null_input", {"title": None, "text": None}), ("null_input", {"title": "", "text": " "})),
    ),
    "text_pair": Case(
        build=tiny.build_pair_encoder,
        table=pairs,
        data={"text": "question", "text_pair": "answer"},
        bad=(("null_input", {"question": None}), ("null_input", {"answer": ""})),
    ),
    "text_generation": Case(
        build=tiny.build_language_model,
        table=lambda rows: tiny.reviews(rows, seed=3).select(["id", "text"]),
        model={"task": "text_generation", "max_length": 24},
        bad=(
            ("null_input", {"text": None}),
            ("null_input", {"text": ""}),
            ("prompt_too_long", {"text": "good " * 500}),
        ),
        predict={"max_new_tokens": 4},
    ),
    "preference": Case(
        build=partial(tiny.build_language_model, kind="llama"),
        table=preferences,
        data={"text": "opening", "chosen": "better", "rejected": "worse"},
        model={"task": "preference", "max_length": 24},
        bad=(("null_input", {"opening": None}), ("prompt_too_long", {"opening": "good " * 500})),
        predict={"max_new_tokens": 4},
    ),
    "embeddings_of_pairs": Case(
        build=tiny.build_encoder,
        table=searches,
        data={"text": "query", "text_pair": "passage"},
        model={"task": "feature_extraction"},
        bad=(("null_input", {"query": None}), ("null_input", {"query": " "})),
    ),
    "embeddings_of_triplets": Case(
        build=tiny.build_embedder,
        table=searches,
        data={"text": "query", "text_pair": "passage", "inputs": {"negative": "other"}},
        model={"task": "feature_extraction"},
        bad=(("null_input", {"query": None}),),
    ),
    "embeddings_of_similar_pairs": Case(
        build=tiny.build_embedder,
        table=searches,
        data={"text": "passage", "text_pair": "other", "label": "same", "problem": "regression"},
        model={"task": "feature_extraction"},
        bad=(("null_input", {"passage": None}),),
    ),
    "image_classification": Case(
        build=tiny.build_vision, table=tiny.digits, bad=BAD_IMAGES, data={"problem": "single_label"}, **IMAGE
    ),
    "image_augmented": Case(
        build=partial(tiny.build_vision, kind="resnet"),
        table=tiny.digits,
        bad=BAD_IMAGES,
        **IMAGE | {"model": IMAGE["model"] | {"task_options": {"random_crop": 0.6, "random_flip": True}}},
    ),
    "image_batch_norm": Case(
        build=partial(tiny.build_vision, kind="resnet"),
        table=tiny.digits,
        **IMAGE | {"model": IMAGE["model"] | {"task_options": {"batch_norm": "batch"}}},
    ),
    "token_classification": Case(
        build=tiny.build_encoder,
        table=moods,
        model={"task": "token_classification", "max_length": 24, "task_options": {"stride": 8}},
        bad=(("null_input", {"text": None}), ("null_input", {"text": " \n"})),
    ),
    "tags_of_words": Case(
        build=partial(tiny.build_encoder, kind="roberta"),
        table=partial(moods, words=True),
        model={"task": "token_classification", "max_length": 32},
        bad=(("null_input", {"text": None}), ("null_input", {"text": []}), ("null_input", {"text": [" ", None]})),
    ),
    "question_answering": Case(
        build=tiny.build_encoder,
        table=questions,
        data={"label": "answers"},
        model={"task": "question_answering", "max_length": 40, "task_options": {"stride": 10}},
        bad=(
            ("null_input", {"question": None}),
            ("null_input", {"context": ""}),
            ("question_too_long", {"question": "good " * 500}),
            ("no_tokens", {"context": "\u200b"}),
        ),
    ),
    "text2text_generation": Case(
        build=tiny.build_encoder_decoder,
        table=verdicts,
        data={"label": "summary"},
        model={"task": "text2text_generation", "task_options": {"prefix": "sum up : "}},
        bad=(("null_input", {"text": None}), ("null_input", {"text": ""})),
        predict={"max_new_tokens": 6},
    ),
    "zero_shot_classification": Case(
        build=build_entailment,
        table=lambda rows: tiny.reviews(rows, seed=8),
        model={"task": "zero_shot_classification"},
        bad=(("null_input", {"text": None}), ("null_input", {"text": " "})),
        predict={"task": "zero_shot_classification", "task_options": {"candidate_labels": ["good", "bad", "a film"]}},
        trains=False,
    ),
    "text_and_numbers": Case(
        build=tiny.build_encoder,
        table=stars,
        data={"inputs": {"numbers": ["stars", "helpful"]}},
        task=own_task.TextAndNumbers(),
        bad=(
            ("null_input", {"text": None}),
            ("null_input", {"stars": None}),
            ("bad_number", {"stars": float("nan")}),
            ("bad_number", {"stars": 1e300}),
        ),
    ),
}


def with_bad_rows(case: Case, rows: int) -> tuple[pa.Table, dict[int, str]]:
    """A table whose first rows cannot be scored, and why; the others can."""
    table = case.table(rows).to_pylist()
    for row, (_, values) in zip(table, case.bad, strict=False):
        row |= values
    wide = pa.Table.from_pylist(table, case.table(rows).schema)
    return wide, {row: reason for row, (reason, _) in enumerate(case.bad)}


def predict(name: str, options: dict[str, Any], **tools: Any) -> Any:
    """`tl.predict` with the task of a case in a fresh process, as `scoring_runs.predict`."""
    from scoring_runs import run

    return run(PREDICT, [name, json.dumps(options, default=str)], **tools)


PREDICT = """
import json, sys
import task_cases
import torchlake as tl
from torchlake.errors import TorchlakeError

case, options = task_cases.CASES[sys.argv[1]], json.loads(sys.argv[2])
try:
    given = {} if case.task is None else {"task": case.task}
    scored = tl.predict(engine=tl.Local(processes=1), **given, **case.predict, **options)
except TorchlakeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(scored.record["provenance"]["rows_scored"])
"""
