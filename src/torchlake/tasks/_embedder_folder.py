"""Writes a trained embedder in the layout of sentence-transformers, which it and torchlake load.

The encoder's weights are in the folder itself under transformers' names, those of a Dense module in its own folder.
Pooling, prompts and the other settings are those of the base model; a plain encoder gets mean pooling.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.model_files.embedding import MODULES, PROMPTS, SETTINGS, Embedding, settings_for, write_layout
from torchlake.tasks._pretrained import encoder_class

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
ENCODER, DENSE = "encoder.", "vectors.dense."
"Prefixes of the module's tensors."


def write_folder(
    folder: Path, state: "Mapping[str, torch.Tensor]", config: Any, *, base: Path, max_length: int
) -> None:
    """Write the weights, config.json and the files of sentence-transformers; `base` is the model that training started
    from."""
    from safetensors.torch import save_file

    def save(tensors: Mapping[str, Any], path: Path) -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, path, metadata={"format": "pt"})

    save(
        {name.removeprefix(ENCODER): each for name, each in state.items() if name.startswith(ENCODER)}, folder / WEIGHTS
    )
    architectures = [encoder_class(config).__name__]
    atomic_io.write_json(
        folder / "config.json", {**config.to_dict(), "architectures": architectures}, site="model.config"
    )
    if not (base / MODULES).is_file():
        write_layout(folder, Embedding(dimensions=int(config.hidden_size), max_length=max_length))
        return
    dense = iter(range(len(state)))
    for module in atomic_io.read_json(base / MODULES):
        place = atomic_io.safe_join(folder, module["path"]) if module["path"] else folder
        place.mkdir(exist_ok=True)
        if module["path"] and (base / module["path"] / "config.json").is_file():
            shutil.copyfile(base / module["path"] / "config.json", place / "config.json")
        if str(module["type"]).endswith("Dense"):
            prefix = f"{DENSE}{next(dense)}."
            mine = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
            save(mine, place / WEIGHTS)
    for name in (MODULES, PROMPTS):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    atomic_io.write_json(folder / SETTINGS, settings_for(base, max_length), site="model.settings")
