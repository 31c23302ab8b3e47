"""An encoder with pooling in the layout of sentence-transformers, which every version of it since 2.0 reads.

`config/embedding.py` has the layout. A folder that is in it is checked and copied, file by file that it names; what is
checked there is what `predict` computes.
"""

import shutil
<<<<<<< HEAD
from pathlib import Path
from typing import Literal, get_args
=======
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
>>>>>>> pairs24

from torchlake import atomic_io
from torchlake.config.embedding import MODULES, PROMPTS, SETTINGS, Embedding, read_embedding, write_layout
from torchlake.errors import UsageError
from torchlake.models.config import load_config, read_head
from torchlake.models.folders import TOKENIZER_FILES
from torchlake.models.safety import INDEX
from torchlake.models.tokenizer import max_length
from torchlake.tasks._embedder_folder import FLAGS, KINDS, MODULES, PROMPTS, SETTINGS, Layout, Pooling, write_layout

<<<<<<< HEAD
Pooling = Literal["mean", "cls", "max", "lasttoken"]
HEADS = ("ForSequenceClassification", "ForCausalLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")


def write_sentence_transformers(model: Path, folder: Path, *, pooling: Pooling | None = None) -> None:
    """Write the encoder in `model` into `folder`, with its own pooling, else with `pooling`.

    Raises UsageError, and DataError for a module or setting that torchlake does not know.
    """
    choices = get_args(Pooling)
    layout = (model / MODULES).is_file()
    how = read_embedding(model)
    if not layout and pooling is None:
        raise UsageError(
            f"{model}: does not say how token states become one vector: give pooling ({', '.join(choices)}); most "
            "encoders were trained with mean."
        )
    if pooling is not None and pooling not in choices:
        raise UsageError(f"pooling is one of {', '.join(choices)}; {pooling!r} was given.")
    if layout and pooling is not None and how.poolings != (pooling,):
        raise UsageError(
            f"{model}: has {' and '.join(how.poolings)} pooling, and was trained with it; leave pooling out."
        )
=======
HEADS = ("ForSequenceClassification", "ForCausalLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")


def read_embedding(folder: Path) -> Layout | None:
    """Return how the model in `folder` embeds texts; None if it is not in this layout.

    Raises DataError for modules other than an encoder, pooling and normalization.
    """
    if not (folder / MODULES).is_file():
        return None
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in atomic_io.read_json(folder / MODULES)]
        paths = [str(module["path"]) for module in atomic_io.read_json(folder / MODULES)]
        unknown = next((kind for kind in kinds if kind not in KINDS), None)
        if unknown is not None or kinds[:2] != list(KINDS[:2]) or paths[0]:
            raise DataError(
                f"{folder / MODULES}: has the modules {', '.join(kinds)}; only an encoder, pooling and normalization "
                "can be exported."
            )
        settings = _read(folder / SETTINGS)
        return Layout(
            pooling=_pooling_of(_read(atomic_io.safe_join(folder, paths[1]) / "config.json"), folder),
            normalize="Normalize" in kinds,
            max_length=int(settings.get("max_seq_length") or max_length(folder)),
            lowercase=bool(settings.get("do_lower_case", False)),
            prompts={str(name): str(text) for name, text in (_read(folder / PROMPTS).get("prompts") or {}).items()},
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{folder / MODULES}: is not in the layout of sentence-transformers ({error!r}).") from error


def write_sentence_transformers(model: Path, folder: Path, *, pooling: Pooling | None = None) -> None:
    """Write the encoder in `model` into `folder`, with its own pooling, else with `pooling`. Raises UsageError."""
    embedding = read_embedding(model)
    if embedding is None:
        if pooling is None:
            raise UsageError(
                f"{model}: does not say how token states become one vector: give pooling ({', '.join(FLAGS)}); most "
                "encoders were trained with mean."
            )
        if pooling not in get_args(Pooling):
            raise UsageError(f"pooling is one of {', '.join(FLAGS)}; {pooling!r} was given.")
        embedding = Layout(pooling=pooling, max_length=max_length(model))
    elif pooling not in (None, embedding.pooling):
        raise UsageError(f"{model}: has {embedding.pooling} pooling, and was trained with it; leave pooling out.")
>>>>>>> pairs24
    architecture = read_head(model).architecture
    if architecture.endswith(HEADS):
        raise UsageError(
            f"{model}: is a {architecture}, and its head does not give embeddings. The format sentence-transformers is "
            "for encoders: a classifier can be exported as onnx or openvino."
        )
    for pattern in ("config.json", "*.safetensors", INDEX, *TOKENIZER_FILES, MODULES, SETTINGS, PROMPTS):
        for path in model.glob(pattern):
            shutil.copyfile(path, folder / path.name)
<<<<<<< HEAD
    if pooling is not None and not layout:
        dimensions = int(load_config(model).hidden_size)
        write_layout(folder, Embedding(poolings=(pooling,), dimensions=dimensions, max_length=max_length(model)))
    elif layout:
        for module in atomic_io.read_json(model / MODULES)[1:]:
            place = atomic_io.safe_join(folder, str(module["path"]))
            place.mkdir(parents=True, exist_ok=True)
            for name in ("config.json", "model.safetensors"):
                if (model / str(module["path"]) / name).is_file():
                    shutil.copyfile(model / str(module["path"]) / name, place / name)
=======
    write_layout(folder, embedding, dimension=int(load_config(model).hidden_size))


def _pooling_of(config: Mapping[str, Any], folder: Path) -> Pooling:
    modes = [name for name, flag in FLAGS.items() if config.get(flag)]
    if config.get("pooling_mode") in FLAGS:  # of sentence-transformers 6
        modes = [config["pooling_mode"]]
    known = {"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode", *FLAGS.values()}
    others = [name for name, value in config.items() if name not in known and value]
    if len(modes) != 1 or others:
        found = ", ".join([*modes, *others])
        raise DataError(f"{folder}: pools tokens by {found}; one of {', '.join(FLAGS)} can be exported.")
    return modes[0]


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if there is no file."""
    value = atomic_io.read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not a JSON object.")
    return value
>>>>>>> pairs24
