"""TRL's side of `sft.py`, in TRL's environment: one trainer, or its rendering; setup and result are JSON.

The clock is the CPU time of this process from the end of the first step to the end of the last; targets are counted in
the batches that the trainer gets. TRL has its fastest settings for one core: no recomputed activations, no bf16.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def train(setup: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    times: list[float] = []
    losses: list[float] = []
    counts: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            times.append(time.process_time())

    common = {
        "output_dir": setup["scratch"],
        "num_train_epochs": 1,
        "per_device_train_batch_size": setup["batch"],
        "learning_rate": setup["rate"],
        "lr_scheduler_type": "constant",
        "max_length": setup["length"],
        "weight_decay": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    if setup["kind"] == "dpo":
        kind: Any = DPOTrainer
        arguments: Any = DPOConfig(**common, beta=0.1, precompute_ref_log_probs=setup["precompute"])
    else:
        kind, arguments = SFTTrainer, SFTConfig(**common, assistant_only_loss=True, packing=setup["kind"] == "packed")

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            if "labels" in inputs:
                counts.append(int((inputs["labels"][:, 1:] != -100).sum()))
            else:
                counts.append(len(inputs["input_ids"]) // 2)
            loss = super().compute_loss(model, inputs, *rest, **options)
            losses.append(float(loss))
            return loss

    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype="float32")
    began = time.process_time()
    trainer = Recorded(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(pq.read_table(setup["table"]).to_pylist()),
        processing_class=AutoTokenizer.from_pretrained(setup["model"]),
        callbacks=[Clock()],
    )
    prepared = time.process_time() - began
    trainer.train()
    return {
        "cpu_s": times[-1] - times[0],
        "learned": sum(counts[1:]),
        "steps": len(times),
        "loss": sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts),
        "prepared_cpu_s": prepared,
        "peak_memory_mib": peak_mib(),
    }


def render(setup: dict[str, Any]) -> dict[str, Any]:
    """Conversations rendered and tokenized by `datasets.map`, as TRL does it; the best of three passes."""
    from datasets import Dataset, disable_caching
    from transformers import AutoTokenizer

    disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(setup["model"])

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        made = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    rows = Dataset.from_list(pq.read_table(setup["table"]).to_pylist())
    rows.select(range(8)).map(tokens)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        made = rows.map(tokens)
        seconds.append(time.process_time() - began)
    return {"cpu_s": min(seconds), "rows": len(rows), "tokens": sum(map(len, made["input_ids"]))}


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    result = render(setup) if setup["kind"] == "render" else train(setup)
    Path(setup["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
