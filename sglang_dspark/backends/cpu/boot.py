"""Prepare a process for CPU serving: entry point of the group `sglang.srt.platforms`.

It runs inside `import sglang`, in every process, before any other plugin code. So it sets
environment defaults and installs stubs of modules that have no build for a plain CPU. Several
configuration modules import `torchvision` for one enum. `sgl_kernel`'s CPU build requires AVX512
or AMX; its operators are in sgl_kernel_ops.py and delta_rule.py. Its CUDA build may be installed,
but cannot be imported without a GPU. A module that can be imported is used.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec

from sglang_dspark.serving import startup

ATTENTION_BACKEND = "dspark_cpu"  # name of our attention backend
PLATFORM_CLASS = "sglang_dspark.backends.cpu.platform.DsparkCpuPlatform"
# The members of `torchvision.transforms.InterpolationMode` that configurations use.
InterpolationMode = enum.Enum("InterpolationMode", {
    "NEAREST": "nearest", "NEAREST_EXACT": "nearest-exact", "BILINEAR": "bilinear",
    "BICUBIC": "bicubic", "BOX": "box", "HAMMING": "hamming", "LANCZOS": "lanczos",
})  # fmt: skip


def activate() -> str | None:
    """Prepare this process for CPU serving and name the platform class; None means inert.

    Inert where torch finds any accelerator, where `DSPARK_DISABLE` or `SGLANG_PLUGINS` turns the
    package off, and where the user sets `SGLANG_USE_CPU_ENGINE` to anything but 1.
    """
    import torch

    if startup.switched_off() is not None or torch.accelerator.is_available():
        return None
    if os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1") != "1":
        return None
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # libgomp reads it when it is loaded
    # The generic dense draft has stacked context projections only as an option; one matmul over
    # all draft layers is faster than one for each.
    os.environ.setdefault("SGLANG_DSPARK_STACKED_CTX_KV", "1")
    install_stubs()
    return PLATFORM_CLASS


def install_stubs() -> None:
    """Add the stubs to `sys.modules` where the real modules cannot be imported."""
    if importlib.util.find_spec("torchvision") is None:
        # transformers looks for torchvision once and caches the result, which must be False.
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        _add_module("torchvision", __version__="0.0.0")
        for name in ("transforms", "transforms.functional"):
            _add_module(f"torchvision.{name}", InterpolationMode=InterpolationMode)
    try:
        importlib.import_module("sgl_kernel")
    except ImportError:
        import torch

        from sglang_dspark.backends.cpu import delta_rule, sgl_kernel_ops

        operators = {name: op for name, op in vars(sgl_kernel_ops).items() if name.endswith("_cpu")}
        _add_module("sgl_kernel", **operators)
        layers = {name: op for name, op in vars(delta_rule).items() if name.endswith("_cpu")}
        _add_module("sgl_kernel.mamba", **layers)
        for name, op in layers.items():  # also looked up as operators of torch
            setattr(torch.ops.sgl_kernel, name, op)


def _add_module(name: str, **attributes: object) -> None:
    """Register an importable module; a dotted name becomes an attribute of its parent as well."""
    module = types.ModuleType(name, f"Stand-in of sglang-dspark for `{name}`.")
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
