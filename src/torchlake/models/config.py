"""The configuration of a model folder: architecture, positions, embeddings, padding token.

Weights are not opened. Folders given here have passed `safety.check_folder`. For BERT, RoBERTa, DistilBERT and similar
encoders, and for ViT, ResNet and similar models, config.json is read without transformers, whose import takes longer
than scoring a small table.
"""

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlake import atomic_io
from torchlake.config.task_spec import label_name
from torchlake.errors import DataError, pip_install
from torchlake.storage.versions import Version, settled_version_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_MODEL_TYPE = "torchlake"
"`model_type` in the config.json of a task's own module that has no configuration."
NO_TOKEN = -1
"The padding token of a head that skips no token of a row; no tokenizer writes this id."
# Their tables of positions begin with the padding id and its predecessors, which no token can use.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
     "xlm-roberta", "xlm-roberta-xl", "xmod"}
)  # fmt: skip

_BERT: Mapping[str, Any] = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "is_decoder": False,
}
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "camembert": {**_BERT, "pad_token_id": 1},
    "distilbert": {**_BERT, "num_hidden_layers": 6},
    "electra": {**_BERT, "hidden_size": 256, "num_attention_heads": 4, "embedding_size": 128},
    "mpnet": {**_BERT, "vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32},
    "roberta": {**_BERT, "vocab_size": 50265, "pad_token_id": 1},
    "xlm-roberta": {**_BERT, "pad_token_id": 1},
}
"Fields of the encoders' configurations, with the defaults of transformers for fields that config.json lacks."
IMAGE_MODELS = frozenset({"beit", "convnext", "convnextv2", "deit", "resnet", "swin", "swinv2", "vit"})
"Types of models for images that keep the names of their classes in config.json."
COMMON_HEADS = {
    "SequenceClassification": "text_classification",
    "ImageClassification": "image_classification",
    "TokenClassification": "token_classification",
    "QuestionAnswering": "question_answering",
}
"The tasks of heads by the end of their class's name, for the types above."
HEADS = {
    **{task: re.sub("(?<=[a-z])(?=[A-Z])", "_", head).upper() for head, task in COMMON_HEADS.items()},
    "text_generation": "CAUSAL_LM",
    "text2text_generation": "SEQ_TO_SEQ_CAUSAL_LM",
}
"The name of each task in transformers' mappings of Auto classes."
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}


def encoder_config(folder: Path) -> dict[str, Any] | None:
    """Return the fields of `ENCODERS` for an encoder of these types, read without transformers; None for others.

    Raises DataError for an MPNet that transformers fails to compute.
    """
    values = atomic_io.read_json(folder / "config.json")
    defaults = ENCODERS.get(values.get("model_type"))
    if defaults is None:
        return None
    names = DISTILBERT_NAMES if values["model_type"] == "distilbert" else {}
    found = {"model_type": values["model_type"]}
    for name, default in defaults.items():
        # transformers knows its common names for DistilBERT's, too, but for the activation.
        other = default if name == "hidden_act" else values.get(name, default)
        found[name] = values.get(names.get(name, name), other)
    buckets = found.get("relative_attention_num_buckets")
    if isinstance(buckets, int) and buckets < 32:
        raise DataError(
            f"{folder / 'config.json'}: relative_attention_num_buckets is {buckets}, but transformers computes MPNet "
            "with 32 buckets of distances. Use a model with 32 or more."
        )
    return found


def load_config(folder: Path) -> "PretrainedConfig":
    """Return the configuration of a model folder that has passed `check_folder`. Raises DataError.

    Each version of the file is read once per process; callers get a copy of their own.
    """
    files = sorted(folder.glob("config*.json"))  # config.json may refer to the others, by version of transformers
    return copy.deepcopy(_config_of(folder, tuple(settled_version_of(str(file)) for file in files)))


