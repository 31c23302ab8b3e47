"""A language model on Ray by hand, as Ray's documentation shows it: the peer of bench/ray_generation.py.

read_text -> map_batches(tokenized) -> TorchTrainer with deepspeed.initialize, ZeRO-3 -> the best of its checkpoints as
a model folder -> map_batches(Completer)
"""

import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def lines_of(setup: dict[str, Any], name: str) -> ray.data.Dataset:
    """A row for each line of the text, in blocks enough for all workers."""
    return ray.data.read_text(setup[name], override_num_blocks=2 * setup["ranks"])


def by_hand(setup: dict[str, Any], pad_to: int | None) -> dict[str, Any]:
    """`pad_to`: tokens that every line is padded to; None: those of the longest line of its batch."""
    home = Path(setup["home"])
    tokenize = partial(tokenized, model=setup["model"], block=setup["block"])
    # Materialized, or Ray would tokenize the lines again in every epoch.
    datasets = {
        name: lines_of(setup, name).map_batches(tokenize, batch_size=1024).materialize()
        for name in ("train", "validation")
    }
    trainer = TorchTrainer(
        train_by_hand,
        train_loop_config={**setup, "pad_to": pad_to},
        scaling_config=ScalingConfig(num_workers=setup["ranks"], use_gpu=False),
        run_config=RunConfig(
            storage_path=str(home / "ray-train"),
            checkpoint_config=CheckpointConfig(checkpoint_score_attribute="perplexity", checkpoint_score_order="min"),
        ),
        datasets=datasets,
    )
    result = trainer.fit()
    folder = home / "by-hand-model"
    best = result.get_best_checkpoint("perplexity", "min")
    with best.as_directory() as checkpoint:
        save_whole(checkpoint, setup["model"], folder)
    began = time.perf_counter()
    prompts = ray.data.read_parquet(setup["prompts"]).repartition(2 * setup["ranks"])
    written = prompts.map_batches(
        Completer,
        fn_constructor_args=(str(folder), setup["new_tokens"]),
        batch_size=setup["prompts_at_once"],
        compute=ray.data.ActorPoolStrategy(size=setup["ranks"]),
    )
    written.write_parquet(setup["written"])
    return {
        "model": folder,
        "write_s": time.perf_counter() - began,
        **{name: result.metrics[name] for name in ("train_s", "steps", "padding")},
    }


def tokenized(batch: dict[str, np.ndarray], model: str, block: int) -> dict[str, Any]:
    """A line's tokens and the end token, as Ray's workers make them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = tokenizer(batch["text"].tolist(), truncation=True, max_length=block - 1)["input_ids"]
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in rows]}


def train_by_hand(config: dict[str, Any]) -> None:
    """What every worker of TorchTrainer runs."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    # An operator for ranks of one machine, which DeepSpeed would compile first, for a minute; gloo does its work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rows, pad_to, total = config["batch_rows"] // config["ranks"], config["pad_to"], config["steps"]
    model = AutoModelForCausalLM.from_pretrained(config["model"])
    warmup = max(1, round(0.1 * total))
    schedule = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": config["rate"],
        "warmup_num_steps": warmup,
        "warmup_type": "linear",
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "optimizer": {"type": "AdamW", "params": {"lr": config["rate"], "weight_decay": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "total_num_steps": total}},
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 1.0,
        },
    )

    def collate(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        lengths = [len(ids) for ids in batch["input_ids"]]
        ids = torch.zeros(len(lengths), pad_to or max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (tokens, length) in enumerate(zip(batch["input_ids"], lengths, strict=True)):
            ids[row, :length], mask[row, :length] = torch.tensor(np.array(tokens)), 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    shards = {name: ray.train.get_dataset_shard(name) for name in ("train", "validation")}
    seconds, steps, tokens, computed = 0.0, 0, 0, 0
    for epoch in range(config["epochs"]):
        began = time.perf_counter()
        engine.train()
        for batch in shards["train"].iter_torch_batches(
            batch_size=rows, collate_fn=collate, local_shuffle_buffer_size=16 * rows, local_shuffle_seed=epoch
        ):
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()
            steps, tokens = steps + 1, tokens + int(batch["attention_mask"].sum())
            computed += batch["input_ids"].numel()
        seconds += time.perf_counter() - began
        engine.eval()
        sums = torch.zeros(2)
        for batch in shards["validation"].iter_torch_batches(batch_size=rows, collate_fn=collate):
            targets = int(batch["attention_mask"][:, 1:].sum())
            with torch.no_grad():
                sums += torch.tensor([engine(**batch, use_cache=False).loss.item() * targets, targets])
        torch.distributed.all_reduce(sums)
        report = {
            "perplexity": math.exp(sums[0] / sums[1]),
            "train_s": seconds,
            "steps": steps,
            "padding": 1 - tokens / computed,
        }
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)  # every rank its part
            ray.train.report(report, checkpoint=Checkpoint.from_directory(folder))


def save_whole(checkpoint: str, base: str, folder: Path) -> None:
    """The parts of a ZeRO checkpoint as a model folder."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


class Completer:
    """`generate` as the kind of class that Ray Data makes once in every process."""

    def __init__(self, model: str, new_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.new_tokens = new_tokens
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        tokens = self.tokenizer(batch["text"].tolist(), return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = self.model.generate(
                **tokens, max_new_tokens=self.new_tokens, do_sample=False, pad_token_id=self.tokenizer.pad_token_id
            )
        new = out[:, tokens["input_ids"].shape[1] :]
        return {"text": batch["text"], "generated_text": self.tokenizer.batch_decode(new, skip_special_tokens=True)}
