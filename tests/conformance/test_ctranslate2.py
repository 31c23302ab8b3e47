"""CTranslate2 writes the texts of `eager`: families, tokenizers without a begin token, neighbors, refusals."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import families
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake import atomic_io, plugins
from torchlake.errors import UnsafeError, UsageError
from torchlake.models import load
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.runtimes import Text, _ctranslate2_export, _exports, write_all
from torchlake.runtimes._ctranslate2 import longest_beside

TEXTS = [
    "the film",
    "a",
    "the plot of this movie is " * 3,
    "good",
    "not a film </s> , but a story of all of it",
    "we",
    "a",
]
NEEDS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 4096},
    "mistral": {"sliding_window": None},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None, "pad_token_id": None},
}
"What the tiny configurations of `families` lack, as published models have it."
ENCODER_DECODERS = ("bart", "mbart", "mt5", "pegasus", "t5", "umt5")
FAMILIES = list(_ctranslate2_export.loaders())
QUICK = {"gpt2", "t5"}
"The tests below compare those of llama."


def build(folder: Path, name: str, **changes: Any) -> Path:
    """A tiny model of the family, with rotary scaling and the like by `changes` of its configuration."""
    tokenizer = tiny.language_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    writer = name not in ENCODER_DECODERS
    if not writer:
        ends |= {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": tokenizer.eos_token_id}
    config = families.config_of(name, vocab_size=len(tokenizer), **ends)
    for key, value in {**NEEDS.get(name, {}), **changes}.items():
        setattr(config, key, value)
    auto: Any = transformers.AutoModelForCausalLM if writer else transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.data.normal_(0.0, 0.2)
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers(model: Path, runtime: str, texts: list[str] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    """What the model writes for each text, in this process."""
    options = {"max_new_tokens": 8, **options}
    table: pa.Table = tl.predict(model, pa.table({"text": texts}), engine=tiny.Here(), runtime=runtime, **options)
    return table.drop(["text"]).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sweep(FAMILIES, quick=QUICK))
def test_texts_are_those_of_eager(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, name)
    if name == "qwen2":
        assert load.load_tokenizer(model).bos_token is None
    expected = answers(model, "eager")
    assert len({each["generated_text"] for each in expected}) > 2
    assert answers(model, "ctranslate2") == expected
    export = _exports.current(model, "ctranslate2", load_spec(model).task)
    assert export is not None
    assert "ctranslate2" in atomic_io.read_manifest(export)["versions"]
    names = _ctranslate2_export.vocabulary(export)
    known = load.load_tokenizer(model).get_vocab()
    assert all(names[token] == one for one, token in known.items() if token < len(names))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an export in fp32."""
    model = build(tmp_path_factory.mktemp("models") / "llama", "llama")
    answers(model, "ctranslate2", TEXTS[:1])
    return model


def test_stop_strings_end_tokens_and_neighbors_are_those_of_eager(llama: Path) -> None:
    whole = answers(llama, "eager")
    stop = [whole[0]["generated_text"][2:4], whole[4]["generated_text"][3:5]]
    expected = answers(llama, "eager", stop=stop)
    assert {"stop", "length"} == {each["finish_reason"] for each in expected}
    assert answers(llama, "ctranslate2", stop=stop) == expected
    assert answers(llama, "ctranslate2", TEXTS[::-1], stop=stop, batch_tokens=60) == expected[::-1]
    assert answers(llama, "ctranslate2", [*TEXTS[:2], "another one beside them"])[:2] == whole[:2]


def test_a_text_that_was_begun_is_continued(llama: Path) -> None:
    spec, options = load_spec(llama), GenerationOptions(max_new_tokens=8)
    writer = plugins.load("runtimes", "ctranslate2").open_writer(llama, spec, device="cpu", options=options)
    prompts = [np.array(each) for each in ([5, 6, 7, 8, 9], [10, 11, 12], [20])]
    whole = write_all(writer, prompts, options)
    for row, ids in enumerate(prompts):
        writer.add(row, ids, options, Text(tokens=whole[row, : row + 1]))
    found: dict[int, list[int]] = {}
    while writer.rows:
        writer.step(lambda ended: found.update({one.row: one.text.tokens.tolist() for one in ended}))
    assert [found[row] for row in range(3)] == whole.tolist()


def test_what_a_report_raises_leaves_an_empty_writer(llama: Path) -> None:
    spec, options = load_spec(llama), GenerationOptions(max_new_tokens=8)
    writer = plugins.load("runtimes", "ctranslate2").open_writer(llama, spec, device="cpu", options=options)
    for error in (OSError, KeyboardInterrupt):

        def report(ended: Any, error: type[BaseException] = error) -> None:
            raise error("stop")

        writer.add(0, np.array([5, 6, 7]), options)
        with pytest.raises(error, match="stop"):
            writer.step(report)
        assert not writer.rows
    assert (write_all(writer, [np.array([5, 6, 7])], options) >= -2).all()


