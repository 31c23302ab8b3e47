"""What a user would pick to embed a table instead, each as its manual says, one thread each.

One function per group; a group shares a process and its loaded model. Run by `embeddings.py` in the group's own
environment, so nothing here imports torchlake, and libraries are imported where they are used.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _contender import Score, serve
from _scoring_exports import once

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
VNNI = "model_qint8_avx512_vnni.onnx"
QUANTIZED = "openvino_model_qint8_quantized.xml"


def main() -> None:
    serve(lambda setup: GROUPS[setup["group"]](setup))


def sentence_torch(setup: dict[str, Any]) -> Mapping[str, Score]:
    """sentence-transformers with its default backend and batching: 32 texts, sorted by length in characters."""
    from sentence_transformers import SentenceTransformer

    return _encoding("sentence torch", SentenceTransformer(setup["model"], device="cpu"))


def sentence_onnx(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Its onnx backend: the exported graph, and its own dynamic quantization."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer

    folder = copy_of_model(setup, "sentence-onnx")
    once(folder / "onnx" / VNNI, export_onnx, folder)
    offers: dict[str, Score] = {}
    for name, file in (("sentence onnx", "model.onnx"), ("sentence onnx int8", VNNI)):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        loading = {"file_name": file, "subfolder": "onnx", "session_options": options}
        offers |= _encoding(name, SentenceTransformer(str(folder), backend="onnx", model_kwargs=loading))
    return offers


def sentence_openvino(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Its openvino backend: the exported graph, and its own static quantization, calibrated on the training table."""
    from sentence_transformers import SentenceTransformer

    folder = copy_of_model(setup, "sentence-openvino")
    once(folder / "openvino" / QUANTIZED, export_openvino, folder, setup["tables"])
    offers: dict[str, Score] = {}
    for name, file in (("sentence openvino", "openvino_model.xml"), ("sentence openvino int8", QUANTIZED)):
        loading = {"file_name": file, "subfolder": "openvino"}
        offers |= _encoding(name, SentenceTransformer(str(folder), backend="openvino", model_kwargs=loading))
    return offers


def fastembed_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """fastembed with this model's own graph, as exported for sentence-transformers: its files are in a folder."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    folder = Path(setup["scratch"]) / "sentence-onnx"
    if not (folder / "onnx" / "model.onnx").exists():
        raise FileNotFoundError("the graph that sentence-transformers exports is not there")
    TextEmbedding.add_custom_model(
        model="local/minilm", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="local"), dim=384
    )
    model = TextEmbedding("local/minilm", specific_model_path=str(folder), threads=1)

    def score(texts: list[str]) -> tuple[np.ndarray, int]:
        return np.stack(list(model.embed(texts))), 0

    return {"fastembed": score}


def candding_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """candle, by the binding candding."""
    _hub_cache(setup)
    from candding import TextEmbedding

    model = TextEmbedding(MODEL, device="cpu")
    return {"candding": lambda texts: (model.embed(texts), 0)}


def embed_anything_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """candle, by the binding embed_anything."""
    _hub_cache(setup)
    import embed_anything
    from embed_anything import EmbeddingModel, TextEmbedConfig

    model = EmbeddingModel.from_pretrained_hf(MODEL)
    config = TextEmbedConfig(batch_size=32)

    def score(texts: list[str]) -> tuple[np.ndarray, int]:
        made = embed_anything.embed_query(texts, embedder=model, config=config)
        return np.array([each.embedding for each in made], dtype=np.float32), 0

    return {"embed_anything": score}


def daft_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Daft's `embed_text`, which calls sentence-transformers' encode for batches of 64 rows."""
    import daft
    from daft.functions import embed_text

    daft.set_runner_native(num_threads=1)

    def score(texts: list[str]) -> tuple[np.ndarray, int]:
        table = daft.from_pydict({"text": texts})
        vectors = embed_text(daft.col("text"), provider="transformers", model=setup["model"])
        column = table.with_column("embedding", vectors).to_pydict()["embedding"]
        return np.stack([np.asarray(vector) for vector in column]), 0

    return {"daft": score}


def zentorch_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """AMD's backend of torch.compile, weights in bf16, frozen; batches as sentence-transformers makes them."""
    os.environ["TORCHINDUCTOR_FREEZING"] = "1"
    import torch
    import zentorch  # noqa: F401  it registers the backend
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(setup["model"], device="cpu", model_kwargs={"dtype": torch.bfloat16})
    model[0].auto_model.compile(backend="zentorch", dynamic=True)

    return _encoding("zentorch", model)


GROUPS: dict[str, Callable[[dict[str, Any]], Mapping[str, Score]]] = {
    "sentence torch": sentence_torch,
    "sentence onnx": sentence_onnx,
    "sentence openvino": sentence_openvino,
    "fastembed": fastembed_,
    "candding": candding_,
    "embed_anything": embed_anything_,
    "daft": daft_,
    "zentorch": zentorch_,
}


def export_onnx(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    model = SentenceTransformer(str(folder), backend="onnx", model_kwargs={"export": True})
    model.save_pretrained(str(folder))
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))


def export_openvino(folder: Path, tables: str) -> None:
    from sentence_transformers import SentenceTransformer, export_static_quantized_openvino_model

    model = SentenceTransformer(str(folder), backend="openvino", model_kwargs={"export": True})
    model.save_pretrained(str(folder))
    calibration = {"dataset_config_name": "default", "dataset_split": "train", "column_name": "text"}
    export_static_quantized_openvino_model(model, None, str(folder), dataset_name=tables, **calibration)


def _encoding(name: str, model: Any) -> Mapping[str, Score]:
    import torch

    torch.set_num_threads(1)

    def score(texts: list[str]) -> tuple[np.ndarray, int]:
        vectors = model.encode(texts, batch_size=32, show_progress_bar=False, convert_to_numpy=False)
        return np.stack([vector.float().numpy() for vector in vectors]), 0

    return {name: score}


def copy_of_model(setup: dict[str, Any], name: str) -> Path:
    """A folder of its own for a library that saves its exports beside the model."""
    folder = Path(setup["scratch"]) / name
    if not folder.exists():
        shutil.copytree(setup["model"], folder, ignore=shutil.ignore_patterns("runtimes", "onnx", "openvino"))
    return folder


def _hub_cache(setup: dict[str, Any]) -> None:
    """Lay the model out as the hub's cache, for libraries that load models by name only."""
    home = Path(setup["scratch"]).resolve() / "hub-cache"
    os.environ |= {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    place = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    revision = hashlib.sha256(MODEL.encode()).hexdigest()[:40]
    if not (place / "refs" / "main").exists():
        shutil.copytree(setup["model"], place / "snapshots" / revision, dirs_exist_ok=True)
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(revision)


if __name__ == "__main__":
    main()
