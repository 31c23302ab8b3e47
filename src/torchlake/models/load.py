"""Load models from their folders.

A model folder has Hugging Face's layout (config.json, model.safetensors, the tokenizer's files) plus

    task.json        the `TaskSpec`: the task, its classes in their type, its columns (`spec.py`)
    README.md        the model card
    manifest.json    size and sha256 of every file, written last

so `AutoModel*.from_pretrained` loads it, and torchlake loads any folder of transformers. Every model passes
`safety.check_folder` and is then loaded by transformers with local files, safetensors and no remote code. If there is a
manifest, it is verified first, which reads the weights once more.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.task_spec import GENERATIVE, TASK_FILE, TaskSpec
from torchlake.errors import DataError
from torchlake.models.adapters import base as adapters
from torchlake.models.config import (
    POSITIONS_AFTER_PADDING,
    embeddings,
    in_words,
    load_config,
    pad_id,
    positions,
    read_head,
    set_pad_id,
)
from torchlake.models.folders import file_hash, model_folder, weight_files
from torchlake.models.safety import check_folder
from torchlake.models.tokenizer import (
    has_tokenizer,
    load_pair_tokenizer,
    load_text_tokenizer,
    load_tokenizer,
    max_length,
    read_by_place,
)
from torchlake.models.write import quiet, save_model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "TaskSpec",
    "check_folder",
    "embeddings",
    "from_pretrained",
    "load_config",
    "load_model",
    "load_pair_tokenizer",
    "load_text_tokenizer",
    "load_tokenizer",
    "load_weights",
    "max_length",
    "model_folder",
    "positions",
    "refuse_outputs",
    "refuse_sizes",
    "refuse_unused",
    "save_model_folder",
    "whole_config",
]

CLASSIFIES = "ForSequenceClassification"
BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|relative_position_index|version|embed_positions\.weights|causal_mask|"
    r"rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$|(^|\.)pooler\."
)
"""Tensors that models do without: constants that they compute themselves, in files of older versions, and the pooler of
an architecture whose head does not read it."""


_in_memory: ContextVar[bool] = ContextVar("in_memory", default=False)


@contextmanager
def reading_into_memory() -> Iterator[None]:
    """Let models that are loaded in the block keep no memory map of their files.

    A process that answers for days must not depend on its files: another program that writes into a mapped one changes
    the model, and one that truncates it ends the process. Costs a copy of the weights, which processes do not share.
    """
    token = _in_memory.set(True)
    try:
        yield
    finally:
        _in_memory.reset(token)


def is_mapped() -> bool:
    """Return whether a model that is loaded now may stay in a memory map of its files."""
    return not _in_memory.get()


def check_files(folder: Path) -> None:
    """Raise the errors of `check_folder`, and DataError if a file differs from the manifest, if there is one."""
    check_folder(folder)
    if (folder / atomic_io.MANIFEST).exists():
        atomic_io.check_manifest(folder, hashed=file_hash)


def load_model(
    folder: str | Path,
    spec: TaskSpec | None = None,
    *,
    auto_class: str,
    dtype: "torch.dtype | None" = None,
    placement: Mapping[str, Any] | None = None,
) -> "PreTrainedModel":
    """Load a fine-tuned model in evaluation mode into main memory, in `dtype` (default: fp32).

    `placement`, arguments of transformers, loads it over several devices instead.

    Raises UnsafeError like `check_folder`; DataError if a file differs from the manifest, if weights are missing (an
    encoder with an untrained head would predict at random) or unused, or if the head does not fit `spec`.
    """
    folder = model_folder(folder)
    check_files(folder)
    model, info = from_pretrained(folder, auto_class, dtype=dtype, **(placement or {}))
    refuse_sizes(folder, info["mismatched_keys"])
    if lacking := sorted(info["missing_keys"]):
        raise DataError(
            f"{folder}: the weights lack {', '.join(lacking[:4])}. It is not a fine-tuned "
            f"{type(model).__name__}: its predictions would be random. Fine-tune it first (torchlake train)."
        )
    refuse_unused(folder, info["unexpected_keys"])
    if spec is not None and spec.problem not in GENERATIVE:
        refuse_outputs(folder, model.config.num_labels, spec)
    model.train(False)
    if not is_mapped():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


def refuse_sizes(folder: Path, mismatched: Iterable[tuple[Any, ...]]) -> None:
    """Raise DataError for tensors whose size differs from the model's: (name, size in the file, size in the model)."""
    for name, *sizes in sorted(mismatched):
        stored, wanted = (" x ".join(map(str, size)) for size in sizes)
        raise DataError(
            f"{folder}: the weights lack {name} of the size {wanted}, which config.json asks for; theirs is {stored}. "
            "Correct config.json (id2label, the widths), or copy it from where the weights are from."
        )


def refuse_outputs(folder: Path, outputs: int | None, spec: TaskSpec) -> None:
    """Raise DataError if a head does not have an output for each class, or one output without classes."""
    if outputs != (wanted := max(1, len(spec.labels))):
        file = TASK_FILE if (folder / TASK_FILE).exists() else "config.json"
        raise DataError(f"{folder}: the head has {outputs} outputs, but {file} asks for {wanted}")


