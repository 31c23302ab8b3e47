"""Fine-tune a language model with DeepSpeed ZeRO-3 on Ray, then let it complete prompts in one batch job.

    python examples/ray_generation.py MODEL LINES OUTPUT --prompts "First Citizen:" "ROMEO:"

LINES is a table with the column text (Parquet, CSV, JSON lines). Ray's workers tokenize it in parallel; the ranks share
weights, gradients and moments, and each writes its own part of every checkpoint; the epoch with the best perplexity is
what OUTPUT/model has. Run it again after a crash: it continues. `--address auto` joins the Ray cluster of this machine.
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import torchlake as tl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("lines", help="table of lines")
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", nargs="+", default=["First Citizen:"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus-per-process", type=float)
    parser.add_argument("--address")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="blocks of one step, over all ranks")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    args = parser.parse_args()

    engine = tl.Ray(args.address, processes=args.processes, gpus_per_process=args.gpus_per_process)
    run = tl.train(
        data={"train": args.lines, "validation": {"fraction": 0.1}},
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

    prompts = args.output / "prompts.parquet"
    pq.write_table(pa.table({"text": args.prompts}), prompts)
    written = args.output / "completed"
    tl.predict(
        run.model, prompts, written, columns=["text"], max_new_tokens=40, temperature=0.8, seed=1, engine=engine,
        overwrite=True,
    )  # fmt: skip
    for row in pq.read_table(written).to_pylist():
        print(f"{row['text']}{row['generated_text']}")


if __name__ == "__main__":
    main()
