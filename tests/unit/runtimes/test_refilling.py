"""Rows take the places of those that have ended: every text is the one that its row has alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import families
from sweeps import sweep
from torchlake.jobs.worker.texts import Budget, Prompt, Texts
from torchlake.models.generation import END, NON_FINITE, GenerationOptions, generation_options
from torchlake.models.spec import load_spec
from torchlake.runtimes import Ended, Text, Writer, eager
from torchlake.runtimes._writing.prefix import BLOCK, Beginnings, leader
from torchlake.runtimes._writing.row import Row
from torchlake.runtimes._writing.session import SHARED, RefillingWriter, session_of
from torchlake.runtimes._writing.static import StaticWriter

KINDS = [
    "gpt2",
    "llama",
    "bloom",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "opt",
    "gpt_neox",
    "falcon",
    "mpt",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    "deepseek_v3",
    "gpt_oss",
    "gptj",
    "gpt_neo",
    "stablelm",
    "starcoder2",
]
APART = {"bloom", "deepseek_v3", "falcon", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mpt"}
"Their attention is not the one of transformers' table, limits the scores, or computes keys after the cache."
LENGTHS = (1, 3, 9, 20, 2, 33, 5, 18)
BUDGET = Budget(tokens=150, rows=3)


def writers(folder: Path, name: str) -> tuple[Any, StaticWriter, RefillingWriter]:
    built = families.build(folder, name, kind="writer", dropout=False)
    model = AutoModelForCausalLM.from_pretrained(built).eval()
    static = StaticWriter(model, built, GenerationOptions())
    session = session_of(model, static)
    assert session is not None
    return model, static, session


def prompts(**options: Any) -> list[Prompt]:
    """Rows of several lengths, which end at different times; half of them begin alike."""
    drawn = np.random.default_rng(0)
    head = drawn.integers(5, 90, 20)
    parts = [(head if row % 2 else head[:0], drawn.integers(5, 90, length)) for row, length in enumerate(LENGTHS)]
    return [
        Prompt(row=row, ids=np.concatenate(part), options=GenerationOptions(max_new_tokens=2 + row, **options))
        for row, part in enumerate(parts)
    ]


def write(writer: Writer, rows: Sequence[Prompt], budget: Budget = BUDGET) -> dict[int, list[int]]:
    waiting = [list(rows)]
    texts: dict[int, list[int]] = {}
    for row, ended in Texts(writer=writer, budget=budget, more=lambda: waiting.pop() if waiting else []).write():
        assert isinstance(ended, Ended), ended
        assert ended.reason == ("stop" if ended.text.tokens[-1] < 0 else "length")
        texts[row] = ended.text.tokens.tolist()
    assert not writer.rows
    return texts


@pytest.mark.parametrize("name", sweep(KINDS, quick={"llama"}))
def test_texts_are_those_of_generate_alone(tmp_path: Path, name: str) -> None:
    """Greedy, of any family: refilled, in another order, without some rows, and with a beginning that is shared."""
    model, static, session = writers(tmp_path / "model", name)
    rows = prompts()
    found = write(session, rows)
    for one in rows:
        ids = torch.from_numpy(one.ids)[None]
        limit = one.options.max_new_tokens
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, eos_token_id=static.ends
        )[0, len(one.ids) :].tolist()
        assert found[one.row] == [END if token in static.ends else token for token in whole], one.row
    assert write(session, rows[::-1]) == found == write(session, rows, Budget(tokens=10**6, rows=100))
    some = rows[1::3]
    assert write(session, some) == {one.row: found[one.row] for one in some}
    assert (session._least is None) == (name in APART)
    if session._least is not None:
        session._least = BLOCK  # read from one place, also those of a few tokens
        assert write(session, rows) == found == write(session, rows[::-1], Budget(tokens=10**6, rows=100))
        assert len(session._slots.beginning) == BLOCK
    sampled = prompts(temperature=1.3, top_k=50, seed=3)
    assert write(session, sampled) == write(static, sampled)


def test_a_text_that_was_begun_is_continued(tmp_path: Path) -> None:
    _, static, session = writers(tmp_path / "model", "llama")
    for options in ({}, {"temperature": 1.0, "seed": 2}):
        rows = prompts(**options)
        whole = write(static, rows)
        begun = [
            Prompt(row=one.row, ids=one.ids, options=one.options, begun=Text(tokens=np.array(whole[one.row][:known])))
            for known, one in enumerate(rows)
            if known < len(whole[one.row])
        ]
        assert write(session, begun) == {one.row: whole[one.row] for one in begun} == write(static, begun)


def test_rows_have_their_own_options(tmp_path: Path) -> None:
    _, static, session = writers(tmp_path / "model", "llama")
    rows, sampled = prompts(), prompts(temperature=1.0, seed=1)
    mixed = [(rows, sampled)[one.row % 2][one.row] for one in rows]
    alone = write(static, rows), write(static, sampled)
    expected = {row: alone[row % 2][row] for row in range(len(rows))}
    assert write(session, mixed) == expected == write(static, mixed)


def test_a_row_whose_scores_are_not_finite_leaves_nothing_behind(tmp_path: Path) -> None:
    model, _, session = writers(tmp_path / "model", "llama")
    rows = prompts()
    expected = write(session, rows)
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = torch.nan
    bad = Prompt(row=100, ids=np.full(40, 95), options=GenerationOptions(max_new_tokens=9))
    found = write(session, [bad, *rows], Budget(tokens=10**6, rows=2))
    assert found.pop(100) == [NON_FINITE]
    assert found == expected


def test_beams_have_the_texts_that_they_have_alone(tmp_path: Path) -> None:
    """Of any limit; a row whose scores are not finite is named, and each token is reported."""
    model, static, session = writers(tmp_path / "model", "llama")
    rows = [*prompts(num_beams=3), *(replace(one, row=one.row + 10) for one in prompts(num_beams=3))]
    expected = {one.row: write(static, [one])[one.row] for one in rows}
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = torch.nan
    bad = Prompt(row=100, ids=np.full(3, 95), options=rows[4].options)
    reports: list[int] = []
    texts = Texts(
        writer=session,
        budget=Budget(tokens=10**6, rows=100),
        more=lambda waiting=[[bad, *rows]]: waiting.pop() if waiting else [],  # type: ignore[misc]
        report=lambda writer, ended: reports.append(len(ended)),
    )
    found = {row: one.text.tokens.tolist() for row, one in texts.write() if isinstance(one, Ended)}
    assert found.pop(100) == [NON_FINITE]
    assert found == expected
    longest = max(map(len, expected.values()))
    assert longest < reports.count(0), "each step"
    assert max(reports) < len(rows) / 2, "rows of one limit"


def test_a_batch_of_beams_has_as_many_rows_as_its_time_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses the batch: the first one has one row, which tells what others may have."""
    _, writer, _ = writers(tmp_path / "model", "llama")
    rows = [replace(one, options=replace(one.options, max_new_tokens=4)) for one in prompts(num_beams=2)]
    search, sizes = writer._search, list[int]()

    def counted(some: Sequence[Any], report: Any) -> None:
        sizes.append(len(some))
        search(some, report)

    monkeypatch.setattr(writer, "_search", counted)
    found = write(writer, rows, Budget(tokens=10**6, rows=100))
    assert sizes == [1, len(rows) - 1]
    monkeypatch.setattr("torchlake.runtimes._writing.static.SEARCH_S", 0.0)
    assert write(writer, rows, Budget(tokens=10**6, rows=100)) == found
    assert sizes[2:] == [1] * len(rows)


