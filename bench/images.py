"""How fast are images scored and trained on, and does decoding ever keep the model waiting?

Scoring: ResNet-50 over a table of paths of JPEG files, each contender in a fresh process with all cores: `predict`, a
hand-written DataLoader with one worker, and transformers' pipeline; in turn, best of the rounds, imports included.
`waiting` is the share of the scoring time in which the model has no batch, as the next one is not decoded yet.

Training: ResNet-50 from scratch on scikit-learn's digits at 64 x 64, in fp32, one thread for each process, at 1 and 2
processes with the statistics of all ranks, and at 2 with those of each (train.batch_norm=local), beside a loop by hand
(DistributedDataParallel, each rank normalizes by its own rows): seconds of an epoch, the share of waiting, accuracy on
held-out digits, and how far the loss of the first step differs (the later ones differ by rounding, which such a network
multiplies from step to step).

`--many 100000` scores a folder of 100,000 small images instead, and a tenth of it, and compares peak memory.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish
from PIL import Image

import torchlake as tl

CONTENDERS = ("torchlake", "dataloader", "pipeline")
SIDE, BATCH = 64, 100
RATE = 1e-3
TRAINING = {"batch_size": BATCH, "learning_rate": RATE, "micro_batch_tokens": 1 << 20, "precision": "fp32"}


def write_photos(folder: Path, number: int) -> Path:
    """Smooth JPEG images of 640 x 480, about 40 kB each, and a table of their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    paths = [folder / f"{row}.jpg" for row in range(number)]
    for path in paths:
        values = random.integers(0, 255, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(values).resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    table = pa.table({"id": range(number), "image": [str(path) for path in paths]})
    pq.write_table(table, folder / "photos.parquet")
    return folder / "photos.parquet"


def write_small(folder: Path, number: int) -> Path:
    """Digits as PNG files, repeated, a thousand in each folder, and a table of their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    files, paths = [path.read_bytes() for path in small_pngs(SCRATCH / "digits")], []
    for row in range(number):
        path = folder / str(row // 1000) / f"{row}.png"
        if row % 1000 == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(files[row % len(files)])
        paths.append(str(path))
    pq.write_table(pa.table({"id": range(number), "image": paths}), folder / "images.parquet")
    return folder / "images.parquet"


def small_pngs(folder: Path) -> list[Path]:
    from sklearn.datasets import load_digits

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = []
    for row, values in enumerate(load_digits().images):
        paths.append(folder / f"{row}.png")
        image = Image.fromarray((values / 16 * 255).astype(np.uint8)).convert("RGB")
        image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def resnet(folder: Path, *, labels: int | None, **shape: Any) -> Path:
    """A ResNet with random weights, with a head for the given number of classes, or without one."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel, ViTImageProcessorPil

    torch.manual_seed(0)
    kind = ResNetModel if labels is None else ResNetForImageClassification
    side = SIDE if labels is None else 224
    kind(ResNetConfig(num_labels=labels or 2, **shape)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return folder


def scored(name: str, model: Path, table: Path) -> tuple[dict[str, Any], pa.Table]:
    output = SCRATCH / "images-out"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(Path(__file__).with_name("_images_contender.py")), name, model, table, output]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]), pq.read_table(output / "labels.parquet").sort_by("id")


def score(number: int, rounds: int) -> list[dict[str, Any]]:
    table, model = write_photos(SCRATCH / "photos", number), resnet(SCRATCH / "resnet-50", labels=1000)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    labels: dict[str, pa.Table] = {}
    for _ in range(rounds):
        for name in CONTENDERS:
            one, labels[name] = scored(name, model, table)
            found[name].append(one)
    best = {name: min(each, key=lambda one: one["seconds"]) for name, each in found.items()}
    rows = []
    for name, one in best.items():
        busy = one.get("forward_s", 0) + one.get("waiting_s", 0)
        same = np.asarray(labels[name]["label"].to_numpy() == labels["pipeline"]["label"].to_numpy())
        rows.append(
            {
                "name": f"score: {name}",
                "seconds": one["seconds"],
                "rows_per_s": number / one["seconds"],
                "over_dataloader": best["dataloader"]["seconds"] / one["seconds"],
                "waiting": one["waiting_s"] / busy if "waiting_s" in one else None,
                "agreement": float(same.mean()),
                "peak_memory_mib": one["peak_memory_mib"],
            }
        )
    return rows


