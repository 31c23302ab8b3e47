"""The depth of a model's parameters: which of them are trained, and at which share of the learning rate.

    depth    0             1 ... N           N + 1
             embeddings    the layers        what follows the last layer: final norm, pooler, head

A parameter between two stacks of layers (an encoder's final norm) has the depth of the layer before it.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchlake.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from torchlake.config.sections.model import Freeze

SHOWN = 4
"The number of names that an error message shows."


def layers(model: "nn.Module") -> "list[nn.Module]":
    """Return the model's transformer layers in the order of its modules; of an encoder-decoder, those of both parts.

    They are the members of the outermost module lists that contain matrices. For a list of lists (Funnel's blocks) the
    inner lists are used, because a list is never called. Empty for a model without such a list.
    """
    from torch import nn

    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        members = [each for each in module if not isinstance(each, nn.ModuleList)]
        parts = [part for each in members for part in each.modules() if not isinstance(part, nn.Embedding)]
        if any(parameter.ndim > 1 for part in parts for parameter in part.parameters(recurse=False)):
            found += members
            inside |= {id(each) for member in members for each in member.modules()}
    return found


def depths(model: "nn.Module") -> dict[str, int]:
    """Return the depth of each parameter, by name; tied parameters have that of their first place."""
    from torch import nn

    places = {id(layer): number for number, layer in enumerate(layers(model), start=1)}
    top, found, seen = len(places) + 1, dict[str, int](), set[int]()
    depth, inside = 0, ""
    for name, module in model.named_modules(remove_duplicate=False):
        if inside and not name.startswith(inside):
            inside, depth = "", top if depth == len(places) else depth
        if id(module) in places and not inside:
            depth, inside = places[id(module)], f"{name}."
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                embeds = isinstance(module, nn.Embedding) and not inside
                found[f"{name}.{key}" if name else key] = 0 if embeds else depth
    return found


def layer_scales(model: "nn.Module", decay: float | None) -> dict[str, float]:
    """Return the share of the learning rate of each parameter, by name: `decay` to the power of N + 1 - depth; empty
    for None.

    So the head takes the whole learning rate, the last layer `decay` of it, the embeddings the least (as in ELECTRA,
    Clark et al. 2020). Raises ConfigError for a model without layers.
    """
    if decay is None:
        return {}
    if not layers(model):
        raise ConfigError(f"train.layer_decay: {type(model).__name__} has no list of layers. Remove the setting.")
    top = len(layers(model)) + 1
    return {name: decay ** (top - depth) for name, depth in depths(model).items()}


def freeze(model: "nn.Module", wanted: "Freeze | None") -> None:
    """Train what `model.freeze` does not name. Raises ConfigError if it names nothing of the model, or everything."""
    if wanted is None:
        return
    names = frozen_names(model, wanted)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.freeze={_shown(wanted)}: no parameter of {type(model).__name__} would be trained (the head of a "
            "language model may be its word embeddings). Freeze less."
        )


def frozen_names(model: "nn.Module", wanted: "Freeze") -> set[str]:
    """Return the parameters that `model.freeze` selects, by name."""
    if wanted == "body":
        inside = [f"{name}." for name in head_modules(model)]
        return {name for name, _ in model.named_parameters() if not any(f".{each}" in f".{name}" for each in inside)}
    found = depths(model)
    if not isinstance(wanted, int | str):
        return _matching(list(found), wanted)
    number = len(layers(model))
    if isinstance(wanted, int) and wanted > number:
        raise ConfigError(f"model.freeze={wanted}: {type(model).__name__} has {number} layers")
    deepest = wanted if isinstance(wanted, int) else 0
    return {name for name, depth in found.items() if depth <= deepest}


def body_name(model: "nn.Module") -> str:
    """Return the name of the child that holds the layers; searched for where transformers does not name it."""
    named = getattr(model, "base_model_prefix", "")
    inside = {id(layer) for layer in ([] if named else layers(model))}
    found = (name for name, child in model.named_children() if any(id(each) in inside for each in child.modules()))
    return str(named or next(found, ""))


def head_modules(model: "nn.Module") -> list[str]:
    """Return the names of the modules beside the body of a model, and of its pooler, which may be new, too.

    A language model's head is not among them if it is its output embeddings.
    """
    body = body_name(model)
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    children = [(name, child) for name, child in model.named_children() if name != body and child is not lm_head]
    beside = [name for name, child in children if any(True for _ in child.parameters())]
    pooler = getattr(getattr(model, body, None), "pooler", None)
    return [*beside, *(["pooler"] if pooler is not None else [])]


def untrained_layers(model: "nn.Module") -> int:
    """Return the number of first layers below the first trained parameter: their backward pass is not computed."""
    found = depths(model)
    lowest = min((found[name] for name, each in model.named_parameters() if each.requires_grad), default=0)
    return max(0, lowest - 1)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that match a pattern, or are below a match. Raises ConfigError for a pattern without one."""
    matched: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not own:
            raise ConfigError(
                f"model.freeze: {pattern!r} matches no parameter; the names are {', '.join(names[:SHOWN])} ..."
            )
        matched |= own
    return matched


def _shown(wanted: "Freeze") -> str:
    return str(wanted) if isinstance(wanted, int | str) else f"[{', '.join(wanted)}]"
