"""How fast does a language model learn and write, beside Hugging Face's own loops, and how well after as many tokens?

A small model of GPT-2's shape from random weights, on lines of Shakespeare. Training: one pass over the same lines,
each padded to the longest of its batch (Trainer) or packed end to end (torchlake), batches of as many tokens.
Perplexity is that of held-out lines, measured by transformers alone for both: end to end in blocks, and each line by
itself. Writing: prompts of unequal length, continued greedily by `generate` in arrival order and by torchlake, both
with the untrained model, which ends no text early. The contenders run in turn, each in a process of its own, one core.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser
from _contender import ONE_THREAD
from _fresh import alone
from _shakespeare import lines_of_shakespeare, num_tokens, perplexities, small_model

BLOCK = 128
RATE = 1e-3
NEW_TOKENS = 32
TRAINER_ROWS = 128
LIMIT_S = 1_500
HOME = SCRATCH / "text-generation"

Result = dict[str, Any]


def gpt2(tokens: int, layers: int, width: int) -> Any:
    """GPT-2's shape, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=tokens,
        n_positions=2 * BLOCK,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 32),
        bos_token_id=0,
        eos_token_id=0,
        **drops,
    )
    return GPT2LMHeadModel(config)


def train_torchlake(setup: dict[str, Any]) -> Result:
    import torchlake as tl

    run = HOME / "run"
    shutil.rmtree(run, ignore_errors=True)
    done = tl.train(
        run=run,
        data={"train": setup["table"], "validation": None},
        model={"base": setup["model"], "task": "text_generation", "max_length": BLOCK},
        train={
            "epochs": 1,
            "batch_size": setup["blocks"],
            "learning_rate": RATE,
            "checkpoint_every": "10h",
            "precision": "fp32",
        },
    )
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    computed = sum(line["padded_tokens"] for line in steps)
    return {
        "seconds": sum(line["seconds"] for line in steps),
        "steps": len(steps),
        "padding": 1 - sum(line["tokens"] for line in steps) / computed,
        **perplexities(done.model, setup["held_out"], BLOCK),
    }


