"""Writes a trained embedder in the layout of sentence-transformers, which it and torchlake load.

The encoder's weights lie in the folder itself under transformers' names, those of a Dense module in its own folder.
Pooling, prompts and the other settings are those of the base model; a plain encoder gets mean pooling.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchlake import atomic_io
<<<<<<< HEAD
from torchlake.config.embedding import MODULES, PROMPTS, SETTINGS, Embedding, write_layout
=======
from torchlake.config.embedding import MODULES, PROMPTS, SETTINGS
>>>>>>> pairs24

if TYPE_CHECKING:
    import torch

Pooling = Literal["mean", "cls", "max", "lasttoken"]
POOLING = "1_Pooling/config.json"
KINDS = ("Transformer", "Pooling", "Normalize")
FLAGS: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
WEIGHTS = "model.safetensors"
ENCODER, DENSE = "encoder.", "vectors.dense."
"Prefixes of the module's tensors."


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an encoder's token states become the vector of a text."""

    pooling: Pooling
    normalize: bool = False
    max_length: int
    "Tokens; longer texts are truncated."
    lowercase: bool = False
    "Whether texts become lower case before they are tokenized."
    prompts: Mapping[str, str] = field(default_factory=dict)


def write_folder(
    folder: Path, state: "Mapping[str, torch.Tensor]", config: Any, *, base: Path, max_length: int
) -> None:
    """Write the weights, config.json and the files of sentence-transformers; `base` is the model trained from."""
    import transformers
    from safetensors.torch import save_file

    def save(tensors: Mapping[str, Any], path: Path) -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, path, metadata={"format": "pt"})

    save(
        {name.removeprefix(ENCODER): each for name, each in state.items() if name.startswith(ENCODER)}, folder / WEIGHTS
    )
    kind = transformers.AutoModel._model_mapping[type(config)]
    architecture = (kind[0] if isinstance(kind, tuple) else kind).__name__
    atomic_io.write_json(
        folder / "config.json", {**config.to_dict(), "architectures": [architecture]}, site="model.config"
    )
    if not (base / MODULES).is_file():
<<<<<<< HEAD
        write_layout(folder, Embedding(dimensions=int(config.hidden_size), max_length=max_length))
=======
        layout = Layout(pooling="mean", max_length=max_length)
        write_layout(folder, layout, dimension=int(config.hidden_size))
>>>>>>> pairs24
        return
    dense = iter(range(len(state)))
    for module in atomic_io.read_json(base / MODULES):
        place = atomic_io.safe_join(folder, module["path"]) if module["path"] else folder
        place.mkdir(exist_ok=True)
        if module["path"] and (base / module["path"] / "config.json").is_file():
            shutil.copyfile(base / module["path"] / "config.json", place / "config.json")
        if str(module["type"]).endswith("Dense"):
            prefix = f"{DENSE}{next(dense)}.0."
            mine = {
                f"linear.{name.removeprefix(prefix)}": each for name, each in state.items() if name.startswith(prefix)
            }
            save(mine, place / WEIGHTS)
    for name in (MODULES, PROMPTS):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    settings = atomic_io.read_json(base / SETTINGS) if (base / SETTINGS).is_file() else {}
    atomic_io.write_json(folder / SETTINGS, {**settings, "max_seq_length": max_length}, site="model.settings")


def write_layout(folder: Path, layout: Layout, *, dimension: int) -> None:
    """Write the files of sentence-transformers beside an encoder's, whose states have `dimension` numbers."""
    kinds = KINDS if layout.normalize else KINDS[:2]
    modules = [
        {"idx": place, "name": str(place), "path": "" if place == 0 else f"{place}_{kind}", "type": _type(kind)}
        for place, kind in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": dimension}
    pooling |= {flag: name == layout.pooling for name, flag in FLAGS.items()}
    contents = {
        MODULES: modules,
        POOLING: pooling,
        SETTINGS: {"max_seq_length": layout.max_length, "do_lower_case": layout.lowercase},
        PROMPTS: {"prompts": dict(layout.prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        atomic_io.write_json(folder / name, content, site="exported.layout")
    if layout.normalize:
        (folder / "2_Normalize").mkdir()


def _type(kind: str) -> str:
    """Return the class's import path that every version since 2.0 accepts."""
    return f"sentence_transformers.models.{kind}"
