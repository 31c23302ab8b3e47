"""Model folders: reading and writing them, and giving an encoder the head that a task needs.

A model folder is Hugging Face's layout (config.json, model.safetensors, the tokenizer's files) plus

    task.json        the `TaskSpec`: what the model is asked, its classes in their own type, its columns
    README.md        the model card
    manifest.json    size and sha256 of every file, written last

so `AutoModel*.from_pretrained` loads it, and torchlake loads any folder of transformers. Every road into a model goes
through `safety.check_folder`, then through transformers with local files, safetensors and no remote code. Where there
is a manifest it is verified first, which reads the weights once more.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.config.task_spec import GENERATIVE, TASK_FILE, Label, Problem, TaskSpec, label_name, spec_from_json
from torchlake.errors import DataError
from torchlake.models.config import embeddings, in_words, load_config, positions, read_head, set_pad_id
from torchlake.models.folders import model_folder
from torchlake.models.safety import INDEX, check_folder
from torchlake.models.tokenizer import has_tokenizer, load_text_tokenizer, load_tokenizer, max_length
from torchlake.models.write import quiet, save_model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "Label",
    "Problem",
    "TaskSpec",
    "base_model",
    "check_folder",
    "embeddings",
    "load_config",
    "load_model",
    "load_spec",
    "load_text_tokenizer",
    "load_tokenizer",
    "load_weights",
    "max_length",
    "model_folder",
    "positions",
    "save_model_folder",
]

log = logging.getLogger(__name__)

WRITERS = ("ForCausalLM", "LMHeadModel")
"How transformers names the architectures that continue a text."
PROBLEM_TYPES: dict[Problem, Any] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def load_spec(folder: str | Path) -> TaskSpec:
    """The task.json of a model folder; without one, what config.json says about a classifier or a language model.

    Raises DataError when neither does.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if (folder / TASK_FILE).exists():
        return spec_from_json(folder / TASK_FILE, atomic_io.read_json(folder / TASK_FILE))
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
    if not head.architecture.endswith("ForSequenceClassification"):
        raise DataError(
            f"{folder}: config.json names the architecture {head.architecture}, which neither classifies nor continues "
            f"text, and there is no {TASK_FILE}. Fine-tune it first (torchlake train), or name a fine-tuned model."
        )
    problems = {name: problem for problem, name in PROBLEM_TYPES.items()}
    names = head.names
    problem = problems.get(head.problem_type or "", "regression" if len(names) == 1 else "single_label")
    labels = () if problem == "regression" else tuple(names[index] for index in range(len(names)))
    if len(set(labels)) != len(labels):
        raise DataError(f"{folder / 'config.json'}: id2label gives two classes the same name")
    return TaskSpec(
        task="text_classification",
        problem=problem,
        labels=labels,
        text="text",
        label="label",
        max_length=max_length(folder),
    )


