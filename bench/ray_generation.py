"""What does your own language model cost on Ray, from lines to completed prompts, by hand and by torchlake?

The pipeline: lines are tokenized by Ray's workers; a small model of GPT-J's shape learns them under DeepSpeed
ZeRO-3 on two ranks (gloo, one thread each), each of which writes its part of a checkpoint after every epoch; the
checkpoint with the best perplexity on lines held out completes prompts in a batch job. By hand it is what Ray's
documentation shows (`_ray_by_hand.py`), each line a row, padded to the block as in Ray's example of GPT-J, or to the
longest row of its batch; torchlake packs lines into blocks, and learns every other line as the completion of the one
before it, too. Batches hold as many tokens, and optimizer, rate and schedule are the same. All run in turn on one warm
Ray, and transformers alone measures the perplexity of other lines afterwards.
"""

import json
import math
import shutil
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from _common import SCRATCH, finish, parser
from _on_engines import set_up
from _ray_by_hand import by_hand, lines_of
from _shakespeare import lines_of_shakespeare, num_tokens, perplexities, perplexity_of_answers, small_model

import torchlake as tl

BLOCK = 128
RATE = 1e-3
BATCH_ROWS = 128
NEW_TOKENS = 32
PROMPTS_AT_ONCE = 32
HOME = SCRATCH / "ray-generation"
COMPLETIONS = "torchlake, completions"
PERPLEXITIES = ("perplexity_blocks", "perplexity_lines", "perplexity_answers")

Setup = dict[str, Any]
Result = dict[str, Any]


