"""Record versions and machine, on which a run's results depend besides its configuration."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

_PACKAGES = ("numpy", "safetensors", "torch", "transformers", "sglang-dspark")


def environment() -> dict[str, str]:
    """Return the versions and machine that a run depends on."""
    found = {name: version(name) for name in _PACKAGES}
    return found | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
