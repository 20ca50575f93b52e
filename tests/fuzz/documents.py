"""Hypothesis strategies for broken files: a valid document changed in structure, text or bytes.

A document is what JSON can hold. A dialect is its form in a file: JSON, YAML, JSON lines, CSV.
Values that no document can hold (NaN, tags, numbers of 5000 digits) are written into the text.
"""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.broken_files import VALUES, YAML_VALUES, nested, places, wrong_throughout

Draw = Callable[[st.SearchStrategy[Any]], Any]
MARK = "a hole in the document"  # with a number: where a text of its own goes
TWIN = "a twin of "  # before a field's name: the same field a second time
NAMES = ("", "extra", "x" * 3000, "a\nb", "\x1b[31m", "0", "__class__", "../../x", "é")
FACTORS = (-1, 0, 0.5, 1e-9, 3, 1e6, 1e12, 1e300)
WORDS = (
    "",
    " ",
    "x" * 5000,
    "../../../etc/passwd",
    "/dev/zero",
    "a\x00b",
    "\x1b[2J",
    "${HOME}",
    "<script>",
    "%s%n",
    "nan",
    "True",
    "1e9",
    "\u202e",
    "\ud7ff",
)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037")
EXECUTES = (
    '!!python/object/apply:os.system ["touch {0}"]',
    '!!python/object/apply:subprocess.check_output [["touch", "{0}"]]',
    '!!python/object/new:os.system ["touch {0}"]',
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/object:pathlib.Path {{}}",
    "!!python/object/apply:builtins.eval [\"open('{0}', 'w')\"]",
    "!!python/tuple [1, 2]",
    "!ruby/object:Gem::Requirement {{}}",
)


@dataclass(frozen=True)
class Dialect:
    """The form of a document as text, and texts that may replace a value in it."""

    name: str
    render: Callable[[Any], str]
    odd: tuple[str, ...]


def _rows(document: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in document)


def _table(document: Any) -> str:
    out = io.StringIO()
    rows = [row if isinstance(row, list) else [row] for row in document]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _block(document: Any) -> str:
    return str(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))


JSON = Dialect("json", json.dumps, tuple(VALUES))
LINES = Dialect("lines", _rows, tuple(VALUES))
TABLE = Dialect("table", _table, (*VALUES, '"', '"a\nb"', ",", ",,,,", "\x00", "1;2"))


def yaml_dialect(sentinel: str, *, block: bool) -> Dialect:
    """YAML. sentinel: the file that its tags would make, were they followed; block: indented, else
    as JSON."""
    tags = tuple(each.format(sentinel) for each in EXECUTES)
    odd = (*VALUES, *YAML_VALUES, *tags)
    return Dialect("yaml", _block if block else json.dumps, odd)


