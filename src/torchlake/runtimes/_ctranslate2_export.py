"""Convert a language model to CTranslate2's format, and compare what comes out with the model.

    our loaded model -> the library's converter -> model.bin, config.json, a vocabulary -> eight probe rows

The converter of the library reads the modules of the model that torchlake has loaded: it opens no file of weights, no
code, and no network. Its vocabulary lists the tokenizer's tokens by id, because rows go in and come out as ids: unused
ids get a name, and a missing begin or unknown token is the end token (without them, the files do not load).

Some models are converted without an error and then compute something else (sliding windows, some scalings of
positions). So the model writes a few tokens after eight probe rows first, the longest of which is longer than any
window, and the converted model must give the same scores for each of these tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError, pip_install
from torchlake.models.config import in_words, load_config, positions, read_head
from torchlake.models.generation import settings_of, start_token
from torchlake.models.load import load_tokenizer
from torchlake.processes import hardware
from torchlake.runtimes import _exports, first_reason
from torchlake.runtimes._ctranslate2_names import completed, older_phi, set_scales

LIBRARY = "ctranslate2"
TASKS = ("text_generation", "text2text_generation")
LOADERS = """
bloom:Bloom codegen:CodeGen falcon:Falcon gemma:Gemma gemma2:Gemma2 gemma3_text:Gemma3 gpt2:GPT2 gptj:GPTJ
gpt_bigcode:GPTBigCodeMHA gpt_neox:GPTNeoX llama:Llama mistral:Mistral mpt:MPT opt:OPT phi:Phi phi3:Phi3 qwen2:Qwen2
qwen3:Qwen3
bart:Bart mbart:MBart mt5:MT5 pegasus:Pegasus t5:T5 umt5:UMT5"""
"The model types that are converted, decoders first, and the names of the library's loaders."
COMPUTED_SETTINGS = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id"}
COMPUTED_SETTINGS |= {"forced_eos_token_id", "suppress_tokens", "bad_words_ids"}
"The keys of generation_config.json that `_ctranslate2.py` computes with."
VOCABULARIES = ("vocabulary.json", "shared_vocabulary.json")
LENGTHS = (1, 2, 3, 5, 9, 17, 40)
"Tokens of the probe rows, besides the longest one."
LONGEST = (130, 8192)
"The least and the most tokens of the longest probe row."
STEPS = 4
AGREEMENT = 1e-3
"The tolerance of scores, as a share of the largest: far above rounding, far below the error of a wrong position."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot be converted, or the library not run here, or None."""
    kind = read_head(folder).model_type
    known = loaders()
    model = None
    if kind not in known:
        model = f"it converts no models of type {kind!r}, only of {', '.join(known)}: use 'eager'"
    elif left := sorted(settings_of(folder).keys() - COMPUTED_SETTINGS):
        model = f"it cannot compute {', '.join(left)} of generation_config.json: use 'eager'"
    lacks = None if find_spec(LIBRARY) else f"the library {LIBRARY!r} is not installed: "
    return first_reason(model=model, library=lacks and lacks + pip_install("torchlake[ctranslate2]"))


def loaders() -> dict[str, str]:
    """Return the name of the library's class that converts each model type."""
    pairs = (each.split(":") for each in LOADERS.split())
    return {kind: f"{name}Loader" for kind, name in pairs}


