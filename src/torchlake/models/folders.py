"""Find a model's files, and hash their content.

A model is given as its folder, the folder of the run that trained it, or its name on the Hugging Face hub
(`name@revision` for a branch, tag or commit), whose snapshot is downloaded once. A path whose first folder exists is
never looked up on the hub. Hashes cover the files that affect predictions or tokens, not cards and manifests.
They are of the files' content, whatever a manifest says. Cost: each version of a file is read once per process.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from torchlake import atomic_io
from torchlake.config.model_files.embedding import FILES
from torchlake.config.task_spec import TASK_FILE
from torchlake.errors import DataError, FingerprintError, TorchlakeError
from torchlake.storage.versions import Version, settled_version_of
from torchlake.tables.sources.files import local_path

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
JOB_FILE, TUNING_FILE = "job.yaml", "tuning.json"
"The files that identify the folder of a run and of a tuning; a finished tuning has both."
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAPPED = (".safetensors", ".bin", ".onnx")
"Ends of the names of files that libraries map into memory."
CHAT_TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"Further chat templates, such as one for conversations with tools."
ADAPTER_CONFIG, ADAPTER_TENSORS, BASE_RECORD = "adapter_config.json", "adapter_model.safetensors", "base.json"
"The files of an adapter, in place of weights; see adapters/base.py."
ADAPTER = "adapter"
"The folder beside whole weights that holds the adapter alone, as peft loads it."
IMAGE_FILES = ("processor_config.json", "preprocessor_config.json")
"The files of an image processor; the first that has one counts."
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@\w[\w./-]*)?")
VOCABULARY_FILES = ("*.model", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes")
"Vocabularies in formats of their own, as transformers' tokenizers name them."
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", *VOCABULARY_FILES)
HUB_REFUSED = ("[!0-9a]*/*", "a[!d]*/*", "ad[!d]*/*", "*/*/*")
"What `check_folder` would refuse: files in folders other than numbered ones and the one of further chat templates."
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*vocab*.json",
    "normalizer.json", "vocab.txt", "merges.txt", "dict.txt", *VOCABULARY_FILES, CHAT_TEMPLATE,
)  # fmt: skip
# The layout of sentence-transformers: numbered folders hold pooling and what follows it.
EMBEDDING_FILES = (*FILES, "[0-9]*_*/config.json", "[0-9]*_*/*.safetensors")
DECIDING_FILES = (
    "config.json",
    "generation_config.json",
    TASK_FILE,
    "*.safetensors",
    INDEX,
    ADAPTER_CONFIG,
    BASE_RECORD,
    *TOKENIZER_FILES,
    NAMED_TEMPLATES,
    *IMAGE_FILES,
    *EMBEDDING_FILES,
)


def model_folder(model: str | Path) -> Path:
    """Return the folder of a local model, of a run's model, or of a hub model's snapshot (downloaded if not cached).

    Raises DataError if there is no such model here or on the hub, or if the run has no model yet.
    """
    folder = Path(os.path.expanduser(local_path(model)))
    if _is_folder(folder):
        return _model_of_run(folder)
    name = str(model)
    if not HUB_NAME.fullmatch(name):
        raise DataError(
            f"{name}: there is no such model folder, and it is not a valid name on the Hugging Face Hub."
            f"{_nearest(folder)}"
        )
    if len(folder.parts) > 1 and Path(folder.parts[0]).is_dir():
        raise DataError(
            f"{name}: there is no such model folder in {Path(folder.parts[0]).absolute()}.{_nearest(folder)} Because "
            f"there is a folder {folder.parts[0]!r} here, it was not looked for on the Hugging Face Hub; to use a "
            "model from there, download it (hf download) and give its path."
        )
    name, _, revision = name.partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    log.info("%s: no such folder; looking on the Hugging Face hub", model)
    try:
        snapshot = snapshot_download(
            name, revision=revision or None, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_REFUSED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        cause = "HF_HUB_OFFLINE is set" if offline else (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{model}: there is no such folder here ({folder.absolute()}). Could not download it from the Hugging Face "
            f"Hub ({cause}). Give the path of a model folder, or download the model where there is a network."
            f"{_nearest(folder)}"
        ) from None
    return Path(snapshot)


def _is_folder(path: Path) -> bool:
    """Return whether the folder exists. Raises DataError for a file and for a folder without permission."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; a model is a folder that can be read") from error
    if not is_folder:
        raise DataError(f"{path}: is a file; a model is a folder with config.json and model.safetensors")
    return True