def broken(document: Any, *dialects: Dialect) -> st.SearchStrategy[bytes]:
    """Contents of a file whose valid content is `document` in one of the dialects."""
    text = dialects[0].render(document)
    structures = [_structure(document, dialect) for dialect in dialects]
    return st.one_of(
        *(structures * (4 // len(structures))),
        damaged(text.encode()),
        _spelled(text),
        _throughout(text),
    )


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with bytes flipped, cut, copied, put in or written over, one to four times."""
    steps = st.tuples(
        st.sampled_from(("flip", "cut", "keep", "copy", "insert", "overwrite")),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    )
    return st.lists(steps, min_size=1, max_size=4).map(lambda each: _damage(content, each))


def _damage(content: bytes, steps: list[tuple[str, float, float, int]]) -> bytes:
    made = bytearray(content)
    for what, first, second, value in steps:
        if not made:
            break
        start, other = int(first * len(made)), int(second * len(made))
        low, high = min(start, other), max(start, other)
        if what == "flip":
            made[start] ^= 1 << value % 8
        elif what == "cut":
            del made[low:high]
        elif what == "keep":
            del made[start:]
        elif what == "copy":
            made[high:high] = made[low:high][: 1 << 16]
        elif what == "insert":
            made[start:start] = bytes([value]) * (1 + other % 9)
        else:
            made[start] = value
    return bytes(made)


def _throughout(text: str) -> st.SearchStrategy[bytes]:
    known = st.sampled_from(list(wrong_throughout(text)))
    return st.one_of(known, st.binary(max_size=64), st.text(max_size=64).map(_utf8))


def _spelled(text: str) -> st.SearchStrategy[bytes]:
    """The valid text with other ends of lines, in another encoding, or behind a mark."""

    def spell(how: tuple[str, str, str]) -> bytes:
        end, encoding, before = how
        return (before + text.replace("\n", end)).encode(encoding, "replace")

    ends = st.sampled_from(("\n", "\r\n", "\r", "\n\n", "\u2028"))
    encodings = st.sampled_from(("utf-8", *ENCODINGS))
    return st.tuples(ends, encodings, st.sampled_from(("", "\ufeff", "\n", "\t", "\x00"))).map(
        spell
    )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _structure(document: Any, dialect: Dialect) -> st.SearchStrategy[bytes]:
    @st.composite
    def made(draw: Draw) -> bytes:
        changed = copy.deepcopy(document)
        fillings: list[str] = []
        for _ in range(draw(st.integers(1, 3))):
            _change(draw, changed, dialect, fillings)
        text = dialect.render(changed).replace(TWIN, "")
        for number, filling in enumerate(fillings):
            hole = f"{MARK} {number}"
            text = text.replace(json.dumps(hole), filling, 1).replace(hole, filling, 1)
        return _utf8(text)

    return made()


def _change(draw: Draw, document: Any, dialect: Dialect, fillings: list[str]) -> None:
    """One change in place."""
    found = places(document)
    if not found:
        return
    place, name = found[draw(st.integers(0, len(found) - 1))]
    way = draw(st.sampled_from(("odd", "odd", "odd", *WAYS)))
    if way == "odd":
        deep = nested(draw(st.sampled_from((66, 500)))) if draw(st.integers(0, 19)) == 0 else None
        fillings.append(deep or draw(st.sampled_from(dialect.odd)))
        place[name] = f"{MARK} {len(fillings) - 1}"
    else:
        WAYS[way](draw, document, place, name)


def _other(draw: Draw, document: Any, place: Any, name: Any) -> None:
    """A value from elsewhere in the document."""
    found = places(document)
    where, key = found[draw(st.integers(0, len(found) - 1))]
    place[name] = copy.deepcopy(where[key])


def _field(draw: Draw, document: Any, place: Any, name: Any) -> None:
    """A field or entry more, one less, one twice, or under another name."""
    way = draw(st.integers(0, 3))
    if isinstance(place, list):
        if way < 2:
            del place[name]
        else:
            place.insert(name, copy.deepcopy(place[name]))
    elif way == 0:
        place[draw(st.sampled_from(NAMES))] = copy.deepcopy(place[name])
    elif way == 1:
        del place[name]
    elif way == 2:
        place[TWIN + name] = copy.deepcopy(place[name])
    else:
        place[draw(st.sampled_from((name + "s", name.upper(), *NAMES)))] = place.pop(name)


def _scaled(draw: Draw, document: Any, place: Any, name: Any) -> None:
    """A number times another, a text or list many times, the opposite of a flag."""
    value, factor = place[name], draw(st.sampled_from(FACTORS))
    if isinstance(value, bool):
        place[name] = not value
    elif isinstance(value, int | float):
        scaled = value * factor
        whole = isinstance(value, int) and abs(scaled) < 1e30
        place[name] = int(scaled) if whole else scaled
    elif isinstance(value, str | list):
        place[name] = value * draw(st.sampled_from((0, 2, 40)))


def _wrapped(draw: Draw, document: Any, place: Any, name: Any) -> None:
    value = place[name]
    place[name] = draw(st.sampled_from(([value], {"x": value}, [[value], value], {}, [], None)))


def _worded(draw: Draw, document: Any, place: Any, name: Any) -> None:
    place[name] = draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)))


def _numbered(draw: Draw, document: Any, place: Any, name: Any) -> None:
    place[name] = draw(st.one_of(st.integers(-9, 70_000), st.floats(-1e6, 1e6), st.integers()))


WAYS: dict[str, Callable[[Draw, Any, Any, Any], None]] = {
    "other": _other,
    "field": _field,
    "scaled": _scaled,
    "wrapped": _wrapped,
    "worded": _worded,
    "numbered": _numbered,
}
