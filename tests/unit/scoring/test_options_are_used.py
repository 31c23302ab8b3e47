"""No option is accepted and ignored: it changes the result, is refused, or is known to have no effect on rows.

A new option of `predict`, `map`, `rank`, `evaluate` or `plan` needs an entry here: what it does to a small job.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.config.measuring import EvaluateOptions
from torchlake.config.options import PredictOptions
from torchlake.errors import TorchlakeError
from torchlake.jobs.map import MapOptions
from torchlake.scoring.rank import RankOptions

ROWS = tiny.reviews(12).drop_columns("label")
CHANGES, REFUSED, NO_EFFECT = "changes", "refused", "no effect"
# (value, what it does to a stored table with a Parquet folder as output, and what to a frame in memory)
GIVEN: dict[str, tuple[Any, str, str]] = {
    "where": ("id < 5", CHANGES, REFUSED),
    "sample": (0.5, CHANGES, REFUSED),
    "limit": (3, CHANGES, REFUSED),
    "seed": (3, REFUSED, REFUSED),  # of a sample, or of sampled tokens
    "csv": ({"delimiter": ";"}, REFUSED, REFUSED),
    "on_bad_file": ("quarantine", NO_EFFECT, REFUSED),  # no file is bad
    "accept_new_input": (True, NO_EFFECT, REFUSED),  # the output is new
    "accept_removed_input": (True, NO_EFFECT, REFUSED),
    "max_error_rate": (0.0, REFUSED, REFUSED),  # one row has no text
    "overwrite": (True, NO_EFFECT, REFUSED),
    "format": ("delta", CHANGES, REFUSED),
    "mode": ("append", REFUSED, REFUSED),
    "incremental": (True, REFUSED, REFUSED),
    "commit_id": ("one", CHANGES, REFUSED),
    "partition_by": (["text"], REFUSED, REFUSED),
    "add_columns": (True, REFUSED, REFUSED),
    "target_file_size": ("1MiB", NO_EFFECT, REFUSED),  # there is one chunk
    "chunk_rows": (5, CHANGES, REFUSED),
    "row_timeout_s": (30.0, NO_EFFECT, REFUSED),
    "task": ("text_classification", NO_EFFECT, NO_EFFECT),
    "task_options": ({"threshold": 0.5}, REFUSED, REFUSED),
    "text_pair": ("text", REFUSED, REFUSED),
    "inputs": ({"image": "text"}, REFUSED, REFUSED),
    "prefix": ("is_", CHANGES, CHANGES),
    "all_probabilities": (True, CHANGES, CHANGES),
    "embedding": ("int8", REFUSED, REFUSED),
    "null": ("score", CHANGES, CHANGES),
    "max_length": (5, CHANGES, CHANGES),
    "batch_tokens": (64, CHANGES, NO_EFFECT),  # the names of files, which have the settings
    "gpus_per_process": (2, REFUSED, REFUSED),
    "max_new_tokens": (3, REFUSED, REFUSED),
    "temperature": (0.5, REFUSED, REFUSED),
    "top_k": (3, REFUSED, REFUSED),
    "top_p": (0.5, REFUSED, REFUSED),
    "language": ("de_DE", REFUSED, REFUSED),
    "stop": ("x", REFUSED, REFUSED),
    "json_schema": ({"type": "object"}, REFUSED, REFUSED),
    "json_columns": (True, REFUSED, REFUSED),
    "regex": ("a", REFUSED, REFUSED),
    "choices": ("a,b", REFUSED, REFUSED),
    "grammar": ("a.lark", REFUSED, REFUSED),
    "chat": (True, REFUSED, REFUSED),
    **{
        name: (value, REFUSED, REFUSED)  # this model does not write
        for name, value in {
            "prompt": "{text}",
            "system": "a",
            "examples": [{"text": "a", "completion": "b"}],
            "tools": "text",
            "chat_template": "a",
            "template_options": {"a": 1},
            "continue_final_message": True,
            "n": 2,
            "explode": True,
            "seed_by": "key",
            "min_p": 0.1,
            "min_new_tokens": 1,
            "num_beams": 2,
            "repetition_penalty": 1.1,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "stop_token_ids": [1],
            "logprobs": True,
        }.items()
    },
    **{
        name: (value, REFUSED, REFUSED)  # of endpoints: test_endpoint.py
        for name, value in {
            "endpoint": "https://host/v1",
            "model_name": "a",
            "key_env": "HOME",
            "api": "chat",
            "price": {"a": {}},
            "request_options": {"a": 1},
            "concurrency": 2,
            "requests_per_minute": 9.0,
            "tokens_per_minute": 9.0,
            "max_retries": 1,
            "max_cost": 1.0,
            "max_tokens_total": 9,
            "batch_api": True,
            "insecure_endpoint": True,
        }.items()
    },
    "batch_rows": (5, CHANGES, NO_EFFECT),
    "token_counts": (True, CHANGES, CHANGES),
    "runtime_python": ("python", REFUSED, REFUSED),  # of a runtime that needs none
}
MAPPED = {"gpus_per_process": NO_EFFECT, "max_error_rate": NO_EFFECT}
"What the function of `map` does otherwise: it fails for no row, and this engine has no GPUs to give."


TEXTS = tiny.reviews(12)["text"].to_pylist()
PAIRS = pa.table(
    {
        "id": range(12),
        "q": [TEXTS[number // 4] for number in range(12)],
        "d": [None, *TEXTS[1:]],
        "other": TEXTS[::-1],
    }
)
RANKED: dict[str, tuple[Any, str, str]] = {
    "query": ("other", CHANGES, CHANGES),
    "document": ("other", CHANGES, CHANGES),
    "relevant": ("bad", CHANGES, CHANGES),
    "key": ("id", CHANGES, REFUSED),
    "columns": (["other"], CHANGES, REFUSED),
    "runtime": ("eager", CHANGES, NO_EFFECT),  # the names of files; the scores are the same to four digits
    "engine": (tiny.Here(), NO_EFFECT, NO_EFFECT),
    "all_probabilities": (True, REFUSED, REFUSED),
    "prefix": ("is_", REFUSED, REFUSED),
    "text_pair": ("d", REFUSED, REFUSED),
    "commit_id": ("one", REFUSED, REFUSED),
    "format": ("delta", REFUSED, REFUSED),
}
"As GIVEN; the names are those of `rank`, and options that it does otherwise than `predict`."
EVALUATED: dict[str, tuple[Any, str, str]] = {
    "text": ("other", CHANGES, CHANGES),
    "label": ("other", REFUSED, REFUSED),  # the model does not know these labels
    "text_pair": ("other", REFUSED, REFUSED),
    "inputs": ({"image": "text"}, REFUSED, REFUSED),
    "task": ("text_classification", NO_EFFECT, NO_EFFECT),
    "engine": (tiny.Here(), NO_EFFECT, NO_EFFECT),
    "runtime": ("eager", NO_EFFECT, NO_EFFECT),
    "reference": ("a", REFUSED, REFUSED),
    "key": ("id", REFUSED, CHANGES),
    "slices": (["id"], REFUSED, CHANGES),
    "no_texts": (True, REFUSED, CHANGES),
    "label_hints": (True, REFUSED, CHANGES),
    "overwrite": (True, REFUSED, NO_EFFECT),
}
"As GIVEN, without and with `report`."
PLANNED: dict[str, tuple[Any, str]] = {
    "processes": (2, CHANGES),
    "gpu_memory": ("8GiB", CHANGES),
    "overrides": (["train.epochs=3"], CHANGES),
    "bandwidth": ("1GB", CHANGES),
    "latency": (0.5, CHANGES),
    "flops": ("2T", CHANGES),
    "sample_rows": (5, CHANGES),
}


PLAIN = dict[str, Any]()
"The result of each small job without an option; it is run once."


def make_function() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"same": batch["text"]})


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_model(tmp_path_factory.mktemp("model") / "model", encoder=tiny_bert)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "in.parquet"
    pq.write_table(rows(), path)
    return path


def rows() -> pa.Table:
    return ROWS.set_column(1, "text", [[None, *ROWS["text"].to_pylist()[1:]]])


class Near(float):
    """A score, equal to those that differ in digits that depend on the runtime, or on which rows share a batch."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-5

    __hash__ = None  # type: ignore[assignment]


