"""Read files that a user or a machine wrote: return a value within limits, or raise one clear line.

Python's JSON and YAML readers accept values that break later code: NaN, numbers that overflow,
duplicate fields (the last one wins silently), nesting deeper than Python's stack, aliases that grow
without bound. Here each raises a ValueError of one short line. `reading` converts it to a
`DSparkError` that names the file and the fix.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml

from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

MOST_BYTES = 16 << 20  # of a table or a configuration
MOST_RECORDED = 1 << 30  # of a recording, which has entries for every request
MOST_YAML_BYTES = 1 << 18
MOST_DEPTH = 64
MOST_NODES = 20_000  # of YAML; an alias counts all nodes that it expands to
MOST_DIGITS = 40  # of an integer; every such integer fits a float
MOST_QUOTED = 160  # characters of a found value that a message quotes

FAULTS = (
    ValueError,  # UnicodeDecodeError, JSONDecodeError and pydantic's ValidationError too
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,  # OverflowError
    AssertionError,
    RecursionError,
    yaml.YAMLError,
)


def brief(what: object, most: int = MOST_QUOTED) -> str:
    """Format `what` for a message: one line of printable characters, at most `most` of them."""
    line = " ".join(str(what).split())
    cut = line if len(line) <= most else line[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


def fault(error: Exception) -> str:
    """Format an error of `FAULTS` or an OSError briefly."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return f"nested deeper than {MOST_DEPTH}"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return brief(f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}")
    if isinstance(error, yaml.reader.ReaderError):  # its own text names "<unicode string>"
        return brief(f"a character that YAML does not allow, U+{error.character:04X}")
    if isinstance(error, UnicodeDecodeError):
        return f"no text in UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}"
    if isinstance(error, KeyError):
        return brief(f"no {error}")
    return brief(error) or type(error).__name__


def wrong_fields(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Format the fields that a pydantic model rejected, with reasons, the first ones first.

    model: the validated model. With it, an unknown field is shown with the nearest known field,
    and the path omits the names of union alternatives, which no file contains.
    """
    return brief("; ".join(_wrong_field(e, model) for e in error.errors()[:20]), 2 * MOST_QUOTED)


def _wrong_field(error: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    location, known = _known_beside(error["loc"], model)
    found, says = error["input"], error["msg"].removeprefix("Value error, ")
    if not location and error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        what = {type(None): "nothing", str: "plain text", list: "a list"}.get(
            type(found), "a number"
        )
        return f"a mapping of fields is wanted, one `name: value` a line; found {what}"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(location[-1]), known, 1)
        says = f"no such field{f'; did you mean {near[0]}?' if near else ''}"
    elif error["type"] != "missing" and isinstance(found, str | int | float | None):
        says += f", found {brief(repr(found), 40)}"
    return f"{'.'.join(map(str, location))}: {says}" if location else says


def _known_beside(
    location: tuple[str | int, ...], model: type[BaseModel] | None
) -> tuple[tuple[str | int, ...], list[str]]:
    """Return the path as the file has it, and the known fields at its end.

    Pydantic adds the tag of a union's member, the value of its field `kind`, to the path.
    """
    if model is None:
        return location, []
    here, path = [model], []
    for step in location[:-1]:
        tagged = [m for m in here if step in _kinds(m)]
        if len(here) > 1 and tagged:
            here = tagged
            continue
        path.append(step)
        if isinstance(step, str):
            fields = [m.model_fields[step].annotation for m in here if step in m.model_fields]
            here = [m for each in fields for m in _models_in(each)] or here
    return (*path, *location[-1:]), [name for m in here for name in m.model_fields]


def _kinds(model: type[BaseModel]) -> tuple[object, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Collect the pydantic models in a field's annotation."""
    if hasattr(annotation, "model_fields"):
        return [annotation]  # type: ignore[list-item]
    return [model for each in get_args(annotation) for model in _models_in(each)]


@contextmanager
def reading(path: Path, what: str, fix: str) -> Iterator[None]:
    """Convert errors of a block that reads `path` to a DSparkError that names the file.

    what: the kind of file, for the message. fix: the user's remedy, the end of the message.
    """
    try:
        yield
    except DSparkError as error:
        if str(path) in str(error):
            raise
        raise DSparkError(f"{path}: {error}") from None
    except OSError as error:
        raise DSparkError(f"cannot read the {what} {path} ({fault(error)}); {fix}") from None
    except FAULTS as error:
        raise DSparkError(f"{path} is no {what} ({fault(error)}); {fix}") from None


def load_json(path: Path, *, finite: bool = True, most: int = MOST_BYTES) -> Any:
    """Return the value of a JSON file of up to `most` bytes; see `parse_json`.

    Raises OSError if it cannot be read, ValueError in one short line for its content.
    """
    return parse_json(_text(path, most), finite=finite)


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text. finite: reject NaN and infinities.

    Raises ValueError in one short line, also for duplicate fields, for integers of more than
    `MOST_DIGITS` digits, and for nesting deeper than `MOST_DEPTH` levels.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float if finite else float,
            parse_constant=_no_number if finite else float,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_DEPTH}") from None
    _require_depth(value)
    return value


