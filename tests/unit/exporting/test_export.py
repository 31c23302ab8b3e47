"""Exports: what the other tool computes with the folder is what the model computes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.atomic_io import check_manifest
from torchlake.cli.main import main
from torchlake.config.model_files.embedding import Embedding, read_embedding, write_layout
from torchlake.errors import DataError, OutputError, UnsafeError, UsageError
from torchlake.exporting import sentence_transformers
from torchlake.runtimes import _openvino

ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torchlake as tl
from torchlake.errors import StorageError
from torchlake.models.write import new_folder
from torchlake.runtimes import _openvino
from transformers import AutoTokenizer

def _save_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"word{number}" for number in range(1000)])
    with new_folder(folder, site="model") as place:
        tokenizer.save_pretrained(place)

model, exported, out = map(Path, sys.argv[1:])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # no file may be larger, as if the disk were full
for write in (
    lambda: tl.export(model, out / "onnx", format="onnx"),
    lambda: tl.export(model, out / "transformers", format="transformers"),
    lambda: _openvino.write(exported / "model.onnx", out),
    lambda: _save_tokenizer(out / "tokenizer"),
):
    try:
        write()
    except StorageError as error:
        print(error)
"""
TEXTS = ["a good film", "the bad film is a bad film, bad and long", "good", "the plot is thin but a good good film"]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def probabilities(model: Path) -> np.ndarray:
    """(B, C) float, by the runtime `eager`."""
    with tl.load(model, runtime="eager", all_probabilities=True) as classify:
        answers = classify(TEXTS)
    return np.array([[answer["prob_bad"], answer["prob_good"]] for answer in answers])


def tokens(folder: Path) -> dict[str, np.ndarray]:
    """What the exported tokenizer makes of the texts, padded."""
    encoded = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="np")
    return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def test_onnx_runtime_gives_the_models_probabilities(tiny_model: Path, tmp_path: Path) -> None:
    import onnxruntime

    folder = tl.export(tiny_model, tmp_path / "onnx", format="onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], tokens(folder))
    assert softmax(logits) == pytest.approx(probabilities(tiny_model), abs=1e-4)
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}
    manifest = check_manifest(folder)
    assert (manifest["kind"], manifest["layout"]) == ("export", "onnx")


def test_openvino_gives_the_models_probabilities(tiny_model: Path, tmp_path: Path) -> None:
    folder = tl.export(tiny_model, tmp_path / "openvino", format="openvino")
    assert {"openvino_model.xml", "openvino_model.bin", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    precision = {"INFERENCE_PRECISION_HINT": "f32"}  # by default it depends on the CPU
    compiled = _openvino.library().Core().compile_model(folder / "openvino_model.xml", "CPU", precision)
    logits = compiled(tokens(folder))[0]
    assert softmax(logits) == pytest.approx(probabilities(tiny_model), abs=1e-4)


@pytest.fixture
def encoder(tiny_bert: Path, tmp_path: Path) -> Path:
    """An encoder that says how it embeds texts."""
    folder = tmp_path / "encoder"
    model = AutoModel.from_pretrained(tiny_bert)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    return folder


def pooled(encoder: Path, how: str, *, normalize: bool) -> np.ndarray:
    """The embeddings by hand, one text after the other."""
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    vectors = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(**tokenizer(text, truncation=True, max_length=8, return_tensors="pt")).last_hidden_state[0]
        pick = {"mean": states.mean(0), "cls": states[0], "max": states.max(0).values, "lasttoken": states[-1]}
        vectors.append(pick[how] / pick[how].norm() if normalize else pick[how])
    return torch.stack(vectors).numpy()


@pytest.mark.parametrize(
    ("how", "normalize"),
    sweep(
        [(how, normalize) for how in ("mean", "cls", "max", "lasttoken") for normalize in (False, True)],
        quick=[("mean", True), ("cls", False), ("max", False), ("lasttoken", True)],
    ),
)
def test_sentence_transformers_gives_the_encoders_embeddings(
    encoder: Path, tmp_path: Path, how: sentence_transformers.Pooling, normalize: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    embedding = Embedding(poolings=(how,), normalize=normalize, max_length=8, dimensions=32, prompt="q: ")
    write_layout(encoder, embedding)
    assert read_embedding(encoder) == embedding
    folder = tl.export(encoder, tmp_path / "out", format="sentence-transformers")
    assert read_embedding(folder) == embedding
    loaded = SentenceTransformer(str(folder), device="cpu")
    assert loaded.encode(TEXTS, prompt="") == pytest.approx(pooled(encoder, how, normalize=normalize), abs=1e-5)
    assert loaded.max_seq_length == 8
    assert loaded.prompts[loaded.default_prompt_name] == "q: "
    with tl.load(folder) as embed:
        vectors = [answer["embedding"] for answer in embed(TEXTS)]
    assert loaded.encode(TEXTS) == pytest.approx(np.array(vectors), abs=1e-5)


def test_a_folder_with_a_dense_module_is_copied_whole(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = tiny.build_embedder(tmp_path / "model")
    folder = tl.export(model, tmp_path / "out", format="sentence-transformers")
    assert read_embedding(folder) == read_embedding(model)
    vectors = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert vectors.shape == (len(TEXTS), 16)
    assert (vectors == SentenceTransformer(str(model), device="cpu").encode(TEXTS)).all()
    ours = tl.predict(folder, pa.table({"text": TEXTS}))["embedding"].to_pylist()
    np.testing.assert_allclose(np.array(ours), vectors, atol=1e-5)


def test_what_sentence_transformers_saves_is_read_again(encoder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tl.export(encoder, tmp_path / "out", format="sentence-transformers", pooling="cls")
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(tmp_path / "saved"))
    found = read_embedding(tmp_path / "saved")
    assert (found.poolings, found.normalize) == (("cls",), False)


def test_an_encoder_without_pooling_needs_it_and_one_with_it_keeps_it(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Set pooling"):
        tl.export(encoder, tmp_path / "out", format="sentence-transformers")
    with pytest.raises(UsageError, match="pooling: expected 'mean', 'cls'"):
        tl.export(encoder, tmp_path / "out", format="sentence-transformers", pooling="sum")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    write_layout(encoder, Embedding(dimensions=32))
    with pytest.raises(UsageError, match="was trained with mean pooling"):
        tl.export(encoder, tmp_path / "out", format="sentence-transformers", pooling="cls")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("", "Transformer"), ("1", "Dense")], "the modules Transformer, Dense"),
        ([("", "Transformer")], "the modules Transformer; they have to be"),
        ([("", "Transformer"), ("1", "LSTM")], "which torchlake does not support"),
        ([("", "Transformer"), ("../..", "Pooling")], "leads out"),
        ([("", "Transformer"), ("1", "Pooling")], "pools token states by nothing"),
    ],
)
def test_other_modules_are_refused(encoder: Path, tmp_path: Path, modules: list[tuple[str, str]], message: str) -> None:
    kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (encoder / "modules.json").write_text(json.dumps(kinds))
    with pytest.raises((DataError, UnsafeError), match=message):
        tl.export(encoder, tmp_path / "out", format="sentence-transformers")


