"""Nothing in a model folder is ignored: every key and every tensor is computed, harmless, or refused by its name."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.embedding import settings_for
from torchlake.config.model_files.known_keys import KnownKeys
from torchlake.errors import DataError, TorchlakeError, UsageError
from torchlake.models import load
from torchlake.models.folders import model_hash, weight_files
from torchlake.models.generation import settings_of
from torchlake.models.spec import load_spec
from torchlake.tasks._pretrained import base_model, load_encoder

TEXTS = ["a great film", "A DULL Film ΣΟΦΟΣ", "the film that I liked best of all, and not only for its end " * 3]


def edit(file: Path, **changes: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**before, **changes}))


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    (to / "manifest.json").unlink(missing_ok=True)
    return to


# The installed libraries.


def parameters(kind: type, *classes: type) -> set[str]:
    """The names of the arguments of a class and its bases, of one library."""
    owners = [
        each for each in kind.__mro__ if "__init__" in each.__dict__ and each.__module__[:12] == kind.__module__[:12]
    ]
    given = [one for each in owners for one in inspect.signature(each.__init__).parameters.values()]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name for one in given if one.kind not in variable} - {"self"}


def tokenizers() -> Iterator[tuple[str, KnownKeys, set[str]]]:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    for name in {name for name in TOKENIZER_MAPPING_NAMES.values() if name}:
        yield name, known_keys.TOKENIZER, parameters(getattr(transformers, name))


def image_processors() -> Iterator[tuple[str, KnownKeys, set[str]]]:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    for kind, names in IMAGE_PROCESSOR_MAPPING_NAMES.items():
        if kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and kind != "timm_wrapper" and "pil" in names:
            yield kind, known_keys.IMAGES, set(getattr(transformers, names["pil"]).valid_kwargs.__annotations__)


def generation() -> Iterator[tuple[str, KnownKeys, set[str]]]:
    keys = {key for key in vars(transformers.GenerationConfig()) if key != "_original_object_hash"}
    yield "GenerationConfig", known_keys.GENERATION, {key for key in keys if key not in known_keys.SAMPLING}


def sentence_transformer_modules() -> Iterator[tuple[str, KnownKeys, set[str]]]:
    modules = "sentence_transformers.base.modules", "sentence_transformers.sentence_transformer.modules"
    for names, place in ((("Transformer", "Dense", "Normalize"), modules[0]), (("Pooling", "Dropout"), modules[1])):
        for name in names:
            kind = getattr(import_module(place), name)
            known = getattr(known_keys, name.upper())
            given = parameters(kind) if name != "Pooling" else set(inspect.signature(kind).parameters)
            elsewhere = {"model_name_or_path", "sentence_embedding_dimension"}
            yield name, known, {*kind.config_keys, *kind.config_key_renames, *given} - elsewhere


@pytest.mark.parametrize("listed", [tokenizers, image_processors, generation, sentence_transformer_modules])
def test_every_key_of_the_installed_libraries_is_in_a_list(
    listed: Callable[[], Iterator[tuple[str, KnownKeys, set[str]]]],
) -> None:
    """A key of a new version is to be computed, or to be written into a list after a look at what it does."""
    found = list(listed())
    assert found
    assert {
        name: unknown for name, keys, given in found if (unknown := sorted(k for k in given if k not in keys))
    } == {}


def test_no_key_is_in_two_lists() -> None:
    lists = [each for each in vars(known_keys).values() if isinstance(each, KnownKeys)]
    assert len(lists) >= 15
    for each in lists:
        computed, harmless = set(each.computed.split()), set(each.harmless.split())
        assert not computed & harmless
        assert not (computed | harmless) & each.refused.keys()
    assert not [key for key in known_keys.SAMPLING.harmless.split() if key in known_keys.GENERATION]


# Files.

EMBEDDER_FILES = {
    "sentence_bert_config.json": {"max_seq_length": 48, "query_length": 5},
    "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
    "1_Pooling/config.json": {"include_prompt": False},
    "2_Dense/config.json": {"module_output_name": "other"},
    "3_Normalize/config.json": {"module_input_name": "token_embeddings"},
    "tokenizer_config.json": {"gguf_file": "tokenizer.json"},
}
"Files of an embedder, and values that are known but not computed."


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.mark.parametrize("name", EMBEDDER_FILES)
def test_an_unknown_key_of_an_embedder_is_refused_by_its_name(embedder: Path, tmp_path: Path, name: str) -> None:
    folder = copied(embedder, tmp_path / "model")
    edit(folder / name, no_such_key=True)
    with pytest.raises(TorchlakeError, match=rf"{name}: has the key 'no_such_key'"):
        tl.load(folder)
    shutil.copy(embedder / name, folder / name) if (embedder / name).exists() else (folder / name).unlink()
    edit(folder / name, **EMBEDDER_FILES[name])
    with pytest.raises(TorchlakeError, match=rf"{name}: .*{list(EMBEDDER_FILES[name])[-1]}"):
        tl.load(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"processing_kwargs": {"txt": {}}},
        {"processing_kwargs": {"text": {"no_such_key": 1}}},
        {"processing_kwargs": {"common": {"add_special_tokens": False}}},
        {"processing_kwargs": {"text": {"truncation": False}}},
        {"modality_config": {"text": {"method": "get_text_features", "method_output_name": "last_hidden_state"}}},
        {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
        {"modality_config": {"text": {"method": "forward"}, "message": {"method": "forward", "format": "flat"}}},
        {"transformer_task": "fill-mask"},
        {"module_output_name": "sentence_embedding"},
        {"query_expansion": {"strategy": "fixed", "length": 32}},
        {"model_args": {"no_such_key": 1}},
        {"config_args": {"num_hidden_layers": 1}},
    ],
)
def test_settings_that_change_vectors_are_refused(embedder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = copied(embedder, tmp_path / "model")
    edit(folder / "sentence_bert_config.json", **settings)
    with pytest.raises(DataError, match=f"sentence_bert_config.json: .*{next(iter(settings))}"):
        load_spec(folder)


def test_what_sentence_transformers_6_saves_is_computed(embedder: Path, tmp_path: Path) -> None:
    """Poolings in the order given, residuals, lengths by name, lower case: the vectors are those of the library."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as theirs

    def saved(*modules: Any, **settings: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        encoder = theirs.Transformer(str(embedder), **settings)
        SentenceTransformer(modules=[encoder, *modules], device="cpu").save(str(folder), create_model_card=False)
        return folder

    dense, same = theirs.Dense(96, 32, use_residual=True), theirs.Dense(32, 32, use_residual=True, bias=False)
    several = theirs.Pooling(32, ("weightedmean", "cls", "max"))
    folders = [
        saved(several, theirs.Dropout(0.5), dense, same, theirs.Normalize(), do_lower_case=True),
        saved(theirs.Pooling(32), processing_kwargs={"text": {"max_length": 9}, "common": {"max_length": 6}}),
        saved(theirs.Pooling(32), processor_kwargs={"model_max_length": 7}),
    ]
    for folder, length in zip(folders, (128, 6, 7), strict=True):
        with tl.load(folder) as model:
            found = np.array([answer["embedding"] for answer in model(TEXTS)])
            assert model.spec.max_length == length
        np.testing.assert_allclose(found, SentenceTransformer(str(folder), device="cpu").encode(TEXTS), atol=1e-5)


def test_a_new_length_replaces_every_older_one(tmp_path: Path) -> None:
    settings = {"max_seq_length": 9, "processing_kwargs": {"text": {"max_length": 6, "padding": True}}}
    edit(tmp_path / "sentence_bert_config.json", **settings)
    wanted = {"max_seq_length": 5, "processing_kwargs": {"text": {"padding": True}}}
    assert settings_for(tmp_path, 5) == wanted


def test_settings_under_an_older_name_count(embedder: Path, tmp_path: Path) -> None:
    folder = copied(embedder, tmp_path / "model")
    (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
    before = model_hash(folder)
    assert load_spec(folder).max_length == 48
    edit(folder / "sentence_roberta_config.json", max_seq_length=12)
    assert (load_spec(folder).max_length, model_hash(folder) == before) == (12, False)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_an_unknown_key_of_an_image_processor_is_refused(tmp_path: Path, name: str) -> None:
    folder = tiny.build_vision(tmp_path / "vision")
    before = model_hash(folder)
    load_processor = tl.plugins.load("tasks", "image_classification").load_processor
    load_processor(folder, None, scoring=True)
    edit(folder / name, **({"image_processor": {"no_such_key": 1}} if name.startswith("proc") else {"no_such_key": 1}))
    with pytest.raises(DataError, match=rf"{name}: has the key '(image_processor\.)?no_such_key'"):
        load_processor(folder, None, scoring=True)
    assert model_hash(folder) != before


# The longest input.


@pytest.mark.parametrize(
    ("tokenizer", "positions", "expected"),
    [(900, 1024, 900), (int(1e30), 1024, 1024), (2000, 1024, 1024), (900, -1, 900), (1e30, -1, 512)],
)
def test_the_longest_input_is_that_of_the_author(
    tiny_bert: Path, tmp_path: Path, tokenizer: float, positions: int, expected: int
) -> None:
    folder = copied(tiny_bert, tmp_path / "model")
    edit(folder / "tokenizer_config.json", model_max_length=tokenizer)
    edit(folder / "config.json", max_position_embeddings=positions)
    assert load.max_length(folder) == expected
    task = tl.plugins.load("tasks", "text_classification")
    assert task.max_length(folder, None) == min(expected, 512), "what training costs does not depend on the base"


def test_a_job_sets_the_longest_input(embedder: Path, tiny_model: Path, tiny_gpt2: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["a great film", "a great film dull"]})
    for folder, column in ((embedder, "embedding"), (tiny_model, "score")):
        scored = tl.predict(folder, table, max_length=5)
        assert scored["truncated"].to_pylist() == [False, True]
        np.testing.assert_allclose(*(np.array(one) for one in scored[column].to_pylist()), atol=1e-5)
        with pytest.raises(UsageError, match=r"max_length=129: .* has positions for 128 tokens only"):
            tl.load(folder, max_length=129)
    with pytest.raises(UsageError, match="text_generation does not truncate"):
        tl.load(tiny_gpt2, max_length=16)
    tl.predict(tiny_model, write(table, tmp_path), tmp_path / "out", max_length=5)
    assert tl.predict(tiny_model, tmp_path / "in.parquet", tmp_path / "out", max_length=5).record["fingerprint"]


def write(table: pa.Table, folder: Path) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(table, folder / "in.parquet")
    return folder / "in.parquet"


# Weights.


def test_every_runtime_reads_the_same_files(tiny_model: Path, tmp_path: Path) -> None:
    """transformers reads model.safetensors beside an older index, and the file that config.json names before both."""
    folder, old = copied(tiny_model, tmp_path / "model"), tmp_path / "old"
    model = load.load_model(folder, auto_class="AutoModelForSequenceClassification")
    texts = ["a great film", "dull"]
    expected = [answer["score"] for answer in tl.load(folder, runtime="eager")(texts)]
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(old, max_shard_size="20KB")
    for file in old.glob("model*"):
        shutil.copy(file, folder)
    for runtime in ("eager", "varlen"):
        assert [answer["score"] for answer in tl.load(folder, runtime=runtime)(texts)] == pytest.approx(expected)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert len(weight_files(folder)) > 1
    edit(folder / "config.json", transformers_weights="other.safetensors")
    for runtime in ("eager", "varlen"):
        assert [answer["score"] for answer in tl.load(folder, runtime=runtime)(texts)] == pytest.approx(expected)


ROADS: dict[str, Callable[[Path], object]] = {
    "eager": lambda folder: tl.load(folder, runtime="eager"),
    "varlen": lambda folder: tl.load(folder, runtime="varlen"),
    "vectors": lambda folder: tl.load(folder, task="feature_extraction", runtime="eager"),
    "vectors, varlen": lambda folder: tl.load(folder, task="feature_extraction", runtime="varlen"),
    "training": lambda folder: base_model(folder, SPEC, "AutoModelForSequenceClassification"),
}
CLASSIFY = ("eager", "varlen")
SPEC = load.TaskSpec(
    task="text_classification", problem="single_label", labels=("a", "b", "c"), text="text", label="l", max_length=16
)


@pytest.mark.parametrize(
    ("road", "prefix"), [(road, prefix) for road in ROADS for prefix in ("bert.", "") if prefix or road not in CLASSIFY]
)
def test_a_tensor_that_the_model_does_not_have_is_refused(
    tiny_model: Path, tiny_bert: Path, tmp_path: Path, road: str, prefix: str
) -> None:
    """A layer more than config.json says; heads that are replaced or left out, buffers and poolers are fine."""
    folder = copied(tiny_model if prefix else tiny_bert, tmp_path / "model")
    if road.startswith("vectors"):
        (folder / "task.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{prefix}embeddings.position_ids"] = torch.arange(128)[None]
    if road not in CLASSIFY and prefix:
        tensors["cls.predictions.bias"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ROADS[road](folder)
    name = f"{prefix}encoder.layer.2.output.dense.weight"
    save_file({**tensors, name: torch.zeros(32, 64)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"does not have the tensors .*encoder\.layer\.2\.output\.dense\.weight"):
        ROADS[road](folder)


def test_an_encoder_leaves_the_decoder_out(tmp_path: Path) -> None:
    folder = tiny.build_encoder_decoder(tmp_path / "t5")
    load_encoder(folder, weights=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "encoder.block.2.x": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"encoder\.block\.2\.x"):
        load_encoder(folder, weights=True)


def test_an_encoder_of_another_size_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = copied(tiny_bert, tmp_path / "model")
    edit(folder / "config.json", vocab_size=500)
    with pytest.raises(DataError, match=r"lack embeddings\.word_embeddings\.weight"):
        load_encoder(folder, weights=True)


# Generation.

OWN: list[dict[str, Any]] = [
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": 2},
    {"suppress_tokens": list(range(4, 40))},
    {"begin_suppress_tokens": list(range(4, 60))},
    {"bad_words_ids": [[1], [7, 8], [20]]},
    {"decoder_start_token_id": 5},
    {"eos_token_id": [2, *range(20, 60)]},
    {"bos_token_id": 7, "num_beams": 4, "temperature": 0.3, "repetition_penalty": 1.3},
]
ALIKE = {"forced_eos_token_id", "suppress_tokens", "bad_words_ids"}
"Processors of transformers compute them, as they do begin_suppress_tokens."


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_encoder_decoder(tmp_path_factory.mktemp("models") / "bart", kind="bart")


@pytest.mark.parametrize(
    "own",
    sweep(OWN, quick=[own for own in OWN if not own.keys() & ALIKE]),
    ids=lambda own: next(iter(own)),
)
def test_texts_are_those_of_transformers_with_what_belongs_to_the_model(
    translator: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    folder = copied(translator, tmp_path / "model")
    edit(folder / "generation_config.json", **own)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).train(False)
    plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "temperature": 1.0}
    expected = []
    for text in TEXTS:
        ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, **plain)
        expected.append(tokenizer.decode(ids[0, 1:], skip_special_tokens=True))
    found = tl.predict(folder, pa.table({"text": TEXTS}), max_new_tokens=8, engine=tiny.Here())
    assert found["generated_text"].to_pylist() == expected


def test_a_row_that_reaches_the_limit_did_not_stop(translator: Path, tmp_path: Path) -> None:
    folder = copied(translator, tmp_path / "model")
    edit(folder / "generation_config.json", forced_eos_token_id=2, sequence_bias=[[[2], -100.0]])
    found = tl.load(folder, max_new_tokens=3)("a great film")
    assert (found["finish_reason"], found["generated_tokens"]) == ("length", 2)


def test_a_decoder_keeps_its_suppressed_tokens(tiny_gpt2: Path, tmp_path: Path) -> None:
    folder = copied(tiny_gpt2, tmp_path / "model")
    edit(folder / "generation_config.json", suppress_tokens=list(range(4, 60)), begin_suppress_tokens=[60, 61, 62])
    tokenizer, model = load.load_tokenizer(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = tl.predict(folder, pa.table({"text": TEXTS}), max_new_tokens=6, engine=tiny.Here())
    for text, written in zip(TEXTS, found["generated_text"].to_pylist(), strict=True):
        given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert written == tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    edit(folder / "generation_config.json", forced_bos_token_id=3)
    with pytest.raises(DataError, match="forced_bos_token_id is for encoder-decoders"):
        tl.load(folder)


def test_the_record_and_one_log_line_say_what_counts(
    translator: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(translator, tmp_path / "model")
    edit(folder / "generation_config.json", forced_bos_token_id=9, num_beams=4, do_sample=False, temperature=0.5)
    caplog.set_level("INFO")
    scored = tl.predict(folder, write(pa.table({"text": TEXTS}), tmp_path), tmp_path / "out", engine=tiny.Here())
    assert scored.record["provenance"]["generation_config"]["forced_bos_token_id"] == 9
    (line,) = [line for line in caplog.messages if "not used" in line]
    assert "num_beams, temperature: not used" in line
    edit(folder / "generation_config.json", no_such_key=1)
    with pytest.raises(DataError, match=r"generation_config.json: has the key 'no_such_key'"):
        tl.load(folder)


def test_a_translator_writes_the_language_that_is_asked_for(tmp_path: Path) -> None:
    folder = tiny.build_translator(tmp_path / "mbart")
    tokenizer: Any = load.load_tokenizer(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).train(False)
    ids = tokenizer("de_DE fr_XX", return_tensors="pt")
    for language in ("de_DE", "fr_XX"):
        written = model.generate(**ids, forced_bos_token_id=tokenizer.lang_code_to_id[language], max_new_tokens=4)
        wanted = tokenizer.decode(written[0, 1:], skip_special_tokens=True)
        assert tl.load(folder, language=language, max_new_tokens=4)("de_DE fr_XX")["generated_text"] == wanted
    with pytest.raises(
        UsageError, match=r"language='xx': .* does not translate into it. It knows af_ZA, ar_AR, .*zh_CN"
    ):
        tl.load(folder, language="xx")


def test_training_keeps_what_belongs_to_the_model(translator: Path, tmp_path: Path) -> None:
    base = copied(translator, tmp_path / "base")
    edit(base / "generation_config.json", forced_bos_token_id=9, bad_words_ids=[[1]], num_beams=4, eos_token_id=7)
    task = tl.plugins.load("tasks", "text2text_generation")
    spec = load_spec(base)
    processor, model = task.load_processor(base, spec, scoring=False), task.base_model(base, spec)
    task.save_model(tmp_path / "trained", dict(model.state_dict()), model.config, processor, spec, card={})
    kept = settings_of(base)
    assert settings_of(tmp_path / "trained") == {**kept, "eos_token_id": [2, 7]}
    assert "num_beams" not in json.loads((tmp_path / "trained" / "generation_config.json").read_text())
