"""The mutants of the catalogue: one YAML file a theme; `mutant.py` says what an entry means."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import TypeAdapter

from tests.mutants.mutant import Mutant


def read(folder: Path) -> tuple[Mutant, ...]:
    """Read the entries of all files in a folder. Raises pydantic's error for a wrong entry."""
    entries = TypeAdapter(tuple[Mutant, ...])
    return tuple(
        mutant
        for file in sorted(folder.glob("*.yaml"))
        for mutant in entries.validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    )


ALL = read(Path(__file__).parent)


def of_area(area: str) -> tuple[Mutant, ...]:
    """Return the mutants of an area. Raises ValueError where there are none."""
    found = tuple(mutant for mutant in ALL if mutant.area == area)
    if not found:
        raise ValueError(f"the catalogue has no area {area!r}")
    return found