def near(table: pa.Table) -> list[dict[str, Any]]:
    """The rows, with scores that are compared as `Near`."""
    return [
        {name: Near(value) if isinstance(value, float) else value for name, value in row.items()}
        for row in table.to_pylist()
    ]


def contents(folder: Path) -> Any:
    """What a reader sees of an output: its kind, files and rows, and the name of its commit."""
    dataset = tl.open(folder)
    found = dataset.to_table()
    names = sorted(path.name for path in folder.rglob("*.parquet"))
    commits = [path.read_text() for path in folder.rglob("commit.json")]
    named = any('"commit_id"' in text for text in commits)
    kind = (folder / "_delta_log").exists()
    return kind, found.schema, near(found.sort_by(found.column_names[0])), names, named


def effect(run: Callable[..., Any], name: str, value: Any) -> str:
    if run.__qualname__ not in PLAIN:
        PLAIN[run.__qualname__] = run()
    plain = PLAIN[run.__qualname__]
    try:
        given = run(**{name: value})
    except (TorchlakeError, TypeError):
        return REFUSED
    return NO_EFFECT if given == plain else CHANGES


@pytest.mark.parametrize("name", sorted(PredictOptions.__annotations__))
def test_options_of_predict(name: str, model: Path, table: Path, tmp_path: Path) -> None:
    def stored(**options: Any) -> Any:
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        tl.predict(model, table, output, key="id", engine=tiny.Here(), **options)
        return contents(output)

    def frame(**options: Any) -> Any:
        scored = tl.predict(model, rows(), engine=tiny.Here(), **options)
        return scored.schema, near(scored)

    value, of_table, of_frame = GIVEN[name]
    assert effect(stored, name, value) == of_table
    assert effect(frame, name, value) == of_frame


