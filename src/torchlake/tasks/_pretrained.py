"""The model that a job starts from, and the one that it has made: of transformers, or a task's own module.

One rank reads the weights. The others build the same modules on the meta device, which takes no memory, and get their
part of the weights from the strategy: loading N ranks takes the main memory of one model, not of N.
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchlake.config.task_spec import GENERATIVE, TaskSpec, label_name
from torchlake.errors import DataError, TaskError
from torchlake.models.config import load_config
from torchlake.models.folders import model_folder
from torchlake.models.load import (
    CLASSIFIES,
    from_pretrained,
    load_model,
    load_weights,
    refuse_sizes,
    refuse_unused,
    whole_config,
)
from torchlake.models.safety import check_folder
from torchlake.models.spec import PROBLEM_TYPES, head_spec
from torchlake.models.tokenizer import choose_padding_of_head, read_by_place
from torchlake.models.write import quiet

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

ENCODERS_ALONE = frozenset(
    {"blenderbot", "blenderbot-small", "m2m_100", "marian", "pegasus", "pegasus_x", "prophetnet"}
)
"Encoder-decoders whose encoder is a model of its own, beside those of T5's kind with a class of this name."
_WRITERS = {
    "AutoModelForCausalLM": ("causal language model", "GPT-2, GPT-J, OPT, Llama, Qwen or Mistral"),
    "AutoModelForSeq2SeqLM": ("encoder-decoder", "T5, BART, Pegasus or Marian"),
}
_CHOICES = {
    "": "Choose an encoder such as BERT, RoBERTa, DistilBERT, ModernBERT or DeBERTa.",
    "AutoModelForImageClassification": "Choose a model such as ViT, DeiT, Swin, ConvNeXt or ResNet.",
}
"The remedy for a model that has no head for a task, by its Auto class."


def base_model(base: str | Path, spec: TaskSpec, auto_class: str, *, empty: bool = False) -> "PreTrainedModel":
    """Load the encoder `base` with a new head for `spec`, in fp32. torch's global generator initializes the head.

    `empty`: the same modules on the meta device; no weights are read, and their completeness is not checked.

    A language model keeps its head. So do a classifier with the same classes, whose rows are reordered, and a
    regression in the same units. Raises DataError if the architecture has no such head or weights are missing.
    """
    import transformers

    folder = model_folder(base)
    check_folder(folder)
    if spec.problem in GENERATIVE:
        return language_model(folder, auto_class, empty=empty)
    trained = head_spec(folder)
    config = whole_config(folder, auto_class)
    names = [label_name(label) for label in spec.labels] or ["value"]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = PROBLEM_TYPES.get(spec.problem)
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        raise DataError(
            f"{folder}: the architecture {config.model_type!r} has no head for {spec.task} in transformers. "
            f"{_CHOICES.get(auto_class, _CHOICES[''])}"
        )
    if auto_class.endswith(CLASSIFIES):
        choose_padding_of_head(config, folder)
    if empty:
        return _empty_model(config, auto_class)
    model, info = from_pretrained(folder, auto_class, config=config)
    body = f"{model.base_model_prefix}."
    lacking = [*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])]
    # The pooler is part of the head: some encoders were pretrained without one and lack its weights.
    torn = sorted(key for key in lacking if key.startswith(body) and not key.startswith(f"{body}pooler."))
    refuse_sizes(folder, (key for key in info["mismatched_keys"] if key[0] in torn))
    if torn:
        raise DataError(f"{folder}: the encoder's weights lack {', '.join(torn[:4])}; the model is incomplete")
    refuse_unused(folder, info["unexpected_keys"], body=body)
    head = _head(model)
    kept = None if trained is None or lacking or len(head) != 1 else _rows_kept(trained, spec)
    if kept is None:
        _draw_head(model, head)
    else:
        _order_rows(head[0], kept)
    if trained is not None:
        what = (
            "initialized at random: it was trained for other classes or numbers"
            if kept is None
            else "kept: it has the same classes"
        )
        log.info("%s: the head is %s", folder, what)
    model.config.architectures = [type(model).__name__]
    return model


def language_model(base: str | Path, auto_class: str, *, empty: bool) -> "PreTrainedModel":
    """Load a model that writes text, with its head. Raises DataError if the architecture has no such class."""
    import transformers

    folder = model_folder(base)
    check_folder(folder)
    config = load_config(folder)
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        kind, models = _WRITERS[auto_class]
        raise DataError(
            f"{folder}: the architecture {config.model_type!r} has no {kind} in transformers. Choose a {kind} such as "
            f"{models}."
        )
    if empty:
        return _empty_model(whole_config(folder, auto_class), auto_class)
    model = load_model(folder, auto_class=auto_class)
    model.config.architectures = [type(model).__name__]
    return model


def _empty_model(config: "PretrainedConfig", auto_class: str) -> "PreTrainedModel":
    """Return the same model as `from_pretrained`, without values: every tensor is on the meta device."""
    import torch
    import transformers

    with quiet(), torch.device("meta"):
        model: PreTrainedModel = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    if auto_class.endswith(CLASSIFIES):
        read_by_place(model)
    return model


def _rows_kept(trained: TaskSpec, spec: TaskSpec) -> list[int] | None:
    """Return, for each output of `spec`, its row in a head trained for `trained`; None if they do not match."""
    before, now = ([label_name(label) for label in each.labels] for each in (trained, spec))
    same_units = (trained.mean, trained.deviation) == (spec.mean, spec.deviation)
    if trained.problem != spec.problem or sorted(before) != sorted(now) or not same_units:
        return None
    return [before.index(name) for name in now] or [0]


def _head(model: "PreTrainedModel") -> "list[torch.nn.Module]":
    """Return the output layer: outside the body, with one output per class. All known architectures have one such
    module, unless an earlier layer has the same width."""
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
    """Initialize the output layer again, even if the folder has one of the same shape: it is for other classes."""
    initialize: Any = model._init_weights
    for module in head:
        for tensor in module.parameters(recurse=False):
            tensor._is_hf_initialized = False  # type: ignore[attr-defined]
        initialize(module)


def own_model(task: Any, base: str | Path | None, spec: TaskSpec, *, empty: bool) -> "torch.nn.Module":
    """Return the module that a task builds on the model folder `base`, or without one; `empty`: on the meta device."""
    import torch

    folder = None if base is None else model_folder(base)
    if folder is not None:
        check_folder(folder)
    with torch.device("meta" if empty else "cpu"):
        return _built(task, folder, spec, weights=not empty)


def refuse_placement(task: Any, placement: Any) -> None:
    """Raise TaskError if a task's own module should be split over several devices."""
    if placement:
        raise TaskError(f"the task {task.name!r}: its module cannot be split over several devices")


