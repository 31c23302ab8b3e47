"""Embeddings that learn from pairs: the losses of sentence-transformers, folders that it loads, and what is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import families
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.errors import ConfigError, DataError, UsageError
from torchlake.models.spec import load_spec
from torchlake.tasks import _contrastive
from torchlake.tasks.feature_extraction import task

PAIRS, TRIPLETS = task_cases.CASES["embeddings_of_pairs"], task_cases.CASES["embeddings_of_triplets"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of triplets after a few steps."""
    return train(tmp_path_factory.mktemp("embedder"), steps=8)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of triplets, trained until it finds most texts."""
    return train(tmp_path_factory.mktemp("learned"), steps=120)


def train(folder: Path, *, steps: int) -> Path:
    sections = TRIPLETS.sections(
        folder, tiny.build_embedder(folder / "base"), max_steps=steps, epochs=12, batch_size=16, learning_rate=2e-3
    )
    runs.succeed(folder / "run", sections)
    return folder / "run" / "model"


def test_the_ranking_loss_is_that_of_sentence_transformers() -> None:
    """Cosines times 20, cross entropy over all second texts and hard negatives of the batch."""
    outputs = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    similar = 20 * unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2]]).T
    expected = torch.nn.functional.cross_entropy(similar, torch.arange(5))
    assert torch.allclose(_contrastive.ranking_loss(outputs) / 5, expected)
    cosine = torch.nn.functional.cosine_similarity(outputs[:, 0], outputs[:, 1])
    wanted = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.2])
    assert torch.allclose(
        _contrastive.similarity_loss(outputs[:, :2], wanted) / 5, torch.nn.functional.mse_loss(cosine, wanted)
    )


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing it scripts functions of torch
@pytest.mark.parametrize("micro_batch_tokens", [pytest.param(200, marks=pytest.mark.slow), 100_000])
def test_steps_are_those_of_sentence_transformers(tmp_path: Path, micro_batch_tokens: int) -> None:
    """Losses and gradient norms of its loss under AdamW; here in micro-batches of a few rows, and in one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    base, steps = tiny.build_embedder(tmp_path / "base"), 4
    config = json.loads((base / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "config.json").write_text(json.dumps(config))
    sections = TRIPLETS.sections(tmp_path, base, max_steps=steps, epochs=steps, batch_size=32, warmup=0.0)
    sections["train"] |= {"micro_batch_tokens": micro_batch_tokens, "weight_decay": 0.0}
    sections["data"]["validation"] = None
    table = pq.read_table(sections["data"]["train"]).slice(0, 32)
    pq.write_table(table, sections["data"]["train"])
    runs.succeed(tmp_path / "run", sections)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]

    model = SentenceTransformer(str(base), device="cpu").train()
    loss_of = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    expected = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = sections["train"]["learning_rate"] * (steps - step) / steps
        texts = [model.preprocess(table[name].to_pylist()) for name in ("query", "passage", "other")]
        loss = loss_of(texts, None)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_what_is_found_is_what_sorting_finds() -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 2, 4)).astype(np.float32)
    vectors[:, 1] += vectors[:, 0]
    found = _contrastive.found_shares(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    ranks = np.array([1 + (row > row[at]).sum() for at, row in enumerate(unit[:, 0] @ unit[:, 1].T)])
    np.testing.assert_array_equal(found["recall_at_1"], ranks <= 1)
    np.testing.assert_array_equal(found["recall_at_10"], ranks <= 10)
    np.testing.assert_allclose(found["mrr_at_10"], np.where(ranks <= 10, 1 / ranks, 0))


def test_copies_share_a_place_and_equal_vectors_find_nothing() -> None:
    vectors = np.eye(4, dtype=np.float32)[[0, 0, 1, 2]][:, None].repeat(2, axis=1)
    found = _contrastive.found_shares(vectors)
    assert found["recall_at_1"].tolist() == [0.5, 0.5, 1, 1]
    assert found["mrr_at_10"].tolist() == [0.75, 0.75, 1, 1]
    collapsed = _contrastive.found_shares(np.ones((50, 2, 3), dtype=np.float32))
    assert collapsed["recall_at_1"].mean() == pytest.approx(1 / 50)
    assert collapsed["recall_at_10"].mean() == pytest.approx(10 / 50)


@pytest.mark.slow
def test_training_finds_more_than_the_base(learned: Path, tmp_path: Path) -> None:
    table = TRIPLETS.table(96)
    columns = {"text": "query", "text_pair": "passage"}
    before = tl.evaluate(learned.parents[1] / "base", table, **columns)
    after = tl.evaluate(learned, table, text_pair="passage")
    assert set(after.metrics) == {"recall_at_1", "recall_at_10", "mrr_at_10"}
    assert float(after.metrics["mrr_at_10"]) > float(before.metrics["mrr_at_10"]) + 0.1
    pq.write_table(table, tmp_path / "in.parquet")
    stored = tl.evaluate(learned, tmp_path / "in.parquet", text_pair="passage")
    assert float(stored.metrics["mrr_at_10"]) == pytest.approx(float(after.metrics["mrr_at_10"]))
    similar = tl.evaluate(learned, table, text="passage", text_pair="other", label="same")
    assert set(similar.metrics) == {"spearman", "pearson"}
    with pytest.raises(UsageError, match="name the column of the second text"):
        tl.evaluate(learned, table)


def test_rows_without_a_text_or_a_similarity_are_left_out(trained: Path) -> None:
    table = TRIPLETS.table(12).to_pylist()
    table[0]["passage"], table[1]["query"], table[2]["same"] = None, " ", None
    given = {"text_pair": "passage", "label": "same", "text": "query"}
    found = tl.evaluate(trained, pa.Table.from_pylist(table), **given)
    assert (found.rows, found.failed, found.errors) == (12, 3, {"null_input": 2, "null_label": 1})


def test_the_folder_reads_single_texts(trained: Path) -> None:
    spec = load_spec(trained)
    assert (spec.text, spec.text_pair, dict(spec.inputs), spec.label) == ("query", None, {}, None)
    assert (spec.problem, spec.dimensions, spec.max_length) == ("feature_extraction", 16, 48)
    vectors = tl.predict(trained, TRIPLETS.table(6))["embedding"].to_pylist()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
@pytest.mark.parametrize("kind", sweep(["own layout", "plain", "t5"], quick={"own layout"}))
def test_sentence_transformers_loads_the_folder_with_equal_vectors(trained: Path, tmp_path: Path, kind: str) -> None:
    from sentence_transformers import SentenceTransformer

    folder = trained
    if kind != "own layout":
        build = tiny.build_encoder if kind == "plain" else tiny.build_encoder_decoder
        base = build(tmp_path / "base")
        runs.succeed(tmp_path / "run", PAIRS.sections(tmp_path, base, max_steps=2))
        folder = tmp_path / "run" / "model"
    stated = json.loads((folder / "config.json").read_text())["architectures"]
    assert stated == ["T5EncoderModel" if kind == "t5" else "BertModel"]
    texts = TRIPLETS.table(20)["passage"].to_pylist()
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    ours = tl.predict(folder, pa.table({"query": texts}))["embedding"].to_pylist()
    np.testing.assert_allclose(np.array(ours), theirs, atol=1e-5)


@pytest.mark.slow
def test_a_model_trained_on_trains_again_and_with_adapters(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    sections = PAIRS.sections(tmp_path, trained, max_steps=3, ema=0.9)
    sections["model"]["lora"] = {"rank": 2}
    runs.succeed(tmp_path / "run", sections)
    assert load_spec(tmp_path / "run" / "model").dimensions == 16
    before, after = (
        np.array(tl.predict(folder, PAIRS.table(6))["embedding"].to_pylist())
        for folder in (trained, tmp_path / "run" / "model")
    )
    assert 1e-6 < np.abs(before - after).max() < 0.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: data.pop("text_pair"), ConfigError, "data.text_pair: feature_extraction learns from pairs"),
        (lambda data: data.update(label="same"), ConfigError, "reads no label, unless data.problem is regression"),
        (lambda data: data.update(problem="single_label"), ConfigError, "unless data.problem is regression"),
        (lambda data: data.update(inputs={"worse": "other"}), ConfigError, "no input 'worse'; .* are negative"),
        (
            lambda data: data.update(problem="regression", label="same", inputs={"negative": "other"}),
            ConfigError,
            "have no negative; remove it",
        ),
        (lambda data: data.update(problem="regression", label="id"), DataError, "is not from -1 to 1"),
    ],
)
def test_mistakes_in_a_job(
    tmp_path: Path, tiny_bert: Path, change: Callable[[dict[str, Any]], Any], error: type, message: str
) -> None:
    sections = PAIRS.sections(tmp_path, tiny_bert)
    change(sections["data"])
    with pytest.raises(error, match=message):
        tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)


def test_an_encoder_that_padding_changes_is_refused(tmp_path: Path) -> None:
    base = families.build(tmp_path / "base", "fnet", kind="classifier")
    with pytest.raises(ConfigError, match=r"base: padding changes the vectors of a model of type 'fnet'"):
        tl.train(run=tmp_path / "run", engine=runs.Inline(), **PAIRS.sections(tmp_path, base))


def test_a_similarity_out_of_range_is_a_bad_row() -> None:
    spec = replace(tiny.SPEC, task="feature_extraction", problem="regression", labels=(), text_pair="other")
    array = pa.array([0.5, 4.0, None, -1.0])
    assert list(task.bad_labels(array, spec)) == [1]
    assert task.encode_labels(array.filter(pa.array([True, False, False, True])), spec).to_pylist() == [0.5, -1.0]
