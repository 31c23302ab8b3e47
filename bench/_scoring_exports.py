"""What the peers make of a model once: their exports, and the tokens and batches that all of them share."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def load_model(setup: dict[str, Any], **options: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(setup["model"], **options).eval()


def load_tokenizer(setup: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(setup["model"])


def batches(
    tokenizer: Any, texts: list[str], batch: int, *, by_length: bool = False, length: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Token ids and mask (B, L) int64, and which rows they are; padded to the longest of the batch, or to `length`."""
    rows = tokenizer(texts, truncation=True, max_length=length or 512)["input_ids"]
    lengths = np.array([len(row) for row in rows])
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(rows))
    for first in range(0, len(rows), batch):
        chosen = order[first : first + batch]
        ids = np.full((len(chosen), length or int(lengths[chosen].max())), tokenizer.pad_token_id, dtype=np.int64)
        for place, row in enumerate(chosen):
            ids[place, : lengths[row]] = rows[row]
        mask = np.arange(ids.shape[1]) < lengths[chosen, None]
        yield ids, mask.astype(np.int64), chosen


def once(file: Path, make: Callable[..., None], *args: Any) -> None:
    """Make an export that is not there, in a process of its own: its memory is not the scoring process's."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=make, args=args)
    process.start()
    process.join()
    if process.exitcode != 0 or not file.exists():
        raise RuntimeError(f"the export ended with {process.exitcode}; the log beside {file.parent} says why")


def export_onnx_int8(setup: dict[str, Any], file: Path) -> None:
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    fp32, making = file.with_name("fp32.onnx"), file.with_name("making.onnx")
    axes = {0: "batch", 1: "length"}
    with torch.inference_mode():
        torch.onnx.export(
            _Logits.of(load_model(setup)),
            tuple(_example().values()),
            str(fp32),
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "logits": {0: "batch"}},
            opset_version=18,
            dynamo=False,
        )
    quantize_dynamic(fp32, making, weight_type=QuantType.QInt8)
    fp32.unlink()
    making.rename(file)


def export_openvino_int8(setup: dict[str, Any], file: Path) -> None:
    import nncf
    import openvino

    model = openvino.convert_model(_Logits.of(load_model(setup)), example_input=_example())
    singles = batches(load_tokenizer(setup), setup["texts"], 1)
    rows = [{"input_ids": ids, "attention_mask": mask} for ids, mask, _ in singles]
    quantized = nncf.quantize(model, nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows))
    openvino.save_model(quantized, file.with_name("making.xml"))
    file.with_name("making.bin").rename(file.with_suffix(".bin"))
    file.with_name("making.xml").rename(file)


def export_sentence_onnx_int8(folder: Path) -> None:
    from sentence_transformers import CrossEncoder, export_dynamic_quantized_onnx_model

    model = CrossEncoder(str(folder), backend="onnx", model_kwargs={"export": True})
    model.save_pretrained(str(folder))
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))


def export_sentence_openvino_int8(folder: Path, tables: str) -> None:
    from sentence_transformers import CrossEncoder, export_static_quantized_openvino_model

    model = CrossEncoder(str(folder), backend="openvino", model_kwargs={"export": True})
    model.save_pretrained(str(folder))
    calibration = {"dataset_config_name": "default", "dataset_split": "train", "column_name": "text"}
    export_static_quantized_openvino_model(model, None, str(folder), dataset_name=tables, **calibration)


def _example() -> dict[str, Any]:
    import torch

    ids = torch.randint(5, 1000, (2, 16), dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class _Logits:
    """The model with a tensor for an answer, as exporters want it."""

    @staticmethod
    def of(model: Any) -> Any:
        import torch

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

        return Logits().eval()