def load_yaml(path: Path) -> Any:
    """Return the value of a YAML file of up to `MOST_YAML_BYTES`; None for an empty one.

    Raises OSError if it cannot be read, ValueError in one short line for its content.
    """
    return parse_yaml(_text(path, MOST_YAML_BYTES))


def parse_yaml(text: str) -> Any:
    """Return the value of YAML text, None for an empty one. Raises ValueError in one short line."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(fault(error)) from None
    except FAULTS:  # PyYAML raises an IndexError for `!!int ""`
        raise ValueError("a value that is not of the type its tag says") from None
    _require_depth(value)
    return value


def number(value: object, low: float, high: float) -> float:
    """Return a number in [low, high] as a float. Raises ValueError for others, booleans and NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{brief(repr(value), 40)} is not a number from {low:g} to {high:g}")
    return float(value)


def integer(value: object, low: int, high: int) -> int:
    """Return an integer in [low, high]. Raises ValueError for other values and booleans."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{brief(repr(value), 40)} is no integer from {low} to {high}")
    return value


def _text(path: Path, most: int) -> str:
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most >> 10} KiB")
    return content.decode("utf-8-sig")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(_twice(Counter(name for name, _ in pairs).most_common(1)[0][0]))
    return values


def _twice(name: str) -> str:
    return f"the field {brief(name, 40)} stands twice"


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{brief(digits, 40)} is too large a number")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _require_depth(value: object) -> None:
    """Raise ValueError if lists and mappings are nested deeper than `MOST_DEPTH`."""
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = [each for each in below if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MOST_DEPTH}")


class _Loader(yaml.SafeLoader):
    """A YAML loader that counts the nodes of a document before it constructs any."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._level = 0
        self._sizes: dict[int, int] = {}  # by id: nodes of each finished subtree, itself included

    def compose_node(self, parent: Any, index: Any) -> Any:
        before, alias = self._nodes, self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > MOST_DEPTH:
            raise ValueError(f"nested deeper than {MOST_DEPTH}")
        node = super().compose_node(parent, index)
        self._level -= 1
        if alias and id(node) not in self._sizes:
            raise ValueError("an alias stands inside what it stands for")
        self._nodes += self._sizes[id(node)] if alias else 1
        if self._nodes > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} entries")
        if not alias:
            self._sizes[id(node)] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(_twice(key.value))
                seen.add(key.value)
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        value.encode()  # raises for a lone surrogate, which no file or file name can contain
        return value


def _yaml_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Parse an integer, hexadecimal too: Python cannot print one of more than 4300 digits."""
    if len(node.value) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(node.value)} digits")
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_integer)