def load_model(
    folder: str | Path, spec: TaskSpec | None = None, *, auto_class: str, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """The fine-tuned model of a folder, in evaluation mode, in main memory, in fp32 unless `dtype` says otherwise.

    Raises UnsafeError as `check_folder` does; DataError when a file is not the one in the manifest, when weights are
    missing (an encoder whose head was never trained would answer at random), or when the head does not fit `spec`.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if (folder / atomic_io.MANIFEST).exists():
        atomic_io.check_manifest(folder)
    model, info = _from_pretrained(folder, auto_class, dtype=dtype)
    lacking = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if lacking:
        raise DataError(
            f"{folder}: the weights lack {', '.join(lacking[:4])}. It is not a fine-tuned model of its kind "
            f"({type(model).__name__}): its answers would be random. Fine-tune it first (torchlake train)."
        )
    if spec is not None and spec.problem not in GENERATIVE and model.config.num_labels != max(1, len(spec.labels)):
        raise DataError(
            f"{folder}: the head has {model.config.num_labels} outputs, {TASK_FILE} names {len(spec.labels)} classes"
        )
    model.train(False)
    return model


def load_weights(folder: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a model folder by name, verified like `load_model`'s, in a memory map that processes share.

    Raises UnsafeError as `check_folder` does, DataError for a file that is damaged.
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


def base_model(base: str | Path, spec: TaskSpec, auto_class: str) -> "PreTrainedModel":
    """The encoder `base` with a fresh head for `spec`, in fp32; torch's global generator decides the head's weights.

    A language model keeps the head that it was trained with, and so does a classifier of the same classes, whose rows
    are put into their order, and a regression in the same units.
    Raises DataError when the architecture has no such head or the model's own weights are incomplete.
    """
    import transformers

    folder = model_folder(base)
    check_folder(folder)
    if spec.problem in GENERATIVE:
        return _language_model(folder, auto_class)
    trained = head_spec(folder)
    config = _whole_config(folder, auto_class)
    names = [label_name(label) for label in spec.labels] or ["value"]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = PROBLEM_TYPES[spec.problem]
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        raise DataError(
            f"{folder}: the architecture {config.model_type!r} has no head for {spec.task} in transformers. "
            "Choose an encoder such as BERT, RoBERTa, DistilBERT, ModernBERT or DeBERTa."
        )
    model, info = _from_pretrained(folder, auto_class, config=config)
    body = f"{model.base_model_prefix}."
    lacking = [*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])]
    # The pooler counts to the head: encoders that were pretrained without one come without its weights.
    torn = sorted(key for key in lacking if key.startswith(body) and not key.startswith(f"{body}pooler."))
    if torn:
        raise DataError(f"{folder}: the encoder's weights lack {', '.join(torn[:4])}; the model is incomplete")
    head = _head(model)
    kept = None if trained is None or lacking or len(head) != 1 else _rows_kept(trained, spec)
    if kept is None:
        _draw_head(model, head)
    else:
        _order_rows(head[0], kept)
    if trained is not None:
        what = "drawn: it was trained for other classes or numbers" if kept is None else "kept: it has the same classes"
        log.info("%s: the head is %s", folder, what)
    model.config.architectures = [type(model).__name__]
    return model


def head_spec(folder: Path) -> TaskSpec | None:
    """What the head of a model folder was trained for; None where there is none, or its classes have no names."""
    check_folder(folder)
    if not read_head(folder).architecture.endswith("ForSequenceClassification"):
        return None
    try:
        return load_spec(folder)
    except DataError:
        return None


def layers(model: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The model's transformer layers, in the order of its modules: of an encoder-decoder those of both.

    They are the members of its outermost lists of modules that hold matrices. A list of lists (Funnel's blocks) stands
    for the lists in it, because it is never called itself. Empty for a model without such a list.
    """
    from torch import nn

    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        members = [each for each in module if not isinstance(each, nn.ModuleList)]
        parts = [part for each in members for part in each.modules() if not isinstance(part, nn.Embedding)]
        if any(parameter.ndim > 1 for part in parts for parameter in part.parameters(recurse=False)):
            found += members
            inside |= {id(each) for member in members for each in member.modules()}
    return found


def _language_model(folder: Path, auto_class: str) -> "PreTrainedModel":
    import transformers

    config = load_config(folder)
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        raise DataError(
            f"{folder}: the architecture {config.model_type!r} does not continue texts in transformers. Choose a "
            "causal language model such as GPT-2, GPT-J, OPT, Llama, Qwen or Mistral."
        )
    model = load_model(folder, auto_class=auto_class)
    model.config.architectures = [type(model).__name__]
    # Chat models name several end tokens, and not always in config.json, which is what training hands on.
    if model.generation_config is not None and model.generation_config.eos_token_id is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id
    return model


def _whole_config(folder: Path, auto_class: str) -> "PretrainedConfig":
    """A folder's configuration; of a classifier with the padding token that it needs.

    Decoders come without a padding token, and would refuse two rows at once. Raises DataError for a model that needs to
    be told the language of its rows.
    """
    config = load_config(folder)
    if getattr(config, "languages", None) and getattr(config, "default_language", None) is None:
        known = ", ".join(map(str, config.languages[:4]))
        raise DataError(
            f"{folder / 'config.json'}: default_language is null, and a model of type {config.model_type!r} computes "
            f"with the adapter of a row's language. Set default_language to the language of your rows ({known}, ...)."
        )
    if auto_class.endswith("ForSequenceClassification"):
        # Keys and values are kept for answers that are continued; here they would fill memory.
        config.get_text_config().use_cache = False
        token = load_tokenizer(folder).pad_token_id if has_tokenizer(folder) else None
        if isinstance(token, int):
            set_pad_id(config, token)
    return config


def _from_pretrained(
    folder: Path, auto_class: str, *, config: "PretrainedConfig | None" = None, dtype: "torch.dtype | None" = None
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """The model, and what transformers reports about keys that are missing, mismatched or unexpected."""
    import torch
    import transformers

    config = config if config is not None else _whole_config(folder, auto_class)
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
            )
    except Exception as error:
        raise DataError(f"{folder}: the model cannot be loaded: {in_words(error)}") from error
    return model, info


def _rows_kept(trained: TaskSpec, spec: TaskSpec) -> list[int] | None:
    """The row of a head trained for `trained` that is each output of `spec`; None where it means something else."""
    before, now = ([label_name(label) for label in each.labels] for each in (trained, spec))
    same_units = (trained.mean, trained.deviation) == (spec.mean, spec.deviation)
    if trained.problem != spec.problem or sorted(before) != sorted(now) or not same_units:
        return None
    return [before.index(name) for name in now] or [0]


def _head(model: "PreTrainedModel") -> "list[torch.nn.Module]":
    """The output layer: what has an output for each class and is not in the body; one module in every architecture
    known, unless a layer before it is as narrow."""
    import torch

    body = getattr(model, model.base_model_prefix, None)
    inside = {id(module) for module in body.modules()} if isinstance(body, torch.nn.Module) else set()
    return [
        module
        for module in model.modules()
        if id(module) not in inside and getattr(module, "out_features", None) == model.config.num_labels
    ]


def _order_rows(head: "torch.nn.Module", rows: list[int]) -> None:
    import torch

    with torch.no_grad():
        for tensor in head.parameters(recurse=False):
            tensor.copy_(tensor[rows])


def _draw_head(model: "PreTrainedModel", head: "list[torch.nn.Module]") -> None:
    """Draw the output layer, also where the folder brought one of the same shape: it means other classes."""
    initialize: Any = model._init_weights
    for module in head:
        for tensor in module.parameters(recurse=False):
            tensor._is_hf_initialized = False  # type: ignore[attr-defined]
        initialize(module)
