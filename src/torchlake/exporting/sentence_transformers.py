"""An encoder with pooling in the layout of sentence-transformers, which every version of it since 2.0 reads.

`config/model_files/embedding.py` describes the layout. If the model folder has it, the files that it names are checked
and copied; the check covers what `predict` computes.
"""

import shutil
from pathlib import Path
from typing import Literal, get_args

from torchlake import atomic_io
from torchlake.config.model_files.embedding import FILES, MODULES, Embedding, read_embedding, write_layout
from torchlake.errors import UsageError
from torchlake.models.config import load_config, read_head
from torchlake.models.folders import INDEX, TOKENIZER_FILES
from torchlake.models.tokenizer import max_length

Pooling = Literal["mean", "cls", "max", "lasttoken"]
HEADS = ("ForSequenceClassification", "ForCausalLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")


def write_sentence_transformers(model: Path, folder: Path, *, pooling: Pooling | None = None) -> None:
    """Write the encoder in `model` with its own pooling, else `pooling`. Raises UsageError and DataError."""
    choices = get_args(Pooling)
    layout = (model / MODULES).is_file()
    how = read_embedding(model)
    architecture = read_head(model).architecture
    if architecture.endswith(HEADS):
        raise UsageError(
            f"{model}: is a {architecture}, whose head does not return embeddings. The format sentence-transformers is "
            "for encoders: a classifier can be exported as onnx or openvino."
        )
    if not layout and pooling is None:
        raise UsageError(
            f"{model}: the folder does not say how token states become one vector. Set pooling "
            f"({', '.join(choices)}); most encoders were trained with mean."
        )
    if layout and pooling is not None and how.poolings != (pooling,):
        raise UsageError(
            f"{model}: the model was trained with {' and '.join(how.poolings)} pooling. Leave pooling out."
        )
    for pattern in ("config.json", "*.safetensors", INDEX, *TOKENIZER_FILES, *FILES):
        for path in model.glob(pattern):
            shutil.copyfile(path, folder / path.name)
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
