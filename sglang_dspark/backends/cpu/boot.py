"""Prepare a process for CPU serving: entry point of the group `sglang.srt.platforms`.

It runs inside `import sglang`, in every process, before any other plugin code. So it sets
environment defaults and installs stubs of modules without an AVX2 CPU build (`torchvision`,
`sgl_kernel`). On a machine with an accelerator, or if the user disables the package, it does
nothing.
"""

from __future__ import annotations

import os

from sglang_dspark.serving import startup

PLATFORM_CLASS = "sglang_dspark.backends.cpu.platform.DsparkCpuPlatform"


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
    from sglang_dspark.backends.cpu import stub_modules

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # libgomp reads it when it is loaded
    # The generic dense draft has stacked context projections only as an option; one matmul over
    # all draft layers is faster than one for each.
    os.environ.setdefault("SGLANG_DSPARK_STACKED_CTX_KV", "1")
    stub_modules.install()
    return PLATFORM_CLASS