def prepare(folder: Path, spec: TaskSpec, name: str, kind: str) -> None:
    """Convert the model for the runtime `name`, with weights of `kind` ("float32", "int8"), into its folder.

    Raises UsageError if it cannot be converted or its scores differ from the model's, StorageError, and the errors of
    `models.load_model`.
    """
    with _exports.making(folder, name, rows=0, versions=_exports.versions(LIBRARY), task=spec.task) as place:
        # An export of the other runtime in fp32 was compared when it was made.
        if kind == "float32" or _exports.current(folder, LIBRARY, spec.task) is None:
            with TemporaryDirectory(dir=place) as scratch:
                # Weights of 8 bits differ from the model by design: how much, `optimize` measures.
                compared = place if kind == "float32" else Path(scratch)
                model = plugins.load("tasks", spec.task).load_model(folder, spec)
                expected = _expected(folder, model)  # first: converting takes the model apart
                _convert(folder, model, compared, "float32")
                _compare(folder, compared, expected)
        if kind != "float32":
            _convert(folder, plugins.load("tasks", spec.task).load_model(folder, spec), place, kind)


def vocabulary(place: Path) -> list[str]:
    """Return the tokens of an export by id."""
    path = next(place / name for name in VOCABULARIES if (place / name).is_file())
    names: list[str] = atomic_io.read_json(path)
    return names


def opened(place: Path, *, reads_apart: bool, kind: str) -> Any:
    """Return the library's model of an export; `reads_apart`: an encoder-decoder."""
    import ctranslate2

    made = ctranslate2.Translator if reads_apart else ctranslate2.Generator
    return made(str(place), device="cpu", compute_type=kind, inter_threads=1, intra_threads=hardware.threads())


def _convert(folder: Path, model: Any, place: Path, kind: str) -> None:
    """Write the model in the library's format, which takes it apart. Raises UsageError if it cannot be converted."""
    import torch
    from ctranslate2.converters import transformers as converters

    tokens = AllTokens(load_tokenizer(folder), _embeddings(model))
    try:
        config = completed(model)
        with torch.no_grad():
            loader = getattr(converters, loaders()[config.model_type])()
            spec = loader(older_phi(model) if config.model_type == "phi" else model, tokens)
        if config.is_encoder_decoder:
            spec.config.decoder_start_token = tokens.names[start_token(folder, config)]
        else:
            spec.register_vocabulary(tokens.names)  # OPT's would have a multiple of eight tokens
        set_scales(spec, config)
        spec.validate()
        spec.optimize(quantization=kind)
        spec.save(str(place))
    except (ValueError, AttributeError, LookupError, TypeError, NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"{folder}: {LIBRARY} cannot convert this model of type {model.config.model_type!r} ({in_words(error)}). "
            "Use another runtime; 'eager' runs every model."
        ) from error
    _check_vocabulary(folder, vocabulary(place), tokens.names)


def _check_vocabulary(folder: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise UsageError unless each id is the same token in the export and in the tokenizer."""
    pairs = enumerate(zip_longest(found, wanted))
    different = next(((token, ours, own) for token, (ours, own) in pairs if ours != own), None)
    if different is not None or len(set(found)) != len(found):
        token, ours, own = different or (len(set(found)), "a token", "two ids for it")
        raise UsageError(
            f"{folder}: {LIBRARY} has {ours!r} as the token with the id {token}, and the tokenizer has {own!r}. Use "
            "another runtime; 'eager' runs every model."
        )


@dataclass
class AllTokens:
    """What the converter asks a tokenizer for, with a token for each of the model's `size` ids."""

    tokenizer: Any
    size: int
    names: list[str] = field(init=False)
    chat_template: None = None  # with one, Gemma 3's answers would end at another token

    def __post_init__(self) -> None:
        known = {token: name for name, token in self.tokenizer.get_vocab().items()}
        self.names = [known.get(token, f"<no token {token}>") for token in range(self.size)]
        self.eos_token = self.tokenizer.eos_token

    def __getattr__(self, name: str) -> str:
        """Return a special token; one that the tokenizer lacks, or the model has no embedding for, is the end token."""
        if name not in ("bos_token", "unk_token", "pad_token"):
            raise AttributeError(name)
        token = getattr(self.tokenizer, name)
        return str(token if token in self.names else self.eos_token)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return {name: token for token, name in enumerate(self.names)}

    def convert_ids_to_tokens(self, token: int) -> str:
        """Return the token of an id."""
        return self.names[token]


def _embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _probe_rows(folder: Path, model: Any) -> list[list[int]]:
    """Return token ids of eight rows; the longest is longer than any window, if the model has positions for it."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    windows = [getattr(config, name, None) for name in ("sliding_window", "relative_attention_max_distance")]
    windows += [rope.get("original_max_position_embeddings")]
    longest = min(max([LONGEST[0], *(each + 16 for each in windows if isinstance(each, int))]), LONGEST[1])
    limit = positions(folder) or getattr(config, "max_seq_len", None)
    longest = longest if limit is None else max(1, min(longest, limit - STEPS))
    size = min(_embeddings(model), len(load_tokenizer(folder)))
    random = np.random.default_rng(0)
    return [random.integers(0, size, min(length, longest)).tolist() for length in (*LENGTHS, longest)]


def _expected(folder: Path, model: Any) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return the probe rows, the tokens that the model writes after each, and the scores (STEPS, V) of each token."""
    import torch
    from transformers import GenerationConfig

    apart = bool(model.config.is_encoder_decoder)
    start = {"decoder_start_token_id": start_token(folder, model.config)} if apart else {}
    model.generation_config = GenerationConfig()
    options: Any = GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **start
    )
    found = []
    for row in _probe_rows(folder, model):
        ids = torch.tensor([row])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        written = made.sequences[0, 1 if apart else len(row) :].tolist()
        found.append((row, written, torch.cat(made.logits).float().log_softmax(-1).numpy()))
    return found


