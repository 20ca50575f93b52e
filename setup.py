"""Build the CPU kernels' C++ library into the wheel; all else is in pyproject.toml.

The wheel is one for all Python versions and x86-64 levels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sglang_dspark.backends.cpu import csrc


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout's library is built by `make setup`
            return
        try:
            csrc.build(Path(self.build_lib, *csrc.__name__.split(".")))
        except csrc.BuildError as error:  # the first start tries again
            print(f"warning: the wheel has no library of the CPU kernels: {error}", file=sys.stderr)


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel is for one platform


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
