"""The shape and the parameters of the model that a job trains, without its weights.

config.json -> the model on torch's meta device (shapes without memory) -> Shape, Parameters
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.sections.strategies import LoraOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import DataError
from torchlake.models.config import head_width
from torchlake.models.load import check_folder, load_config
from torchlake.optim.depth import body_name, freeze, untrained_layers
from torchlake.planning.terms import Parameters, Shape

if TYPE_CHECKING:
    from torch import nn


ONCE_PER_ROW = frozenset({"AutoModel", "AutoModelForSequenceClassification", "AutoModelForImageClassification"})
"Auto classes with one output per row instead of per token."
WRITERS = frozenset({"AutoModelForCausalLM", "AutoModelForSeq2SeqLM"})
"Auto classes whose outputs are the words of the vocabulary instead of labels."


def survey_model(job: Job, base: Path | None, spec: TaskSpec) -> tuple[Shape, Parameters]:
    """Return the shape and parameter counts of the model that training would make of `base` and `job.model.lora`.

    Raises DataError if the architecture has no head for the task or no repeated layers, and the errors of `build` of a
    task with its own module.
    """
    from torch import nn

    if base is not None:
        check_folder(base, weights=False)
    model, config, per_token = _empty_model(base, spec)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise DataError(f"{base}: {type(model).__name__} has no repeated layers; plan supports transformers only.")
    if not all(isinstance(getattr(config, name, None), int) for name in ("hidden_size", "num_attention_heads")):
        raise DataError(
            f"{base}: the layers of {type(model).__name__} differ; plan supports only transformers of equal layers."
        )
    layers = max(lists, key=_numbers)
    times = getattr(config, "num_hidden_layers", None) or len(layers)
    writes = plugins.load("tasks", spec.task).auto_class in WRITERS
    outputs = config.vocab_size if writes else config.num_labels
    shape = _shape(config, max(layers, key=_numbers), times, outputs, per_token)
    shape = replace(shape, output_trained=not writes or job.model.lora is None)
    parameters = _parameters(model, layers, times / len(layers))
    if job.model.lora is not None:
        return shape, _with_lora(parameters, model, layers, job.model.lora)
    if job.model.freeze is None:
        return shape, parameters
    freeze(model, job.model.freeze)
    shape = replace(shape, untrained=min(times, round(untrained_layers(model) * times / len(layers))))
    return shape, _with_frozen(parameters, model, layers, times / len(layers))


def _empty_model(base: Path | None, spec: TaskSpec) -> "tuple[nn.Module, Any, bool]":
    """Return the model on the meta device, its configuration, and whether it has outputs for each token."""
    import torch
    import transformers

    task = plugins.load("tasks", spec.task)
    if not task.auto_class:
        with torch.device("meta"):
            module = task.build(base, spec, weights=False)
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "hidden_size"):
            raise DataError(
                f"the task {task.name!r}: its module has no `config` of a transformers encoder; plan supports only "
                "modules around one."
            )
        config.num_labels = max(1, len(spec.labels))
        return module, config, False
    assert base is not None, "checked by draft_spec"
    config = load_config(base)
    auto: Any = getattr(transformers, task.auto_class)
    if type(config) not in auto._model_mapping:
        raise DataError(f"{base}: the architecture {config.model_type!r} has no head for {spec.task} in transformers.")
    per_token = auto.__name__ not in ONCE_PER_ROW
    if auto.__name__ not in WRITERS:
        config.num_labels = max(1, len(spec.labels))
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=False), config, per_token


def _shape(config: Any, layer: "nn.Module", layers: int, outputs: int, per_token: bool) -> Shape:
    """Read the widths from the linear layers, because configurations use many names for them."""
    from torch import nn

    linear = [widths for module in layer.modules() if (widths := _widths(module))]
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = head_width(config)
    query, key_value = heads * head, (getattr(config, "num_key_value_heads", None) or heads) * head
    feed_forward = max((read for read, _ in linear), default=hidden)
    raised = sum(made for read, made in linear if read == hidden and made % feed_forward == 0)
    # A dropout next to the three projections of an attention applies to its probabilities.
    dropouts = [
        dropout
        for parent in layer.modules()
        for dropout in parent.children()
        if isinstance(dropout, nn.Dropout) and dropout.p and sum(map(bool, map(_widths, parent.children()))) < 3
    ]
    attention_dropout = max(
        float(getattr(config, name, 0) or 0) for name in ("attention_probs_dropout_prob", "attention_dropout")
    )
    return Shape(
        layers=layers,
        hidden=hidden,
        query=query,
        key_value=key_value,
        heads=heads,
        feed_forward=feed_forward,
        gated=raised >= 2 * feed_forward,
        readers=sum(read == hidden for read, _ in linear) - (query == hidden),
        packed=(hidden, query + 2 * key_value) in linear and bool(getattr(config, "rope_parameters", None)),
        rms_norm=any("RMSNorm" in type(module).__name__ for module in layer.modules()),
        dropouts=len(dropouts),
        attention_dropout=attention_dropout > 0,
        fused=config._attn_implementation in ("sdpa", None),
        outputs=outputs,
        output_per_token=per_token,
    )


def _parameters(model: "nn.Module", layers: "nn.ModuleList", times: float) -> Parameters:
    """Count parameters, all trainable; each layer runs `times` times."""
    matrices = round(times * _matrices(layers))
    total = _numbers(model)
    return Parameters(
        total=total,
        trainable=total,
        matrices=matrices,
        matrices_trainable=matrices,
        linear=sum(_numbers(module) for module in model.modules() if _widths(module)),
        layer=max(map(_numbers, layers)),
        layers=_numbers(layers),
        units=len(layers),
    )


def _with_frozen(parameters: Parameters, model: "nn.Module", layers: "nn.ModuleList", times: float) -> Parameters:
    """Count the parameters that are trained in a model of which some are frozen; each layer runs `times` times."""
    linear = [module for module in layers.modules() if _widths(module)]
    trained = sum(each.numel() for one in linear for each in one.parameters() if each.requires_grad and each.ndim > 1)
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return replace(parameters, trainable=trainable, matrices_trainable=round(times * trained))


def _named(model: "nn.Module", last: str) -> "nn.Module | None":
    """Return the first module with this last part of its name."""
    return next((module for name, module in model.named_modules() if name.rpartition(".")[2] == last), None)


def _with_lora(parameters: Parameters, model: Any, layers: "nn.ModuleList", lora: LoraOptions) -> Parameters:
    """Add LoRA's two matrices for each linear layer (or those in `lora.targets`) to the counts.

    These and a copy of a classifier's head, including the encoder's pooler, and of `lora.also_train` are trainable;
    everything else is frozen, also a language model's head.
    """

    def added(module: "nn.Module") -> int:
        named = ((name.rpartition(".")[2], _widths(one)) for name, one in module.named_modules())
        wanted = (widths for name, widths in named if widths and (lora.targets is None or name in lora.targets))
        return sum(lora.rank * (read + made) for read, made in wanted)

    body, words = body_name(model), getattr(model, "get_output_embeddings", lambda: None)()
    beside = [child for name, child in model.named_children() if name != body and child is not words]
    pooler = getattr(getattr(model, body, None), "pooler", None)
    ends = {"embed_tokens": getattr(model, "get_input_embeddings", lambda: None)(), "lm_head": words}
    copied = [ends.get(name) or _named(model, name) for name in lora.also_train or ()]
    head = sum(map(_numbers, [*beside, *(each for each in (pooler, *copied) if each is not None)]))
    matrices = round(added(layers) * parameters.matrices / max(1, _matrices(layers)))
    return replace(
        parameters,
        total=parameters.total + added(layers) + head,
        trainable=added(layers) + head,
        matrices=parameters.matrices + matrices,
        matrices_trainable=matrices,
        linear=parameters.linear + added(layers),
        layer=parameters.layer + max(map(added, layers)),
        layers=parameters.layers + added(layers),
    )


def _numbers(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(module: "nn.Module") -> int:
    """Count the weights of linear layers."""
    return sum(read * made for read, made in filter(None, map(_widths, module.modules())))


def _widths(module: "nn.Module") -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer, including GPT-2's Conv1D; None for other modules."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, nn.Parameter):
        return module.weight.shape[0], module.weight.shape[1]
    return None
