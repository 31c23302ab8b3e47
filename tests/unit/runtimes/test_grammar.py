"""Texts that fit a structure: whatever a random model would write, alone and beside other rows."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import UsageError
from torchlake.models import load
from torchlake.models.generation import END, STUCK, GenerationOptions, decoded
from torchlake.models.structured.shortest import shortest_text
from torchlake.models.structured.structure import Structure, read_structure
from torchlake.runtimes import Ended, Text, Writer
from torchlake.runtimes._writing.choosing import choose
from torchlake.runtimes._writing.row import Row
from torchlake.runtimes.eager import writer_of

PROMPTS = ["the film", "a", "good , not bad", "what a bore of a film", "we"]
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "kind": {"enum": ["good", "goodish", "bad"]},
    },
    "required": ["name", "stars", "kind"],
}


def of(**given: Any) -> Structure:
    found = read_structure(given)
    assert found is not None
    return found


@cache
def writer_for(folder: Path) -> tuple[Writer, Any]:
    return writer_of(
        AutoModelForCausalLM.from_pretrained(folder).eval(), folder, GenerationOptions()
    ), load.load_tokenizer(folder)


def written(
    folder: Path, structure: Structure, prompts: Sequence[str] = PROMPTS, begun: Sequence[Text] = (), **options: Any
) -> list[np.ndarray]:
    """The tokens of each answer, written together."""
    writer, tokenizer = writer_for(folder)
    asked = GenerationOptions(structure=structure, **{"max_new_tokens": 60, **options})
    found: dict[int, np.ndarray] = {}

    def report(ended: Sequence[Ended]) -> None:
        found.update({one.row: one.text.tokens for one in ended})

    for row, prompt in enumerate(prompts):
        ids = np.array(tokenizer(prompt)["input_ids"], np.int64)
        writer.add(row, ids, asked, *([begun[row]] if begun else []))
    while writer.rows:
        writer.step(report)
    return [found[row] for row in range(len(prompts))]


# Schemas whose texts have an end: a random model seldom ends a string or a list by itself.
WORDS = st.sampled_from(["a", "kind", "sehr gut", 'quo"te', "né", "x y/z"])
LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 999),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(WORDS, st.integers(-5, 5), st.none()), min_size=1, max_size=3),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "format": "date"},
            {"type": "string", "pattern": "^[A-C]{2}-\\d$"},
        ]
    ),
)


def _object(properties: dict[str, Any], required: list[bool]) -> dict[str, Any]:
    names = [name for name, wanted in zip(properties, required, strict=False) if wanted]
    return {"type": "object", "properties": properties, "required": names}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(WORDS, inner, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


def check_schema(folder: Path, schema: Any, texts: int) -> None:
    prompts = [f"{PROMPTS[number % 5]} {number}" for number in range(texts)]
    _, tokenizer = writer_for(folder)
    for tokens in written(folder, of(json_schema=schema), prompts, max_new_tokens=120, temperature=1.0):
        if len(tokens) == 120 and tokens[-1] != END:
            continue  # cut, which the job says in `error`
        assert tokens[-1] == END
        value = json.loads(decoded(tokenizer, tokens[:-1], exact=True))
        jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    least = shortest_text(of(json_schema=schema))
    if least is not None:
        jsonschema.validate(json.loads(least[0]), schema)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_texts_fit_any_schema(tiny_gpt2: Path, schema: Any) -> None:
    check_schema(tiny_gpt2, schema, texts=3)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_many_texts_fit_any_schema(tiny_llama: Path, schema: Any) -> None:
    check_schema(tiny_llama, schema, texts=60)


@pytest.mark.parametrize("temperature", sweep([0.0, 1.0], quick={1.0}))
def test_rows_do_not_depend_on_others_and_are_continued_in_the_middle(tiny_llama: Path, temperature: float) -> None:
    """Also in the middle of what the grammar forces: the matcher follows the tokens that the journal kept."""
    structure = of(json_schema=FORM)
    together = written(tiny_llama, structure, temperature=temperature)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert written(tiny_llama, structure, [prompt], temperature=temperature)[0].tolist() == tokens.tolist()
    for kept in (1, 3, 11):
        begun = [Text(tokens=tokens[:kept]) for tokens in together]
        again = written(tiny_llama, structure, begun=begun, temperature=temperature)
        assert [each.tolist() for each in again] == [each.tolist() for each in together]


def test_what_leaves_no_choice_is_spelled_as_the_tokenizer_does_and_needs_no_end_token(tiny_llama: Path) -> None:
    _, tokenizer = writer_for(tiny_llama)
    structure = of(regex="the film was (good|bad)")
    found = written(tiny_llama, structure)
    for tokens in found:
        spelled = tokenizer("the film was")["input_ids"]
        assert tokens[: len(spelled)].tolist() == spelled
        assert decoded(tokenizer, tokens[:-1]) in ("the film was good", "the film was bad")
        assert tokens[-1] == END
    most = max(len(tokens) - 1 for tokens in found)
    assert [each.tolist() for each in written(tiny_llama, structure, max_new_tokens=most)] == [
        each.tolist() for each in found
    ]


def test_a_grammar_without_a_token_ends_the_row(tiny_llama: Path) -> None:
    """The model may suppress tokens, and may have more logits than the tokenizer has tokens."""
    _, tokenizer = writer_for(tiny_llama)

    def chosen(row: Row, *possible: int) -> int:
        scores = torch.full((1, len(tokenizer) + 64), -torch.inf)
        scores[:, list(possible)] = 1.0
        return int(choose(scores, [row])[0])

    options = GenerationOptions(structure=of(regex="a*"))
    named: dict[str, Any] = {"number": 0, "prompt": np.array([5]), "ends": [2], "tokenizer": tokenizer, "limit": 9}
    row = Row(options=options, tokens=[], **named)
    a, b = (tokenizer(text)["input_ids"][0] for text in "ab")
    assert [chosen(row, a, b), chosen(row, b, 2), chosen(row, b, len(tokenizer) + 3)] == [a, 2, STUCK]
    row.take(STUCK)
    assert row.text.tokens.tolist() == [STUCK]


def predicted(model: Path, texts: Sequence[str] = PROMPTS, **options: Any) -> list[dict[str, Any]]:
    with tl.load(model, **options) as loaded:
        return loaded(texts)


def test_grammars_are_files(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "dates.lark").write_text(
        'start: day " of " month\nday: /[1-9]/\nmonth: "May" | "June"', encoding="utf-8"
    )
    for row in predicted(tiny_llama, grammar=tmp_path / "dates.lark"):
        assert re.fullmatch("[1-9] of (May|June)", row["generated_text"])
        assert (row["finish_reason"], row["error"]) == ("stop", None)


def test_a_schema_without_columns_is_refused_before_the_model_is_loaded(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="json_columns: /properties/a: it has no type"):
        tl.load(tiny_llama, json_schema={"type": "object", "properties": {"a": {}}}, json_columns=True)
    taken = {"type": "object", "properties": {"Finish_Reason": {"type": "string"}}}
    with pytest.raises(UsageError, match="a property of the schema is 'finish_reason'"):
        tl.load(tiny_llama, json_schema=taken, json_columns=True)


def test_cut_texts_are_errors_that_keep_the_text(tiny_gpt2: Path) -> None:
    rows = predicted(tiny_gpt2, json_schema=FORM, json_columns=True, max_new_tokens=36)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        if row["finish_reason"] == "stop":
            assert row["error"] is None
            assert json.loads(row["generated_text"]) == {name: row[name] for name in FORM["properties"]}
        else:
            assert row["error"].startswith("length: the text was cut after 36 tokens")
            assert row["generated_text"].startswith('{"name"')
            assert row["name"] is None


@pytest.mark.parametrize("kind", sweep(["gpt2", "llama"], quick={"gpt2"}))
def test_the_probability_of_a_choice_is_that_of_all_its_tokens_and_an_end(
    kind: str, tiny_gpt2: Path, tiny_llama: Path
) -> None:
    folder = tiny_gpt2 if kind == "gpt2" else tiny_llama
    choices = ["good", "good film", "a bore"]
    rows = predicted(folder, choices=choices)
    for row, alone in zip(rows, predicted(folder, choices=choices, batch_tokens=80), strict=True):
        assert row == pytest.approx(alone, rel=1e-4)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), load.load_tokenizer(folder)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        scores = []
        for choice in choices:
            before, after = (tokenizer(each)["input_ids"] for each in (prompt, choice))
            after = [*after, tokenizer.eos_token_id]
            with torch.no_grad():
                found = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
            scores.append(sum(float(found[len(before) + place - 1, token]) for place, token in enumerate(after)))
        wanted = np.exp(np.array(scores) - max(scores))
        shares = [row[f"prob_{choice}"] for choice in choices]
        assert shares == pytest.approx(wanted / wanted.sum(), rel=1e-4)
        assert row["generated_text"] == choices[int(np.argmax(shares))]
        assert (row["finish_reason"], row["error"]) == ("stop", None)
    drawn = predicted(folder, PROMPTS * 4, choices=choices, temperature=9.0)
    assert len({row["generated_text"] for row in drawn}) > 1
    for row, equal in zip(drawn[:5], drawn[5:10], strict=True):  # of equal prompts, in other places of the batch
        assert row == pytest.approx(equal, rel=1e-4)
    for row, first in zip(drawn, rows, strict=False):
        assert row["prob_good"] == pytest.approx(first["prob_good"], rel=1e-4)


@pytest.mark.parametrize("kind", sweep(["t5", "bart"], quick={"bart"}))
def test_encoder_decoders(kind: Any, tmp_path: Path) -> None:
    folder = tiny.build_encoder_decoder(tmp_path / kind, kind=kind)
    if kind == "bart":  # as facebook's: the first token is forced, and not part of the text
        about = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        (folder / "generation_config.json").write_text(
            json.dumps({**about, "forced_bos_token_id": 0}), encoding="utf-8"
        )
    for row in predicted(folder, task="text2text_generation", json_schema=FORM, max_new_tokens=40):
        if row["error"] is None:
            jsonschema.validate(json.loads(row["generated_text"]), FORM)
        else:
            assert row["error"].startswith("length")
    rows = predicted(folder, task="text2text_generation", choices="good,good film")
    assert [row["prob_good"] + row["prob_good film"] for row in rows] == pytest.approx([1.0] * 5)


def test_a_vocabulary_without_the_letters_is_refused(tmp_path: Path) -> None:
    folder = tiny.build_translator(tmp_path / "translator")
    with pytest.raises(UsageError, match="regex: the tokenizer of .* has no tokens for 'aa'"):
        predicted(folder, task="text2text_generation", regex="[a-z]{2,5}")


def sentence_pieces(folder: Path) -> Path:
    """A Llama with SentencePiece's kind of vocabulary: bytes for what it lacks, and no space before the first word."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁film",
        "▁{",
        "{",
        '"',
        "a",
        "▁a",
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=len(words) + 5, max_position_embeddings=128, eos_token_id=2, **shape)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_sentence_pieces_may_begin_with_a_space_that_is_removed(tmp_path: Path) -> None:
    folder = sentence_pieces(tmp_path / "pieces")
    rows = predicted(folder, [*PROMPTS, "é"], json_schema=FORM, max_new_tokens=90, temperature=1.0)
    assert any(row["error"] is None for row in rows)
    for row in rows:
        if row["error"] is None:
            jsonschema.validate(json.loads(row["generated_text"]), FORM)
            assert row["generated_text"].startswith("{")
