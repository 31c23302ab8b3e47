"""Model folders: reading and writing them, and giving an encoder the head that a task needs.

A model folder is Hugging Face's layout (config.json, model.safetensors, the tokenizer's files) plus

    task.json        the `TaskSpec`: what the model is asked, its classes in their own type, its columns
    README.md        the model card
    manifest.json    size and sha256 of every file, written last

so `AutoModel*.from_pretrained` loads it, and torchlake loads any folder of transformers. Every road into a model goes
through `safety.check_folder`, then through transformers with local files, safetensors and no remote code. Where there
is a manifest it is verified first, which reads the weights once more.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import durable
from torchlake.errors import DataError
from torchlake.model_folders import model_folder
from torchlake.model_writing import quiet, save_model_folder
from torchlake.safety import INDEX, check_folder
from torchlake.task_spec import TASK_FILE, WRITING, Label, Problem, TaskSpec, spec_from_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "Label",
    "Problem",
    "TaskSpec",
    "base_model",
    "check_folder",
    "load_config",
    "load_model",
    "load_spec",
    "load_tokenizer",
    "load_weights",
    "max_length",
    "model_folder",
    "positions",
    "save_model_folder",
]

MAX_LENGTH = 512
WRITERS = ("ForCausalLM", "LMHeadModel")
"How transformers names the architectures that continue a text."
PROBLEM_TYPES: dict[Problem, Any] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
# Their tables of positions begin with the padding id and its predecessors, which no token can use.
POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)


def load_spec(folder: str | Path) -> TaskSpec:
    """The task.json of a model folder; without one, what config.json tells of a classifier or a language model.

    Raises DataError when neither tells.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if (folder / TASK_FILE).exists():
        return spec_from_json(folder / TASK_FILE, durable.read_json(folder / TASK_FILE))
    config = load_config(folder)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture.endswith(WRITERS):
        return TaskSpec(
            task="text_generation",
            problem="next_token",
            labels=(),
            text="text",
            label=None,
            max_length=max_length(folder),
        )
    if not architecture.endswith("ForSequenceClassification"):
        raise DataError(
            f"{folder}: config.json names the architecture {architecture}, which neither classifies nor continues "
            f"text, and there is no {TASK_FILE}. Fine-tune it first (torchlake train), or name a fine-tuned model."
        )
    problems = {name: problem for problem, name in PROBLEM_TYPES.items()}
    names: dict[Any, str] = config.id2label or {}
    problem = problems.get(config.problem_type or "", "regression" if len(names) == 1 else "single_label")
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


def max_length(folder: str | Path, requested: int | None = None) -> int:
    """Tokens that a row may have: `requested`, or what model and tokenizer can take, at most 512.

    Raises DataError when more is requested than the model has positions.
    """
    folder = model_folder(folder)
    check_folder(folder)
    limit = positions(folder)
    if requested is not None:
        if limit is not None and requested > limit:
            raise DataError(f"max_length is {requested}, but {folder} has positions for {limit} tokens only")
        return requested
    return min(limit or MAX_LENGTH, load_tokenizer(folder, pad_with_end=True).model_max_length, MAX_LENGTH)


def positions(folder: Path) -> int | None:
    """Tokens that the model of a folder, which `check_folder` has let in, has positions for; None: no such limit."""
    config = load_config(folder)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    return limit - (config.pad_token_id or 0) - 1 if config.model_type in POSITIONS_AFTER_PADDING else limit


