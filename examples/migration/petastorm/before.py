"""Petastorm: a linear regression on a Parquet table, each rank reading its row groups.

    torchrun --nproc-per-node 2 examples/migration/petastorm/before.py TABLE

TABLE is a Parquet file with the columns id, x and y. `requirements.txt` has versions that work together.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ids", action="store_true", help="print the ids that each rank read, in its order")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(2, dtype=torch.float64)
    for epoch in range(args.epochs):
        reader = make_batch_reader(
            args.table.resolve().as_uri(),
            cur_shard=rank,
            shard_count=size,
            shuffle_row_groups=True,
            seed=epoch,
            num_epochs=1,
            reader_pool_type="dummy",  # with the default, threads, a rank got no rows in some epochs
        )
        ids: list[int] = []
        sums = torch.zeros(4, dtype=torch.float64)  # of gradients (2), of squared errors, of rows
        with BatchedDataLoader(reader, batch_size=64) as batches:
            for batch in batches:
                x = torch.stack([batch["x"], torch.ones_like(batch["x"])])
                errors = weights @ x - batch["y"]
                sums += torch.cat([2 * x @ errors, errors.square().sum()[None], torch.tensor([float(len(errors))])])
                ids += batch["id"].tolist()
        dist.all_reduce(sums)
        weights -= 0.1 * sums[:2] / sums[3]
        parts: list[list[int]] = [[]] * size
        dist.all_gather_object(parts, ids)
        if rank == 0:
            print(f"epoch {epoch + 1}, {int(sums[3])} rows, loss {(sums[2] / sums[3]).item():.6f}", flush=True)
            if args.ids:
                print(f"epoch {epoch + 1}, ids {parts}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
