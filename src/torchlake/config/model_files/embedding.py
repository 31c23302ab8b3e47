"""How an encoder's token states become the vector of a row, according to the files of a model folder.

    modules.json                        Transformer -> Pooling -> Dense ... -> Normalize
    1_Pooling/config.json               how token states become one vector
    2_Dense/config.json                 a product after it, with its weights beside this file
    sentence_bert_config.json           longest input, in tokens; lower case
    config_sentence_transformers.json   prompts, and the number of dimensions to keep

This is the layout of sentence-transformers. `modules.json` names classes to import; here they are compared with a list,
and nothing is imported; nor is any key ignored (`known_keys.py`). A folder without it has a plain encoder, whose
vectors are the mean of the token states.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.known_keys import check_keys
from torchlake.errors import DataError

MODULES, SETTINGS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
OLD_SETTINGS = tuple(
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"Earlier names of SETTINGS; sentence-transformers reads the first file that has a key."
FILES = (MODULES, SETTINGS, *OLD_SETTINGS, PROMPTS)
KIND = re.compile(r"sentence_transformers(?:\.\w+)*\.(Transformer|Pooling|Dense|Normalize|Dropout)")
"Supported modules, by the import paths of old and new versions."
POOLINGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"Each pooling and its flag in old versions, in the order in which several flags are concatenated."
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU")
"Functions after a Dense module, by their names in torch.nn."


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A product after pooling: x (B, I) -> activation(x weight^T + bias) [+ x] (B, O)."""

    folder: str
    "Folder of its weights, relative to the model folder."
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool = False
    "Whether x is added; if O is not I, its product with weights of its own."


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """How token states (L, H) become one vector."""

    poolings: tuple[str, ...] = ("mean",)
    "The poolings; the vectors of several are concatenated in this order."
    dense: tuple[Dense, ...] = ()
    dimensions: int
    "Numbers in a vector; fewer than the modules produce if it is truncated, which happens before normalization."
    normalize: bool = False
    max_length: int | None = None
    "Maximum tokens of a row; None: as many as the encoder has positions for."
    lowercase: bool = False
    "Whether texts become lower case before they are tokenized."
    prompt: str = ""
    "A prompt that is put before each text."


def read_embedding(folder: Path) -> Embedding:
    """Return how the model in `folder`, which has passed `check_folder`, embeds texts.

    Raises DataError with the name of a module or setting that is not supported, because leaving it out would change
    the vectors.
    """
    width = _width(folder)
    if not (folder / MODULES).is_file():
        return Embedding(dimensions=width)
    try:
        return _read_modules(folder, width)
    except DataError:  # this is a ValueError, too
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / MODULES}: is not in the layout of sentence-transformers ({error!r})") from error


