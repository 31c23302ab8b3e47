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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.cross_encoder import is_cross_encoder, with_pairs
from torchlake.config.embedding import MODULES, read_embedding
from torchlake.config.task_spec import GENERATIVE, TASK_FILE, Label, Problem, TaskSpec, spec_from_json
from torchlake.errors import DataError
from torchlake.models.config import class_names, embeddings, in_words, load_config, positions, read_head, set_pad_id
from torchlake.models.folders import model_folder
from torchlake.models.safety import INDEX, check_folder
from torchlake.models.tokenizer import (
    TOKEN_TYPES,
    has_tokenizer,
    load_pair_tokenizer,
    load_text_tokenizer,
    load_tokenizer,
    max_length,
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
    "save_model_folder",
    "uses_token_types",
    "whole_config",
]

log = logging.getLogger(__name__)

ZERO_SHOT = "zero_shot_classification"
"The task of classifiers of pairs that score any classes, without training on them."
EMBEDS = "feature_extraction"
"The task of encoders without a head."
HEADS = {
    "ForSequenceClassification": "text_classification",
    "ForImageClassification": "image_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForQuestionAnsweringSimple": "question_answering",
}
"The task of each head, by the suffix of its class in transformers."
OWN_PROBLEMS = {"token_classification": "spans", "question_answering": "answer"}
"Problems of tasks that have only one."
INPUTS = {"image_classification": ("image",), "question_answering": ("question", "context")}
"Inputs of tasks that do not read a `text`."
OWN_LABELS = {"question_answering": ("start", "end")}
"The outputs of heads whose number is not that of the classes in config.json."
WRITERS = ("ForCausalLM", "LMHeadModel")
"The suffix of causal language models in transformers."
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
    if head.architecture.endswith(WRITERS):
        return TaskSpec(
            task="text_generation",
            problem="next_token",
            labels=(),
            text="text",
            label=None,
            max_length=max_length(folder),
        )
    if head.architecture.endswith("ForConditionalGeneration") and load_config(folder).is_encoder_decoder:
        return TaskSpec(
            task="text2text_generation",
            problem="text",
            labels=(),
            text="text",
            label="label",
            max_length=max_length(folder),
        )
    of_head = _task_of(head.architecture)
    if of_head is None:
        raise DataError(
            f"{folder}: config.json has the architecture {head.architecture}, which neither classifies nor generates "
            f"text, and there is no {TASK_FILE}. Fine-tune it first (torchlake train), or name a fine-tuned model; for "
            f"the embeddings of an encoder give the task {EMBEDS}."
        )
    problems = {name: problem for problem, name in PROBLEM_TYPES.items()}
    names = head.names
    problem = problems.get(head.problem_type or "", "regression" if len(names) == 1 else "single_label")
    problem = OWN_PROBLEMS.get(of_head, problem)
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


def _task_of(architecture: str) -> str | None:
    return next((task for suffix, task in HEADS.items() if architecture.endswith(suffix)), None)


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
    encoder with an untrained head would predict at random), or if the head does not fit `spec`.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if (folder / atomic_io.MANIFEST).exists():
        atomic_io.check_manifest(folder)
    model, info = from_pretrained(folder, auto_class, dtype=dtype, **(placement or {}))
    lacking = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if lacking:
        raise DataError(
            f"{folder}: the weights lack {', '.join(lacking[:4])}. It is not a fine-tuned "
            f"{type(model).__name__}: its predictions would be random. Fine-tune it first (torchlake train)."
        )
    if spec is not None and spec.problem not in GENERATIVE and model.config.num_labels != max(1, len(spec.labels)):
        raise DataError(
            f"{folder}: the head has {model.config.num_labels} outputs, {TASK_FILE} has {len(spec.labels)} classes"
        )
    model.train(False)
    return model


def load_weights(folder: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of a model folder by name, verified as in `load_model`, in a memory map that processes share.

    Raises UnsafeError like `check_folder`, DataError for a damaged file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_folder(folder)
    if (folder / atomic_io.MANIFEST).exists():
        atomic_io.check_manifest(folder)
    files = [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(atomic_io.read_json(folder / INDEX)["weight_map"].values()))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: cannot be read: {in_words(error)}") from error
    return tensors


def head_spec(folder: Path) -> TaskSpec | None:
    """Return the task that the head of a model folder was trained for; None if it has no head, or no names for its
    classes."""
    check_folder(folder)
    if _task_of(read_head(folder).architecture) is None:
        return None
    try:
        return load_spec(folder)
    except DataError:
        return None


def whole_config(folder: Path, auto_class: str) -> "PretrainedConfig":
    """Return a folder's configuration, for a classifier with a padding token.

    Decoders lack a padding token and would refuse batches. Raises DataError for a model that needs the language of its
    rows.
    """
    config = load_config(folder)
    if getattr(config, "languages", None) and getattr(config, "default_language", None) is None:
        known = ", ".join(map(str, config.languages[:4]))
        raise DataError(
            f"{folder / 'config.json'}: default_language is null, and a model of type {config.model_type!r} computes "
            f"with the adapter of a row's language. Set default_language to the language of your rows ({known}, ...)."
        )
    if auto_class.endswith("ForSequenceClassification"):
        # Without generation, cached keys and values would only fill memory.
        config.get_text_config().use_cache = False
        token = load_tokenizer(folder).pad_token_id if has_tokenizer(folder) else None
        if isinstance(token, int):
            set_pad_id(config, token)
    return config


def from_pretrained(
    folder: Path,
    auto_class: str,
    *,
    config: "PretrainedConfig | None" = None,
    dtype: "torch.dtype | None" = None,
    **placement: Any,
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """Return the model, and transformers' report on missing, mismatched and unexpected keys."""
    import torch
    import transformers

    config = config if config is not None else whole_config(folder, auto_class)
    try:
        with quiet():
            model, info = getattr(transformers, auto_class).from_pretrained(
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
    return model, info
