"""Where the shipped drafters lie: `drafters/` in a checkout, package data in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.errors import DSparkError

DEMO_DRAFTER = "smollm2-135m-dspark"
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_drafter_path(name: str = DEMO_DRAFTER) -> Path:
    """Directory (config.json, model.safetensors) of a drafter that ships with the package.

    Raises DSparkError when the installation carries no such drafter.
    """
    places = (_PACKAGE.parent / "drafters" / name, _PACKAGE / "drafters_data" / name)
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise DSparkError(
        f"the drafter {name} is not in this installation (looked in {places[0]} and {places[1]}); "
        "install the package again, or name a drafter with --drafter DIR"
    )
