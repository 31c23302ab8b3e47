"""Columns in the names of folders, as Hive, Spark and pyarrow write them: `year=2024/month=01/part-0.parquet`.

A table has them if every file is in folders with the same names before the "=", in the same order. The column is
int32 if every value is an integer, else a string; `__HIVE_DEFAULT_PARTITION__` is null.
"""

import logging
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

log = logging.getLogger(__name__)

NULL = "__HIVE_DEFAULT_PARTITION__"


def partitions_of(names: Sequence[str]) -> tuple[pa.Schema, list[dict[str, str | None]]]:
    """Return the columns in the files' names, relative to the table's folder, and each file's values as strings."""
    values = [_values(name) for name in names]
    keys = [tuple(name for name, _ in pairs) for pairs in values]
    if len({*keys}) != 1 or len({*keys[0]}) != len(keys[0]):
        if any(keys):
            folder = next(name for name, pairs in zip(names, values, strict=True) if pairs).rpartition("/")[0]
            log.warning("folders such as %r are not read as columns: not all files have the same ones", folder)
        return pa.schema([]), [{} for _ in names]
    found = [{name: None if text == NULL else text for name, text in pairs} for pairs in values]
    return pa.schema([(name, _type([one[name] for one in found])) for name in keys[0]]), found


def _values(name: str) -> list[tuple[str, str]]:
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return [(unquote(key), unquote(text)) for key, equals, text in pairs if equals and key]


def _type(texts: Sequence[str | None]) -> pa.DataType:
    if all(text is None for text in texts):
        return pa.string()
    try:
        pa.array(texts, pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32()