def load_tokenizer(folder: str | Path, *, pad_with_end: bool = False) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a model folder.

    `pad_with_end` is for language models: many have no padding token, and the end of a text can stand for it, because
    what is padding is told by the mask. Raises DataError when there is no tokenizer, or one without those tokens.
    """
    from transformers import AutoTokenizer

    folder = model_folder(folder)
    check_folder(folder, weights=False)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json")) and not any(
        folder.glob("*.model")
    ):
        raise DataError(
            f"{folder}: there is no tokenizer in it (tokenizer.json). Save the model's tokenizer there too."
        )
    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{folder}: its tokenizer cannot be loaded: {_in_words(error)}") from error
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: {type(tokenizer).__name__} is a tokenizer in Python; torchlake needs a fast one "
            "(tokenizer.json). Convert it with transformers, or choose a model that has one."
        )
    if pad_with_end and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise DataError(f"{folder}: its tokenizer has no padding token (pad_token in tokenizer_config.json)")
    loaded: PreTrainedTokenizerFast = tokenizer
    return loaded


def load_model(
    folder: str | Path, spec: TaskSpec | None = None, *, auto_class: str, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """The fine-tuned model of a folder, in evaluation mode, in main memory, in fp32 unless `dtype` says otherwise.

    Raises UnsafeError as `check_folder` does; DataError when a file is not the one in the manifest, when weights are
    missing (an encoder whose head was never trained would answer at random), or when the head does not fit `spec`.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if (folder / durable.MANIFEST).exists():
        durable.check_manifest(folder)
    model, info = _from_pretrained(folder, auto_class, dtype=dtype)
    lacking = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if lacking:
        raise DataError(
            f"{folder}: the weights lack {', '.join(lacking[:4])}. It is not a fine-tuned model of its kind "
            f"({type(model).__name__}): its answers would be random. Fine-tune it first (torchlake train)."
        )
    if spec is not None and spec.problem not in WRITING and model.config.num_labels != max(1, len(spec.labels)):
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
    if (folder / durable.MANIFEST).exists():
        durable.check_manifest(folder)
    files = [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(durable.read_json(folder / INDEX)["weight_map"].values()))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: cannot be read: {_in_words(error)}") from error
    return tensors


def base_model(base: str | Path, spec: TaskSpec, auto_class: str) -> "PreTrainedModel":
    """The encoder `base` with a fresh head for `spec`, in fp32; torch's global generator decides the head's weights.

    A language model keeps the head that it was trained with.
    Raises DataError when the architecture has no such head or the model's own weights are incomplete.
    """
    import transformers

    folder = model_folder(base)
    check_folder(folder)
    if spec.problem in WRITING:
        return _language_model(folder, auto_class)
    config = load_config(folder)
    names = [str(label).lower() if isinstance(label, bool) else str(label) for label in spec.labels] or ["value"]
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
    _draw_head(model)
    model.config.architectures = [type(model).__name__]
    return model


def layers(model: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The model's transformer layers in their order: of its lists of modules of one class the one with most parameters.

    Empty for a model without such a list.
    """
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [members for members in lists if len({type(member) for member in members}) == 1]
    return max(alike, key=lambda members: sum(each.numel() for one in members for each in one.parameters()), default=[])


def load_config(folder: Path) -> "PretrainedConfig":
    """The configuration of a model folder that `check_folder` has let in. Raises DataError."""
    import transformers

    model_type = durable.read_json(folder / "config.json").get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise DataError(
            f"{folder / 'config.json'}: the installed transformers has no model type {str(model_type)[:80]!r}; "
            "a newer version may (pip install -U transformers)"
        )
    try:
        auto: Any = transformers.AutoConfig
        config: PretrainedConfig = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config
    except Exception as error:
        raise DataError(f"{folder / 'config.json'}: cannot be loaded: {_in_words(error)}") from error


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


def _from_pretrained(
    folder: Path, auto_class: str, *, config: "PretrainedConfig | None" = None, dtype: "torch.dtype | None" = None
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """The model and what transformers tells of keys that are missing, mismatched or unexpected."""
    import torch
    import transformers

    config = config if config is not None else load_config(folder)
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
        raise DataError(f"{folder}: the model cannot be loaded: {_in_words(error)}") from error
    return model, info


def _draw_head(model: "PreTrainedModel") -> None:
    """Draw the output layer anew, also where the folder brought one of the same shape; it may mean other classes."""
    import torch

    initialise: Any = model._init_weights
    body = getattr(model, model.base_model_prefix, None)
    inside = {id(module) for module in body.modules()} if isinstance(body, torch.nn.Module) else set()
    for module in model.modules():
        if id(module) not in inside and getattr(module, "out_features", None) == model.config.num_labels:
            for tensor in module.parameters(recurse=False):
                tensor._is_hf_initialized = False  # type: ignore[attr-defined]
            initialise(module)


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