def _model_of_run(folder: Path) -> Path:
    """Return the model folder for the folder of a run, of its checkpoints or of a tuning; return other folders
    unchanged.

    Raises DataError if there is no model yet, and for a single checkpoint.
    """
    above = (folder, *folder.absolute().parents)
    at = next((place for place, one in enumerate(above) if one.name == CHECKPOINTS), -1)
    run = above[at + 1]
    is_run, is_tuning = (run / JOB_FILE).is_file(), (run / TUNING_FILE).is_file()
    if (folder / "config.json").exists() or not (is_run or is_tuning):
        return folder
    models = [one for one in (run / "model", *sorted(run.glob("trials/*/model"))) if (one / "config.json").exists()]
    named = " or ".join(map(str, models))
    if is_tuning and (not is_run or len(models) != 1):
        raise DataError(
            f"{run}: is the folder of a tuning that is not finished. Run the same command again"
            + (f", or name a model that it has already: {named}." if models else ".")
        )
    if not models:
        raise DataError(_unfinished(run))
    if folder.name.startswith("step_"):
        raise DataError(f"{folder}: is a checkpoint, not a model folder. The model of its run is {named}.")
    log.info("%s: is the folder of a run; its model is %s", folder, models[0])
    return models[0]


def _unfinished(run: Path) -> str:
    """Return the error for a run without a model folder, with the location of its best model so far."""
    # Imported here: importing pydantic and object stores takes longer than scoring a small table.
    from torchlake.checkpoints import location
    from torchlake.checkpoints.store import BEST
    from torchlake.config.job import load_job

    try:
        place = location.find_store(load_job(run / JOB_FILE).train.checkpoint_folder, run)
        best = [f"{place}/{name}" for name in place.list_complete(BEST)]
    except TorchlakeError:
        best = []
    so_far = f" The weights of its best model so far are in the checkpoint {best[-1]}." if best else ""
    return (
        f"{run}: is the folder of a run that is not finished, so there is no model in it yet.{so_far} Run the same "
        f"command again: the training continues, and writes its best model to {run / 'model'}."
    )


def _nearest(folder: Path) -> str:
    """Return a hint: the name most similar to the first missing part of a path."""
    missing = next((part for part in [*reversed(folder.parents), folder] if not os.path.exists(part)), folder)
    try:
        names = [entry.name for entry in os.scandir(missing.parent) if os.path.isdir(entry)]
    except OSError:
        return ""
    close = get_close_matches(missing.name, names, n=1)
    return f" Did you mean {str(missing.parent / close[0])!r}?" if close else ""


def base_folder(base: str | None) -> Path | None:
    """Return the folder of a job's base model; None if it has none. Raises the errors of `model_folder`."""
    return None if base is None else model_folder(base)


def model_hash(folder: str | Path) -> str:
    """Return the sha256 over all that affects predictions: weights, configuration, tokenizer, task."""
    return _hash_files(model_folder(folder), DECIDING_FILES)


def files_of(folder: Path, patterns: Sequence[str] = DECIDING_FILES) -> set[Path]:
    """Return the files of a folder that match the patterns; by default those of `model_hash`."""
    return {path for pattern in patterns for path in folder.glob(pattern)}


def check_hash(folder: str | Path, expected: str) -> None:
    """Raise FingerprintError if a model is not the one with this hash: another one is at its path now."""
    if model_hash(folder) != expected:
        raise FingerprintError(
            f"{folder}: the model was replaced after this job or function was made, so it scores nothing more. Run "
            "the same command again, or make the function again, for the model that is there now."
        )


