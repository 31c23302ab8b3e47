"""Write src/torchlake/runs/arguments.py from the models of a job's sections: `make reference`.

Python callers pass sections as mappings, `train(data={...}, train={...})`. Type checkers read their keys and values
from a file, so it is written from the models that check the values. A test fails when the two differ.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from torchlake.config.job import SECTIONS
from torchlake.config.types import Every

FILE = Path(__file__).parents[1] / "src" / "torchlake" / "runs" / "arguments.py"
PATH = "str | Path | None"
GIVEN = {
    "DataConfig.train": "Input",
    "DataConfig.validation": "Input | FractionSection | FoldSection | None",
    "ModelConfig.base": PATH,
    "DeepSpeedOptions.config": PATH,
    "TrainConfig.checkpoint_folder": PATH,
    "TrainConfig.collective_timeout": "float | str",
    "TrainConfig.class_weights": 'Literal["balanced"] | Mapping[Any, float] | None',
    "TrackConfig.mlflow": PATH,
}
"Fields that take more than their models say: frames, paths, and what validators convert."
HEAD = '''"""The types of a job's sections as mappings, as Python callers pass them; written by tools/arguments.py.

A type checker and an editor know from these the keys of `train(data={...}, train={...})`. The models in
`config/sections/` check the values and describe each field: change these and run `make reference`.
"""

'''


def text() -> str:
    """The text of the file."""
    classes = [lines for model in _models() for lines in ("", "", *_section(model))]
    sections = [name for name in SECTIONS if name != "engine"]
    classes += [
        *("", "", "class Sections(TypedDict, total=False):"),
        '    """The sections of a job that `train` and `plan` accept as arguments; `engine` is a separate argument."""',
        "",
        *(f"    {name}: {_type(SECTIONS[name])}" for name in sections),
    ]
    return HEAD + "\n".join([*_imports(), *classes, ""])


def _imports() -> Iterator[str]:
    yield from ("from collections.abc import Mapping, Sequence", "from pathlib import Path")
    yield from ("from typing import Any, Literal, TypedDict", "")
    homes: dict[str, list[str]] = {}
    for model in _models():
        if not _is_value(model):
            homes.setdefault(model.__module__, []).append(model.__name__)
    for home, names in sorted(homes.items()):
        yield f"from {home} import {', '.join(sorted(names))}"
    yield "from torchlake.tables.sources.streams import Input"


def _models() -> list[type[BaseModel]]:
    """The models of the sections, inner ones first."""
    found: dict[type[BaseModel], None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for field in kind.model_fields.values():
                visit(field.annotation)
            found.setdefault(kind)
        for inner in get_args(kind):
            visit(inner)

    for name, section in SECTIONS.items():
        if name != "engine":
            visit(section)
    return list(found)


def _is_value(model: type[BaseModel]) -> bool:
    """Whether a model is one of several forms of a value, which callers give as a mapping only."""
    return model.__name__ in ("Fraction", "Fold")


def _name(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config").removesuffix("Options") + "Section"


def _section(model: type[BaseModel]) -> Iterator[str]:
    yield f"class {_name(model)}(TypedDict{'' if _is_value(model) else ', total=False'}):"
    for name, field in model.model_fields.items():
        yield f"    {name}: {GIVEN.get(f'{model.__name__}.{name}') or _type(field.annotation)}"


def _type(kind: Any) -> str:
    """A field's type as callers write it: sequences for tuples, mappings for models."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(one) for one in inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]".replace("'", '"')
    if origin is tuple:
        return f"Sequence[{_type(inner[0])}]"
    if origin is dict:
        return f"Mapping[{_type(inner[0])}, {_type(inner[1])}]"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"{kind.__name__} | {_name(kind)}"
    return {types.NoneType: "None", Any: "Any", Every: "str"}.get(kind) or kind.__name__


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
