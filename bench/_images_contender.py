"""One contender of images.py in a process of its own: scores a table of paths, prints its seconds as JSON.

`_images_contender.py NAME MODEL TABLE OUTPUT`; the output is a Parquet table of `id` and `label`.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BATCH = 8


def torchlake(model: str, table: str, output: Path) -> dict[str, Any]:
    import torchlake as tl

    options = {"key": "id", "engine": tl.Local(processes=1), "batch_tokens": 196 * BATCH}
    scored = tl.predict(model, table, output / "scored", **options)
    pq.write_table(pq.read_table(output / "scored", columns=["id", "label"]), output / "labels.parquet")
    provenance = scored.record["provenance"]
    waited = provenance["waiting_seconds"]
    return {"forward_s": provenance["forward_seconds"], "waiting_s": waited}


def dataloader(model: str, table: str, output: Path) -> dict[str, Any]:
    """By hand: a Dataset that decodes with Pillow, a DataLoader with one worker, the same processor and model."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    rows, processor = pq.read_table(table), AutoImageProcessor.from_pretrained(model)
    classifier = AutoModelForImageClassification.from_pretrained(model).eval()
    paths = rows["image"].to_pylist()

    class Images(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, row: int) -> Any:
            return processor(Image.open(paths[row]).convert("RGB"), return_tensors="pt")["pixel_values"][0]

    labels, forward = [], 0.0
    with torch.inference_mode():
        for batch in DataLoader(Images(), batch_size=BATCH, num_workers=1):
            began = time.perf_counter()
            labels += classifier(pixel_values=batch).logits.argmax(-1).tolist()
            forward += time.perf_counter() - began
    names = [classifier.config.id2label[label] for label in labels]
    pq.write_table(pa.table({"id": rows["id"], "label": names}), output / "labels.parquet")
    return {"forward_s": forward}


def pipeline(model: str, table: str, output: Path) -> dict[str, Any]:
    from transformers import pipeline as make

    rows = pq.read_table(table)
    classify = make("image-classification", model=model, device="cpu", top_k=1)
    found = classify(rows["image"].to_pylist(), batch_size=BATCH)
    names = [one[0]["label"] for one in found]
    pq.write_table(pa.table({"id": rows["id"], "label": names}), output / "labels.parquet")
    return {}


def main() -> None:
    name, model, table, output = sys.argv[1:]
    Path(output).mkdir(parents=True)
    began = time.monotonic()
    measured = globals()[name](model, table, Path(output))
    seconds = time.monotonic() - began
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"seconds": seconds, "peak_memory_mib": peak >> 10, **measured}))


if __name__ == "__main__":
    main()