def gptj(tokens: int, layers: int, width: int) -> Any:
    """GPT-J's shape: rotary positions, attention beside the feed-forward layer; without dropout."""
    from transformers import GPTJConfig, GPTJForCausalLM

    heads = max(1, width // 32)
    config = GPTJConfig(
        vocab_size=tokens,
        n_positions=2 * BLOCK,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        rotary_dim=width // heads // 2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return GPTJForCausalLM(config)


def by_torchlake(setup: Setup, *, completions: bool = False) -> Result:
    """`completions`: of two lines the second is learned, as the completion of the first."""
    engine, run = tl.Ray(processes=setup["ranks"]), HOME / "run"
    names = ("train", "validation")
    pairs: Any = {**{name: setup[f"{name}_pairs"] for name in names}, "completion": "completion"}
    done = tl.train(
        run=run,
        data=pairs if completions else {name: lines_of(setup, name) for name in names},
        model={"base": setup["model"], "task": "text_generation", "max_length": BLOCK},
        train={
            "strategy": "deepspeed",
            "deepspeed": {"stage": 3},
            "epochs": setup["epochs"],
            "batch_size": setup["blocks"],
            "learning_rate": RATE,
            "checkpoint_every": "epoch",
            "precision": "fp32",
        },
        engine=engine,
    )
    began = time.perf_counter()
    tl.predict(
        done.model,
        setup["prompts"],
        setup["written"],
        columns=["text"],
        max_new_tokens=NEW_TOKENS,
        engine=engine,
    )
    write_s = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    return {
        "model": done.model,
        "train_s": sum(line["seconds"] for line in steps),
        "write_s": write_s,
        "steps": len(steps),
        "padding": 1 - sum(line["tokens"] for line in steps) / sum(line["padded_tokens"] for line in steps),
    }


def main() -> None:
    options_parser = parser(
        __doc__, rows=8000, held_out=600, prompts=128, epochs=2, layers=4, width=128, processes=2, rounds=1
    )
    options_parser.add_argument("--contenders", nargs="*", default=[], help="their names in the table (default: all)")
    options = options_parser.parse_args()
    lines = lines_of_shakespeare()
    set_up()
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    measured, held_out = lines[-options.held_out :], lines[-2 * options.held_out : -options.held_out]
    learned, base = lines[: options.rows], HOME / "base"
    small_model(base, learned, partial(gptj, layers=options.layers, width=options.width))
    (HOME / "train.txt").write_text("\n".join(learned))
    (HOME / "validation.txt").write_text("\n".join(held_out))
    for name, some in (("train", learned), ("validation", held_out)):
        pairs = {"text": some[:-1:2], "completion": [f"\n{line}" for line in some[1::2]]}
        pq.write_table(pa.table(pairs), HOME / f"{name}.parquet")
    # Prompts of one line and of up to eight.
    counts = np.random.default_rng(0).integers(1, 9, options.prompts)
    prompts = ["\n".join(measured[at % len(measured) :][:count]) for at, count in enumerate(counts)]
    pq.write_table(pa.table({"text": prompts}), HOME / "prompts.parquet")
    tokens = num_tokens(base, learned)
    setup: Setup = {
        "home": str(HOME),
        "model": str(base),
        "train": str(HOME / "train.txt"),
        "validation": str(HOME / "validation.txt"),
        "train_pairs": str(HOME / "train.parquet"),
        "validation_pairs": str(HOME / "validation.parquet"),
        "prompts": str(HOME / "prompts.parquet"),
        "written": str(HOME / "written"),
        "ranks": options.processes,
        "epochs": options.epochs,
        "rate": RATE,
        "block": BLOCK,
        "batch_rows": BATCH_ROWS,
        "new_tokens": NEW_TOKENS,
        "prompts_at_once": PROMPTS_AT_ONCE,
        "blocks": max(1, round(tokens * BATCH_ROWS / len(learned) / BLOCK)),
        "steps": options.epochs * math.ceil(len(learned) / BATCH_ROWS),
    }
    ray.init(
        address="local",  # not a cluster that happens to be here
        num_cpus=3 * options.processes,  # by Ray's count: beside its workers TorchTrainer wants room for Ray Data's
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _system_config={"worker_niceness": 0},  # the others' processes are not nice to the machine's users either
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    contenders = {
        "by hand, padded to the block": partial(by_hand, pad_to=BLOCK),
        "by hand, padded to the batch's longest": partial(by_hand, pad_to=None),
        "torchlake": by_torchlake,
        COMPLETIONS: partial(by_torchlake, completions=True),
    }
    best: dict[str, Result] = {}
    for _ in range(options.rounds):
        for name in options.contenders or contenders:
            for left in ("run", "ray-train", "by-hand-model", "written"):
                shutil.rmtree(HOME / left, ignore_errors=True)
            began = time.perf_counter()
            result = contenders[name](setup)
            result["seconds"] = time.perf_counter() - began
            assert pq.read_table(setup["written"]).num_rows == options.prompts, "every prompt is completed once"
            model = result.pop("model")
            if name == COMPLETIONS:
                answers = [(one, f"\n{other}") for one, other in zip(measured[:-1:2], measured[1::2], strict=True)]
                result["perplexity_answers"] = perplexity_of_answers(model, answers)
            else:
                result |= perplexities(model, measured, BLOCK)
            print(f"  {name}: {result}", file=sys.stderr)
            if name not in best or result["seconds"] < best[name]["seconds"]:
                best[name] = result
    ray.shutdown()
    first = next(iter(best.values()))
    rows = [
        {
            "name": name,
            "seconds": result["seconds"],
            "ratio": first["seconds"] / result["seconds"],
            "train_tokens_per_s": options.epochs * tokens / result["train_s"],
            "train_ratio": first["train_s"] / result["train_s"],
            **{key: result.get(key) for key in ("write_s", "padding", "steps", *PERPLEXITIES)},
        }
        for name, result in best.items()
    ]
    note = (
        f"{options.rows:,} lines of Shakespeare ({tokens:,} tokens), {options.epochs} epochs, GPT-J's shape with "
        f"{options.layers} layers of {options.width}, ZeRO-3 on {options.processes} ranks of one thread, fp32, "
        f"{options.prompts} prompts, {NEW_TOKENS} new tokens, greedy; ratios to the first, best of {options.rounds}"
    )
    finish(
        "ray_generation", rows, as_json=options.json, note=note, keep=options.rows == 8000 and not options.contenders
    )


if __name__ == "__main__":
    main()
