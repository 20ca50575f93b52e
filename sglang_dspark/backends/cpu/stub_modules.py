"""Install stubs of modules that have no build for a plain CPU: `torchvision`, `sgl_kernel`.

Only missing modules are installed, so a machine that has the real package uses it. Several
configuration modules import `torchvision` for one enum. `sgl_kernel`'s CPU build
requires AVX512 or AMX; its operators are in sgl_kernel_ops.py. Its CUDA build may be installed, but
cannot be imported without a GPU: that counts as missing.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec


class InterpolationMode(enum.Enum):
    """The members of `torchvision.transforms.InterpolationMode` that configurations use."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def install() -> None:
    """Add the stubs to `sys.modules` where the real modules are not installed."""
    if is_missing("torchvision"):
        _install_torchvision()
    if is_missing("sgl_kernel") or not _can_be_imported("sgl_kernel"):
        from sglang_dspark.backends.cpu import sgl_kernel_ops

        add_module(
            "sgl_kernel", {name: getattr(sgl_kernel_ops, name) for name in sgl_kernel_ops.__all__}
        )


def is_missing(name: str) -> bool:
    """Return whether neither a module of this name nor a stub can be imported."""
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _can_be_imported(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def add_module(name: str, attributes: dict[str, object]) -> types.ModuleType:
    """Register an importable module; a dotted name becomes an attribute of its parent as well."""
    module = types.ModuleType(name, f"Stand-in of sglang-dspark for `{name}`.")
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _install_torchvision() -> None:
    # transformers looks for torchvision once and caches the result, which must be False.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    names = {"InterpolationMode": InterpolationMode}
    add_module("torchvision", {"__version__": "0.0.0"})
    add_module("torchvision.transforms", dict(names))
    add_module("torchvision.transforms.functional", dict(names))
