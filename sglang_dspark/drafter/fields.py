"""A drafter's `config.json`, field by field: each of the type it must have, or one clear line.

Both readers build on it: `DrafterConfig`, which we compute with, and serving/checkpoint.py, which
checks every drafter that SGLang serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief, fault, load_json
from sglang_dspark.errors import DSparkError

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_AGAIN = "fetch or export the drafter again"


def raw_config(path: Path) -> dict[str, Any]:
    """`config.json` of a drafter's directory, as it stands there.

    Raises DSparkError where there is no directory or file, or it holds no JSON object.
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
    """The fields of `path`/config.json; those of `dflash_config` and `dspark_config`, which stand
    above the others, among them. Raises DSparkError where one of the two is no mapping."""

    def __init__(self, raw: Mapping[str, Any], path: Path | str):
        self.path, self._fields = path, dict(raw)
        for name in ("dflash_config", "dspark_config"):
            nested = raw.get(name) or {}
            if not isinstance(nested, dict):
                raise self._wrong(name, "a mapping", nested)
            self._fields |= nested

    def get(self, name: str, default: Any = None) -> Any:
        """Whatever stands there."""
        return self._fields.get(name, default)

    def integer(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        """An integer of at least `least`. DSparkError for another value, and for none where there
        is no default."""
        value = self._fields.get(name, default)
        if value is None and name not in self._fields:
            raise DSparkError(
                f"{self.path}/config.json: {name!r} is missing; is this a DSpark drafter?"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(name, f"an integer >= {least}", value)
        return value

    def layer_ids(self) -> tuple[int, ...]:
        """`target_layer_ids`: one integer at least."""
        ids = self._fields.get("target_layer_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise self._wrong("target_layer_ids", "a list of integers", ids)
        return tuple(ids)

    def markov_head(self, default: str | None = None) -> str:
        """`markov_head_type`, in small letters as SGLang reads it."""
        found = str(self._fields.get("markov_head_type", default)).lower()
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
