"""Load models from their folders.

A model folder has Hugging Face's layout (config.json, model.safetensors, the tokenizer's files) plus

    task.json        the `TaskSpec`: the task, its classes in their type, its columns
    README.md        the model card
    manifest.json    size and sha256 of every file, written last

so `AutoModel*.from_pretrained` loads it, and torchlake loads any folder of transformers. Every model passes
`safety.check_folder` and is then loaded by transformers with local files, safetensors and no remote code. If there is a
manifest, it is verified first, which reads the weights once more.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.model_files.cross_encoder import is_cross_encoder, with_pairs
from torchlake.config.model_files.embedding import MODULES, read_embedding
from torchlake.config.task_spec import GENERATIVE, TASK_FILE, Label, Problem, TaskSpec, spec_from_json
from torchlake.errors import DataError
from torchlake.models.adapters import base as adapters
from torchlake.models.config import (
    HEADS,
    POSITIONS_AFTER_PADDING,
    Head,
    architectures_of,
    class_names,
    embeddings,
    in_words,
    load_config,
    pad_id,
    positions,
    read_head,
    set_pad_id,
    tasks_of,
)
from torchlake.models.folders import file_hash, model_folder, weight_files
from torchlake.models.safety import check_folder
from torchlake.models.tokenizer import (
    MAX_LENGTH,
    TOKEN_TYPES,
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
    "Label",
    "Problem",
    "TaskSpec",
    "check_folder",
    "embeddings",
    "from_pretrained",
    "load_config",
    "load_model",
    "load_pair_tokenizer",
    "load_spec",
    "load_text_tokenizer",
    "load_tokenizer",
    "load_weights",
    "max_length",
    "model_folder",
    "positions",
    "refuse_unused",
    "save_model_folder",
    "uses_token_types",
    "whole_config",
]

log = logging.getLogger(__name__)

ZERO_SHOT = "zero_shot_classification"
"The task of classifiers of pairs that score any classes, without training on them."
EMBEDS = "feature_extraction"
"The task of encoders without a head."
OWN_PROBLEMS = {"token_classification": "spans", "question_answering": "answer"}
"Problems of tasks that have only one."
INPUTS = {"image_classification": ("image",), "question_answering": ("question", "context")}
"Inputs of tasks that do not read a `text`."
OWN_LABELS = {"question_answering": ("start", "end")}
"The outputs of heads whose number is not that of the classes in config.json."
CLASSIFIES = "ForSequenceClassification"
BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|relative_position_index|version|embed_positions\.weights|causal_mask|"
    r"rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$|(^|\.)pooler\."
)
"""Tensors that models do without: constants that they compute themselves, in files of older versions, and the pooler of
an architecture whose head does not read it."""
WRITERS: dict[str, tuple[Problem, str | None]] = {
    "text_generation": ("next_token", None),
    "text2text_generation": ("text", "label"),
}
"The problem and the label column of tasks that write text."
PROBLEM_TYPES: dict[Problem, Any] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def load_spec(folder: str | Path, task: str | None = None) -> TaskSpec:
    """Return the task in task.json, or else the task of sentence-transformers' modules.json or of the head in
    config.json.

    `task` "feature_extraction" uses the encoder of a folder that has none of these, or has a head;
    "zero_shot_classification" uses any classifier. Raises DataError if none of this names a task.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if task == ZERO_SHOT:
        length = max_length(folder)
        return TaskSpec(task=task, problem=task, labels=(), text="text", label=None, max_length=length)
    if (folder / TASK_FILE).exists():
        return spec_from_json(folder / TASK_FILE, atomic_io.read_json(folder / TASK_FILE))
    if task == EMBEDS or (task is None and (folder / MODULES).exists() and not is_cross_encoder(folder)):
        return _embedding_spec(folder)
    head = read_head(folder)
    of_head = _task_of(folder, head, task)
    if of_head in WRITERS:
        problem, label = WRITERS[of_head]
        length = max_length(folder)
        if of_head == "text_generation":
            length = min(length, MAX_LENGTH)  # of a block: prompts are not cut
        return TaskSpec(task=of_head, problem=problem, labels=(), text="text", label=label, max_length=length)
    problems = {name: problem for problem, name in PROBLEM_TYPES.items()}
    names = head.names
    problem = problems.get(head.problem_type or "", "regression" if len(names) == 1 else "single_label")
    problem = OWN_PROBLEMS.get(of_head, problem)
    if problem == "regression" and len(names) > 1:
        raise DataError(
            f"{folder / 'config.json'}: problem_type is regression, and the head has {len(names)} outputs. torchlake "
            "predicts one number a row. For classes, set problem_type to single_label_classification or "
            "multi_label_classification."
        )
    labels: tuple[Label, ...] = OWN_LABELS.get(of_head, ())
    if not labels and problem != "regression":
        labels = class_names(folder, names)
    inputs = INPUTS.get(of_head, ())
    spec = TaskSpec(
        task=of_head,
        problem=problem,
        labels=labels,
        text="" if inputs else "text",
        label="label",
        max_length=0 if of_head == "image_classification" else max_length(folder),
        inputs={name: name for name in inputs},
    )
    return with_pairs(spec, folder)


