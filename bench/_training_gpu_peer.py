"""Hugging Face's Trainer as a contender of `training_gpu.py`: the same rows, weights, batch size and precision.

Writes the seconds and tokens of every step. The options come as JSON in the first argument.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Clock(TrainerCallback):
    """The seconds between the ends of steps, and the tokens of their batches."""

    def __init__(self) -> None:
        self.tokens = 0
        self.steps: list[dict[str, float]] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.began:
            _synchronize()
            self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _synchronize()
        now = time.perf_counter()
        self.steps.append({"seconds": now - self.began})
        self.began = now


def main(options: dict[str, Any]) -> None:
    table = pq.read_table(options["table"])
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    texts = table["text"].to_pylist()
    if options["language_model"]:
        model: Any = AutoModelForCausalLM.from_pretrained(options["model"])
        length = options["max_length"]
        stream = [token for row in tokenizer(texts)["input_ids"] for token in (*row, tokenizer.eos_token_id)]
        blocks = [stream[first : first + length] for first in range(0, len(stream) - length + 1, length)]
        rows = [{"input_ids": block} for block in blocks]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(options["model"])
        names = sorted(set(table["label"].to_pylist()))
        numbers = [names.index(label) for label in table["label"].to_pylist()]
        rows = [
            {"input_ids": ids, "labels": number}
            for ids, number in zip(tokenizer(texts, truncation=True, max_length=512)["input_ids"], numbers, strict=True)
        ]
    clock, tokens = Clock(), list[int]()

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in batch]
        tokens.append(sum(lengths))
        if options["language_model"]:
            ids = torch.tensor([row["input_ids"] for row in batch])
            return {"input_ids": ids, "labels": ids}
        longest, pad = max(lengths), tokenizer.pad_token_id
        ids = torch.tensor([row["input_ids"] + [pad] * (longest - len(row["input_ids"])) for row in batch])
        mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in batch])}

    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=options["scratch"],
        max_steps=options["steps"],
        per_device_train_batch_size=options["batch"],
        learning_rate=options["rate"],
        weight_decay=0.01,
        warmup_steps=max(1, options["steps"] // 10),
        max_grad_norm=1.0,
        bf16=cuda,
        torch_compile=options["compile"],
        gradient_checkpointing=options["checkpointing"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not cuda,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[clock])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "steps": [
            {**step, "tokens": number, "loss": loss}
            for step, number, loss in zip(clock.steps, tokens, losses, strict=False)
        ],
        "peak_memory": torch.cuda.max_memory_allocated() if cuda else None,
    }
    Path(options["out"]).write_text(json.dumps(result))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
