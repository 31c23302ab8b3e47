"""How fast do rows come from token Parquet into padded batches of 64, on one core?

The peer is what a notebook does: Parquet to Python lists, torch's DataLoader with a collate function that pads.
"""

import os
import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import SCRATCH, arguments, finish

from torchlake.data.batching import pad
from torchlake.data.loading import build_cache, open_tokens
from torchlake.data.order import epoch_batches
from torchlake.outputs.find import folder_output
from torchlake.outputs.parts import part_name
from torchlake.outputs.transaction import WriteRequest
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.table import open_table


def write_tokens(rows: int):
    """Token Parquet of random rows, 4 to 60 tokens long."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(4.0, 7.0, rows), 4, 60).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(5, 30000, offsets[-1], dtype=np.int32)
    table = pa.table(
        {
            "row_id": [str(row) for row in range(rows)],
            "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
            "length": lengths,
            "target": rng.integers(0, 2, rows),
            "error": pa.nulls(rows, pa.string()),
        }
    )
    source, output = SCRATCH / "tokens-source.parquet", SCRATCH / "tokens"
    SCRATCH.mkdir(exist_ok=True)
    shutil.rmtree(output, ignore_errors=True)
    pq.write_table(table, source)
    plan = plan_chunks(open_table(source), columns=table.column_names)
    with folder_output(output).begin(WriteRequest(plan=plan, fingerprint={}, schema=table.schema)) as out:
        parts = [
            out.parts.write(part_name(plan, chunk, {}), table.slice(chunk.first_row, chunk.rows), chunk=chunk.index)
            for chunk in out.pending
        ]
        out.commit(parts, {})
    return output


def ours(folder) -> int:
    """From Parquet to batches, the memory-mapped cache is built again."""
    cache = SCRATCH / "tokens-cache"
    shutil.rmtree(cache, ignore_errors=True)
    build_cache(folder, cache)
    table = open_tokens(cache)
    tokens = 0
    for batch in epoch_batches(table.tokens.lengths, batch_size=64, seed=0, epoch=0):
        ids, _ = pad(table.tokens, batch, 0)
        tokens += torch.from_numpy(ids).numel()
    return tokens


def peer(folder, rows: int) -> int:
    columns = pq.read_table(folder, columns=["input_ids", "target"]).slice(0, rows).to_pydict()
    dataset = list(zip(columns["input_ids"], columns["target"], strict=True))

    def collate(batch):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row, _ in batch], batch_first=True)
        return ids, (ids != 0).long(), torch.tensor([target for _, target in batch])

    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=collate)
    return sum(ids.numel() for ids, _, _ in loader)


def main() -> None:
    options = arguments(__doc__, rows=1_000_000, rounds=3)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    folder = write_tokens(options.rows)
    share = options.rows // 10
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        began = time.perf_counter()
        ours(folder)
        seconds["ours"].append(time.perf_counter() - began)
        began = time.perf_counter()
        peer(folder, share)
        seconds["peer"].append((time.perf_counter() - began) * 10)
    ours_s, peer_s = min(seconds["ours"]), min(seconds["peer"])
    finish(
        "loading",
        [
            {"name": "pyarrow to lists, DataLoader, pad_sequence", "rows_per_s": options.rows / peer_s, "ratio": 1.0},
            {"name": "torchlake", "rows_per_s": options.rows / ours_s, "ratio": peer_s / ours_s},
        ],
        as_json=options.json,
        note=f"{options.rows:,} rows of 4 to 60 tokens (a tenth of them for the peer), batches of 64, one core, "
        f"best of {options.rounds}",
    )


if __name__ == "__main__":
    main()
