"""Imports what a CUDA server of ours imports where torch says that there is a GPU; says what fails.

Run as a program. Faked are torch's answers about the device and the names of the binary packages
that have no build without one; no operator runs. One line of JSON: the modules, why any did not
import, and the seams of CUDA whose target is not what it should be.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang_dspark.backends.cpu import boot

PACKAGES = (
    "sglang_dspark.experts",
    "sglang_dspark.kernels",
    "sglang_dspark.patches",
    "sglang_dspark.backends.cuda",
    "sglang_dspark.backends.moe",
    "sglang_dspark.step",
)
BINARY = "sgl_kernel"
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
)


class Named(ModuleType):
    """A module with every name; a call of one raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> None:
        raise AssertionError(f"{self.__name__} was called without a device")


class Binaries(MetaPathFinder, Loader):
    """Find `sgl_kernel` and every module below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != BINARY:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Named(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def fake_device() -> None:
    """One H100 with CUDA 13, as far as torch is asked."""
    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: H100.name
    torch.cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    torch.cuda.get_device_properties = lambda device=None: H100
    torch.version.cuda = "13.0"
    os.environ["SGLANG_USE_CPU_ENGINE"] = "0"  # our start found no GPU
    sys.meta_path.insert(0, Binaries())
    boot.install_stubs()  # of torchvision, which comes with SGLang on a machine with a GPU


def ours() -> list[str]:
    """Every module of PACKAGES but those that only a CPU's server installs."""
    found: list[str] = []
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        found += [each.name for each in pkgutil.walk_packages(path, f"{package}.")]
    return [name for name in found if not name.startswith("sglang_dspark.patches.cpu")]


def main() -> None:
    """Import all, check the seams, print what was found."""
    fake_device()
    failed, wrong = {}, []
    for name in ours():
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    from sglang_dspark.patches import registry

    for name in ours():
        for seam in getattr(sys.modules.get(name), "SEAMS", ()):
            if found := registry.mismatch(seam):
                wrong.append(str(found))
    from sglang.srt.utils import is_cuda

    from sglang_dspark.backends.moe.expert_report import experts_here
    from sglang_dspark.serving import upstream

    said = {"modules": ours(), "failed": failed, "seams": wrong, "is_cuda": is_cuda()}
    said["experts"], _ = experts_here()
    said["names"] = {}
    for name, (module, _) in upstream.PLACES.items():
        try:
            getattr(upstream, name)
        except Exception as error:
            said["names"][module] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main()
