"""What a user would pick instead, as a careful one writes it: inference mode, dynamic padding, a fast tokenizer.

One function per group of contenders; a group shares a process and its loaded model. Run by `scoring.py` in the group's
own environment, so nothing here imports torchlake, and libraries are imported where they are used.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _contender import Score, serve
from _scoring_exports import (
    batches,
    export_onnx_int8,
    export_openvino_int8,
    export_sentence_onnx_int8,
    export_sentence_openvino_int8,
    load_model,
    load_tokenizer,
    once,
)

SEED_LENGTH = 128
Forward = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Token ids and mask (B, L) int64 in, logits (B, C) out."""


def main() -> None:
    serve(lambda setup: GROUPS[setup["group"]](setup))


def transformers_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """The stock model: the seed's loop, the seed's loop improved step by step, and transformers' own pipeline."""
    import torch
    from transformers import pipeline

    torch.set_num_threads(1)
    model, tokenizer = load_model(setup), load_tokenizer(setup)
    run = partial(_torch_forward, model)
    labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)

    def by_pipeline(texts: list[str], *, batch: int) -> tuple[np.ndarray, int]:
        answers = classify(texts, batch_size=batch, truncation=True)
        scores = [{answer["label"]: answer["score"] for answer in row} for row in answers]
        computed = sum(ids.size for ids, _, _ in batches(tokenizer, texts, batch=batch))
        return np.array([[row[label] for label in labels] for row in scores]), computed

    return {
        "seed": partial(_seed, tokenizer, model),
        "autograd off": partial(_hand_written, tokenizer, run, batch=32, length=SEED_LENGTH),
        "dynamic padding": partial(_hand_written, tokenizer, run, batch=32),
        "sorted": partial(_hand_written, tokenizer, run, batch=32, by_length=True),
        "pipeline": partial(by_pipeline, batch=1),
        "pipeline 32": partial(by_pipeline, batch=32),
    }


def bettertransformer(setup: dict[str, Any]) -> Mapping[str, Score]:
    """The seed's second loop: the same rectangles through Optimum's BetterTransformer."""
    import torch
    from optimum.bettertransformer import BetterTransformer

    torch.set_num_threads(1)
    # Optimum declines models that call scaled_dot_product_attention themselves.
    model = BetterTransformer.transform(load_model(setup, attn_implementation="eager")).eval()
    return {"bettertransformer": partial(_seed, load_tokenizer(setup), model)}


def onnxruntime_int8(setup: dict[str, Any]) -> Mapping[str, Score]:
    """torch.onnx's exporter by tracing, then ONNX Runtime's dynamic quantization."""
    import onnxruntime

    file = Path(setup["scratch"]) / "hand-onnx" / "int8.onnx"
    once(file, export_onnx_int8, setup, file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {"input_ids": ids, "attention_mask": mask})[0])

    return _two_orders("onnxruntime int8", load_tokenizer(setup), run)


def openvino_int8(setup: dict[str, Any]) -> Mapping[str, Score]:
    """openvino.convert_model, then nncf's static quantization, calibrated on training rows."""
    import openvino

    file = Path(setup["scratch"]) / "hand-openvino" / "int8.xml"
    once(file, export_openvino_int8, setup, file)
    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.compile_model(file, "CPU", options).create_infer_request()

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.array(request.infer({"input_ids": ids, "attention_mask": mask})[0])

    return _two_orders("openvino int8", load_tokenizer(setup), run)


def torch_int8(setup: dict[str, Any]) -> Mapping[str, Score]:
    """PyTorch's dynamic quantization of the linear layers."""
    import torch
    from torch.ao.quantization import quantize_dynamic

    torch.set_num_threads(1)
    model = quantize_dynamic(load_model(setup), {torch.nn.Linear}, dtype=torch.qint8)
    run = partial(_torch_forward, model)
    return {"torch int8 sorted": partial(_hand_written, load_tokenizer(setup), run, batch=16, by_length=True)}


def sentence_torch(setup: dict[str, Any]) -> Mapping[str, Score]:
    """sentence-transformers' CrossEncoder with its default backend."""
    from sentence_transformers import CrossEncoder

    return _cross_encoder("sentence torch", CrossEncoder(setup["model"], device="cpu"))


