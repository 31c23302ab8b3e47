"""Which parameters of a model are trained, and at which share of the learning rate: by their depth.

    depth    0             1 ... N           N + 1
             embeddings    the layers        what follows the last layer: final norm, pooler, head

A parameter between two stacks of layers (an encoder's final norm) has the depth of the layer before it.
"""

from torch import nn

from torchlake.errors import ConfigError
from torchlake.models.load import layers


def layer_scales(model: nn.Module, decay: float | None) -> dict[str, float]:
    """The share of the learning rate of each parameter, by name: `decay` to the power of N + 1 - depth; empty for None.

    So the head takes the whole learning rate, the last layer `decay` of it, the embeddings the least (as in ELECTRA,
    Clark et al. 2020). Raises ConfigError for a model without layers.
    """
    if decay is None:
        return {}
    if not layers(model):
        raise ConfigError(f"train.layer_decay: {type(model).__name__} has no list of layers. Leave it out.")
    top = len(layers(model)) + 1
    return {name: decay ** (top - depth) for name, depth in depths(model).items()}


def depths(model: nn.Module) -> dict[str, int]:
    """The depth of each parameter, by name; tied parameters have that of their first place."""
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
                found[f"{name}.{key}" if name else key] = (
                    0 if isinstance(module, nn.Embedding) and not inside else depth
                )
    return found