def load_weights(folder: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of a model folder by name, verified as in `load_model`, in a memory map that processes share.

    In a block of `reading_into_memory` they are copies.
    Raises UnsafeError like `check_folder`, DataError for a damaged file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_files(folder)
    if adapters.is_adapter(folder):  # merged into its base; tied tensors occur once
        from torchlake.checkpoints.format import untied

        merged = dict(untied(from_pretrained(folder, read_head(folder).architecture)[0].state_dict()))
        return _kept(merged)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            found = load_file(file)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: cannot be read: {in_words(error)}") from error
        tensors |= _kept(found)
    return tensors


def _kept(tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return tensors if is_mapped() else {name: tensor.clone() for name, tensor in tensors.items()}


def refuse_unused(folder: Path, names: Iterable[str], *, body: str | None = None) -> None:
    """Raise DataError if one of the tensors `names`, which a model did not load, belongs to it.

    `body`, the prefix of the encoder's tensors: those of another head, or of a decoder, are replaced or left out.
    """
    left = sorted(name for name in names if BUFFERS.search(name) is None)
    if left and body is not None:
        from safetensors import safe_open

        stored: set[str] = set()
        for file in weight_files(folder):
            with safe_open(file, framework="numpy") as opened:
                stored.update(opened.keys())
        if any(name.startswith(body) for name in stored):
            left = [name for name in left if name.startswith(body)]
        left = sorted(set(left) - _tensors_of(folder)) if left else []
    if left:
        raise DataError(
            f"{folder}: a model of its config.json does not have the tensors {', '.join(left[:4])} of its weights. "
            "Correct config.json (the number of layers, architectures), or remove the tensors."
        )


def _tensors_of(folder: Path) -> set[str]:
    """Return the names of the tensors of the architecture in config.json."""
    import torch
    import transformers

    known = getattr(transformers, read_head(folder).architecture, None)
    if known is None:
        return set()
    with quiet(), torch.device("meta"):
        return set(known(load_config(folder)).state_dict())


def whole_config(folder: Path, auto_class: str) -> "PretrainedConfig":
    """Return a folder's configuration. Raises DataError for a model that needs the language of its rows.

    Encoder-decoders and RoBERTa's kind compute with the padding token: if a classifier has none, it is the tokenizer's.
    """
    config = load_config(folder)
    if getattr(config, "languages", None) and getattr(config, "default_language", None) is None:
        known = ", ".join(map(str, config.languages[:4]))
        raise DataError(
            f"{folder / 'config.json'}: default_language is null, and a model of type {config.model_type!r} computes "
            f"with the adapter of a row's language. Set default_language to the language of your rows ({known}, ...)."
        )
    if auto_class.endswith(CLASSIFIES):
        # Without generation, cached keys and values would only fill memory.
        config.get_text_config().use_cache = False
        token = pad_id(config)
        if config.is_encoder_decoder or config.model_type in POSITIONS_AFTER_PADDING:
            token = load_tokenizer(folder).pad_token_id if token is None and has_tokenizer(folder) else token
            set_pad_id(config, token)
    return config


def from_pretrained(
    folder: Path,
    auto_class: "str | type[PreTrainedModel]",
    *,
    config: "PretrainedConfig | None" = None,
    dtype: "torch.dtype | None" = None,
    **placement: Any,
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """Return the model, and transformers' report on missing, mismatched and unexpected keys."""
    import torch
    import transformers

    model_class: Any = getattr(transformers, auto_class) if isinstance(auto_class, str) else auto_class
    name = model_class.__name__
    config = config if config is not None else whole_config(folder, name)
    if adapters.is_adapter(folder):
        return _with_adapter(folder, model_class, config, dtype, placement)
    try:
        with quiet():
            model, info = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype or torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **placement,
            )
    except Exception as error:
        raise DataError(f"{folder}: the model cannot be loaded: {in_words(error)}") from error
    if name.endswith(CLASSIFIES):
        read_by_place(model)
    return model, info


def _with_adapter(
    folder: Path, model_class: Any, config: "PretrainedConfig", dtype: "torch.dtype | None", placement: dict[str, Any]
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """Return the base of an adapter with the adapter merged into it in fp32, and the report on its keys.

    What the base has and this model does not, such as another head, was judged before the training.
    """
    from torchlake.models.adapters import merging, quantized

    place = adapters.find_base(folder)
    check_files(place)
    model, info = from_pretrained(place, model_class, config=config, **placement)
    kind = adapters.read_base(folder).quantize
    if kind is not None:
        quantized.round_weights(model, kind)
    whole: Any = merging.merged(model, folder)
    replaced = merging.trained_whole(folder)
    report = {
        "missing_keys": sorted({*info["missing_keys"]} - replaced),
        "mismatched_keys": [key for key in info["mismatched_keys"] if key[0] not in replaced],
        "unexpected_keys": [],
    }
    return whole if dtype is None else whole.to(dtype), report
