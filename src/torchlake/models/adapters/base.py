"""The base of an adapter: which model it changes.

    adapter_config.json           rank, scale and targets, as peft and vLLM read them
    adapter_model.safetensors     A and B of every target, and the modules that were trained whole
    base.json                     name, revision and hash of the base, and how its weights were quantized

The folder has the configuration, the tokenizer and task.json of the whole model. An adapter computes something else on
other weights, so a base with another hash is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.errors import DataError, FingerprintError
from torchlake.models import folders

CONFIG, TENSORS, RECORD = folders.ADAPTER_CONFIG, folders.ADAPTER_TENSORS, folders.BASE_RECORD
SNAPSHOTS = "snapshots"
"The folder of the hub's cache whose folders are named by commits."
HARMLESS = {"peft_type": "LORA", "auto_mapping": None, "init_lora_weights": True, "runtime_config": None}
"The only values that these keys of adapter_config.json may have; others would draw weights or import code."


@dataclass(frozen=True, kw_only=True)
class Base:
    """What base.json says."""

    name: str
    "A name on the Hugging Face Hub, or the path of a folder."
    revision: str | None
    "The commit on the hub; None for a folder."
    hash: str
    "The base's `model_hash`."
    quantize: str | None = None
    "How the frozen weights of its layers were quantized in training: nf4, int8 or not."


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter in place of weights."""
    return (folder / RECORD).is_file() and (folder / CONFIG).is_file()


def describe_base(base: str, *, quantize: str | None) -> Base:
    """Return what base.json will say about a job's base model, which exists."""
    place = folders.model_folder(base)
    on_hub = place.parent.name == SNAPSHOTS and not Path(base).expanduser().exists()
    name = base.partition("@")[0] if on_hub else str(place.resolve())
    revision = place.name if on_hub else None
    return Base(name=name, revision=revision, hash=folders.model_hash(place), quantize=quantize)


def read_base(folder: Path) -> Base:
    """Return what base.json says. Raises DataError if it is incomplete."""
    values = atomic_io.read_json(folder / RECORD)
    if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in ("name", "hash")):
        raise DataError(f"{folder / RECORD}: names no base; it has the keys name, revision and hash")
    found: dict[str, Any] = {name: values.get(name) for name in Base.__dataclass_fields__}
    return Base(**found)


def write_base(folder: Path, base: Base) -> None:
    """Write base.json."""
    atomic_io.write_json(folder / RECORD, asdict(base), site="model.base")


def find_base(folder: Path) -> Path:
    """Return the folder of an adapter's base, downloaded from the hub if need be.

    Raises DataError if there is no such model, FingerprintError if its weights, configuration or tokenizer are others.
    """
    base = read_base(folder)
    try:
        place = folders.model_folder(base.name if base.revision is None else f"{base.name}@{base.revision}")
    except DataError as error:
        raise DataError(
            f"{folder}: holds an adapter, and its base cannot be opened: {error} Put the base back, or write its new "
            f"path as `name` into {RECORD}; the content is compared by its hash."
        ) from error
    now = folders.model_hash(place)
    if now != base.hash:
        raise FingerprintError(
            f"{folder}: holds an adapter for {base.name} with the hash {base.hash[:12]}, and that model now has the "
            f"hash {now[:12]}: its weights, configuration or tokenizer have changed, and with them all predictions. "
            "Put the base back as it was, or train the adapter again."
        )
    return place


def check_config(file: Path, values: Any) -> None:
    """Raise DataError for an adapter_config.json that is not of LoRA, or would draw weights or import code."""
    if not isinstance(values, Mapping):
        raise DataError(f"{file}: is not a JSON object")
    for key, wanted in HARMLESS.items():
        if values.get(key, wanted) != wanted:
            raise DataError(
                f"{file}: {key}={str(values[key])[:80]!r} is refused; in an adapter that torchlake loads it is "
                f"{json.dumps(wanted)}."
            )