def load_own(
    task: Any,
    folder: Path,
    spec: TaskSpec,
    *,
    dtype: "torch.dtype | None" = None,
    placement: Mapping[str, Any] | None = None,
) -> "torch.nn.Module":
    """Return a task's module with the weights of a model folder, in evaluation mode.

    Raises TaskError if the module and the folder have different tensors, and the errors of `load_weights`.
    """
    from torchlake.checkpoints.format import untied

    refuse_placement(task, placement)
    module = _built(task, folder, spec, weights=False)
    tensors = load_weights(folder)
    expected = untied(module.state_dict())
    wrong = [name for name, tensor in expected.items() if name in tensors and tensors[name].shape != tensor.shape]
    differing = [*wrong, *sorted(expected.keys() ^ tensors.keys())]
    if differing:
        raise TaskError(
            f"the task {task.name!r}: build returned a module whose tensors are not those in {folder}: "
            f"{', '.join(differing[:4])}. Pass the task that trained this model."
        )
    module.load_state_dict(tensors, strict=False)
    if dtype is not None:
        module.to(dtype)
    module.train(False)
    return module


def encoder_class(config: "PretrainedConfig") -> "type[PreTrainedModel]":
    """Return the class of models without a head; of encoder-decoders that sentence-transformers loads without their
    decoder, only the encoder.

    Raises DataError if transformers has none.
    """
    import transformers

    model_class = _body_class(config)
    stem = model_class.__name__.removesuffix("Model")
    if config.model_type in ENCODERS_ALONE:
        return cast("type[PreTrainedModel]", getattr(sys.modules[model_class.__module__], f"{stem}Encoder"))
    return cast("type[PreTrainedModel]", getattr(transformers, f"{stem}EncoderModel", model_class))


def _body_class(config: "PretrainedConfig") -> "type[PreTrainedModel]":
    import transformers

    known: Any = transformers.AutoModel._model_mapping.get(type(config), None)
    if known is None:
        raise DataError(f"transformers has no model without a head of the type {config.model_type!r}")
    return cast("type[PreTrainedModel]", known[0] if isinstance(known, tuple) else known)


def load_encoder(folder: Path, *, weights: bool) -> "torch.nn.Module":
    """Return the transformers model in a folder without its head; of T5 and similar models without the decoder.

    `weights=False`: no weights are read.
    """
    import torch

    config = load_config(folder)
    model_class = encoder_class(config)
    if not weights:
        with quiet():
            made: torch.nn.Module = model_class._from_config(config, dtype=torch.float32)
        return made
    # These encoders do not find their weights among those of a whole model.
    whole = config.model_type in ENCODERS_ALONE and config.architectures != [model_class.__name__]
    model, info = from_pretrained(folder, _body_class(config) if whole else model_class, config=config)
    lacking = [*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])]
    # Marian's positions are computed.
    torn = sorted(
        key
        for key in lacking
        if not key.startswith("pooler.")
        and "Sinusoid" not in type(model.get_submodule(key.rpartition(".")[0])).__name__
    )
    refuse_sizes(folder, (key for key in info["mismatched_keys"] if key[0] in torn))
    if torn:
        raise DataError(f"{folder}: the encoder's weights lack {', '.join(torn[:4])}; the model is incomplete")
    refuse_unused(folder, info["unexpected_keys"], body=f"{model.base_model_prefix}.")
    return cast("torch.nn.Module", model.get_encoder()) if whole else model


def _built(task: Any, folder: Path | None, spec: TaskSpec, *, weights: bool) -> "torch.nn.Module":
    import torch

    module = task.build(folder, spec, weights=weights)
    if not isinstance(module, torch.nn.Module):
        raise TaskError(f"the task {task.name!r}: build returned a {type(module).__name__}, not a torch.nn.Module")
    return module
