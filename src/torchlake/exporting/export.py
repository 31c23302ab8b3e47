"""`export`: write a model folder as a folder that another tool loads.

The folder appears whole or not at all, and only an earlier export is replaced. Its `manifest.json` names the model by
its hash. Nothing in it is a pickle.
"""

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from torchlake import atomic_io
from torchlake.config.arguments import check_arguments
from torchlake.errors import DataError, OutputError, UsageError
from torchlake.exporting import graphs
from torchlake.exporting.sentence_transformers import Pooling, write_sentence_transformers
from torchlake.models import folders
from torchlake.models.safety import check_folder
from torchlake.models.write import new_folder
from torchlake.tables.record import local_output

Format = Literal["onnx", "openvino", "sentence-transformers", "transformers"]
KIND = "export"
"The manifest's entry that makes a folder an export."


def export(model: str | Path, folder: str | Path, *, format: Format, pooling: Pooling | None = None) -> Path:
    """Write the model folder `model` into `folder`, in the layout of another tool; return the folder's path.

    `format="onnx"` (text classification): `model.onnx` with the inputs `input_ids` and `attention_mask`, (B, L) int64,
    and the output `logits`, (B, C) float32; `config.json` and the tokenizer's files, as Optimum and ONNX Runtime load
    it. `format="openvino"`: the same as `openvino_model.xml` and `openvino_model.bin`. Graphs are compared with the
    model on rows of several shapes before they are written.

    `format="sentence-transformers"`: an encoder with pooling, as `SentenceTransformer(folder)` loads it. If `model` is
    in this layout, its own pooling is kept; else `pooling` is "mean", "cls", "max" or "lasttoken".

    `format="transformers"`: the same model folder with whole weights; an adapter is merged into its base.

    Raises UsageError for a model that the format does not support, MissingExtra for a missing library, and OutputError
    if `folder` holds anything but an earlier export.
    """
    check_arguments({"format": format, "pooling": pooling}, export.__annotations__)
    if pooling is not None and format != "sentence-transformers":
        raise UsageError(
            f"pooling applies to the format sentence-transformers only; the graph of {format} returns logits."
        )
    source, target = folders.model_folder(model), local_output(folder).absolute()
    check_folder(source)
    _check_replaceable(source, target)
    embedder = partial(write_sentence_transformers, pooling=pooling)
    write = embedder if format == "sentence-transformers" else graphs.WRITERS[format]
    manifest = {
        "format": 1,
        "kind": KIND,
        "layout": format,
        "model": folders.model_hash(source),
        "versions": {name: version(name) for name in ("torchlake", "torch", "transformers")},
    }
    with new_folder(target, site="exported", **manifest) as place:
        write(source, place)
    return target


def _check_replaceable(source: Path, target: Path) -> None:
    """Raise OutputError if something other than an export would be replaced, or the model itself."""
    if target.resolve() == source.resolve():
        raise OutputError(f"{target}: is the model folder itself. Name another folder.")
    if not target.exists():
        return
    try:
        known = target.is_dir() and (not any(target.iterdir()) or atomic_io.read_manifest(target).get("kind") == KIND)
    except DataError:
        known = False
    if not known:
        raise OutputError(
            f"{target}: holds files that are not an export of torchlake. Name another folder, or delete this one."
        )
