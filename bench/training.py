"""How fast does an epoch train, beside a plain loop that pads to 128, at the same mathematics?

Both train roberta-base's shape from the same random weights, without dropout, on the same rows in the same batches with
the same optimizer and schedule, one thread; the losses of every step are compared. What differs is the padding.
"""

import json
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import torch
from _common import SCRATCH, arguments, finish, random_model, reviews
from transformers import AutoTokenizer

import torchlake as tl
from torchlake import models
from torchlake.data.order import epoch_batches

LEARNING_RATE = 2e-5
BATCH = 32


def plain_loop(folder, texts, labels) -> tuple[list[float], float, int]:
    """Losses of each step, seconds, and tokens computed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = replace(models.load_spec(folder), labels=(0, 1))
    torch.manual_seed(0)
    model = models.base_model(folder, spec, "AutoModelForSequenceClassification").train()  # the head torchlake draws
    padded = tokenizer(texts, padding="max_length", max_length=128, truncation=True, return_tensors="pt")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    batches = epoch_batches(mask.sum(1).numpy(), batch_size=BATCH, seed=0, epoch=0)
    losses = []
    began = time.perf_counter()
    for rows in batches:
        logits = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
        loss = torch.nn.functional.cross_entropy(logits, labels[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - began, ids.numel()


def main() -> None:
    options = arguments(__doc__, rows=384)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # children inherit it
    torch.set_num_threads(1)
    folder = random_model(SCRATCH / "roberta-base-shape")
    table = pq.read_table(reviews() / "train.parquet")
    rows = np.random.default_rng(0).permutation(len(table))[: options.rows]
    table = table.take(rows)
    subset = SCRATCH / "training.parquet"
    pq.write_table(table, subset)
    run = SCRATCH / "training-run"
    shutil.rmtree(run, ignore_errors=True)
    tl.train(
        run=run,
        data={"train": str(subset), "validation": None},
        model={"base": str(folder), "max_length": 128},
        train={
            "epochs": 1,
            "batch_size": BATCH,
            "learning_rate": LEARNING_RATE,
            "weight_decay": 0.01,
            "warmup": 0.0,
            "schedule": "constant",
            "checkpoint_every": "10h",
        },
        engine=tl.Local(processes=1),
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    ours_s = sum(line["seconds"] for line in steps)
    losses, peer_s, padded_tokens = plain_loop(
        folder, table["text"].to_pylist(), torch.tensor(table["label"].to_numpy())
    )
    tokens = sum(line["tokens"] for line in steps)
    difference = max(abs(a - line["loss"]) for a, line in zip(losses, steps, strict=True))
    common = {"steps": len(losses)}
    finish(
        "training",
        [
            {
                "name": "plain loop, padded to 128",
                "rows_per_s": len(table) / peer_s,
                "tokens_per_s": tokens / peer_s,
                "ratio": 1.0,
                "padding": 1 - tokens / padded_tokens,
                **common,
            },
            {
                "name": "torchlake train, single",
                "rows_per_s": len(table) / ours_s,
                "tokens_per_s": tokens / ours_s,
                "ratio": peer_s / ours_s,
                "largest_loss_difference": difference,
                **common,
            },
        ],
        as_json=options.json,
        note=f"{len(table)} reviews, one epoch, roberta-base's shape, batch {BATCH}, one core",
    )


if __name__ == "__main__":
    main()
