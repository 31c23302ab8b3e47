"""Safety checks of a model folder: data only, of limited size, without references to other places.

`check_folder` runs before any library reads the folder. It does not open weights, limits size and depth of a file
before parsing it, and refuses all that could run code or refer to something outside the folder:

    weights         safetensors only; a pickle anywhere in the folder is refused, even if unused
    configuration   no key that names code, and none that makes transformers download a kernel
    files           plain files; no link out of the folder (except a hub snapshot's links to its blobs), and no file
                    name in a configuration that leads out of it
    sizes           JSON: bytes and depth; safetensors: the length in the header

Cost: one read of the JSON files, well under a second for the largest tokenizer.json; weights are not read. Each
version of a file is read once per process.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from torchlake.errors import DataError, UnsafeError, need_library
from torchlake.models.adapters import base
from torchlake.models.folders import INDEX, VOCABULARY_FILES, WEIGHTS, weight_files
from torchlake.storage.versions import Version, settled_version_of

MAX_ENTRIES = 10_000
MAX_DEPTH = 64
MAX_CONFIG_BYTES = 4 << 20
MAX_VOCABULARY_BYTES = 128 << 20
MAX_HEADER_BYTES = 16 << 20
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")
VOCABULARY_SUFFIXES = frozenset({".txt", *(one[1:] for one in VOCABULARY_FILES)})

# Formats whose usual loader is pickle. An OpenVINO `x.bin` beside its `x.xml` is raw numbers, and allowed; so is
# CTranslate2's `model.bin` among the exports of runtimes, by its first bytes.
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill"})
CODE_KEYS = frozenset(
    {"auto_map", "custom_pipelines", "trust_remote_code", "_attn_implementation_internal",
     "_experts_implementation_internal", "use_kernels", "kernels", "kernel_config", "kernel_mapping", "_target_",
     "py/object", "__reduce__"}
)  # fmt: skip
# Kernels are compiled code. Where the library `kernels` is installed, transformers (5.5 to 5.23) downloads them for
# flash attention that is not installed, for names with a slash, for other kinds of experts than these ...
IMPLEMENTATIONS = frozenset({None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"})
# ... for many values of quantization_config, and for these models as they are built.
MODELS_WITH_KERNELS = frozenset({"mra", "rwkv", "sam3_video", "yoso"})
NAMES_FILE = re.compile(r"(?:_files?|_spm|(?<!name_or)_path|^vocab|^merges|^transformers_weights)$")
NOT_OPENED = "special_tokens_map_file"
"Older versions of transformers wrote this path of another machine into tokenizer_config.json; no version opens it."
BRACKETS = np.zeros(256, dtype=np.int8)
"By byte: how much deeper a JSON file is behind it."
BRACKETS[list(b"[{")], BRACKETS[list(b"]}")] = 1, -1


def _is_raw(folder: Path, file: Path) -> bool:
    """Return whether a file with the name of a pickle holds the raw numbers of an export."""
    if file.suffix == ".bin" and file.with_suffix(".xml").exists():
        return True
    if file.name != "model.bin" or file.relative_to(folder).parts[0] != "runtimes":
        return False
    with file.open("rb") as opened:
        head = opened.read(4)
    # The number of the format, in four bytes; empty while it is written. Pickles and zip files begin otherwise.
    return head[1:] in (b"", b"\0\0\0")


def check_folder(path: str | Path, *, weights: bool = True) -> None:
    """Refuse a model folder that is not plain data; with `weights=False` the folder may contain only a tokenizer.

    Raises UnsafeError with file and rule for anything that could run code or leads out of the folder; DataError for
    files that are missing, too large, too deep, or whose format is not that of their name.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such model folder")
    # All files are listed before one is read: a refused link must not be followed first.
    files = list(_files(folder))
    for file in files:
        # Even unused ones: libraries fall back to them, for example if the safetensors file is removed later.
        if file.suffix.lower() in PICKLES and not _is_raw(folder, file):
            raise UnsafeError(
                f"{file}: refused by the rule 'no pickles': loading such a file can run code. torchlake reads weights "
                "from *.safetensors only. Convert them (save_pretrained of transformers does), or move the file away."
            )
        if file.suffix == ".safetensors":
            check_safetensors(file)
        if file.suffix in VOCABULARY_SUFFIXES and file.stat().st_size > MAX_VOCABULARY_BYTES:
            raise DataError(f"{file}: refused by the rule 'bounded vocabulary': at most {MAX_VOCABULARY_BYTES:,} bytes")
    # Only of the top folder: transformers reads no other, and exports below it hold JSON of other tools.
    values = {file.name: _check_json(file) for file in files if file.suffix == ".json" and file.parent == folder}
    adapter = base.is_adapter(folder)
    if adapter:
        base.check_config(folder / base.CONFIG, values[base.CONFIG])
    elif base.CONFIG in values:
        raise DataError(
            f"{folder / base.CONFIG}: the folder holds an adapter, which refers to another model. "
            "Merge it into its base (merge_and_unload of peft) and save the result."
        )
    for name in values:
        if name.endswith(".safetensors.index.json"):
            _check_index(folder / name, values[name])
    counted = weight_files(folder)
    if weights and adapter:
        need_library("peft", "lora", f"{folder}: an adapter")
        base.find_base(folder)
    elif weights and not counted:
        raise DataError(f"{folder}: has no weights ({WEIGHTS}, or several with {INDEX})")
    for file in counted:
        if not file.is_file():
            raise DataError(f"{file}: missing, but named in {INDEX}")
    if "config.json" in values:
        config = values["config.json"]
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise DataError(f"{folder / 'config.json'}: has no model_type")
    elif weights:
        raise DataError(f"{folder}: not a model folder, there is no config.json in it")


