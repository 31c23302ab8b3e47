"""Read YAML as plain values with the line of each, so that error messages can name the line.

Duplicate keys are errors, tags create no objects, and size, depth and alias expansion are limited before any value is
built, which takes a second pass over the text.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from torchlake.errors import ConfigError, UnsafeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 10_000
YAML_TAG = "tag:yaml.org,2002:"

Location = tuple[str | int, ...]


def read_text(path: Path) -> str:
    """Return the text of a job file. Raises ConfigError if it is unreadable or too big."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise _too_big(str(path))
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file{_nearest(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start:,}); save it as UTF-8") from None


def read_yaml(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    """Return the plain value in a YAML document, and the line (from 1) of every value in it.

    Raises ConfigError for text that is not YAML, is too big, too deep or has a key twice; UnsafeError for a tag.
    """
    if len(text) > MAX_BYTES:
        raise _too_big(name)
    try:
        # The parser of events is not recursive; the composer is, so depth is checked before it runs.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise ConfigError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    lines: dict[Location, int] = {}
    return (None if root is None else _plain(loader, root, (), name, lines)), lines


def _plain(loader: yaml.SafeLoader, node: yaml.Node, at: Location, name: str, lines: dict[Location, int]) -> Any:
    """Return the plain value of a node; `lines` collects each location's line, its length limits alias expansion."""
    where = f"{name}:{node.start_mark.line + 1}"
    lines.setdefault(at, node.start_mark.line + 1)
    if len(lines) > MAX_NODES or len(at) > MAX_DEPTH:
        raise ConfigError(f"{where}: more than {MAX_NODES:,} values or {MAX_DEPTH} levels once aliases are expanded")
    kind = node.tag.removeprefix(YAML_TAG)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{name}:{line}: a key is a word, not a {shape(key_node.value)}")
            _refuse_tag(key_node, f"{name}:{line}")
            if key_node.tag == f"{YAML_TAG}merge":
                raise ConfigError(f"{name}:{line}: merge keys (<<) are not read; write the keys themselves")
            key = key_node.value
            if key in mapping:
                raise ConfigError(
                    f"{name}:{line}: {dotted((*at, key))}: given twice, first in line {lines[(*at, key)]}"
                )
            lines[(*at, key)] = line
            mapping[key] = _plain(loader, value_node, (*at, key), name, lines)
        return mapping
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_plain(loader, item, (*at, index), name, lines) for index, item in enumerate(node.value)]
    _refuse_tag(node, where)
    if kind in ("timestamp", "merge", "value"):
        return node.value
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        raise ConfigError(f"{where}: {dotted(at)}: {quote(node.value)} is not a valid {kind}") from None


def _too_big(name: str) -> ConfigError:
    return ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes, the limit of a YAML file")


def _nearest(path: Path) -> str:
    """Return a hint for a missing job file: a file in the folder with a similar name, such as .yaml for .yml."""
    try:
        there = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    close = [name for name in there if Path(name).stem == path.stem] or get_close_matches(path.name, there, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _refuse_tag(node: yaml.Node, where: str) -> None:
    scalars = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value")
    if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(YAML_TAG) not in scalars:
        shown = node.tag.replace(YAML_TAG, "!!")
        raise UnsafeError(f"{where}: the tag {quote(shown)} is refused: a job file is data and builds no objects")


def dotted(location: Location) -> str:
    """Return a location as a dotted name: train.epochs."""
    return ".".join(str(part) for part in location) or "(top)"


def quote(value: Any) -> str:
    """Return a value for a message, in YAML's notation, with at most 80 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shape(value: Any) -> str:
    """Return the kind of a YAML value, for messages."""
    return "list" if isinstance(value, list | tuple) else "mapping" if isinstance(value, dict) else "single value"