def test_choices_are_reported_one_by_one(tiny_gpt2: Path) -> None:
    """Rows of many choices take long: each that is computed is an advance."""
    options = generation_options("text_generation", writes=True, choices=["good", "bad", "unsure"])
    assert options is not None
    writer = eager.open_writer(tiny_gpt2, load_spec(tiny_gpt2), device="cpu", options=options)
    for row in range(2):
        writer.add(row, np.arange(5, 8 + row), options)
    reports: list[tuple[int, int]] = []
    writer.step(lambda ended: reports.append((len(ended), len(writer.rows))))
    assert reports == [(0, 2)] * 3 + [(2, 0)]


def test_more_prompts_that_raise_are_no_fault_of_a_row(tmp_path: Path) -> None:
    _, _, session = writers(tmp_path / "model", "gpt2")

    def more() -> Sequence[Prompt]:
        raise RuntimeError("the next chunk cannot be begun")

    with pytest.raises(RuntimeError, match="cannot be begun"):
        list(Texts(writer=session, budget=BUDGET, more=more).write())


def test_a_row_that_raises_is_an_error_and_the_others_are_written(tmp_path: Path) -> None:
    model, _, session = writers(tmp_path / "model", "llama")
    rows = prompts()
    expected = write(session, rows)

    def refuse(module: Any, inputs: Any, given: Any) -> None:
        if (given.get("input_ids", inputs[0] if inputs else torch.zeros(1)) == 95).any():
            raise RuntimeError("no 95")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    waiting = [[*rows[:4], Prompt(row=100, ids=np.array([7, 95, 8]), options=GenerationOptions()), *rows[4:]]]
    texts = dict(Texts(writer=session, budget=BUDGET, more=lambda: waiting.pop() if waiting else []).write())
    assert texts.pop(100) == "RuntimeError: no 95"
    assert {row: one.text.tokens.tolist() for row, one in texts.items() if isinstance(one, Ended)} == expected


