"""Leave out files without any requested row, by the statistics of a table's log and the values of its partitions.

Row groups are left out by the statistics in their files: `tables/selecting.py`.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from torchlake.tables.selection.binding import bind
from torchlake.tables.selection.bounds import constant_bounds, outcomes
from torchlake.tables.selection.conditions import Condition
from torchlake.tables.sources._interface import SourceTable

UNREAD = "unread_files"
"Stands in place of a reason for files whose rows are not counted."


def possible_files(source: SourceTable, asked: Condition | None, where: str) -> tuple[SourceTable, Counter[str]]:
    """Return the table without files in which the condition is true for no row, and their rows by reason, or `UNREAD`.

    At least one file stays, for the columns of the table.
    """
    left_out: Counter[str] = Counter()
    known = source.schema if source.schema is not None else source.partitions
    if asked is None or not source.files or not known.names:
        return source, left_out
    bounds = {**source.bounds}
    for column in source.partitions:
        values = [one.view.constants.get(column.name) for one in source.files]
        bounds[column.name] = constant_bounds(values, column.type)
    bound = bind(asked, known, where, untyped=True, partial=True)
    possible = outcomes(bound, bounds, len(source.files)).true
    possible[0] |= not possible.any()
    for place in np.flatnonzero(~possible):
        one = source.files[place]
        if one.rows is None:
            left_out[UNREAD] += 1
        else:
            deleted = int.from_bytes(one.deleted, "little").bit_count()
            left_out.update({"where": one.rows - deleted, "deleted": deleted})
    return replace(source, files=tuple(one for one, may in zip(source.files, possible, strict=True) if may)), left_out