def sentence_onnx_int8(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Its onnx backend with its own dynamic quantization, as its manual recommends for CPUs."""
    import onnxruntime
    from sentence_transformers import CrossEncoder

    folder = _copy_of_model(setup, "sentence-onnx")
    file = folder / "onnx" / "model_qint8_avx512_vnni.onnx"
    once(file, export_sentence_onnx_int8, folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    loading = {"file_name": file.name, "subfolder": "onnx", "session_options": options}
    return _cross_encoder("sentence onnx int8", CrossEncoder(str(folder), backend="onnx", model_kwargs=loading))


def sentence_openvino_int8(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Its openvino backend with its own static quantization, calibrated on the training table."""
    from sentence_transformers import CrossEncoder

    folder = _copy_of_model(setup, "sentence-openvino")
    file = folder / "openvino" / "openvino_model_qint8_quantized.xml"
    once(file, export_sentence_openvino_int8, folder, setup["tables"])
    loading = {"file_name": file.name, "subfolder": "openvino"}
    return _cross_encoder("sentence openvino int8", CrossEncoder(str(folder), backend="openvino", model_kwargs=loading))


def deepspeed_(setup: dict[str, Any]) -> Mapping[str, Score]:
    """DeepSpeed's inference engine with its kernels; without them it is the stock model."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    engine = deepspeed.init_inference(load_model(setup), dtype=torch.float32, replace_with_kernel_inject=True)
    run = partial(_torch_forward, engine.module)
    return {"deepspeed": partial(_hand_written, load_tokenizer(setup), run, batch=32, by_length=True)}


GROUPS: dict[str, Callable[[dict[str, Any]], Mapping[str, Score]]] = {
    "transformers": transformers_,
    "bettertransformer": bettertransformer,
    "onnxruntime int8": onnxruntime_int8,
    "openvino int8": openvino_int8,
    "torch int8": torch_int8,
    "sentence torch": sentence_torch,
    "sentence onnx int8": sentence_onnx_int8,
    "sentence openvino int8": sentence_openvino_int8,
    "deepspeed": deepspeed_,
}


def _hand_written(
    tokenizer: Any, run: Forward, texts: list[str], *, batch: int, by_length: bool = False, length: int | None = None
) -> tuple[np.ndarray, int]:
    logits: list[np.ndarray] = []
    places: list[np.ndarray] = []
    computed = 0
    for ids, mask, rows in batches(tokenizer, texts, batch, by_length=by_length, length=length):
        logits.append(run(ids, mask))
        places.append(rows)
        computed += ids.size
    order = np.argsort(np.concatenate(places))
    return _softmax(np.concatenate(logits)[order]), computed


def _seed(tokenizer: Any, model: Any, texts: list[str]) -> tuple[np.ndarray, int]:
    """Every row padded to 128 tokens, 32 rows at a time as they come, autograd on."""
    probabilities, computed = [], 0
    for first in range(0, len(texts), 32):
        batch = tokenizer(
            texts[first : first + 32],
            padding="max_length",
            max_length=SEED_LENGTH,
            truncation=True,
            return_tensors="pt",
        )
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        probabilities.append(logits.softmax(1).detach().numpy())
        computed += batch["input_ids"].numel()
    return np.concatenate(probabilities), computed


def _torch_forward(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
        return np.asarray(logits.numpy())


def _two_orders(name: str, tokenizer: Any, run: Forward) -> Mapping[str, Score]:
    return {
        name: partial(_hand_written, tokenizer, run, batch=32),
        f"{name} sorted": partial(_hand_written, tokenizer, run, batch=16, by_length=True),
    }


class _Texts:
    """Single texts for CrossEncoder.predict, which takes a list of strings for one pair: this has length and slices."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice) -> list[str]:
        return self.texts[rows]


def _cross_encoder(name: str, model: Any) -> Mapping[str, Score]:
    import torch

    torch.set_num_threads(1)

    def score(texts: list[str]) -> tuple[np.ndarray, int]:
        probabilities = model.predict(
            _Texts(texts), batch_size=32, activation_fn=torch.nn.Identity(), apply_softmax=True, show_progress_bar=False
        )
        return probabilities, sum(ids.size for ids, _, _ in batches(model.tokenizer, texts, 32))

    return {name: score}


def _copy_of_model(setup: dict[str, Any], name: str) -> Path:
    """A folder of its own for a library that saves its exports beside the model."""
    folder = Path(setup["scratch"]) / name
    if not folder.exists():
        shutil.copytree(setup["model"], folder, ignore=shutil.ignore_patterns("runtimes", "*.md", "manifest.json"))
    return folder


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


if __name__ == "__main__":
    main()
