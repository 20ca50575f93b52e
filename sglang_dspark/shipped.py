"""Locate files that ship with the package: in a checkout's root, or package data of a wheel.

The wheel carries `configs/` and the two dense drafters; `pyproject.toml` defines their names.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from sglang_dspark.errors import DSparkError


def shipped(folder: str) -> Path:
    """Return this installation's folder `configs` or `drafters`, which may be missing."""
    package = Path(str(files("sglang_dspark")))  # SGLang's own readers need files, not streams
    installed = package / f"{folder}_data"
    return installed if installed.is_dir() else package.parent / folder


def config_file(kind: str, given: Path) -> Path:
    """Return the file `given`, or else the shipped one of that name in `configs/<kind>`.

    `cpu-demo`, `cpu-demo.yaml` and `configs/sweep/cpu-demo.yaml` all name the same shipped sweep.
    Raises DSparkError for a folder, and if neither exists; then it lists the shipped ones.
    """
    if given.exists() and not given.is_dir():  # also a pipe, such as a shell's <(...)
        return given
    if given.is_dir():
        raise DSparkError(f"{given} is a folder; name a file of the configuration")
    folder = shipped("configs") / kind
    named = given.as_posix().removeprefix(f"configs/{kind}/").removesuffix(".yaml")
    found = {file.relative_to(folder).with_suffix("").as_posix(): file for file in _yaml(folder)}
    if named in found:
        return found[named]
    raise DSparkError(
        f"no file {given}, and no configuration of that name ships with this package for "
        f"`{kind}`: it has {', '.join(name for name in found if '/' not in name) or 'none'}"
    )


def _yaml(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.yaml"))
