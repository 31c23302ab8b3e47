"""Search by meaning: the passages of a table become vectors in a LanceDB index, and queries find them again.

The vectors are scored exactly once, so the index has every passage once, even if this script was killed before. The
recall says how often the index finds the passage that belongs to a query, beside a search that compares all vectors.
"""

import sys
from pathlib import Path

import lancedb.index
import numpy as np
import pyarrow as pa

import torchlake as tl

FOUND = 10
"Passages that a search returns."
INDEXED = 10_000
"From this number of rows on, an index is faster than comparing all vectors."


def vectors(model: str, table: str, output: Path, text: str) -> tuple[pa.Array, np.ndarray]:
    """The ids, and the vectors (N, D), of the rows of a table that have text."""
    tl.predict(model, table, output, text=text, key="id")
    rows = tl.open(output).to_table()
    rows = rows.filter(rows["error"].is_null())
    flat = rows["embedding"].combine_chunks().flatten().to_numpy()
    return rows["id"].combine_chunks(), flat.reshape(len(rows), -1)


def fill(folder: Path, ids: pa.Array, found: np.ndarray) -> lancedb.table.Table:
    """A table of LanceDB with an index, in the place of an earlier one."""
    column = pa.FixedSizeListArray.from_arrays(pa.array(found.ravel(), pa.float32()), found.shape[1])
    table = lancedb.connect(folder).create_table("passages", pa.table({"id": ids, "vector": column}), mode="overwrite")
    if len(ids) >= INDEXED:
        table.create_index("vector", config=lancedb.index.HnswSq(distance_type="cosine"))
    return table


def main(model: str, table: str, folder: Path) -> None:
    """Embed the passages and the queries of a table with the columns id, query and passage; print the recall."""
    ids, passages = vectors(model, table, folder / "passages", "passage")
    wanted, queries = vectors(model, table, folder / "queries", "query")
    index = fill(folder / "lancedb", ids, passages)
    near = [
        index.search(query, vector_column_name="vector")
        .distance_type("cosine")
        .limit(FOUND)
        .to_arrow()["id"]
        .to_pylist()
        for query in queries
    ]
    recall = np.mean([one in found for one, found in zip(wanted.to_pylist(), near, strict=True)])
    exact = tl.evaluate(model, table, text="query", text_pair="passage")
    print(f"{index.count_rows()} passages; recall at {FOUND}: {recall:.4f}")
    print(f"comparing all vectors: {float(exact.metrics['recall_at_10']):.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