def _compare(folder: Path, place: Path, expected: Sequence[tuple[list[int], list[int], np.ndarray]]) -> None:
    """Raise UsageError if the export in `place` gives other scores, with the first place where it does."""
    apart = load_config(folder).is_encoder_decoder
    names = vocabulary(place)
    try:
        converted = opened(place, reads_apart=apart, kind="float32")
        found = [_scores(converted, [names[token] for token in row], apart=apart) for row, _, _ in expected]
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{folder}: {LIBRARY} cannot run this model: {in_words(error)}. Use 'eager'.") from error
    for number, ((made, scores), (row, written, wanted)) in enumerate(zip(found, expected, strict=True), 1):
        for step, (ours, own) in enumerate(zip(scores, wanted, strict=False)):  # up to an end token
            difference = float(np.abs(ours - own).max())
            if not difference <= AGREEMENT * max(1.0, float(np.abs(own).max())):  # or not finite
                raise UsageError(
                    f"{folder}: {LIBRARY} converts this model, but what comes out does not agree with it: of 8 probe "
                    f"rows, the first that differs is row {number} ({len(row)} tokens), at token {step + 1} after it, "
                    f"where a log-probability differs by {difference:.2g}. Use another runtime; 'eager' runs every "
                    "model."
                )
            if (
                step >= len(made) or names[written[step]] != made[step]
            ):  # two tokens are equally likely: from here on texts differ
                break


def _scores(converted: Any, row: list[str], *, apart: bool) -> tuple[list[str], list[np.ndarray]]:
    """Return the tokens that the converted model writes after a row, and the log-probabilities (V,) for each."""
    if apart:
        named = {"max_decoding_length": STEPS, "min_decoding_length": 0, "max_input_length": 0, "beam_size": 1}
        (made,) = converted.translate_batch([row], return_end_token=True, return_logits_vocab=True, **named)
        tokens, logits = made.hypotheses[0], made.logits[0]
    else:
        named = {"max_length": STEPS, "include_prompt_in_result": False}
        (made,) = converted.generate_batch([row], return_end_token=True, return_logits_vocab=True, **named)
        tokens, logits = made.sequences[0], made.logits[0]
    rows = [np.asarray(each, np.float64).ravel() for each in logits]
    return tokens, [each - each.max() - np.log(np.exp(each - each.max()).sum()) for each in rows]