def test_scores_of_given_answers_are_those_of_the_model(llama: Path) -> None:
    spec, module = load_spec(llama), plugins.load("runtimes", "ctranslate2")
    ids, answer = np.array([5, 6, 7, 8, 9]), np.array([20, 21, 22])
    whole = np.concatenate([ids, answer])[None]
    logits = plugins.load("runtimes", "eager").load(llama, spec, device="cpu")(
        input_ids=whole, attention_mask=whole * 0 + 1
    )
    own = module.load(llama, spec, device="cpu")(input_ids=whole, attention_mask=whole * 0 + 1)
    np.testing.assert_allclose(own, logits, atol=module.TOLERANCE)
    scores = torch.from_numpy(logits)[0].log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])
    (found,) = module.load_log_probs(llama, spec, device="cpu")([ids], [answer])
    np.testing.assert_allclose(found, scores[:, 0].numpy(), atol=1e-4)


def test_eight_bits_are_an_export_of_their_own(llama: Path) -> None:
    assert all(each["error"] is None for each in answers(llama, "ctranslate2_int8", TEXTS[:2]))
    sizes = [(llama / "runtimes" / name / "model.bin").stat().st_size for name in ("ctranslate2", "ctranslate2_int8")]
    assert sizes[1] < sizes[0] / 2
    assert _exports.identity(llama, "ctranslate2") != _exports.identity(llama, "ctranslate2_int8")


def test_what_it_does_not_compute_is_refused_before_any_work(llama: Path, tmp_path: Path) -> None:
    mixed = families.build(tmp_path / "mixtral", "mixtral", kind="writer")
    with pytest.raises(UsageError, match="no models of type 'mixtral'"):
        answers(mixed, "ctranslate2")
    with pytest.raises(UsageError, match="does not compute temperature"):
        answers(llama, "ctranslate2", temperature=0.7)
    copy = shutil.copytree(llama, tmp_path / "copy", ignore=shutil.ignore_patterns("runtimes"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "sequence_bias": [[[3], 1.0]]}))
    with pytest.raises(UsageError, match="cannot compute sequence_bias"):
        answers(copy, "ctranslate2")


def test_tokens_that_the_model_lacks_are_never_written(llama: Path, tmp_path: Path) -> None:
    """The library would take an id above the vocabulary for another one, or fail."""
    copy = shutil.copytree(llama, tmp_path / "copy", ignore=shutil.ignore_patterns("runtimes"))
    file, most = copy / "generation_config.json", 99_999
    file.write_text(json.dumps({"eos_token_id": [2, most], "suppress_tokens": [most, 7]}))
    assert answers(copy, "ctranslate2") == answers(copy, "eager")
    file.write_text(json.dumps({"eos_token_id": most}))
    with pytest.raises(UsageError, match="the model has no end token"):
        answers(copy, "ctranslate2")


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "mistral",
            {"sliding_window": 16},
            r"of 8 probe rows, the first that differs is row \d \(\d+ tokens\), at token",
        ),
        pytest.param("llama", {"rope_parameters": LLAMA3}, "the first that differs is row", marks=pytest.mark.slow),
        ("llama", {"rope_parameters": YARN}, "cannot convert this model of type 'llama'.*yarn"),
    ],
    ids=["window", "llama3", "yarn"],
)
def test_a_model_that_converts_and_does_not_agree_is_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = build(tmp_path, name, **changes)
    with pytest.raises(UsageError, match=words):
        plugins.load("runtimes", "ctranslate2").prepare(model, load_spec(model), [])
    assert not list((model / "runtimes").iterdir())


@pytest.mark.slow
def test_linear_scaling_agrees(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = build(tmp_path, "llama", rope_parameters=rope)
    assert answers(model, "ctranslate2") == answers(model, "eager")


def test_a_pickle_beside_the_exports_is_still_refused(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    load.check_folder(copy)
    (copy / "runtimes" / "ctranslate2" / "model.bin").write_bytes(pickle.dumps({"weights": 1}))
    with pytest.raises(UnsafeError, match="no pickles"):
        load.check_folder(copy)


def test_another_token_in_the_vocabulary_is_an_export_that_is_made_again(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    place = copy / "runtimes" / "ctranslate2" / "vocabulary.json"
    names = json.loads(place.read_text())
    place.write_text(json.dumps([names[1], names[0], *names[2:]]))
    assert _exports.current(copy, "ctranslate2", "text_generation") is None
    assert answers(copy, "ctranslate2", TEXTS[:2]) == answers(copy, "eager", TEXTS[:2])


@pytest.mark.parametrize(
    ("sizes", "new", "longest"),
    [
        ([5] * 4, 64, 5),
        ([10, 11, 30], 64, 30),  # twenty more steps are cheaper than a batch of 64
        ([10, 11, 1000], 64, 11),
        ([1, 2, 3], 64, 1),
        ([10, 11, 12], 0, 10),  # only equal ones
    ],
)
def test_prompts_of_similar_sizes_share_a_batch(sizes: list[int], new: int, longest: int) -> None:
    assert longest_beside(sizes, new) == longest
