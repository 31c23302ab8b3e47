"""Cross-encoders that `CrossEncoder` of sentence-transformers has saved: how their outputs become scores.

    config.json                         version 4 and 5: "sentence_transformers": {"activation_fn": ...}
                                        before: "sbert_ce_default_activation_function"
    modules.json                        version 6: a Transformer alone
    config_sentence_transformers.json   version 6: "model_type": "CrossEncoder", "activation_fn", prompts
    sentence_bert_config.json           version 6: settings of the Transformer

The activation function is a path to import. Here its name is compared with a list, and nothing is imported.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.embedding import MODULES, PROMPTS, SETTINGS
from torchlake.config.task_spec import ACTIVATIONS, TaskSpec
from torchlake.errors import DataError

NEW, OLD = "sentence_transformers", "sbert_ce_default_activation_function"
"Keys of config.json."
TRANSFORMER = re.compile(r"sentence_transformers(?:\.\w+)*\.Transformer")
ACTIVATION = re.compile(r"torch\.nn(?:\.modules\.\w+)?\.(\w+)")
PAIR_COLUMN = "text_pair"
"Column of the second texts, unless another one is named."
SUPPORTED: Mapping[str, Any] = {
    "transformer_task": "sequence-classification",
    "module_output_name": "scores",
    "do_lower_case": False,
    "unpad_inputs": None,
}
"Settings of the Transformer, and the only value that is supported; the longest input is read."


def is_cross_encoder(folder: Path) -> bool:
    """Return whether `CrossEncoder` has saved the folder. Raises DataError for modules that are not supported."""
    if not (folder / MODULES).is_file():
        return not {NEW, OLD}.isdisjoint(_read(folder / "config.json"))
    if _read(folder / PROMPTS).get("model_type") != "CrossEncoder":
        return False
    found = atomic_io.read_json(folder / MODULES)
    kinds = [str(each.get("type")) for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    other = [kind for kind in kinds if TRANSFORMER.fullmatch(kind) is None]
    if len(kinds) != 1 or other:
        raise DataError(
            f"{folder / MODULES}: has the modules {', '.join(kinds)[:200] or 'of no list'}; of a CrossEncoder torchlake "
            "supports a Transformer alone, because without the others the scores would differ"
        )
    return True


def with_pairs(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Return the task of a classifier as `CrossEncoder` scores pairs; that of other folders as it is.

    One output is a number after the activation. Several are classes, whose probabilities are those of `apply_softmax`.
    Raises DataError with the name of a setting that is not supported.
    """
    if spec.task != "text_classification" or not is_cross_encoder(folder):
        return spec
    single = len(spec.labels) <= 1
    settings = _read(folder / SETTINGS)
    limits = [spec.max_length]
    for key, value in settings.items():
        if key == "max_seq_length" and isinstance(value, int):
            limits.append(value)
        elif key == "modality_config" and isinstance(value, dict):
            _check(folder, f"{key}.text", value.get("text"), {"method": "forward", "method_output_name": "logits"})
        elif value not in (None, {}):
            _check(folder, key, value, SUPPORTED.get(key))
    return replace(
        spec,
        problem="regression" if single else spec.problem,
        labels=() if single else spec.labels,
        text_pair=PAIR_COLUMN,
        max_length=min(limits),
        activation=_activation(folder, spec, single=single),
        prompt=_prompt(folder),
    )


def _check(folder: Path, key: str, value: Any, supported: Any) -> None:
    if value != supported:
        only = "no value" if supported is None else f"only {supported!r}"
        raise DataError(
            f"{folder / SETTINGS}: {key} is {str(value)[:80]}; for a CrossEncoder torchlake supports {only}"
        )


def _activation(folder: Path, spec: TaskSpec, *, single: bool) -> str | None:
    """Return the name of the function after the outputs; None for none, or for softmax over several."""
    config, saved = _read(folder / "config.json"), _read(folder / PROMPTS) if (folder / MODULES).is_file() else {}
    new = config.get(NEW)
    given = saved.get("activation_fn") or (new.get("activation_fn") if isinstance(new, dict) else None)
    given = given or config.get(OLD)
    if given is None:
        return "Sigmoid" if single else None
    named = ACTIVATION.fullmatch(str(given))
    allowed = ("Identity", *ACTIVATIONS) if single else ("Identity", "Softmax", "Sigmoid")
    if named is None or named[1] not in allowed:
        raise DataError(
            f"{folder}: its CrossEncoder has the activation function {str(given)[:80]!r}; for "
            f"{'one output' if single else 'several outputs'} torchlake supports {', '.join(allowed)} of torch.nn"
        )
    return named[1] if named[1] in ACTIVATIONS and spec.problem != "multi_label" else None


def _prompt(folder: Path) -> str | None:
    """Return the prompt that is put before the first text of every pair."""
    saved = _read(folder / PROMPTS) if (folder / MODULES).is_file() else {}
    name = saved.get("default_prompt_name")
    prompt = None if name is None else (saved.get("prompts") or {}).get(name)
    if name is not None and not isinstance(prompt, str):
        raise DataError(f"{folder / PROMPTS}: default_prompt_name is {name!r}, but prompts has no prompt of that name")
    return prompt or None


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    value = atomic_io.read_json(path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
