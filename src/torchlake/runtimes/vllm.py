"""vLLM in an interpreter of its own (`_foreign/`): continuous batching, shared prefixes, adapters as they are.

    torchlake runtime-env vllm requirements-vllm.txt      the versions that were tested, for another environment
    torchlake predict MODEL TABLE OUTPUT --runtime vllm --runtime-python /opt/vllm/bin/python

vLLM computes in half precision on GPUs, and texts may depend on the rows beside them unless VLLM_BATCH_INVARIANT=1 is
set: a job that is resumed keeps the texts that it has. Seeds are of each row.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.adapters import base as adapters
from torchlake.models.config import embeddings, positions
from torchlake.models.generation import CONFIG, GenerationOptions, settings_of
from torchlake.models.load import load_tokenizer
from torchlake.runtimes import ForeignPython, Forward, Writer
from torchlake.runtimes._foreign import process

TOLERANCE = 0.05
tasks: tuple[str, ...] | None = ("text_generation",)
never: dict[str, str] = {name: "vLLM writes texts" for name in plugins.names("tasks") if name != "text_generation"}
never["text2text_generation"] = "vLLM has no encoder-decoders"
TOKEN_TYPES = False
PYTHON = "TORCHLAKE_RUNTIME_PYTHON_VLLM"
SERVER = Path(__file__).parent / "_foreign" / "vllm_server.py"
REQUIREMENTS = ("vllm==0.33.0", "torch==2.14.0", "transformers>=5.16.1,<5.21")
"The versions that were tested."
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"The ranks that vLLM makes room for."
CHANGED = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")
"Settings of a model that change its scores, and that vLLM does not have."
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "stop")},
    **{f"{kind}_penalty": f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")},
}
"Options of a row, and what vLLM calls them."
OWN = ("language", "seed", "seed_by", "n", "logprobs", "chat", "num_beams", "structure")
"Options that are translated otherwise, or are for torchlake."
RANGES = {"temperature": (0, 2), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
KINDS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"Structures, and what vLLM calls them."


def refusal(folder: Path) -> str | None:
    """Return why vLLM cannot run the model, or None; whether it is installed is seen with an interpreter."""
    kinds = atomic_io.read_json(folder / "config.json").get("architectures") or []
    if not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        return f"vLLM writes texts by causal language models, and this is {', '.join(kinds) or 'of an unknown kind'}"
    file = next((folder / name for name in (CONFIG, "config.json") if (folder / name).is_file()), None)
    values = {} if file is None else atomic_io.read_json(file)
    changed = sorted(name for name in CHANGED if values.get(name) not in (None, []))
    if changed:
        return f"{file}: vLLM does not compute {', '.join(changed)}; use 'eager'"
    return _adapter_refusal(folder) if adapters.is_adapter(folder) else None


def _adapter_refusal(folder: Path) -> str | None:
    config = atomic_io.read_json(folder / adapters.CONFIG)
    wrong = [name for name in ("modules_to_save", "use_dora", "lora_bias", "layer_replication") if config.get(name)]
    wrong += ["bias"] if config.get("bias", "none") != "none" else []
    if wrong:
        return f"vLLM does not apply adapters with {', '.join(wrong)}: train with model.lora.merge=true, or use 'eager'"
    if adapters.read_base(folder).quantize not in (None, "none"):
        return "the adapter was trained on a quantized base: train with model.lora.merge=true, or use 'eager'"
    if _rank(config) > RANKS[-1]:
        return f"the adapter's rank is {_rank(config)}, and vLLM has at most {RANKS[-1]}"
    return None


def cannot_write(options: GenerationOptions) -> str | None:
    """Return why vLLM cannot write with these options, or None."""
    given, plain = asdict(options), asdict(GenerationOptions())
    unknown = sorted(name for name in given.keys() - NAMES.keys() - set(OWN) if given[name] != plain[name])
    unknown += [name for name in ("num_beams", "language") if given.get(name) != plain.get(name)]
    structure = getattr(options, "structure", None)
    if structure is not None and structure.kind not in KINDS:
        unknown.append(structure.kind)
    if unknown:
        return f"vLLM does not have {', '.join(unknown)}; 'eager' does"
    for name, (low, high) in RANGES.items():
        if not low <= given.get(name, low) <= high:
            return f"{name} is {given[name]}, and vLLM has {low} to {high}"
    return None


def versions(python: str, *, imported: bool = False) -> dict[str, str]:
    """Return the versions of an interpreter's vLLM. Raises UsageError if it has none."""
    return process.checked_versions(python, SERVER, imported=imported)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Raise UsageError: vLLM writes texts."""
    raise UsageError("The runtime 'vllm' writes texts, and returns no scores; use 'eager'.")


def open_writer(
    folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions, python: ForeignPython
) -> Writer:
    """Check the interpreter; vLLM starts with the first rows. Raises UsageError."""
    from torchlake.runtimes._foreign.writer import EngineModel, ForeignWriter

    if reason := cannot_write(options):
        raise UsageError(f"The runtime 'vllm': {reason}.")
    found = versions(python.path)
    if python.versions and found != dict(python.versions):
        raise UsageError(
            f"runtime_python: {python.path} on this machine has {found}, and the job began with "
            f"{dict(python.versions)}. Install the same versions on all machines."
        )
    own, tokenizer = settings_of(folder), load_tokenizer(folder)
    named = own.get("eos_token_id", tokenizer.eos_token_id)
    ends = tuple(named) if isinstance(named, list) else () if named is None else (named,)
    vocabulary = embeddings(folder)
    assert vocabulary is not None, "a language model has embeddings"
    model = EngineModel(
        ends=ends,
        vocabulary=vocabulary,
        positions=positions(folder),
        translate=partial(sampling, ends),
        silent_s=python.silent_s,
    )
    hello = {**_model(folder), "device": device, "devices": python.devices}

    def launch(length: int) -> process.EngineProcess:
        return process.EngineProcess(python.path, SERVER, {**hello, "length": length})

    return ForeignWriter(launch, model)


def _model(folder: Path) -> dict[str, Any]:
    """Return which weights, tokenizer and adapter the engine loads."""
    if not adapters.is_adapter(folder):
        return {"model": str(folder), "tokenizer": str(folder), "adapter": None}
    config = atomic_io.read_json(folder / adapters.CONFIG)
    adapters.check_config(folder / adapters.CONFIG, config)
    rank = next(one for one in RANKS if one >= _rank(config))
    adapter = {"path": str(folder), "rank": rank}
    return {"model": str(adapters.find_base(folder)), "tokenizer": str(folder), "adapter": adapter}


def _rank(config: Mapping[str, Any]) -> int:
    ranks: list[int] = [config.get("r", 8), *(config.get("rank_pattern") or {}).values()]
    return max(ranks)


def sampling(ends: tuple[int, ...], prompt: np.ndarray, options: GenerationOptions) -> dict[str, Any]:
    """Return the SamplingParams of a row: the options that are not as by default, its ends, and its seed."""
    if options.temperature == 0:
        return _sampling(ends, options)
    return {**_sampling(ends, replace(options, seed=0)), "seed": seed_of(prompt, options.seed)}


@lru_cache(maxsize=256)
def _sampling(ends: tuple[int, ...], options: GenerationOptions) -> dict[str, Any]:
    """Return what rows with these options have in common."""
    given, plain = asdict(options), asdict(GenerationOptions())
    made = {NAMES[name]: value for name, value in given.items() if name in NAMES and value != plain[name]}
    made["max_tokens"], made["temperature"] = options.max_new_tokens, options.temperature
    made["stop_token_ids"] = [*ends, *given.get("stop_token_ids", ())]
    if given.get("logprobs"):
        made["logprobs"] = 0
    structure = getattr(options, "structure", None)
    if structure is not None:
        value = structure.schema if structure.kind == "json_schema" else structure.text
        made["structured_outputs"] = {KINDS[structure.kind]: value}
    return made


def seed_of(prompt: np.ndarray, seed: int) -> int:
    """Return the seed of a row, from that of the job and the prompt (L,)."""
    digest = hashlib.sha256(seed.to_bytes(8, "little") + prompt.astype("<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
