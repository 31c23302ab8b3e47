"""A sample of a stored table: some rows of chunks that are spread evenly over it.

Nothing is random, so the same table gives the same sample. Cost: at most 32,768 rows in memory, and the footers
(Parquet, Arrow) or one pass (CSV, JSON lines) of the table.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import Plan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table

CHUNK_ROWS = 1_024
CHUNKS_READ = 32


def sample_rows(table: Table, columns: Sequence[str]) -> tuple[pa.Table, Plan]:
    """Return the columns of at most 32,768 rows in the table's order, all of a smaller table, and the plan."""
    plan = plan_chunks(table, columns=columns, chunk_rows=CHUNK_ROWS, hashed=False)
    reader = ChunkReader(columns)
    picked = [plan.chunks[place] for place in evenly_spaced(len(plan.chunks), min(len(plan.chunks), CHUNKS_READ))]
    rows = pa.concat_tables([reader.read(chunk)[0] for chunk in picked]) if picked else plan.schema.empty_table()
    reader.close()
    return rows, plan


def evenly_spaced(rows: int, wanted: int) -> np.ndarray:
    """Return `wanted` positions spread evenly over `rows`: the middles of as many equal parts."""
    return ((np.arange(wanted) + 0.5) * rows / max(1, wanted)).astype(np.int64)