def test_a_model_that_a_format_does_not_support_is_refused(tiny_model: Path, tiny_gpt2: Path, tmp_path: Path) -> None:
    for pooling in ("mean", None):
        with pytest.raises(UsageError, match="whose head does not return embeddings"):
            tl.export(tiny_model, tmp_path / "out", format="sentence-transformers", pooling=pooling)
    with pytest.raises(UsageError, match="the model's task is text_generation"):
        tl.export(tiny_gpt2, tmp_path / "out", format="onnx")
    with pytest.raises(UsageError, match="pooling applies to the format sentence-transformers"):
        tl.export(tiny_model, tmp_path / "out", format="onnx", pooling="mean")
    with pytest.raises(UsageError, match="format: expected 'onnx', 'openvino'"):
        tl.export(tiny_model, tmp_path / "out", format="torchscript")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(encoder: Path, tmp_path: Path) -> None:
    options = {"format": "sentence-transformers", "pooling": "mean"}
    with pytest.raises(OutputError, match="the model folder itself"):
        tl.export(encoder, encoder, **options)
    for place in (tmp_path, tiny.build_model(tmp_path / "other", encoder=encoder)):
        before = sorted(path.name for path in place.iterdir())
        with pytest.raises(OutputError, match="not an export of torchlake"):
            tl.export(encoder, place, **options)
        assert sorted(path.name for path in place.iterdir()) == before
    (tmp_path / "out").mkdir()
    tl.export(encoder, tmp_path / "out", **options)
    weights = load_file(encoder / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, encoder / "model.safetensors", {"format": "pt"})
    tl.export(encoder, tmp_path / "out", **options)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (encoder / "model.safetensors").read_bytes()


def test_a_kill_leaves_no_torn_folder(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "exported.manifest.write:1:enospc")
    with pytest.raises(Exception, match="space"):
        tl.export(encoder, tmp_path / "out", format="sentence-transformers", pooling="mean")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder"]


def test_a_full_disk_is_named_whatever_library_writes(tiny_model: Path, tmp_path: Path) -> None:
    exported, out = tl.export(tiny_model, tmp_path / "graph", format="onnx"), tmp_path / "out"
    out.mkdir()
    words = [sys.executable, "-c", ON_A_FULL_DISK, tiny_model, exported, out]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 4
    assert all("bytes are free there. Make room" in line for line in said)
    assert {path.name for path in out.iterdir()} <= {"model.xml", "model.bin"}  # of the writer without its folder


def test_the_command(encoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(encoder), str(tmp_path / "out"), "--format", "sentence-transformers"]
    assert main([*arguments, "--json"]) == 64
    assert main([*arguments, "--pooling", "mean", "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors"} <= set(found["files"])
