"""The same training with `torchlake.train`.

python examples/migration/hugging_face_trainer/after.py MODEL TABLE RUN
"""

import argparse
import json

import torchlake as tl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("table")
    parser.add_argument("run", help="run folder; the model is in its folder `model`")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()

    run = tl.train(
        data={"train": args.table, "validation": None},
        model={"base": args.model},
        train={
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "learning_rate": args.learning_rate,
            "warmup": 0,
            "precision": "fp32",
        },
        engine=tl.Local(processes=2),
        run=args.run,
    )
    for line in map(json.loads, (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        print(f"step {line['step']}, loss {line['loss']:.6f}")


if __name__ == "__main__":
    main()
