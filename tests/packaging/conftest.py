"""The wheel and the sdist, built once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.building import Installed, build, copy_of_the_checkout, install


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("packages")
    yield copy_of_the_checkout(place / "source")
    shutil.rmtree(place)  # a quarter of a gigabyte


@pytest.fixture(scope="session")
def sdist(source: Path) -> Path:
    return build("sdist", source, source.parent)


@pytest.fixture(scope="session")
def wheel(source: Path) -> Path:
    return build("wheel", source, source.parent)


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Installed:
    return install(wheel, wheel.parent / "installed")