@pytest.mark.parametrize("name", sorted({*MapOptions.__annotations__, *tl.map.__annotations__} & GIVEN.keys()))
def test_options_of_map(name: str, table: Path, tmp_path: Path) -> None:
    def stored(**options: Any) -> Any:
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        schema = {"same": pa.string()}
        tl.map(make_function, table, output, schema=schema, columns=["text"], key="id", engine=tiny.Here(), **options)
        return contents(output)

    assert effect(stored, name, GIVEN[name][0]) == MAPPED.get(name, GIVEN[name][1])


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    encoder = tiny.build_pair_encoder(folder / "encoder")
    return tiny.build_model(folder / "model", encoder=encoder, spec=replace(tiny.SPEC, text="q", text_pair="d"))


@pytest.mark.parametrize("name", sorted({*RANKED, *RankOptions.__annotations__}))
def test_options_of_rank(name: str, reranker: Path, tmp_path: Path) -> None:
    table = tmp_path / "in.parquet"
    pq.write_table(PAIRS, table)
    usual = {"relevant": "good", "engine": tiny.Here()}

    def stored(**options: Any) -> Any:
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        tl.rank(reranker, table, output, **{**usual, **options})
        return contents(output), contents(output.with_name(f"{output.name}.scores"))

    def frame(**options: Any) -> Any:
        ranked = tl.rank(reranker, PAIRS, **{**usual, **options})
        return ranked.schema, near(ranked)

    value, of_table, of_frame = RANKED.get(name, GIVEN.get(name))  # type: ignore[misc]
    assert (effect(stored, name, value), effect(frame, name, value)) == (of_table, of_frame)


@pytest.mark.parametrize("name", sorted({*EVALUATED, *EvaluateOptions.__annotations__} - {"report"}))
def test_options_of_evaluate(name: str, model: Path, tmp_path: Path) -> None:
    table, report = tmp_path / "in.parquet", tmp_path / "report"
    rows = tiny.reviews(40)
    pq.write_table(rows.append_column("other", rows["text"].take(pa.array(range(39, -1, -1)))), table)

    def plain(**options: Any) -> Any:
        found = tl.evaluate(model, table, **{"engine": tiny.Here(), **options})
        return found.rows, {name: Near(one.value) for name, one in found.metrics.items()}

    def reported(**options: Any) -> Any:
        shutil.rmtree(report, ignore_errors=True)
        plain(report=report, **options)
        rows = pq.read_table(report / "rows.parquet")
        return rows.schema, near(rows), (report / "eval.json").read_text().count('"slice')

    value, without, with_report = EVALUATED.get(name) or (GIVEN[name][0], *[GIVEN[name][1]] * 2)
    assert (effect(plain, name, value), effect(reported, name, value)) == (without, with_report)


@pytest.mark.parametrize("name", sorted(PLANNED))
def test_options_of_plan(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(60), tmp_path / "in.parquet")
    sections: dict[str, Any] = {"data": {"train": str(tmp_path / "in.parquet"), "validation": None}}
    sections |= {"model": {"base": str(tiny_bert)}, "train": {"batch_size": 8, "epochs": 2}}

    def run(**options: Any) -> Any:
        usual = {"processes": 3, "flops": "1T", "bandwidth": "2GB", "latency": 0.001}
        return asdict(tl.plan(**sections, **{**usual, **options}))

    value, wanted = PLANNED[name]
    assert effect(run, name, value) == wanted


def test_every_option_has_an_entry() -> None:
    assert {*signature(tl.rank).parameters} - {"model", "table", "output", "options"} <= RANKED.keys()
    assert {*signature(tl.evaluate).parameters} - {"model", "table", "options"} <= EVALUATED.keys()
    assert {*signature(tl.plan).parameters} - {"job", "task", "sections"} == PLANNED.keys()
    assert {*EvaluateOptions.__annotations__} <= {*EVALUATED, *GIVEN, "report"}
    assert {*PredictOptions.__annotations__, *MapOptions.__annotations__} == GIVEN.keys()
