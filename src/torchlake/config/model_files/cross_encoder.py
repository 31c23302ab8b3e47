"""Cross-encoders that `CrossEncoder` of sentence-transformers has saved: how their outputs become scores.

    config.json                         version 4 and 5: "sentence_transformers": {"activation_fn": ...}
                                        before: "sbert_ce_default_activation_function"
    modules.json                        version 6: a Transformer alone
    config_sentence_transformers.json   version 6: "model_type": "CrossEncoder", "activation_fn", prompts
    sentence_bert_config.json           version 6: settings of the Transformer

The activation function is a path to import. Here its name is compared with a list, and nothing is imported.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.model_files import known_keys
from torchlake.config.model_files.embedding import MODULES, PROMPTS, SETTINGS, default_prompt, read_object
from torchlake.config.model_files.known_keys import check_keys
from torchlake.config.task_spec import ACTIVATIONS, TaskSpec
from torchlake.errors import DataError

NEW, OLD = "sentence_transformers", "sbert_ce_default_activation_function"
"Keys of config.json."
ACTIVATION = re.compile(r"torch\.nn(?:\.modules\.\w+)?\.(\w+)")
SUPPORTED = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
    "do_lower_case": False,
}
"Settings of the Transformer, and the only value that is supported; the longest input is read."


def is_cross_encoder(folder: Path) -> bool:
    """Return whether `CrossEncoder` has saved the folder. Raises DataError for modules that are not supported."""
    if not (folder / MODULES).is_file():
        return not {NEW, OLD}.isdisjoint(read_object(folder / "config.json"))
    if read_object(folder / PROMPTS).get("model_type") != "CrossEncoder":
        return False
    modules = atomic_io.read_json(folder / MODULES)
    kinds = [str(dict(module).get("type")) for module in modules] if isinstance(modules, list) else []
    if [kind.rpartition(".")[2] for kind in kinds] != ["Transformer"]:
        raise DataError(
            f"{folder / MODULES}: has the modules {', '.join(kinds)[:200]}; of a CrossEncoder torchlake supports a "
            "Transformer alone, because without the others the scores would differ"
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
    settings = read_object(folder / SETTINGS)
    longest = settings.pop("max_seq_length", None)
    for key, value in settings.items():
        if value not in (None, {}, SUPPORTED.get(key)):
            raise DataError(
                f"{folder / SETTINGS}: {key} is {str(value)[:80]}; for a CrossEncoder torchlake supports "
                f"{SUPPORTED.get(key, 'no value')}"
            )
    saved = read_object(folder / PROMPTS) if (folder / MODULES).is_file() else {}
    check_keys(folder / PROMPTS, saved, known_keys.CROSS_ENCODER)
    return replace(
        spec,
        problem="regression" if single else spec.problem,
        labels=() if single else spec.labels,
        text_pair="text_pair",
        max_length=min(spec.max_length, longest or spec.max_length),
        activation=_activation(folder, saved.get("activation_fn"), spec.problem, single=single),
        prompt=default_prompt(saved, folder) or None,
    )


def _activation(folder: Path, saved: Any, problem: str, *, single: bool) -> str | None:
    """Return the name of the function after the outputs; None for none, or for softmax over several."""
    config = read_object(folder / "config.json")
    given = saved or dict(config.get(NEW) or {}).get("activation_fn") or config.get(OLD)
    if given is None:
        return "Sigmoid" if single else None
    named = ACTIVATION.fullmatch(str(given))
    allowed = ("Identity", *ACTIVATIONS) if single else ("Identity", "Softmax", "Sigmoid")
    if named is None or named[1] not in allowed:
        raise DataError(
            f"{folder}: its CrossEncoder has the activation function {str(given)[:80]!r}; for "
            f"{'one output' if single else 'several outputs'} torchlake supports {', '.join(allowed)} of torch.nn"
        )
    return named[1] if named[1] in ACTIVATIONS and (single or problem != "multi_label") else None
