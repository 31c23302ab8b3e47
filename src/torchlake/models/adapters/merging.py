"""Load an adapter onto its base, by peft.

The adapter is merged into the weights when it is loaded, in fp32: so every runtime computes with plain layers, and
predictions are those of the model that `model.lora.merge: true` writes.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.errors import DataError
from torchlake.models.adapters.base import CONFIG, TENSORS, check_config

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIX = "base_model.model."
"What peft puts before the name of each tensor."
NOT_OF_LAYERS = frozenset({"peft_version", "auto_mapping", "runtime_config"})
"Keys of adapter_config.json that are not arguments of peft's LoraConfig, or are not read."


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence what peft says about names that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def merged(model: "nn.Module", folder: Path) -> "nn.Module":
    """Merge the adapter in `folder` into `model`, in fp32 and in place. Raises DataError if it does not fit."""
    import peft

    tensors = adapter_tensors(folder)
    with quiet_peft():
        wrapped: Any = _wrapped(model, folder)
        found: Any = peft.set_peft_model_state_dict(wrapped, tensors)
        expected = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        wrong = sorted({*found.unexpected_keys, *(expected.keys() ^ tensors.keys())})
        if wrong:
            raise DataError(f"{folder / TENSORS}: does not fit its base and {CONFIG}: {', '.join(wrong[:4])}")
        plain: nn.Module = wrapped.merge_and_unload()
    return plain


def adapter_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of the adapter in a folder, by peft's names. Raises DataError for a damaged file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{folder / TENSORS}: cannot be read: {' '.join(str(error).split())[:300]}") from error


def trained_whole(folder: Path) -> set[str]:
    """Return the names of the tensors that an adapter replaces: of a head, or of other modules trained whole."""
    parts = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")
    names = (name.removeprefix(PREFIX) for name in adapter_tensors(folder))
    return {name for name in names if not any(part in name.split(".") for part in parts)}


def _wrapped(model: "nn.Module", folder: Path) -> Any:
    """Return peft's model, whose values are still those of the base. Raises DataError for keys that peft lacks."""
    import peft

    file = folder / CONFIG
    values: Mapping[str, Any] = atomic_io.read_json(file)
    check_config(file, values)
    known = {name: value for name, value in values.items() if name not in NOT_OF_LAYERS}
    unknown = sorted(known.keys() - peft.LoraConfig.__dataclass_fields__.keys())
    if unknown:
        raise DataError(f"{file}: the installed peft does not know {', '.join(unknown[:4])}; a newer one may")
    try:
        config = peft.LoraConfig(**{**known, "task_type": None})
        return peft.PeftModel(model, config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{file}: does not fit its base: {' '.join(str(error).split())[:300]}") from error
