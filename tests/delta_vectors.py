"""Deletion vectors of Delta tables, which deltalake reads and does not write."""

import base64
import json
import struct
import uuid
import zlib
from pathlib import Path
from typing import Any

import pyroaring

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(content: bytes) -> str:
    """Base85 as the Delta protocol writes it (ZeroMQ's alphabet)."""
    standard = base64.b85encode(content).decode()
    alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    return standard.translate(str.maketrans(alphabet, Z85))


def delete_by_vector(table: Path, path: str, rows: list[int], *, inline: bool = False) -> None:
    """Commit a version that deletes rows of one file by a deletion vector, by the protocol's description."""
    log = sorted((table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for file in log for line in file.read_text().splitlines()]
    add = [action["add"] for action in actions if action.get("add", {}).get("path") == path][-1]
    content = struct.pack("<IQI", 1681511377, 1, 0) + pyroaring.BitMap(rows).serialize()
    vector: dict[str, Any] = {"sizeInBytes": len(content), "cardinality": len(rows)}
    if inline:
        vector |= {"storageType": "i", "pathOrInlineDv": z85(content + bytes(-len(content) % 4))}
    else:
        name = uuid.uuid4()
        stored = b"\x01" + struct.pack(">I", len(content)) + content + struct.pack(">I", zlib.crc32(content))
        (table / f"deletion_vector_{name}.bin").write_bytes(stored)
        vector |= {"storageType": "u", "pathOrInlineDv": z85(name.bytes), "offset": 1}
    remove = {"path": path, "deletionTimestamp": 1, "dataChange": True, "partitionValues": add["partitionValues"]}
    commit = [{"commitInfo": {"operation": "DELETE"}}, {"remove": remove}, {"add": {**add, "deletionVector": vector}}]
    (table / "_delta_log" / f"{len(log):020}.json").write_text("\n".join(map(json.dumps, commit)))
