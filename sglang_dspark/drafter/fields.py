"""Read a drafter's `config.json` field by field; a value of a wrong type is an error of one line.

`DrafterConfig` reads every drafter with it: for a server, the reference engine and `dspark models
convert`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from sglang_dspark.common.files import FAULTS, brief, fault, integer, load_json, number
from sglang_dspark.errors import DSparkError

MARKOV_HEADS = ("vanilla", "gated", "rnn")
MOST_SIZE = 1 << 24  # of a width, a count or an id
MOST_LAYERS = 1024
_AGAIN = "fetch or export the drafter again"


class Declared(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@contextmanager
def reading_config(path: Path | str, kind: str = "DSpark") -> Iterator[None]:
    """Turn errors of code that reads `path`/config.json into a DSparkError in one line.

    The line names the file. kind: of drafter, in the user's words.
    """
    file = Path(path) / "config.json"
    try:
        yield
    except KeyError as error:
        name = brief(error, 80)
        raise DSparkError(f"{file}: {name} is missing; is this a {kind} drafter?") from None
    except DSparkError as error:
        if str(path) in str(error):
            raise
        fix = "" if ";" in str(error) else f"; {_AGAIN}"
        raise DSparkError(f"{file}: {brief(error, 300)}{fix}") from None
    except (*FAULTS, RuntimeError) as error:  # RuntimeError: of torch, where sizes overflow
        what = f"no {kind} drafter's config ({fault(error)})"
        raise DSparkError(f"{file} is {what}; {_AGAIN}") from None


def require_declared(config: Declared) -> None:
    """Raise DSparkError unless a drafter config's fields have their declared types and ranges."""
    for field in fields(config):
        value = getattr(config, field.name)
        try:
            if value is not None or not str(field.type).endswith("| None"):
                _require(value, str(field.type), field.name == "num_layers")
        except ValueError as error:
            raise DSparkError(f"drafter config: {field.name}: {error}") from None


def _require(value: Any, kind: str, of_layers: bool) -> None:
    """Raise ValueError unless `value` is of the type called `kind` and in its range."""
    if kind.startswith("int"):
        integer(value, 0, MOST_LAYERS if of_layers else MOST_SIZE)
    elif kind.startswith("float"):
        number(value, 0.0, 1e15)
    elif kind.startswith("tuple"):
        integer(len(value), 1, MOST_LAYERS)
        for each in value:
            integer(each, 0, MOST_LAYERS - 1)
    elif kind in ("bool", "str") and type(value).__name__ != kind:
        raise ValueError(f"{brief(repr(value), 40)} is no {kind}")


def raw_config(path: Path) -> dict[str, Any]:
    """Read `config.json` of a drafter's directory, unchanged.

    Raises DSparkError if there is no directory or file, or it holds no JSON object.
    """
    path = Path(path)
    check = "check which was named (of a server --speculative-draft-model-path)"
    if not path.is_dir():
        raise DSparkError(f"no drafter at {path}: that is not a directory; {check}")
    try:
        raw = load_json(path / "config.json", finite=False)  # Transformers writes infinities
    except FileNotFoundError:
        raise DSparkError(f"no drafter at {path}: it has no config.json; {check}") from None
    except OSError as error:
        what = f"config.json cannot be read ({fault(error)})"
        raise DSparkError(f"drafter {path}: {what}; {_AGAIN}") from None
    except ValueError as error:
        what = f"config.json cannot be read: it is not JSON ({fault(error)})"
        raise DSparkError(f"drafter {path}: {what}; {_AGAIN}") from None
    if not isinstance(raw, dict):
        raise DSparkError(f"drafter {path}: config.json is no JSON object; {_AGAIN}")
    return raw


class Fields:
    """Fields of `path`/config.json, including those of `dflash_config` and `dspark_config`.

    Raises DSparkError if one of the two is not a mapping, or if a field has two values: SGLang
    reads some names at one level and some at the other.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path | str):
        self.path, self._fields = path, dict(raw)
        for name in ("dflash_config", "dspark_config"):
            nested = raw.get(name)
            if not isinstance(nested, dict | None):
                raise self._wrong(name, "a mapping", nested)
            for key, value in (nested or {}).items():
                outer = self._fields.get(key)
                if outer is not None and outer != value:
                    raise DSparkError(
                        f"drafter {path}: {brief(key, 40)} in config.json is {brief(repr(outer))} "
                        f"in one place and {brief(repr(value))} in {name}; remove the wrong one"
                    )
                self._fields[key] = value

    def merged(self) -> dict[str, Any]:
        """Return all fields at one level, unchecked."""
        return {**self._fields, "dflash_config": None, "dspark_config": None}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, unchecked."""
        return self._fields.get(name, default)

    def integer(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        """Return an integer of at least `least`; null is the default if there is one.

        Raises DSparkError for another value, and for a missing one without a default.
        """
        value = self._fields.get(name)
        value = default if value is None and default is not None else value
        if value is None and name not in self._fields:
            raise DSparkError(
                f"{self.path}/config.json: {name!r} is missing; is this a DSpark drafter?"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(name, f"an integer >= {least}", value)
        return value

    def number(self, name: str, most: float, default: float) -> float:
        """Return a number from 0 to `most`; a string is rejected, as by Transformers."""
        value = self._fields.get(name, default)
        try:
            return number(value, 0.0, most)
        except ValueError:
            raise self._wrong(name, f"a number from 0 to {most:g}", value) from None

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is `true` or `false`."""
        value = self._fields.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def layer_ids(self) -> tuple[int, ...]:
        """Return `target_layer_ids`, at least one integer."""
        ids = self._fields.get("target_layer_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise self._wrong("target_layer_ids", "a list of integers", ids)
        return tuple(ids)

    def markov_head(self) -> str:
        """Return `markov_head_type` in lower case, as SGLang reads it; `vanilla` if absent."""
        found = str(self._fields.get("markov_head_type", MARKOV_HEADS[0])).lower()
        if found not in MARKOV_HEADS:
            raise DSparkError(
                f"drafter {self.path}: markov_head_type {brief(repr(found))} in config.json is "
                f"unknown (known: {', '.join(sorted(MARKOV_HEADS))}); use another drafter"
            )
        return found

    def _wrong(self, name: str, wanted: str, found: object) -> DSparkError:
        return DSparkError(
            f"drafter {self.path}: {name} in config.json must be {wanted}, not "
            f"{brief(repr(found))}; {_AGAIN}"
        )