def test_what_rows_share_is_computed_once_and_places_are_filled(tmp_path: Path) -> None:
    model, static, session = writers(tmp_path / "model", "gpt2")
    computed: list[int] = []
    model.transformer.register_forward_pre_hook(
        lambda module, inputs, given: computed.append((*inputs, *given.values())[0].numel()), with_kwargs=True
    )
    head = np.arange(5, 69)
    rows = [
        Prompt(row=row, ids=np.append(head, [70 + row, 7]), options=GenerationOptions(max_new_tokens=1 + 5 * (row % 4)))
        for row in range(8)
    ]
    budget = Budget(tokens=10**4, rows=3)
    expected, static_passes, static_tokens = write(static, rows, budget), len(computed), sum(computed)
    computed.clear()
    assert write(session, rows, budget) == expected
    assert sum(computed) < 64 + 8 * (2 + 16), "the beginning once, not eight times"
    assert static_tokens > 8 * 64
    assert len(computed) < static_passes
    computed.clear()
    assert write(session, rows, Budget(tokens=1, rows=1)) == expected, "one after the other"
    assert sum(computed) < 64 + 8 * (2 + 16)


@pytest.mark.parametrize("name", sweep(["llama", "qwen2"], quick={"llama"}))
def test_a_long_beginning_is_in_the_cache_once(tmp_path: Path, name: str) -> None:
    """Whatever the number of rows; some have a part of it, or none. Then other rows begin in another way."""
    model, static, session = writers(tmp_path / "model", name)
    drawn = np.random.default_rng(1)
    budget, running = Budget(tokens=200, rows=100), list[int]()

    def written(rows: Sequence[Prompt]) -> dict[int, list[int]]:
        running.clear()
        waiting = [list(rows)]
        texts = Texts(
            writer=session,
            budget=budget,
            more=lambda: waiting.pop() if waiting else [],
            report=lambda writer, ended: running.append(len(writer.rows) + len(ended)),
        )
        return {row: one.text.tokens.tolist() for row, one in texts.write() if isinstance(one, Ended)}

    def begun(head: np.ndarray) -> list[Prompt]:
        parts = [*[head] * 12, head[:40], head[:0]]
        return [  # the one that shares nothing stays when the others have ended
            Prompt(
                row=row,
                ids=np.append(part, drawn.integers(5, 90, 3)),
                options=GenerationOptions(max_new_tokens=4 if len(part) else 9),
            )
            for row, part in enumerate(parts)
        ]

    for _ in range(2):
        rows = begun(drawn.integers(5, 90, SHARED))
        assert written(rows[:12]) == write(static, rows[:12])
        assert max(running) == 12, "12 times 7 tokens, and 64"
        assert session._slots._place.positions < SHARED
        assert written(rows) == write(static, rows)
    rows = begun(np.append(drawn.integers(5, 90, SHARED - 1), 95))
    expected = write(static, rows)
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = torch.nan
    assert written(rows) == {row: [NON_FINITE] if row < 12 else expected[row] for row in range(14)}


def row(number: int, ids: Sequence[int]) -> Row:
    options = GenerationOptions()
    return Row(number=number, prompt=np.array(ids), options=options, ends=(), tokenizer=None, tokens=[], limit=9)


def test_the_longest_beginning_that_half_of_the_prompts_have() -> None:
    some, others = list(range(40)), list(range(50, 90))
    rows = [row(0, [*some, 1]), row(1, others), row(2, [*some, 2, 3]), row(3, some[:20])]
    length, found = leader(rows)
    assert (length, found is not None and found.number) == (32, 0)
    tree = Beginnings()
    for one in rows:
        tree.add(one)
    assert tree.find(np.array(some))[0] == 32
    assert tree.find(np.array(some[:32]))[0] == 16, "the last token is computed"
    for one in rows:
        tree.remove(one)
    assert tree == Beginnings()
    assert leader([row(0, some), row(1, others), row(2, [7])]) == (0, None)


@pytest.mark.parametrize("name", ["mamba"])
def test_models_with_another_cache_are_written_in_batches(tmp_path: Path, name: str) -> None:
    built = families.build(tmp_path / "model", name, kind="writer", dropout=False)
    model = AutoModelForCausalLM.from_pretrained(built).eval()
    static = StaticWriter(model, built, GenerationOptions())
    assert session_of(model, static) is None
    rows = prompts()
    assert write(static, rows) == {one.row: write(static, [one])[one.row] for one in rows}