def train(epochs: int) -> list[dict[str, Any]]:
    from sklearn.datasets import load_digits

    paths, label = small_pngs(SCRATCH / "digits"), load_digits().target
    order = np.random.default_rng(0).permutation(len(paths))
    for name, rows in (("train", order[:1400]), ("test", order[1400:])):
        columns = {"image": [str(paths[row]) for row in rows], "label": label[rows].astype(np.int64)}
        pq.write_table(pa.table(columns), SCRATCH / f"digits-{name}.parquet")
    base, made, losses = resnet(SCRATCH / "resnet-50-body", labels=None), [], []
    os.environ["OMP_NUM_THREADS"] = "1"
    for processes, statistics in ((1, "shared"), (2, "shared"), (2, "local")):
        run = SCRATCH / f"images-run-{processes}-{statistics}"
        shutil.rmtree(run, ignore_errors=True)
        done = tl.train(
            run=run,
            engine=tl.Local(processes=processes),
            data={"train": str(SCRATCH / "digits-train.parquet"), "validation": None, "problem": "single_label"},
            model={"base": str(base), "task": "image_classification", "task_options": {"batch_norm": "batch"}},
            train={"epochs": epochs, "batch_norm": statistics, **TRAINING},
        )
        lines = [json.loads(line) for line in (done.path / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "grad_norm" in line]
        losses.append(steps[0]["loss"])
        spent = [sum(line["seconds"] for line in steps if line["epoch"] == epoch + 1) for epoch in range(epochs)]
        measured = tl.evaluate(done.path / "model", SCRATCH / "digits-test.parquet").metrics
        made.append(
            {
                "name": f"train: {processes} process{'es' * (processes > 1)}{', local' * (statistics == 'local')}",
                "epoch_s": min(spent),
                "rows_per_s": 1400 / min(spent),
                "waiting": sum(line["data_seconds"] for line in steps) / sum(spent),
                "accuracy": measured["accuracy"].value,
                "loss_difference": abs(losses[0] - losses[-1]),
                "speedup": made[0]["epoch_s"] / min(spent) if made else 1.0,
            }
        )
        if statistics == "shared":
            made.append(by_hand(base, processes, epochs, made[1] if len(made) > 1 else None))
    return made


def by_hand(base: Path, processes: int, epochs: int, one: dict[str, Any] | None) -> dict[str, Any]:
    """The same training by _images_ddp.py; `one` is its result with one process."""
    tables = [str(SCRATCH / f"digits-{name}.parquet") for name in ("train", "test")]
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [str(Path(__file__).with_name("_images_ddp.py")), str(base), *tables, str(epochs), str(BATCH), str(RATE)]
    done = subprocess.run([sys.executable, *command, *script], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "name": f"train: {processes} process{'es' * (processes > 1)}, by hand",
        "epoch_s": min(found["epochs_s"]),
        "rows_per_s": 1400 / min(found["epochs_s"]),
        "accuracy": found["accuracy"],
        "speedup": one["epoch_s"] / min(found["epochs_s"]) if one else 1.0,
    }


def many(number: int) -> list[dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    model = SCRATCH / "vit-small"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=10, **shape)).save_pretrained(model)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(model)
    rows = []
    for count in (number // 10, number):
        one, labels = scored("torchlake", model, write_small(SCRATCH / "small", count))
        busy = one["forward_s"] + one["waiting_s"]
        rows.append(
            {
                "name": f"{count:,} small images",
                "seconds": one["seconds"],
                "rows_per_s": count / one["seconds"],
                "waiting": one["waiting_s"] / busy,
                "peak_memory_mib": one["peak_memory_mib"],
                "each_row_once": labels["id"].to_pylist() == list(range(count)),
            }
        )
    return rows


def main() -> None:
    options = arguments(__doc__, images=160, rounds=2, epochs=5, many=0)
    os.environ["TORCHLAKE_PROGRESS"] = "0"
    if options.many:
        note = "Peak memory is that of the process that scores."
        finish("images_many", many(options.many), as_json=options.json, note=note)
        return
    scores = score(options.images, options.rounds) if options.images else []
    rows = [*scores, *train(options.epochs)]
    note = (
        f"Scoring: {options.images} JPEG images of 640 x 480 by ResNet-50, best of {options.rounds}; agreement: with "
        "the labels of the pipeline. Training: ResNet-50, 1,400 digits at 64 x 64; loss_difference: of the first step "
        "to 1 process."
    )
    finish("images", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