def mapped_files(folder: Path) -> dict[Path, os.stat_result]:
    """Return the files of a model, of its exports and of an adapter's base that a loaded model may keep in a map."""
    places = [folder, *(model_folder(base) for base in _base_of(folder))]
    found = (path for place in places for path in place.rglob("*"))
    return {path: path.stat() for path in found if path.suffix in MAPPED and path.is_file()}


def check_in_place(files: Mapping[Path, os.stat_result]) -> None:
    """Raise FingerprintError if one of the files was written over: a model that maps it has other weights now.

    A file that was removed, or that another one has replaced, stays as it was in the map.
    """
    for path, before in files.items():
        with suppress(OSError):
            now = path.stat()
            same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            if now.st_ino == before.st_ino and not same:
                raise FingerprintError(
                    f"{path} was written over while a job scored with it; the rows that it was scoring are not kept. "
                    "Put models in folders of their own, or replace files by renaming, and run the same command again."
                )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights, as transformers chooses them; empty if there are none.

    The file that config.json names (transformers_weights), else model.safetensors, else the shards of the index; other
    files, such as older shards, do not count. Raises DataError for an index without files.
    """
    config = folder / "config.json"
    values = atomic_io.read_json(config) if config.is_file() else {}
    named = values.get("transformers_weights") if isinstance(values, dict) else None
    place = folder / str(named or WEIGHTS)
    if named is None and not place.is_file():
        place = folder / INDEX
    if not place.is_file():
        return []
    if not place.name.endswith(".index.json"):
        return [place]
    index = atomic_io.read_json(place)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise DataError(f"{place}: has no weight_map")
    return [atomic_io.safe_join(folder, name) for name in sorted({str(shard) for shard in shards.values()})]


def weight_bytes(folder: str | Path) -> int:
    """Return the bytes of the weights on disk; of an adapter, also those of its base, if that is here."""
    place = model_folder(folder)
    size = sum(path.stat().st_size for path in weight_files(place))
    for base in _base_of(place):
        size += (place / ADAPTER_TENSORS).stat().st_size + weight_bytes(base)
    return size


def _base_of(folder: Path) -> list[str]:
    """Return the name of an adapter's base; nothing for other models."""
    if not ((folder / BASE_RECORD).is_file() and (folder / ADAPTER_TENSORS).is_file()):
        return []
    named = atomic_io.read_json(folder / BASE_RECORD)
    return [named["name"] if named.get("revision") is None else f"{named['name']}@{named['revision']}"]


def tokenizer_hash(folder: str | Path) -> str:
    """Return the sha256 over the tokenizer's files; equal tokenizers have equal hashes."""
    return _hash_files(model_folder(folder), (*TOKENIZER_FILES, NAMED_TEMPLATES))


def chat_template(folder: Path) -> str | None:
    """Return the text of the chat templates of the tokenizer in a folder; None: it has none.

    As in transformers, those in files of their own replace those in tokenizer_config.json.
    """
    files = [each for pattern in (CHAT_TEMPLATE, NAMED_TEMPLATES) for each in sorted(folder.glob(pattern))]
    if files:
        return "\n".join(each.read_text(encoding="utf-8") for each in files)
    config = folder / "tokenizer_config.json"
    named = atomic_io.read_json(config).get("chat_template") if config.exists() else None
    return (named if isinstance(named, str) else json.dumps(named)) if named else None


def file_hash(path: Path) -> str:
    """Return the sha256 of a file; it is computed once for each version of the file."""
    return _hash_of(path, settled_version_of(str(path)))


def _hash_files(folder: Path, patterns: tuple[str, ...]) -> str:
    names = sorted(path.relative_to(folder).as_posix() for path in files_of(folder, patterns))
    return atomic_io.digest({name: _content_hash(folder / name) for name in names})


def _content_hash(path: Path) -> str:
    """Return the hash of a file; of the record of an adapter's base without its place, because the base may move."""
    values = atomic_io.read_json(path) if path.name == BASE_RECORD else None
    if not isinstance(values, dict):
        return file_hash(path)
    return atomic_io.digest({key: value for key, value in values.items() if key not in ("name", "revision")})


@lru_cache(maxsize=256)
def _hash_of(path: Path, version: Version) -> str:
    return atomic_io.sha256_file(path)
