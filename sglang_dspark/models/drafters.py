"""Find drafters by name: a folder, one that ships with the package, or a Hugging Face id.

The shipped ones are in `drafters/` in a checkout and are package data in an installed wheel.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.models.resolve import resolve
from sglang_dspark.shipped import shipped

DEMO_DRAFTER = "smollm2-135m-dspark"


def find_drafter(name_or_path: str | Path) -> Path:
    """Return the folder of a drafter: an existing one, one shipped under that name, or of an id.

    Raises DSparkError as `models.resolve.resolve` does.
    """
    path = Path(name_or_path).expanduser()
    if not path.is_dir() and str(name_or_path) == path.name:
        return shipped_drafter_path(path.name)
    return resolve(name_or_path)


def shipped_drafter_path(name: str = DEMO_DRAFTER) -> Path:
    """Return the directory (config.json, model.safetensors) of a drafter shipped with the package.

    Raises DSparkError if the installation has no such drafter.
    """
    folder = shipped("drafters")
    if (folder / name / "config.json").is_file():
        return folder / name
    held = ", ".join(sorted(file.parent.name for file in folder.glob("*/config.json"))) or "none"
    raise DSparkError(
        f"no drafter at {name}: there is no such folder, and none ships under that name ({folder} "
        f"holds {held}); name a folder with config.json, or a Hugging Face id as OWNER/NAME"
    )