def _task_of(folder: Path, head: Head, task: str | None) -> str:
    """Return the task of a model's head, or the given one if config.json does not name a head. Raises DataError."""
    import transformers

    known, asked = tasks_of(head), task if task in HEADS else None
    possible = known or [name for name in HEADS if head.model_type in architectures_of(name)]
    if asked is not None and asked not in possible:
        if known:
            raise DataError(f"{folder}: its architecture {head.architecture} is for {known[0]}, not for {asked}")
        raise DataError(f"{folder}: transformers has no model of the type {head.model_type!r} for {asked}")
    chosen = asked or next(iter(known), None)
    if head.architecture and not known and (asked is None or head.architecture in dir(transformers)):
        raise DataError(
            f"{folder}: config.json has the architecture {head.architecture}, which neither classifies nor generates "
            f"text, and there is no {TASK_FILE}. Fine-tune it first (torchlake train), or name a fine-tuned model; for "
            f"the embeddings of an encoder give the task {EMBEDS}."
        )
    if chosen is None:
        raise DataError(
            f"{folder}: config.json has no architectures (the name of the model's class), and there is no {TASK_FILE}. "
            f"Give the task of the model: {', '.join([*possible, EMBEDS])}."
        )
    if chosen == "text2text_generation" and not load_config(folder).is_encoder_decoder:
        raise DataError(
            f"{folder}: a model of type {head.model_type!r} reads sounds, and torchlake has no task for them"
        )
    return chosen


def _embedding_spec(folder: Path) -> TaskSpec:
    how = read_embedding(folder)
    limit = positions(folder)
    longest = max_length(folder) if how.max_length is None else min(how.max_length, limit or how.max_length)
    return TaskSpec(
        task=EMBEDS,
        problem=EMBEDS,
        labels=(),
        text="text",
        label=None,
        max_length=longest,
        dimensions=how.dimensions,
    )


def uses_token_types(folder: Path, *, pairs: bool = False) -> bool:
    """Return whether a model of pairs separates them by token types; `pairs`: it is one without task.json."""
    path = folder / TASK_FILE
    trained = path.exists() and spec_from_json(path, atomic_io.read_json(path)).text_pair is not None
    return (trained or pairs) and TOKEN_TYPES in load_pair_tokenizer(folder).model_input_names


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
    lacking = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if lacking:
        raise DataError(
            f"{folder}: the weights lack {', '.join(lacking[:4])}. It is not a fine-tuned "
            f"{type(model).__name__}: its predictions would be random. Fine-tune it first (torchlake train)."
        )
    refuse_unused(folder, info["unexpected_keys"])
    if spec is not None and spec.problem not in GENERATIVE and model.config.num_labels != max(1, len(spec.labels)):
        raise DataError(
            f"{folder}: the head has {model.config.num_labels} outputs, but "
            f"{TASK_FILE if (folder / TASK_FILE).exists() else 'config.json'} has {len(spec.labels)} classes"
        )
    model.train(False)
    return model


def load_weights(folder: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of a model folder by name, verified as in `load_model`, in a memory map that processes share.

    Raises UnsafeError like `check_folder`, DataError for a damaged file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_files(folder)
    if adapters.is_adapter(folder):  # merged into its base; tied tensors occur once
        from torchlake.checkpoints.format import untied

        return dict(untied(from_pretrained(folder, read_head(folder).architecture)[0].state_dict()))
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: cannot be read: {in_words(error)}") from error
    return tensors


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


def head_spec(folder: Path) -> TaskSpec | None:
    """Return the task that the head of a model folder was trained for; None if it has no head, or no names for its
    classes."""
    check_folder(folder)
    if not set(tasks_of(read_head(folder))) - WRITERS.keys():
        return None
    try:
        return load_spec(folder)
    except DataError:
        return None


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
