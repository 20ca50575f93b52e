"""Files that are broken in every way that a seed draws: bytes, structure, numbers, encodings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError

DEEP = 100_000
HOLE = "a hole in the document"
# Texts that stand where something else belongs.
JSON_WORDS = r"""
1e999 -1e999 NaN Infinity -Infinity null true false -1 0 3 0.5 1e308 -1e308 1e-320 1e-12 1e9
18446744073709551616 "" "x" "1" "\ud800" "a\nb" "\u001b[31m" [] {} [[]] [true] ["1"] {"x":1}
"""
YAML_LINES = """
.nan .inf -.inf 1.0e+999 ~ yes off *a 2001-13-45 1:2:3 0o9 0x1f
!!int
!!float
!!binary
!!bool foo
!!timestamp foo
!!set x
!!omap [1]
!!python/object/apply:os.getpid []
&a [*a]
' " { [ : - ? | > % @ `
"""
LONG = ("9" * 40, "9" * 400, "9" * 5000, f'"{"x" * 5000}"', f'{{"{"k" * 3000}": 1}}')
VALUES = [*JSON_WORDS.split(), *LONG]
YAML_VALUES = [*YAML_LINES.split(), *YAML_LINES.splitlines(), f"0x{'f' * 5000}", "1:" * 200 + "1"]


def nested(depth: int, opening: str = "[", inner: str = "1", closing: str = "]") -> str:
    return opening * depth + inner + closing * depth


def laughs(levels: int) -> str:
    """YAML that stands for 10^levels entries."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def breakages(valid: str, seed: int, count: int, *, is_yaml: bool = False) -> Iterator[bytes]:
    """`count` broken contents of a file whose valid content is the JSON text `valid`."""
    rng = random.Random(seed)
    ways: list[Callable[[str, random.Random], bytes]] = [_bytes, _bytes, _cut, _text, _number]
    ways += [_value] * 6 + [_field] * 2
    yield from wrong_throughout(valid)
    if is_yaml:
        ways += [_yaml_value] * 4
        yield from (laughs(levels).encode() for levels in (3, 6))
    for number in range(count):
        yield ways[number % len(ways)](valid, rng)


def wrong_throughout(valid: str) -> Iterator[bytes]:
    """Contents that are wrong from end to end."""
    yield from (b"", b" \n", b"\xff\xfe", bytes(range(256)), b"\x00" * 4096, b"null", b"[]", b"3")
    yield from (valid.encode("utf-16"), valid.encode("utf-32"), (valid + valid).encode())
    yield from (nested(DEEP).encode(), nested(DEEP, '{"a":', "1", "}").encode())
    yield from (b"[" * 900, nested(70).encode(), b"x" * (17 << 20), b'"' + b"\\u0000" * 999 + b'"')


def _bytes(valid: str, rng: random.Random) -> bytes:
    content = bytearray(valid.encode())
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def _cut(valid: str, rng: random.Random) -> bytes:
    first, second = sorted(rng.sample(range(len(valid)), 2))
    return rng.choice((valid[:first], valid[second:], valid[:first] + valid[second:])).encode()


def _text(valid: str, rng: random.Random) -> bytes:
    """A piece stands twice, so that fields do too."""
    first, second = sorted(rng.sample(range(len(valid)), 2))
    return (valid[:second] + valid[first:second] + valid[second:]).encode()


def _number(valid: str, rng: random.Random) -> bytes:
    digits = [place for place, c in enumerate(valid) if c.isdigit()]
    place = rng.choice(digits or range(len(valid)))
    more = rng.choice(("e", "-", ".", "9" * 20, "e99", "e-99", "e308", "00", "_"))
    return (valid[:place] + more + valid[place:]).encode()


def _value(valid: str, rng: random.Random) -> bytes:
    """Anything in place of something."""
    deep = nested(rng.choice((66, 500, 5000)))
    return _with_hole(valid, rng, rng.choice([*VALUES, deep])).encode()


def _yaml_value(valid: str, rng: random.Random) -> bytes:
    return _with_hole(valid, rng, rng.choice(YAML_VALUES)).encode()


def _field(valid: str, rng: random.Random) -> bytes:
    """A field more, one less, one twice, or under another name."""
    document = json.loads(valid)
    fields = [place for place in places(document) if isinstance(place[0], dict)]
    if not fields:
        return _value(valid, rng)
    place, name = rng.choice(fields)
    way = rng.randrange(4)
    if way == 0:
        place[rng.choice(("", "extra", "x" * 3000, "a\nb", "\x1b[31m"))] = 1
    elif way == 1:
        del place[name]
    elif way == 2:
        place[name + "s"] = place.pop(name)
    text = json.dumps(document)
    start = f"{json.dumps(name)}: "
    return (text if way < 3 else text.replace(start, f"{start}1, {start}", 1)).encode()


def _with_hole(valid: str, rng: random.Random, filling: str) -> str:
    document = json.loads(valid)
    place, name = rng.choice(places(document))
    place[name] = HOLE
    return json.dumps(document).replace(json.dumps(HOLE), filling)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything in a document."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def is_one_line(message: str, path: Path) -> bool:
    """Return whether a refusal can be shown: short, printable, and names the file."""
    return message.isprintable() and str(path) in message and len(message) < 500


def refused(read: Callable[[Path], object], path: Path) -> bool:
    """Return whether `read` refuses the file in one line; re-raise any other error."""
    try:
        read(path)
    except DSparkError as error:
        message = str(error)
    else:
        return False
    assert is_one_line(message, path.parent), message[:1000]
    return True
