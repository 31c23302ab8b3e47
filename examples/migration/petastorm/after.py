"""The same regression with pyarrow as the reader; `torchlake launch` starts the ranks.

    torchlake launch examples/migration/petastorm/after.py --processes 2 -- TABLE
    torchlake launch examples/migration/petastorm/after.py --processes 2 -- TABLE --epoch 1 --skip 40     # continues

The order of rows depends on the epoch alone. Each rank takes one contiguous part of it, so the parts differ by at most
one row. `--skip` rows of each rank's part were read before an interruption and are not read again.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist


def read_part(path: Path, rank: int, size: int, epoch: int, skip: int = 0) -> Iterator[pa.Table]:
    """Yield the rows of this rank in this epoch, one row group at a time, without the first `skip` rows."""
    with pq.ParquetFile(path) as file:
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        first, last = (sum(rows) * number // size for number in (rank, rank + 1))
        first = min(first + skip, last)
        begin = 0
        for group in np.random.default_rng([0, epoch]).permutation(len(rows)):
            start, stop = max(first - begin, 0), min(last - begin, rows[group])
            if start < stop:
                order = np.random.default_rng([1, epoch, group]).permutation(rows[group])
                yield file.read_row_group(group).take(pa.array(order[start:stop]))
            begin += rows[group]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epoch", type=int, default=0, help="epoch to begin with, counted from 0")
    parser.add_argument("--skip", type=int, default=0, help="rows of that epoch that each rank has read before")
    parser.add_argument("--ids", action="store_true", help="print the ids that each rank read, in its order")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(2, dtype=torch.float64)
    for epoch in range(args.epoch, args.epochs):
        ids: list[int] = []
        sums = torch.zeros(4, dtype=torch.float64)  # of gradients (2), of squared errors, of rows
        for batch in read_part(args.table, rank, size, epoch, args.skip if epoch == args.epoch else 0):
            x = torch.tensor(np.stack([batch["x"], np.ones(len(batch))]))
            errors = weights @ x - torch.tensor(batch["y"].to_numpy())
            sums += torch.cat([2 * x @ errors, errors.square().sum()[None], torch.tensor([float(len(errors))])])
            ids += batch["id"].to_pylist()
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