def check_safetensors(file: Path) -> None:
    """Compare the header length in a safetensors file with its size, before a library uses it. Raises DataError."""
    size = file.stat().st_size
    with open(file, "rb") as content:
        start = content.read(9)
    length = struct.unpack("<Q", start[:8])[0] if len(start) == 9 else 0
    if length < 2 or start[8:] != b"{":
        raise DataError(f"{file}: not a safetensors file (no header)")
    # The library allocates the length that the first 8 bytes claim, up to 2^64, before it notices that the file ends.
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise DataError(
            f"{file}: refused by the rule 'sane header': its header has {length:,} bytes in a file of "
            f"{size:,}; the limit is {MAX_HEADER_BYTES:,}. The file is damaged or malicious."
        )


def json_depth(file: Path, *, block_bytes: int = 1 << 20) -> int:
    """Return the depth of nested brackets outside the strings of a JSON file; constant memory, nothing is parsed."""
    depth = deepest = 0
    in_string = 0
    with open(file, "rb") as content:
        while block := content.read(block_bytes):
            # A block must not end within an escape sequence.
            while len(block) - len(block.rstrip(b"\\")) & 1 and (more := content.read(1)):
                block += more
            # Escaped characters are removed, so that every quote that is left begins or ends a string.
            symbols = np.frombuffer(re.sub(rb"\\.", b"", block, flags=re.DOTALL), dtype=np.uint8)
            quotes = symbols == ord('"')
            inside = (np.cumsum(quotes) + in_string) & 1
            steps = BRACKETS[symbols]
            steps[inside == 1] = 0
            levels = depth + np.cumsum(steps, dtype=np.int64)
            if len(levels):
                deepest = max(deepest, int(levels.max()))
                depth = int(levels[-1])
            in_string = (in_string + int(quotes.sum())) & 1
    return deepest


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file below the folder. Refuses links out of it and special files."""
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        # Only in the layout of the hub's cache: a folder elsewhere could name any place "blobs".
        allowed.append(root.parent.parent / "blobs")
    count = 0

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process has just removed it
            raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            count += 1
            if count > MAX_ENTRIES:
                raise DataError(f"{folder}: has more than {MAX_ENTRIES:,} files, too many for a model folder")
            # Links to folders as well: `os.walk` does not follow them, but a library that opens a name inside one does.
            if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in allowed):
                raise UnsafeError(
                    f"{path}: refused by the rule 'no way out': it is a link to {path.resolve()}, outside the folder. "
                    "Copy the file into the folder."
                )
            if name in names:
                if not path.is_file():
                    if not os.path.lexists(path):
                        continue  # another process has just removed or renamed its temporary file
                    raise UnsafeError(f"{path}: refused by the rule 'plain files': it is a pipe, device or dead link")
                yield path


def _check_json(file: Path) -> Any:
    """Return the value of a small JSON file after checking its keys; None for a vocabulary (only checked for size)."""
    version = settled_version_of(str(file))
    limit = MAX_VOCABULARY_BYTES if file.name in VOCABULARIES else MAX_CONFIG_BYTES
    if version.size > limit:
        raise DataError(f"{file}: refused by the rule 'bounded JSON': {version.size:,} bytes; the limit is {limit:,}")
    return _checked_json(file, version)  # a job asks some twenty times: each function that reads the folder does


@lru_cache(maxsize=16)
def _checked_json(file: Path, version: Version) -> Any:
    """Do the part of `_check_json` that reads the file; once for each version of it."""
    # Before parsing: Python's parser recurses once per level, and others overflow the C stack, which kills the process.
    depth = json_depth(file)
    if depth > MAX_DEPTH:
        raise DataError(f"{file}: refused by the rule 'bounded JSON': nested {depth:,} deep; the limit is {MAX_DEPTH}")
    if file.name in VOCABULARIES:
        return None
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON ({error})") from None
    _check_keys(file, value, ())
    return value


def _check_keys(file: Path, value: Any, at: tuple[str, ...]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        where = (*at, str(key))
        if key in CODE_KEYS:
            raise UnsafeError(
                f"{file}: refused by the rule 'no code': the key {'.'.join(where)!r} makes the loader import code or "
                "kernels from elsewhere. If you trust the model, load and save it again with transformers yourself."
            )
        if str(key).endswith(("attn_implementation", "experts_implementation")):
            for name in inner.values() if isinstance(inner, dict) else [inner]:
                # A list of allowed names, not of bad ones: any other name is a repository to download a kernel from.
                if not (name is None or isinstance(name, str)) or name not in IMPLEMENTATIONS:
                    raise _kernel(file, where, name, "Delete the key; torchlake chooses the fastest one.")
        if key == "model_type" and inner in tuple(MODELS_WITH_KERNELS):
            raise _kernel(file, where, inner, "Choose a model of another kind.")
        if key in ("quantization_config", "compression_config") and inner is not None:
            raise _kernel(file, where, inner, "Use the model's weights from before quantization.")
        if NAMES_FILE.search(str(key)) and key != NOT_OPENED:
            _check_names(file, where, inner)
        # At any depth: configurations nest others (text_config, vision_config), which transformers reads in the same
        # way.
        _check_keys(file, inner, where)


def _kernel(file: Path, where: tuple[str, ...], value: Any, remedy: str) -> UnsafeError:
    return UnsafeError(
        f"{file}: refused by the rule 'no code': for {'.'.join(where)!r} = {str(value)[:80]!r} transformers may "
        f"download compiled kernels and run them. {remedy}"
    )


def _check_names(file: Path, where: tuple[str, ...], value: Any) -> None:
    """Refuse the name of a file that is not in the folder: it would be looked up elsewhere."""
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            continue
        # A name that does not exist here is refused, too: transformers would take it for a repository on the hub.
        in_folder = Path(name).name == name and (isinstance(value, list) or (file.parent / name).is_file())
        if not in_folder or where[-1] in ("vocab", "merges"):
            raise UnsafeError(
                f"{file}: refused by the rule 'no way out': {'.'.join(where)!r} names {name[:80]!r}, which is not the "
                "name of a file in the folder. Delete the key, or put the file into the folder and write its name."
            )


def _check_index(file: Path, index: Any) -> None:
    shards = index.get("weight_map") if isinstance(index, dict) else None
    for name in sorted({str(shard) for shard in shards.values()} if isinstance(shards, dict) else ()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsafeError(
                f"{file}: refused by the rule 'no way out': the shard {name[:80]!r} is not the name of a safetensors "
                "file in the folder"
            )