@lru_cache(maxsize=16)
def _config_of(folder: Path, versions: tuple[Version, ...]) -> "PretrainedConfig":
    import transformers

    model_type = atomic_io.read_json(folder / "config.json").get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise DataError(
            f"{folder / 'config.json'}: the installed transformers has no model type {str(model_type)[:80]!r}; "
            f"a newer version may ({pip_install('-U', 'transformers')})"
        )
    try:
        auto: Any = transformers.AutoConfig
        config: PretrainedConfig = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _return_names(config)
        return config
    except Exception as error:
        raise DataError(f"{folder / 'config.json'}: cannot be loaded: {in_words(error)}") from error


def _return_names(config: "PretrainedConfig") -> None:
    """Let a model and its parts return their outputs by name: "return_dict": false is about callers of the model."""
    config.return_dict = True
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _return_names(part)


class Head(NamedTuple):
    """The architecture of a model, and the outputs of a classifier."""

    model_type: str
    architecture: str
    "The class of transformers; empty if config.json names none."
    problem_type: str | None
    names: Mapping[int, Any]
    "{index: class}, as in the file; see `class_names`."


def read_head(folder: Path) -> Head:
    """Return the head of the model; that of common types is read without transformers. Raises DataError."""
    values = atomic_io.read_json(folder / "config.json")
    names = values.get("id2label", {0: "LABEL_0", 1: "LABEL_1"})
    if (
        (values.get("model_type") in ENCODERS or values.get("model_type") in IMAGE_MODELS)
        and isinstance(names, dict)
        and all(str(index).isdecimal() for index in names)
        and not {"num_labels", "_num_labels"} & set(values)
    ):
        architectures = values.get("architectures")
        problem, names = values.get("problem_type"), {int(index): name for index, name in names.items()}
    else:
        config = load_config(folder)
        architectures, problem, names = config.architectures, config.problem_type, config.id2label or {}
    return Head(values.get("model_type", ""), (architectures or [""])[0], problem, names)


def tasks_of(head: Head) -> list[str]:
    """Return the tasks that a model's head is for, by transformers' Auto classes; for common types without it."""
    stem, _, suffix = head.architecture.partition("For")
    common = head.model_type in ENCODERS or head.model_type in IMAGE_MODELS
    if common and stem.lower() == head.model_type.replace("-", "") and suffix in COMMON_HEADS:
        return [COMMON_HEADS[suffix]]
    return [
        task
        for task in HEADS
        if head.model_type in (known := architectures_of(task))
        and any(head.architecture in classes for classes in known.values())
    ]


def architectures_of(task: str) -> dict[str, tuple[str, ...]]:
    """Return the classes of transformers that have a head for a task of `HEADS`, by model type."""
    from transformers.models.auto import modeling_auto

    known: Mapping[str, str | tuple[str, ...]] = getattr(modeling_auto, f"MODEL_FOR_{HEADS[task]}_MAPPING_NAMES")
    return {name: classes if isinstance(classes, tuple) else (classes,) for name, classes in known.items()}