def write_layout(folder: Path, how: Embedding) -> None:
    """Write these files beside an encoder, for a model without Dense modules.

    Every version of sentence-transformers since 2.0 accepts these class names.
    """
    assert not how.dense, "weights of Dense modules cannot be written here"
    kinds = ("Transformer", "Pooling", *(["Normalize"] if how.normalize else []))
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": how.dimensions // len(how.poolings)}
    prompts = {"default": how.prompt} if how.prompt else {}
    contents = {
        MODULES: modules,
        "1_Pooling/config.json": pooling | {flag: name in how.poolings for name, flag in POOLINGS.items()},
        SETTINGS: {"max_seq_length": how.max_length, "do_lower_case": how.lowercase},
        PROMPTS: {
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts), None),
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        atomic_io.write_json(folder / name, content, site="exported.layout")
    for module in modules[2:]:
        (folder / str(module["path"])).mkdir(exist_ok=True)


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of the encoder, and the name of their file. Raises DataError for an unknown key."""
    for name in (SETTINGS, *OLD_SETTINGS):
        if settings := read_object(folder / name):
            check_keys(folder / name, settings, known_keys.TRANSFORMER)
            return settings, name
    return {}, SETTINGS


def settings_for(folder: Path, longest: int) -> dict[str, Any]:
    """Return the settings of the encoder for inputs of at most `longest` tokens."""
    limits = ("max_length", "model_max_length")

    def unlimited(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: unlimited(one) for key, one in value.items() if key not in limits}

    return {**unlimited(read_settings(folder)[0]), "max_seq_length": longest}


def _read_modules(folder: Path, width: int) -> Embedding:
    kinds, paths = [], []
    for module in atomic_io.read_json(folder / MODULES):
        check_keys(folder / MODULES, module, known_keys.MODULE)
        known = KIND.fullmatch(str(module["type"]))
        if known is None:
            raise DataError(
                f"{folder / MODULES}: has the module {str(module['type'])[-80:]!r}, which torchlake does not support; "
                "without it the vectors would differ. It supports Transformer, Pooling, Dense, Dropout and Normalize "
                "of sentence-transformers."
            )
        if known[1] == "Dropout":  # it computes nothing outside of training
            file = atomic_io.safe_join(folder, str(module["path"])) / "config.json"
            check_keys(file, read_object(file), known_keys.DROPOUT)
            continue
        kinds.append(known[1])
        paths.append(str(module["path"]))
    order = "".join(kind[0] for kind in kinds)
    if re.fullmatch("TPD*N?", order) is None or paths[0]:
        raise DataError(
            f"{folder / MODULES}: has the modules {', '.join(kinds)}; they have to be a Transformer in the folder "
            "itself, Pooling, any number of Dense, and Normalize last"
        )
    settings, name = read_settings(folder)
    prompts = read_object(folder / PROMPTS)
    check_keys(folder / PROMPTS, prompts, known_keys.PROMPTS)
    place = atomic_io.safe_join(folder, paths[1]) / "config.json"
    poolings = _poolings(read_object(place), place)
    dense = tuple(_dense(folder, path) for kind, path in zip(kinds, paths, strict=True) if kind == "Dense")
    dimensions = width * len(poolings)
    for each in dense:
        if each.inputs != dimensions:
            raise DataError(f"{folder / each.folder}: expects {each.inputs} numbers, but gets {dimensions}")
        dimensions = each.outputs
    if "Normalize" in kinds:
        last = atomic_io.safe_join(folder, paths[-1]) / "config.json"
        check_keys(last, read_object(last), known_keys.NORMALIZE)
    return Embedding(
        poolings=poolings,
        dense=dense,
        dimensions=min(dimensions, int(prompts.get("truncate_dim") or dimensions)),
        normalize="Normalize" in kinds,
        max_length=_longest(settings, folder / name),
        lowercase=bool(settings.get("do_lower_case", False)),
        prompt=default_prompt(prompts, folder),
    )


def _longest(settings: Mapping[str, Any], file: Path) -> int | None:
    """Return the maximum tokens of a row. Raises DataError for arguments of the model or tokenizer that change it."""
    longest = settings.get("max_seq_length")
    for name in ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs"):
        arguments = settings.get(name) or {}
        check_keys(file, arguments, known_keys.LOADING, name)
        longest = arguments.get("model_max_length") or longest
    modalities = settings.get("modality_config")
    if modalities is not None:
        check_keys(file, modalities, known_keys.MODALITIES, "modality_config")
        check_keys(file, modalities["text"], known_keys.TEXT_MODALITY, "modality_config.text")
    given = settings.get("processing_kwargs") or {}
    check_keys(file, given, known_keys.PROCESSING, "processing_kwargs")
    for kind in ("text", "common"):  # the later ones replace the earlier ones
        arguments = given.get(kind) or {}
        check_keys(file, arguments, known_keys.TEXT_ARGUMENTS, f"processing_kwargs.{kind}")
        longest = arguments.get("max_length") or longest
    return None if longest is None else int(longest)


def _poolings(config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    check_keys(file, config, known_keys.POOLING)
    named = config.get("pooling_mode")  # in new versions, in any order
    if named is None:
        named = [name for name, flag in POOLINGS.items() if config.get(flag)] or (["mean"] if config else [])
    modes = [named] if isinstance(named, str) else list(named)
    unknown = [name for name in modes if name not in POOLINGS]
    if unknown or not modes:
        raise DataError(
            f"{file}: pools token states by {', '.join(map(str, unknown)) or 'nothing'}; torchlake supports "
            f"{', '.join(POOLINGS)}"
        )
    if config.get("include_prompt", True) is False:
        raise DataError(f"{file}: leaves the prompt out (include_prompt), which is not supported yet")
    return tuple(modes)


def _dense(folder: Path, path: str) -> Dense:
    place = atomic_io.safe_join(folder, path)
    config = read_object(place / "config.json")
    check_keys(place / "config.json", config, known_keys.DENSE)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if name not in ACTIVATIONS or not activation.startswith("torch.nn.modules."):
        raise DataError(
            f"{place / 'config.json'}: has the activation {activation[:80]!r}; torchlake supports "
            f"{', '.join(ACTIVATIONS)}"
        )
    if not (place / "model.safetensors").is_file():
        raise DataError(f"{place}: has no weights in model.safetensors")
    return Dense(
        folder=path,
        inputs=int(config["in_features"]),
        outputs=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=name,
        residual=bool(config.get("use_residual", False)),
    )


def default_prompt(config: Mapping[str, Any], folder: Path) -> str:
    """Return the default prompt; empty if there is none."""
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts") or {}
    prompt = prompts.get(name)
    if prompt is None and name in prompts:
        return ""
    if not isinstance(prompt, str):
        raise DataError(f"{folder / PROMPTS}: default_prompt_name is {name!r}, but prompts has no prompt of that name")
    return prompt


def _width(folder: Path) -> int:
    config = read_object(folder / "config.json")
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for name in ("hidden_size", "dim", "d_model", "n_embd"):
        width = config.get(name, (inner or {}).get(name))
        if isinstance(width, int):
            return width
    raise DataError(f"{folder / 'config.json'}: does not say how many numbers a token state has (hidden_size)")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file."""
    value = atomic_io.read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not a JSON object")
    return value