def train_trainer(setup: dict[str, Any]) -> Result:
    """Hugging Face's Trainer with its collator for language models: rows shuffled, padded to a batch's longest."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(setup["model"])
    end = tokenizer.eos_token_id
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})  # not the end token: the collator masks what looks like it
    rows = [
        {"input_ids": [*ids, end]} for ids in tokenizer(pq.read_table(setup["table"])["text"].to_pylist())["input_ids"]
    ]
    model = AutoModelForCausalLM.from_pretrained(setup["model"])
    model.resize_token_embeddings(len(tokenizer))
    collate, computed = DataCollatorForLanguageModeling(tokenizer, mlm=False), list[int]()

    def counted(examples: list[Any]) -> Any:
        batch = collate(examples)
        computed.append(batch["input_ids"].numel())
        return batch

    arguments = TrainingArguments(
        output_dir=str(HOME / "trainer"),
        num_train_epochs=1,
        per_device_train_batch_size=TRAINER_ROWS,
        learning_rate=RATE,
        weight_decay=0.01,
        warmup_steps=round(0.1 * len(rows) / TRAINER_ROWS),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    done = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=counted).train()
    model.save_pretrained(HOME / "trainer-model")
    AutoTokenizer.from_pretrained(setup["model"]).save_pretrained(HOME / "trainer-model")
    return {
        "seconds": done.metrics["train_runtime"],
        "steps": len(computed),
        "padding": 1 - sum(len(row["input_ids"]) for row in rows) / sum(computed),
        **perplexities(HOME / "trainer-model", setup["held_out"], BLOCK),
    }


def write_generate(setup: dict[str, Any]) -> Result:
    """transformers' `generate`, batches in arrival order, padded on the left to the longest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(setup["model"])
    tokenizer = AutoTokenizer.from_pretrained(setup["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts, new, computed, tokens = [], 0, 0, 0
    began = time.perf_counter()
    for first in range(0, len(setup["prompts"]), setup["batch"]):
        batch = tokenizer(setup["prompts"][first : first + setup["batch"]], return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(
                **batch, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        written = out[:, batch["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
        new += int((written != tokenizer.eos_token_id).sum())
        computed, tokens = computed + batch["input_ids"].numel(), tokens + int(batch["attention_mask"].sum())
    return {"seconds": time.perf_counter() - began, "new": new, "padding": 1 - tokens / computed, "texts": texts}


def write_torchlake(setup: dict[str, Any]) -> Result:
    from _scoring_torchlake import read_texts

    from torchlake.models.generation import GenerationOptions
    from torchlake.scoring.rows import ScoringSettings
    from torchlake.scoring.scorer import Scorer

    scorer = Scorer(
        settings=ScoringSettings(
            model=setup["model"],
            runtime="eager",
            text="text",
            keep=(),
            key=None,
            prefix="",
            all_probabilities=False,
            null="error",
            row_timeout_s=600.0,
            batch_tokens=None,
            generation=GenerationOptions(max_new_tokens=NEW_TOKENS),
        )
    )
    began = time.perf_counter()
    work = read_texts(scorer, setup["prompts"])
    table = scorer.score(work)
    return {
        "seconds": time.perf_counter() - began,
        "new": sum(table["generated_tokens"].to_pylist()),
        "padding": 1 - int(work.tokens.lengths.sum()) / scorer.padded_tokens,
        "texts": table["generated_text"].to_pylist(),
    }


def rows_of(
    kind: str, contenders: list[tuple[str, Callable[..., Result], dict[str, Any]]], tokens: int | None, rounds: int
) -> list[dict[str, Any]]:
    """A row for each contender, the best of its rounds; ratios of tokens a second to the first one's.

    `tokens` is what training goes through; where it is None, tokens are those that were written.
    """
    best: dict[str, Result] = {}
    for _ in range(rounds):
        for name, work, setup in contenders:
            result = alone(work, setup, out=HOME / "out.json", limit_s=LIMIT_S)
            print(f"  {name}: { {key: value for key, value in result.items() if key != 'texts'} }", file=sys.stderr)
            if name not in best or result.get("seconds", 1e9) < best[name].get("seconds", 1e9):
                best[name] = result
    first = best[contenders[0][0]]
    rows = []
    for name, _, _ in contenders:
        result = best[name]
        row: dict[str, Any] = {"name": f"{kind}: {name}"}
        if "seconds" in result:
            row["tokens_per_s"] = (tokens or result["new"]) / result["seconds"]
            if "seconds" in first:
                row["ratio"] = row["tokens_per_s"] / ((tokens or first["new"]) / first["seconds"])
            row |= {name: result.get(name) for name in ("padding", "steps", "perplexity_blocks", "perplexity_lines")}
            if "texts" in result and "texts" in first:
                row["same_texts"] = float(
                    np.mean([a == b for a, b in zip(result["texts"], first["texts"], strict=True)])
                )
        rows.append({**row, **({"reason": result["reason"]} if "reason" in result else {})})
    return rows


def main() -> None:
    options = parser(__doc__, rows=8000, held_out=600, prompts=256, layers=4, width=128, rounds=1).parse_args()
    os.environ.update(ONE_THREAD)
    HOME.mkdir(parents=True, exist_ok=True)
    lines = lines_of_shakespeare()
    learned, held_out = lines[: options.rows], lines[-options.held_out :]
    table, model = HOME / "lines.parquet", HOME / "base"
    pq.write_table(pa.table({"text": learned}), table)
    small_model(model, learned, partial(gpt2, layers=options.layers, width=options.width))
    tokens = num_tokens(model, learned)
    blocks = max(1, round(tokens * TRAINER_ROWS / len(learned) / BLOCK))
    setup = {"model": str(model), "table": str(table), "held_out": held_out, "blocks": blocks}
    contenders = [("Hugging Face Trainer, padded", train_trainer, setup), ("torchlake, packed", train_torchlake, setup)]
    rows = rows_of("training", contenders, tokens, options.rounds)
    # Prompts of one line and of up to eight.
    counts = np.random.default_rng(0).integers(1, 9, options.prompts)
    prompts = ["\n".join(held_out[at % len(held_out) :][:count]) for at, count in enumerate(counts)]
    asked = {"model": str(model), "prompts": prompts}
    writers = [
        (f"generate, arrival order, {batch} at once", write_generate, {**asked, "batch": batch}) for batch in (32, 128)
    ]
    rows += rows_of("writing", [*writers, ("torchlake", write_torchlake, asked)], None, options.rounds)
    note = (
        f"{options.rows:,} lines of Shakespeare ({tokens:,} tokens), GPT-2's shape with {options.layers} layers of "
        f"{options.width}, blocks of {BLOCK}, {options.prompts} prompts, {NEW_TOKENS} new tokens, greedy; one core, "
        f"fp32; ratios to the first row of each kind, best of {options.rounds}"
    )
    finish("text_generation", rows, as_json=options.json, note=note, keep=options.rows == 8000)


if __name__ == "__main__":
    main()
