"""Where the shipped drafters lie: `drafters/` in a checkout, package data in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.shipped import shipped

DEMO_DRAFTER = "smollm2-135m-dspark"


def shipped_drafter_path(name: str = DEMO_DRAFTER) -> Path:
    """Directory (config.json, model.safetensors) of a drafter that ships with the package.

    Raises DSparkError when the installation carries no such drafter.
    """
    folder = shipped("drafters")
    if (folder / name / "config.json").is_file():
        return folder / name
    held = ", ".join(sorted(file.parent.name for file in folder.glob("*/config.json"))) or "none"
    raise DSparkError(
        f"the drafter {name} is not in this installation ({folder} holds {held}); name one of "
        "these or a directory, or take it from a checkout of the repository"
    )
