"""What a model folder's config.json says: architecture, longest row, how many tokens it has embeddings for.

No weights are opened. A folder has been let in by `safety.check_folder` before it comes here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io
from torchlake.errors import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


def load_config(folder: Path) -> "PretrainedConfig":
    """The configuration of a model folder that `check_folder` has let in. Raises DataError."""
    import transformers

    model_type = atomic_io.read_json(folder / "config.json").get("model_type")
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
        raise DataError(f"{folder / 'config.json'}: cannot be loaded: {in_words(error)}") from error


def positions(folder: Path) -> int | None:
    """Tokens that the model of a folder, which `check_folder` has let in, has positions for; None: no such limit."""
    config = load_config(folder)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    return limit - (config.pad_token_id or 0) - 1 if config.model_type in POSITIONS_AFTER_PADDING else limit


def embeddings(folder: Path) -> int | None:
    """Tokens that the model of a folder has embeddings for; None where its configuration does not say."""
    if not (folder / "config.json").exists():
        return None
    number = getattr(load_config(folder).get_text_config(), "vocab_size", None)
    return number if isinstance(number, int) else None


def pad_id(config: "PretrainedConfig") -> int | None:
    """The padding token's id in a configuration; None where it has none.

    Decoders that classify read the answer at the last token that has another id, encoders of RoBERTa's kind count
    positions from it, and encoder-decoders begin with it.
    """
    found = getattr(config.get_text_config(), "pad_token_id", None)
    # Early Llamas have -1: none.
    return found if isinstance(found, int) and found >= 0 else None


def set_pad_id(config: "PretrainedConfig", token: int) -> None:
    """Let `token` be the padding token, also what a decoder begins with where the configuration says nothing of that.

    The latter is T5's convention.
    """
    for each in (config, config.get_text_config()):
        each.pad_token_id = token
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = token


def in_words(error: Exception) -> str:
    """The error's class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
