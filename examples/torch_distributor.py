"""torchlake's training with ranks that pyspark's TorchDistributor starts, for platforms that support nothing else.

    python examples/torch_distributor.py MODEL TABLE RUN          (or spark-submit, or the cells of a notebook)

TABLE is Parquet with the columns text and label; the three paths are ones that all executors reach. A rank that fails
is a RankFailed, after which `train` starts the ranks again from the newest checkpoint, `train.max_restarts` times.
"""

import argparse

from pyspark.sql import SparkSession

import torchlake as tl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("table", help="Parquet file or folder")
    parser.add_argument("run", help="run folder")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()

    session = SparkSession.builder.getOrCreate()
    run = tl.train(
        data={"train": args.table},
        model={"base": args.model},
        train={"epochs": args.epochs, "batch_size": args.batch_size, "learning_rate": args.learning_rate},
        engine=tl.Spark(session, processes=args.processes, launcher="torch_distributor"),
        run=args.run,
    )
    print(f"{run.steps} steps, accuracy {run.metrics['accuracy']:.3f} on validation, model in {run.model}")


if __name__ == "__main__":
    main()