def class_names(folder: Path, names: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the names of a head's classes by its outputs. Raises DataError if an output has none of its own."""
    where = f"{folder / 'config.json'}: id2label"
    if names.keys() != set(range(len(names))):
        numbers = ", ".join(map(str, sorted(names)[:20]))
        raise DataError(f"{where} numbers {len(names)} classes {numbers}; the numbers must be 0 to {len(names) - 1}")
    found = []
    for index in range(len(names)):
        if not isinstance(names[index], str | int | float):
            raise DataError(f"{where}: class {index} has the name {names[index]!r:.80}; it must be a string")
        found.append(label_name(names[index]))
    if len(set(found)) != len(found):
        raise DataError(f"{where} gives two classes the same name")
    return tuple(found)


def positions(folder: Path) -> int | None:
    """Return how many tokens of a row the model has positions for; None: no limit."""
    config = _fields(folder, "max_position_embeddings", "pad_token_id", "model_type")
    limit = config["max_position_embeddings"]
    if not isinstance(limit, int) or limit <= 0:
        return None
    return limit - (config["pad_token_id"] or 0) - 1 if config["model_type"] in POSITIONS_AFTER_PADDING else limit


def image_tokens(folder: Path) -> int | None:
    """Return how many tokens ViT and similar models make of an image, by patches; None for other models."""
    values = atomic_io.read_json(folder / "config.json")
    image, patch = values.get("image_size"), values.get("patch_size")
    if not (isinstance(image, int) and isinstance(patch, int) and 0 < patch <= image):
        return None
    return (image // patch) ** 2 + 1


def embeddings(folder: Path) -> int | None:
    """Return how many tokens the model has embeddings for; None if its configuration does not contain the number."""
    file = folder / "config.json"
    if not file.exists() or atomic_io.read_json(file).get("model_type") == OWN_MODEL_TYPE:
        return None
    encoder = encoder_config(folder)
    config = load_config(folder).get_text_config() if encoder is None else None
    number = getattr(config, "vocab_size", None) if encoder is None else encoder["vocab_size"]
    return number if isinstance(number, int) else None


def padding_id(folder: Path) -> int | None:
    """Return the id of the model's padding token, or None."""
    if not (folder / "config.json").exists():
        return None
    encoder = encoder_config(folder)
    return pad_id(load_config(folder)) if encoder is None else _valid_id(encoder["pad_token_id"])


def _fields(folder: Path, *names: str) -> dict[str, Any]:
    """Return fields of a configuration; None for a missing one."""
    encoder = encoder_config(folder)
    if encoder is not None:
        return {name: encoder[name] for name in names}
    config = load_config(folder)
    return {name: getattr(config, name, None) for name in names}


def pad_id(config: "PretrainedConfig") -> int | None:
    """Return the padding token's id in a configuration, or None.

    Decoders that classify use the last token with another id; encoders like RoBERTa count positions from it;
    encoder-decoders start with it.
    """
    return _valid_id(getattr(config.get_text_config(), "pad_token_id", None))


def _valid_id(value: Any) -> int | None:
    # Early Llamas have -1: none.
    return value if isinstance(value, int) and value >= 0 else None


def decoder_start(config: "PretrainedConfig") -> int:
    """Return the token that an encoder-decoder's answer begins with. Raises DataError if there is none."""
    found = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    token = next((one for one in found if isinstance(one, int) and one >= 0), None)
    if token is None:
        raise DataError("config.json has no decoder_start_token_id: set the token that the decoder starts with")
    return token


def set_pad_id(config: "PretrainedConfig", token: int | None) -> None:
    """Set the padding token, also as the decoder's start token if the configuration has none (T5's convention)."""
    for each in (config, config.get_text_config()):
        each.pad_token_id = token
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = token


def in_words(error: Exception) -> str:
    """Return the error's class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def tensor_parallel_refusal(config: "PretrainedConfig", ranks: int) -> str | None:
    """Return why a model of this configuration cannot be split over `ranks` by tensor parallelism, or None.

    transformers has plans for most decoders (Llama, Qwen, Gemma, Mistral, ...) and few encoders: which linear layers
    are split by columns, and which by rows (Shoeybi et al. 2019). `ranks` must divide the heads, because each head is
    computed on one rank.
    """
    body: Any = config.get_text_config()
    if not getattr(body, "base_model_tp_plan", None):
        return f"transformers has no plan for tensor parallelism of models of type {config.model_type!r}"
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(body, name, None)
        several = heads if isinstance(heads, list) else [heads]  # some models have other numbers in each layer
        uneven = next((each for each in several if isinstance(each, int) and each % ranks), None)
        if uneven is not None:
            return f"its {uneven} {name.removeprefix('num_').replace('_', ' ')} cannot be divided among {ranks} ranks"
    return None


def head_width(config: "PretrainedConfig") -> int:
    """Return the numbers of a query of one head of attention."""
    own: Any = config
    return int(getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads)
