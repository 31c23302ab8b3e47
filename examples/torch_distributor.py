"""torchlake's training under a TorchDistributor of one's own, for those whose jobs start ranks that way already.

    python examples/torch_distributor.py MODEL TABLE RUN          (or spark-submit, or the cells of a notebook)

An engine has three methods. This one hands `launch` to TorchDistributor and leaves the rest to torchlake's own engine
for Spark. TABLE is Parquet with the columns text and label; the three paths are ones that all executors reach.
"""

import argparse
from typing import Any

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

import torchlake as tl
from torchlake.engines import Engine


class Distributed(Engine):
    """Ranks as TorchDistributor starts them; chunk jobs (here: tokenising) on the same session."""

    def __init__(self, session: SparkSession, processes: int, use_gpu: bool = False) -> None:
        self.processes = processes
        self.use_gpu = use_gpu
        self.spark = tl.Spark(session, processes=processes)

    def launch(self, fn: Any, *args: Any, processes: int | None = None, **options: Any) -> Any:
        """`fn` is one rank of the training: the loop, which finds its place in torchrun's variables."""
        distributor = TorchDistributor(
            num_processes=processes or self.processes, local_mode=False, use_gpu=self.use_gpu
        )
        try:
            return distributor.run(fn, *args)
        except Exception as error:
            # A RankFailed makes train start the ranks again from the newest checkpoint, train.max_restarts times.
            raise tl.errors.RankFailed(f"TorchDistributor: {error}", rank=0) from error

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        return self.spark.run_chunks(*args, **options)

    def map_frame(self, *args: Any) -> Any:
        return self.spark.map_frame(*args)


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
        engine=Distributed(session, args.processes),
        run=args.run,
    )
    print(f"{run.steps} steps, accuracy {run.metrics['accuracy']:.3f} on validation, model in {run.model}")


if __name__ == "__main__":
    main()
