"""One contender of `training.py` as a script for torchrun: an epoch by a loop that is not torchlake's, from the same
weights.

All of them: the same rows, tokenized beforehand; AdamW with decay on everything but biases and norms, linear warm-up
and decay, gradients clipped at 1. The clock runs from the first batch to the last; rank 0 then scores the test rows.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

WARMUP, CLIP, WEIGHT_DECAY = 0.1, 1.0, 0.01
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Rows(torch.utils.data.Dataset):
    """Token ids and label of each row, padded to `length` or not at all."""

    def __init__(self, folder: str, table: str, rows: int, length: int | None) -> None:
        data = pq.read_table(table)
        data = data.take(np.random.default_rng(0).permutation(len(data))[:rows]) if rows else data
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        how = {"padding": "max_length", "max_length": length} if length else {"max_length": 512}
        self.rows = self.tokenizer(data["text"].to_pylist(), truncation=True, **how)["input_ids"]
        self.labels = data["label"].to_pylist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.rows[index]
        mask = [int(token != self.tokenizer.pad_token_id) for token in ids]
        return {"input_ids": ids, "attention_mask": mask, "labels": self.labels[index]}

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch, padded to its longest row."""
        longest = max(len(row["input_ids"]) for row in rows)
        pad = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        batch = {
            name: [row[name] + [value] * (longest - len(row[name])) for row in rows] for name, value in pad.items()
        }
        return {name: torch.tensor(value) for name, value in {**batch, "labels": [r["labels"] for r in rows]}.items()}


def model_of(setup: dict[str, Any]) -> Any:
    torch.manual_seed(setup["seed"])
    return AutoModelForSequenceClassification.from_pretrained(setup["model"], num_labels=2)


def optimizer_of(model: Any, rate: float) -> torch.optim.Optimizer:
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate)


def schedule_of(optimizer: Any, steps: int) -> Any:
    return get_linear_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)


def loader_of(rows: Rows, setup: dict[str, Any]) -> Any:
    distributed = torch.utils.data.distributed.DistributedSampler
    sampler = distributed(rows, WORLD, RANK, seed=setup["seed"]) if WORLD > 1 else None
    return torch.utils.data.DataLoader(
        rows, batch_size=setup["batch"] // WORLD, shuffle=sampler is None, sampler=sampler, collate_fn=rows.collate
    )


def plain(setup: dict[str, Any], rows: Rows, count: Callable[[Any], None]) -> tuple[Any, Callable[[], None]]:
    """A loop as the seed's notebooks have it: DDP or FSDP over two ranks, in fp32 or under bf16 autocast."""
    model = model_of(setup)
    module = model
    if WORLD > 1 and setup.get("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.base_model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif WORLD > 1:
        module = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
    loader = loader_of(rows, setup)
    optimizer = optimizer_of(model, setup["rate"])
    schedule = schedule_of(optimizer, len(loader))

    def epoch() -> None:
        module.train()
        for batch in loader:
            count(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(setup.get("bf16"))):
                logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = torch.nn.functional.cross_entropy(logits.float(), batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return model, epoch


def trainer(setup: dict[str, Any], rows: Rows, count: Callable[[Any], None]) -> tuple[Any, Callable[[], None]]:
    """Hugging Face's Trainer with its collator, which pads to the longest row of a batch."""
    from transformers import Trainer, TrainingArguments

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = rows.collate(examples)
        count(batch)
        return batch

    model = model_of(setup)
    arguments = TrainingArguments(
        output_dir=setup["scratch"],
        num_train_epochs=1,
        per_device_train_batch_size=setup["batch"] // WORLD,
        learning_rate=setup["rate"],
        weight_decay=WEIGHT_DECAY,
        warmup_steps=round(WARMUP * len(rows) / setup["batch"]),
        max_grad_norm=CLIP,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        disable_tqdm=True,
        seed=setup["seed"],
        bf16=bool(setup.get("bf16")),
    )
    loop = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    return model, lambda: loop.train() and None


def accelerated(setup: dict[str, Any], rows: Rows, count: Callable[[Any], None]) -> tuple[Any, Callable[[], None]]:
    """A plain loop under accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if setup.get("bf16") else "no")
    model = model_of(setup)
    optimizer = optimizer_of(model, setup["rate"])
    loader = torch.utils.data.DataLoader(
        rows, batch_size=setup["batch"] // WORLD, shuffle=True, collate_fn=rows.collate
    )
    module, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = schedule_of(optimizer, len(loader))

    def epoch() -> None:
        module.train()
        for batch in loader:
            count(batch)
            loss = module(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return model, epoch


def lightning(setup: dict[str, Any], rows: Rows, count: Callable[[Any], None]) -> tuple[Any, Callable[[], None]]:
    """Lightning's Trainer, without logger and checkpoints."""
    import lightning as pl

    model = model_of(setup)
    loader = loader_of(rows, setup)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            count(batch)
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model, setup["rate"])
            return [optimizer], [{"scheduler": schedule_of(optimizer, len(loader)), "interval": "step"}]

    loop = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        gradient_clip_val=CLIP,
        precision="bf16-mixed" if setup.get("bf16") else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return model, lambda: loop.fit(Module().train(), loader)


def accuracy(model: Any, setup: dict[str, Any]) -> float:
    """Share of the test rows that the trained model calls right."""
    rows = Rows(setup["model"], setup["test"], 0, None)
    order = sorted(range(len(rows)), key=lambda index: len(rows.rows[index]))
    right = 0
    with torch.inference_mode():
        model.eval()
        for first in range(0, len(order), 64):
            batch = rows.collate([rows[index] for index in order[first : first + 64]])
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(1) == labels).sum())
    return right / len(rows)


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def counted(computed: list[int]) -> Callable[[Any], None]:
    return lambda batch: computed.append(batch["input_ids"].numel())


def every_rank(value: Any) -> Iterator[Any]:
    if WORLD == 1:
        yield value
        return
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    yield from values


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(setup["threads"])
    kind = {"plain": plain, "trainer": trainer, "accelerate": accelerated, "lightning": lightning}[setup["kind"]]
    if WORLD > 1 and kind is plain:
        dist.init_process_group("gloo")
    rows = Rows(setup["model"], setup["train"], setup["rows"], setup.get("length"))
    computed: list[int] = []
    model, epoch = kind(setup, rows, counted(computed))
    began = time.perf_counter()
    epoch()
    seconds = time.perf_counter() - began
    spent = list(every_rank((seconds, sum(computed), peak_mib())))
    # A model that is shared out answers only when all ranks ask.
    scored = accuracy(model, setup) if setup["score"] and (RANK == 0 or setup.get("fsdp")) else None
    if RANK == 0:
        result = {
            "seconds": max(each[0] for each in spent),
            "computed_tokens": sum(each[1] for each in spent),
            "peak_memory_mib": max(each[2] for each in spent),
        }
        if scored is not None:
            result["accuracy"] = scored
        Path(setup["out"]).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
