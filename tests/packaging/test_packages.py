"""Test the contents of the wheel and of the sdist."""

from __future__ import annotations

import shutil
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from sglang_dspark.backends.cpu import csrc
from tests.packaging.building import build

# where a folder of the sources lies in the wheel
PLACES = {
    "sglang_dspark": "sglang_dspark",
    "kernels": "sglang_dspark/kernels",
    "loadtest": "sglang_dspark/loadtest",
    "patches": "sglang_dspark/patches",
    "configs": "sglang_dspark/configs_data",
    "drafters/smollm2-135m-dspark": "sglang_dspark/drafters_data/smollm2-135m-dspark",
    "drafters/smollm2-135m-mtp": "sglang_dspark/drafters_data/smollm2-135m-mtp",
    "drafters/smollm2-135m-mtp1": "sglang_dspark/drafters_data/smollm2-135m-mtp1",
}
MOST_WHEEL_BYTES = 60_000_000
MOST_SDIST_BYTES = 100_000_000  # what package indexes take
MAY_BE_MISSING = ("drafters/smollm2-135m-moe/", "drafters/smollm2-135m-moe-mxfp4/")

pytestmark = pytest.mark.xdist_group("packaging")


def files_below(folder: Path) -> list[str]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return [
        file.relative_to(folder).as_posix()
        for file in found
        if not {"__pycache__", "build"} & set(file.parts) and ".egg-info" not in str(file)
    ]


def contents(wheel: Path) -> dict[str, int]:
    """Return checksums of a wheel's files, without those that describe the build."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: info.CRC
            for info in archive.infolist()
            if not info.filename.endswith(("/RECORD", "/WHEEL"))
        }


def platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(
    wheel: Path, source: Path
) -> None:
    expected = {
        f"{place}/{name}"
        for folder, place in PLACES.items()
        for name in files_below(source / folder)
        if "drafters" in folder or not name.endswith("README.md")  # guides for readers of the code
    }
    packed = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert sorted(expected - packed) == []
    assert sorted(packed - expected) == [f"sglang_dspark/backends/cpu/csrc/{csrc.file_name()}"]
    assert wheel.name.endswith(f"-py3-none-{platform_tag()}.whl")
    assert wheel.stat().st_size < MOST_WHEEL_BYTES


def test_the_sdist_is_the_checkout_less_the_drafters_with_experts(
    sdist: Path, source: Path
) -> None:
    with tarfile.open(sdist) as archive:
        packed = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    missing = set(files_below(source)) - packed
    assert [name for name in sorted(missing) if not name.startswith(MAY_BE_MISSING)] == []
    assert not [name for name in packed if name.startswith(MAY_BE_MISSING)]
    assert sdist.stat().st_size < MOST_SDIST_BYTES


def test_the_image_is_sent_what_the_wheel_is_made_of(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    """By deploy/Dockerfile.dockerignore, which names what is kept."""
    rules = (source / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, tmp_path / name, symlinks=True)
        else:
            shutil.copy(source / name, tmp_path / name)
    assert contents(build("wheel", tmp_path, tmp_path)) == contents(wheel)
    assert {"Makefile", "requirements"} <= set(kept), "`make setup` needs them"


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path) -> None:
    place = sdist.parent / "from_sdist"
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = place.iterdir()
    assert contents(build("wheel", unpacked, place)) == contents(wheel)
