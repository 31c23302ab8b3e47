"""Your own Ray Data pipeline around a model: numbers scaled and put together, texts tokenized and scored.

    python examples/ray_pipeline.py MODEL TABLE OUTPUT --numbers price stars

The model's two stages stand among `map_batches` steps like any other: tokenizing runs on CPUs, scoring where the GPUs
are, and Ray Data streams blocks from one to the next. OUTPUT is a folder of Parquet files, in the order of Ray Data.
For every row exactly once, in a table that a crash cannot tear: `tl.predict(MODEL, TABLE, OUTPUT, engine=tl.Ray())`.
"""

import argparse
from functools import partial

import numpy as np
import pyarrow as pa
import ray

import torchlake as tl


def scaled(batch: pa.Table, columns: list[str], means: dict[str, float], deviations: dict[str, float]) -> pa.Table:
    """Each column minus its mean, over its deviation."""
    for name in columns:
        values = (batch[name].to_numpy() - means[name]) / (deviations[name] or 1.0)
        batch = batch.set_column(batch.column_names.index(name), name, pa.array(values))
    return batch


def together(batch: pa.Table, columns: list[str]) -> pa.Table:
    """The columns as one, a list of numbers for each row."""
    matrix = np.stack([batch[name].to_numpy() for name in columns], axis=1)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), len(columns))
    return batch.drop_columns(columns).append_column("features", lists)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("table", help="Parquet file or folder")
    parser.add_argument("output")
    parser.add_argument("--numbers", nargs="+", default=[], help="columns to scale and put together")
    parser.add_argument("--prefix", default="", help="before the names of predicted columns, if the table has a label")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus-per-process", type=float)
    args = parser.parse_args()

    tokenize, score = tl.ray_stages(
        args.model, prefix=args.prefix, processes=args.processes, gpus_per_process=args.gpus_per_process
    )
    rows = ray.data.read_parquet(args.table)
    if args.numbers:
        means = {name: rows.mean(name) for name in args.numbers}
        deviations = {name: rows.std(name) for name in args.numbers}
        scale = partial(scaled, columns=args.numbers, means=means, deviations=deviations)
        rows = rows.map_batches(scale, batch_format="pyarrow")
        rows = rows.map_batches(partial(together, columns=args.numbers), batch_format="pyarrow")
    score(tokenize(rows)).write_parquet(args.output)


if __name__ == "__main__":
    main()
