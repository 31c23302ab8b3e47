"""Fine-tune a language model with DeepSpeed ZeRO-3 on Ray, then let it complete prompts in one batch job.

    python examples/ray_generation.py MODEL TABLE OUTPUT --prompts "First Citizen:" "ROMEO:"
    python examples/ray_generation.py MODEL TABLE OUTPUT --text line --completion next_line
    python examples/ray_generation.py MODEL TABLE OUTPUT --text messages

TABLE (Parquet, CSV, JSON lines) has lines, prompts with completions, or conversations, whose answers are learned; these
need a model with a chat template. Ray's workers tokenize it in parallel; the ranks share weights, gradients and
moments, and each writes its own part of every checkpoint; the epoch with the best perplexity is what OUTPUT/run/model
has. Run it again after a crash: it continues. `--address auto` joins the Ray cluster of this machine.
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import torchlake as tl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("table", help="table of lines, prompts or conversations")
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", default="text", help="column of lines, prompts or conversations (messages)")
    parser.add_argument("--completion", help="column of the completions; the loss is over them")
    parser.add_argument("--prompts", nargs="+", default=["First Citizen:"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus-per-process", type=float)
    parser.add_argument("--address")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="blocks of one step, over all ranks")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    args = parser.parse_args()

    chats = args.text in ("messages", "conversations")
    engine = tl.Ray(args.address, processes=args.processes, gpus_per_process=args.gpus_per_process)
    run = tl.train(
        data={
            "train": args.table,
            "validation": {"fraction": 0.1},
            "text": args.text,
            "completion": args.completion,
            "learn": "assistant" if chats else None,
        },
        model={"base": args.model, "task": "text_generation", "max_length": args.block},
        train={
            "strategy": "deepspeed",
            "deepspeed": {"stage": 3},
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "learning_rate": args.learning_rate,
        },
        engine=engine,
        run=args.output / "run",
    )
    print(f"{run.steps} steps, perplexity {run.metrics['perplexity']:.1f} on validation")

    asked = [[{"role": "user", "content": prompt}] for prompt in args.prompts] if chats else args.prompts
    prompts, written = args.output / "prompts.parquet", args.output / "completed"
    pq.write_table(pa.table({args.text: asked}), prompts)
    tl.predict(
        run.model, prompts, written, columns=[args.text], max_new_tokens=40, temperature=0.8, seed=1, engine=engine,
        overwrite=True,
    )  # fmt: skip
    for prompt, text in zip(args.prompts, pq.read_table(written)["generated_text"].to_pylist(), strict=True):
        print(f"{prompt}{text}")


if __name__ == "__main__":
    main()
