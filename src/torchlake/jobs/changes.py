"""Find what changes of rows come to: the rows that only the last version of a table has, or only the first one had."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.tables.arrays import from_numpy
from torchlake.tables.hashes import column_hashes, combined
from torchlake.tables.sources._interface import ChangedRows


def net_changes(changed: ChangedRows, key: str) -> tuple[pa.Table, pa.Table]:
    """Return the rows that were added more often than removed, and those that were removed more often.

    A row that was added as often as it was removed has not changed, whatever the order was: the order in one version is
    not known, and a key may have had several rows for a while. A row that was added twice is returned twice, so that
    its key is found to be not unique. Rows are compared by their keys and by hashes of all columns.
    """
    rows, removed = changed.rows, np.asarray(changed.removed)
    hashed = [combined(np.column_stack([column_hashes(one) for one in batch.columns])) for batch in rows.to_batches()]
    places = np.arange(len(rows))
    columns = {
        "key": rows[key],
        "row": from_numpy(np.concatenate([np.zeros(0, np.uint64), *hashed])),
        "count": from_numpy(np.where(removed, -1, 1)),
        "added": from_numpy(places, null=removed),
        "removed": from_numpy(places, null=~removed),
    }
    sums = [("count", "sum"), ("added", "min"), ("added", "max"), ("removed", "max")]
    found = pa.table(columns).group_by(["key", "row"]).aggregate(sums)
    once, twice = (found.filter(pc.greater(found["count_sum"], least)) for least in (0, 1))
    added = pa.chunked_array([*once["added_max"].chunks, *twice["added_min"].chunks], pa.int64())
    gone = found.filter(pc.less(found["count_sum"], 0))["removed_max"]
    return rows.take(added.take(pc.sort_indices(added))), rows.take(gone.take(pc.sort_indices(gone)))
